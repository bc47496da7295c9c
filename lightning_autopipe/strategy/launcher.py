"""Who starts the processes, and what they are told by environment variables."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.profile import ModelProfile

_STARTED_BY = "LIGHTNING_AUTOPIPE_STARTED_BY"
_TOLD_BY_LAUNCHER = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE")
_TOLD_BY_OTHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script once for each device, unless a cluster's launcher has started all processes.

    Those say their ranks, nodes and devices when they meet, and are checked there: nodes may have unlike numbers.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        if isinstance(self.cluster_environment, (TorchElasticEnvironment, SLURMEnvironment)):
            _set_num_threads_if_needed(num_processes=self.num_processes)
            return function(*args, **kwargs)
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def _call_children_scripts(self) -> None:
        added = [name for name in _TOLD_BY_LAUNCHER if name not in os.environ]
        port = self.cluster_environment.main_port
        os.environ[_STARTED_BY] = " ".join((str(os.getpid()), str(port), *added))
        super()._call_children_scripts()


class WorkerLauncher(_MultiProcessingLauncher):
    """Starts a process for each device from this one, and brings back here what global rank 0 has found.

    After a fit this process has the trained weights, the metrics for callbacks, the path of the best checkpoint (all by
    Lightning's own means), and the plan.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        finally:
            self.kill(signal.SIGKILL)  # who interrupts this process means all of them

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._wrapping_function(*args, **kwargs)
        except BaseException as error:
            self._strategy.on_exception(error)  # Lightning calls it in the launching process only
            raise

    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        strategy: Any = trainer.strategy
        # As text: Lightning moves all it finds to the CPU, and stops at frozen types.
        found = [None if one is None else one.to_json() for one in (strategy.plan, strategy.profile)]
        return {**super().get_extra_results(trainer), "autopipe": found}

    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        strategy: Any = trainer.strategy
        plan, profile = extra["autopipe"]
        strategy.note_workers_plan(
            None if plan is None else PipelinePlan.from_json(plan),
            None if profile is None else ModelProfile.from_json(profile),
        )


def forget_another_launch() -> None:
    """Removes what an earlier launch has left in the environment of a command that is not one of its processes.

    The launching process keeps its variables after a fit, for the next one; a command that it starts then would take
    itself for one of several processes, and wait for the others.
    """
    pid, port, *added = os.environ.get(_STARTED_BY, "- -").split()
    if os.environ.get("MASTER_PORT") != port:  # nothing is left, or another launcher has spoken since
        return
    is_launching = pid == str(os.getpid())
    # One whose launching process has ended meanwhile must not launch anew: each of them would, and theirs again.
    is_of_launch = pid == str(os.getppid()) or not _is_running(int(pid))
    is_launched = is_of_launch and os.environ.get("LOCAL_RANK") != "0"
    if not (is_launching or is_launched):
        for name in (*added, _STARTED_BY):
            os.environ.pop(name, None)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class GivenRanksEnvironment(TorchElasticEnvironment):
    """Processes that were started by hand with torchrun's variables."""

    @staticmethod
    def detect() -> bool:
        return all(name in os.environ for name in _TOLD_BY_OTHERS)

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", "0")))


def with_given_ranks(environment: ClusterEnvironment | None) -> ClusterEnvironment | None:
    """The environment, or one that reads ``RANK`` and ``WORLD_SIZE`` where they are set and Lightning would not."""
    if type(environment) is LightningEnvironment and GivenRanksEnvironment.detect():
        return GivenRanksEnvironment()
    return environment
