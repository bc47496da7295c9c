"""What the commands need because one job may be several processes."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import lightning.pytorch as pl
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

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


def refuse_sweep_over_processes(trainer: pl.Trainer) -> None:
    """Refuse a Hydra sweep (``--multirun``) whose jobs are started by Lightning as several processes.

    Lightning starts processes once in the life of a process, and they would repeat the whole sweep.

    Raises:
        ValueError: This is such a sweep.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    started_by_lightning = environment is not None and not environment.creates_processes_externally
    sweeping = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    if sweeping and started_by_lightning and trainer.world_size > 1:
        raise ValueError(
            f"--multirun with {trainer.world_size} processes a job is not supported: Lightning can start processes "
            "only once. Run the jobs one after another without --multirun, or set trainer.devices=1."
        )


def hush_lightning() -> None:
    """Leave out messages of Lightning that a user can do nothing about or that advertise other packages."""
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip: For seamless" not in record.getMessage()
    )
