"""Hydra sweeps (``--multirun``) whose jobs are each a process of their own.

A job may be several processes, and Lightning starts those only once in the life of a process. So the sweeping process
starts the command anew for each job, with the job's overrides and folder, and waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_original_cwd

# Where a job of a sweep writes what its task returned.
_RESULT_FILE = "RECIPES_SWEEP_RESULT_FILE"
# What a job is not told: how the sweep goes on.
_OF_THE_SWEEP = ("hydra.mode", "hydra.sweep", "hydra/sweeper", "hydra.launcher", "hydra/launcher", "hydra.run.dir")
_IN_THIS_PROCESS = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


class SweepError(RuntimeError):
    """A job of a sweep failed, or the sweep was started in a way that cannot work."""


def needs_own_process(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether this process runs a sweep's job that must be started as a process of its own.

    Raises:
        SweepError: torchrun or SLURM started this process as one of several, and each would run the whole sweep.
    """
    environ = os.environ if environ is None else environ
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return False
    if int(environ.get("WORLD_SIZE", environ.get("SLURM_NTASKS", "1"))) == 1:
        return True
    if HydraConfig.get().launcher._target_ == _IN_THIS_PROCESS:
        raise SweepError(
            "--multirun under torchrun or srun would run the whole sweep in every process. Start it once, without "
            "them: each job starts its own processes (trainer.devices). On SLURM, use Hydra's submitit launcher."
        )
    # Another launcher of Hydra's, such as submitit, has started the processes of this job already.
    return False


def run_in_own_process(module: str) -> float | None:
    """Run the sweep's current job as ``python -m module`` and give what its task returned.

    Raises:
        SweepError: The job failed.
    """
    config = HydraConfig.get()
    command = [sys.executable, "-m", module, *_job_arguments()]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        environ = os.environ | {_RESULT_FILE: str(result)}
        with subprocess.Popen(command, env=environ, cwd=get_original_cwd()) as process, _passing_on_sigterm(process):
            status = process.wait()
        if status != 0 or not result.exists():
            raise SweepError(
                f"Job {config.job.num} of the sweep ended with status {status}. Its messages are above, "
                f"its folder is {config.runtime.output_dir}, and its command was: {' '.join(command)}"
            )
        value: float | None = json.loads(result.read_text(encoding="utf-8"))
    return value


def report_result(value: float | None) -> None:
    """Hand the task's result to the sweep that started this process, if one did."""
    path = os.environ.get(_RESULT_FILE)
    # The processes that Lightning starts besides inherit the variable.
    if path is not None and int(os.environ.get("LOCAL_RANK", "0")) == 0:
        Path(path).write_text(json.dumps(value), encoding="utf-8")


@contextlib.contextmanager
def _passing_on_sigterm(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the job, and then this process, when this process is asked to end; a terminal asks both for Ctrl-C anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield  # a launcher with threads: only the main one may handle signals
        return
    is_asked = False

    def pass_on(signum: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        is_asked = True
        process.send_signal(signum)

    previous = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
    if is_asked:
        sys.exit(128 + signal.SIGTERM)


def _job_arguments() -> list[str]:
    config = HydraConfig.get()
    arguments = ["--config-name", config.job.config_name]
    for source in config.runtime.config_sources:
        if source.provider == "command-line":
            arguments += ["--config-dir", source.path]
    overrides: Sequence[str] = [*config.overrides.task, *config.overrides.hydra]
    arguments += [override for override in overrides if not override.lstrip("+~").startswith(_OF_THE_SWEEP)]
    # A setting may be made of the job's number, as in seed='${hydra:job.num}'.
    arguments += [f"hydra.job.num={config.job.num}", f"hydra.job.id={_quoted(str(config.job.id))}"]
    return [*arguments, f"hydra.run.dir={_quoted(config.runtime.output_dir)}"]


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
