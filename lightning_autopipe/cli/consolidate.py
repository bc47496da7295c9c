"""``autopipe consolidate FOLDER FILE``: makes one plain checkpoint file of a sharded checkpoint."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    """Add this command."""
    parser = subparsers.add_parser(
        "consolidate",
        help="make one checkpoint file of a sharded one",
        description="Writes a folder of AutoPipeStrategy(checkpoint_format='sharded') as one file in the format of a "
        "plain Lightning checkpoint, in one process, without GPUs.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="the sharded checkpoint")
    parser.add_argument("file", metavar="FILE", help="the file to write; must not be there yet")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Write it.

    Raises:
        CheckpointError: the folder is damaged, or the file cannot be written.
        ConfigurationError: there is no such folder, or the file is there already.
    """
    from lightning_autopipe.checkpoints.consolidation import consolidate

    consolidate(arguments.folder, arguments.file)
