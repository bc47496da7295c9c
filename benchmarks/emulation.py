"""Steps with sleeping layers on the runtime's own executor, transports and process groups, in processes here.

A stage sleeps for as long as its layers would compute and sends tensors of the size that its layers would give, so that
a few cores can stand in for many devices. All else is real: autograd, messages over gloo, sums of gradients.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.namespaces import enter_namespace
from benchmarks.sleeping import FLOAT_BYTES, SleepingStage, be_prompt
from lightning_autopipe.cluster.flows import MeasuredRound
from lightning_autopipe.cluster.measure import measure_links
from lightning_autopipe.core import ParallelLayout
from lightning_autopipe.planner.workload import StageWork, StepWork
from lightning_autopipe.runtime.executor import StageExecutor
from lightning_autopipe.runtime.gradient_reduction import GradientReducer
from lightning_autopipe.runtime.process_groups import ProcessGroups, create_process_groups
from tests.harness import run_processes

_NUM_ALONE = 15
"""Times that a stage is run alone to know how long it takes."""
_NUM_EXCHANGES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepingRun:
    """Steps to run on some ranks."""

    steps: tuple[StepWork, ...]
    """Seconds are slept, bytes are sent; each uses all ranks."""
    servers: tuple[str, ...]
    """Of each global rank, for the measurement of links."""
    namespaces: tuple[str, ...] = ()
    """Network namespace of each global rank; empty: this process's own."""
    interface: str = "lo"
    """Through which ranks reach each other."""
    num_rounds: int = 2
    """Rounds through all steps in turn."""
    num_repeats: int = 4
    """Of each step in a round, besides one to warm up."""
    links_budget_s: float = 20.0
    """For the measurement of links; 0: none."""
    timeout_s: float = 30.0
    """Limit of each wait for another rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasurement:
    """What was measured of one step."""

    priced: StepWork
    """The step with the seconds of stages and exchange as they were measured alone, each on its own rank."""
    seconds: tuple[float, ...]
    """Of each repetition: from the end of the step before to its end, on rank 0."""

    @property
    def median_s(self) -> float:
        """The typical step."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasurement:
    """What was measured on some ranks."""

    links: tuple[MeasuredRound, ...]
    steps: tuple[StepMeasurement, ...]
    load: tuple[float, float]
    """Processes that wanted to run (1 minute's average), before and after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfRank:
    links: tuple[MeasuredRound, ...]
    works: list[StageWork]
    exchange_s: list[float]
    seconds: list[list[float]]


def layout_of(step: StepWork) -> ParallelLayout:
    """Which rank runs which stage of which replica."""
    return ParallelLayout(num_stages=step.num_stages, num_replicas=len(step.stages), ranks=step.stage_ranks)


def run_sleeping(run: SleepingRun, *, limit_s: float) -> RunMeasurement:
    """Runs steps on processes of their own, one for each rank.

    Args:
        run: what to run.
        limit_s: after so many seconds all is ended, and that is an error.

    Raises:
        AssertionError: a rank failed or did not end in time; the message has all tracebacks.
    """
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="autopipe-emulation-") as folder:
        reports: list[_OfRank] = run_processes(
            len(run.servers),
            _run_rank,
            run,
            str(Path(folder) / "store"),
            timeout_s=limit_s,
            initialize_process_group=False,
            environment={"GLOO_SOCKET_IFNAME": run.interface},
        )
    steps = tuple(
        StepMeasurement(
            priced=replace(
                step,
                stages=tuple(tuple(reports[rank].works[index] for rank in ranks) for ranks in step.list_ranks),
                exchange_s=max(report.exchange_s[index] for report in reports),
            ),
            seconds=tuple(reports[0].seconds[index]),
        )
        for index, step in enumerate(run.steps)
    )
    return RunMeasurement(links=reports[0].links, steps=steps, load=(before, os.getloadavg()[0]))


# In each process -----------------------------------------------------------------------------------


def _run_rank(run: SleepingRun, store: str) -> _OfRank:
    global_rank = int(os.environ["RANK"])
    if run.namespaces:
        enter_namespace(run.namespaces[global_rank])
    be_prompt()
    world_size = len(run.servers)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=global_rank,
        world_size=world_size,
        timeout=timedelta(seconds=run.timeout_s),
    )
    ranks = [_Rank(step, global_rank, run.timeout_s) for step in run.steps]
    links: tuple[MeasuredRound, ...] = ()
    if run.links_budget_s:
        links = measure_links(run.servers, budget_s=run.links_budget_s, timeout_s=run.timeout_s)
    for rank in ranks:
        rank.measure_alone()
    seconds: list[list[float]] = [[] for _ in ranks]
    for _ in range(run.num_rounds):
        for rank, of_step in zip(ranks, seconds, strict=True):
            rank.run()
            for _ in range(run.num_repeats):
                begin = time.perf_counter()
                rank.run()
                of_step.append(time.perf_counter() - begin)
    return _OfRank(
        links=links,
        works=[rank.work for rank in ranks],
        exchange_s=[rank.exchange_s for rank in ranks],
        seconds=seconds,
    )


class _Rank:
    """One rank's part in one step."""

    def __init__(self, step: StepWork, global_rank: int, timeout_s: float) -> None:
        layout = layout_of(step)
        self._groups: ProcessGroups = create_process_groups(layout, timeout_s=timeout_s)
        stage_index, replica_index = layout.stage_index(global_rank), layout.replica_index(global_rank)
        self.work = step.stages[replica_index][stage_index]
        self.exchange_s = 0.0
        self._schedule = step.schedules[replica_index]
        transport = self._groups.transport(torch.device("cpu"))
        transport.warm_up()
        self._executor = StageExecutor(stage_index=stage_index, num_stages=layout.num_stages, transport=transport)
        self._stage = SleepingStage(self.work, is_last=stage_index == layout.num_stages - 1)
        self._reducer = GradientReducer(self._groups.stage, name=f"the replicas of stage {stage_index}")
        self._parameter = nn.Parameter(torch.zeros(max(1, round(self.work.reduced_bytes / FLOAT_BYTES))))
        self._parameter.grad = torch.zeros_like(self._parameter)
        self._number = torch.zeros(1)

    def measure_alone(self) -> None:
        """Puts measured seconds in the place of those to sleep. All ranks call it at once."""
        self.work = self._stage.alone(self.work, _NUM_ALONE)
        seconds = []
        for _ in range(_NUM_EXCHANGES):
            begin = time.perf_counter()
            self._exchange()
            seconds.append(time.perf_counter() - begin)
        self.exchange_s = statistics.median(seconds)

    def run(self) -> None:
        """One step."""
        self._executor.run(self._stage, self._schedule)
        if self.work.reduced_bytes:
            self._reducer.reduce({"parameter": self._parameter})
        self._exchange()
        if self.work.optimizer_s:
            time.sleep(self.work.optimizer_s)

    def _exchange(self) -> None:
        work = dist.all_reduce(self._number, group=self._groups.control, async_op=True)
        assert work is not None
        work.wait()
