"""What the commands need because one job may be several processes."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

CONFIG_DIR = str(Path(__file__).resolve().parent.parent / "configs")


def other_rank_overrides(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> list[str]:
    """Give the Hydra overrides that keep a job which torchrun or SLURM started in one output folder.

    Each process would make a folder named after its own start time. Only the first one does, then; the others write no
    files of their own, and learn the folder for checkpoints from it. Lightning's own launcher passes the folder on.
    """
    argv = sys.argv if argv is None else argv
    environ = os.environ if environ is None else environ
    if int(environ.get("RANK", environ.get("SLURM_PROCID", "0"))) == 0:
        return []
    overrides = ["hydra.output_subdir=null", "hydra/job_logging=stdout"]
    if not any(argument.startswith("hydra.run.dir=") for argument in argv):
        overrides.append("hydra.run.dir=.")
    return overrides


def hush_lightning() -> None:
    """Leave out messages of Lightning that a user can do nothing about or that advertise other packages."""
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip: For seamless" not in record.getMessage()
    )
