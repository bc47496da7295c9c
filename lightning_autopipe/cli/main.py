"""Parses ``autopipe COMMAND …`` and runs the command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_autopipe.cli import cluster, consolidate, plan, show, simulate, trace
from lightning_autopipe.core.errors import AutoPipeError

COMMANDS = (plan, show, simulate, trace, cluster, consolidate)
"""Modules of commands. Each has ``add_parser(subparsers)``, which sets ``run``, a function of the parsed arguments, as
a default of its parser; a wrong input is an `AutoPipeError`. They import torch, if at all, when they run."""

WRONG_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; give the exit code: 0, or 2 for wrong input, which is told in one line.

    Args:
        arguments: Of the command line; None: those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="autopipe", description="Plans pipelines for Lightning modules, and shows what they run on."
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    parsed = parser.parse_args(arguments)
    try:
        parsed.run(parsed)
    except AutoPipeError as error:
        sys.stderr.write(f"autopipe: error: {' '.join(str(error).split())}\n")
        return WRONG_INPUT
    return 0
