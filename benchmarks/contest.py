"""Steps of several runtimes on the same stage modules, in the same processes, in turns."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.module_stage import ModuleStage, seconds_alone
from benchmarks.namespaces import enter_namespace
from benchmarks.peers.torch_pipelining import TorchPipeline, stages_of
from benchmarks.replayed_stage import ReplayedStage
from benchmarks.sleeping import be_prompt
from benchmarks.stage_modules import Seconds, Sleeping, StageMaker
from lightning_autopipe.cluster.flows import MeasuredRound
from lightning_autopipe.cluster.measure import measure_links
from lightning_autopipe.core import ParallelLayout
from lightning_autopipe.core.schedule import Schedule
from lightning_autopipe.runtime.executor import StageExecutor
from lightning_autopipe.runtime.process_groups import create_process_groups
from lightning_autopipe.runtime.stage import StageForward
from lightning_autopipe.schedules.stash import slice_counts
from tests.harness import run_processes

NUM_ALONE = 7
"""Times that a stage is run alone to know how long it takes."""


def mean_square(result: Tensor, targets: Tensor) -> Tensor:
    """The loss of every entry."""
    return torch.nn.functional.mse_loss(result, targets)


class Runner(Protocol):
    """One rank's part in one entry's step."""

    def run(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A step that takes part."""

    title: str
    model: StageMaker
    num_microbatches: int
    num_samples: int
    """Of a micro-batch."""
    schedule: Schedule | str
    """Ours, or the name of a class of torch.distributed.pipelining."""
    ranks: tuple[int, ...] = ()
    """Of our stages, in order; empty: as `ParallelLayout` has it. torch's stage s is on rank s."""
    stages_per_rank: int = 1
    is_replayed: bool = False
    """Whether our stages are cut out of one whole module, instead of called as they are."""

    @property
    def is_ours(self) -> bool:
        """Whether our executor runs it."""
        return isinstance(self.schedule, Schedule)

    def inputs(self) -> Tensor:
        """The step's batch."""
        return self.model.inputs(self.num_microbatches * self.num_samples)

    def unit_sizes(self) -> tuple[int, ...]:
        """Samples of a whole micro-batch, and of a slice where there are any; ``[k - 1]``: one of k slices."""
        num_slices = max(slice_counts(self.schedule)) if isinstance(self.schedule, Schedule) else 1
        return tuple(self.num_samples // number for number in range(1, num_slices + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Entries, and where they run."""

    entries: tuple[Entry, ...]
    servers: tuple[str, ...]
    """Of each global rank."""
    namespaces: tuple[str, ...] = ()
    """Network namespace of each global rank; empty: this process's own."""
    interface: str = "lo"
    num_repeats: int = 5
    """Turns that count; one before warms up."""
    num_steps: int = 1
    """Steps of a turn."""
    links_budget_s: float = 0.0
    """For the measurement of links; 0: none."""
    is_prompt: bool = True
    """Whether processes run as soon as their sleeps are over."""
    measures_alone: bool = True
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryTimes:
    """What was measured of an entry."""

    seconds: tuple[float, ...]
    """Of a step, by turn: from the first rank's begin to the last one's end."""
    cpu_s: tuple[float, ...]
    """Of a step, by turn: all threads of all ranks."""
    alone: tuple[tuple[Seconds, ...], ...]
    """``alone[s][k - 1]``: what stage s takes for one of k slices, measured on its rank without others; ours only."""

    @property
    def median_s(self) -> float:
        """The typical step."""
        return statistics.median(self.seconds)

    @property
    def median_cpu_s(self) -> float:
        """The typical step's CPU time."""
        return statistics.median(self.cpu_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContestTimes:
    """What was measured."""

    entries: tuple[EntryTimes, ...]
    links: tuple[MeasuredRound, ...]
    load: tuple[float, float]
    """Processes that wanted to run (1 minute's average), before and after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfRank:
    turns: list[list[tuple[float, float, float]]]
    """By entry and turn: begin, end, CPU seconds."""
    alone: list[tuple[int, tuple[Seconds, ...]] | None]
    """By entry: the stage, and what it takes."""
    links: tuple[MeasuredRound, ...]


def run_contest(contest: Contest, *, limit_s: float) -> ContestTimes:
    """Runs all entries in turns.

    Args:
        contest: what to run.
        limit_s: after so many seconds all is ended, and that is an error.

    Raises:
        AssertionError: a rank failed or did not end in time; the message has all tracebacks.
    """
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="autopipe-contest-") as folder:
        reports: list[_OfRank] = run_processes(
            len(contest.servers),
            _run_rank,
            contest,
            str(Path(folder) / "store"),
            timeout_s=limit_s,
            initialize_process_group=False,
            environment={"GLOO_SOCKET_IFNAME": contest.interface},
        )
    entries = []
    for index in range(len(contest.entries)):
        turns = list(zip(*(report.turns[index] for report in reports), strict=True))
        alone = dict(found for report in reports if (found := report.alone[index]) is not None)
        entries.append(
            EntryTimes(
                seconds=tuple(
                    (max(end for _, end, _ in turn) - min(begin for begin, _, _ in turn)) / contest.num_steps
                    for turn in turns
                ),
                cpu_s=tuple(sum(cpu_s for _, _, cpu_s in turn) / contest.num_steps for turn in turns),
                alone=tuple(alone[stage_index] for stage_index in sorted(alone)),
            )
        )
    return ContestTimes(entries=tuple(entries), links=reports[0].links, load=(before, os.getloadavg()[0]))


# In each process -----------------------------------------------------------------------------------


def _run_rank(contest: Contest, store: str) -> _OfRank:
    global_rank = int(os.environ["RANK"])
    if contest.namespaces:
        enter_namespace(contest.namespaces[global_rank])
    if contest.is_prompt:
        be_prompt()
    world_size = len(contest.servers)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=global_rank,
        world_size=world_size,
        timeout=timedelta(seconds=contest.timeout_s),
    )
    runners = [runner_of(entry, global_rank, world_size, contest.timeout_s) for entry in contest.entries]
    links: tuple[MeasuredRound, ...] = ()
    if contest.links_budget_s:
        links = measure_links(contest.servers, budget_s=contest.links_budget_s, timeout_s=contest.timeout_s)
    alone = [
        runner.alone() if contest.measures_alone and isinstance(runner, OurPipeline) else None for runner in runners
    ]
    turns: list[list[tuple[float, float, float]]] = [[] for _ in runners]
    for turn in range(contest.num_repeats + 1):
        for runner, of_entry in zip(runners, turns, strict=True):
            dist.barrier()
            cpu_s, begin = time.process_time(), time.perf_counter()
            for _ in range(contest.num_steps):
                runner.run()
            end = time.perf_counter()
            if turn:
                of_entry.append((begin, end, time.process_time() - cpu_s))
    dist.barrier()
    return _OfRank(turns=turns, alone=alone, links=links)


def runner_of(entry: Entry, global_rank: int, world_size: int, timeout_s: float) -> Runner:
    """A rank's part in an entry; all ranks make it at once."""
    if isinstance(entry.schedule, Schedule):
        return OurPipeline(entry, global_rank, timeout_s)
    num_stages = world_size * entry.stages_per_rank
    mine = stages_of(entry.schedule, global_rank, world_size, entry.stages_per_rank)
    return TorchPipeline(
        entry.schedule,
        {index: entry.model.stage(index, num_stages) for index in mine},
        num_stages=num_stages,
        num_microbatches=entry.num_microbatches,
        batch=entry.inputs(),
        loss=mean_square,
    )


class OurPipeline:
    """Our executor, transports and process groups, on plain modules."""

    def __init__(self, entry: Entry, global_rank: int, timeout_s: float) -> None:
        assert isinstance(entry.schedule, Schedule)
        self._entry, self._schedule = entry, entry.schedule
        ranks = tuple((rank,) for rank in entry.ranks)
        layout = ParallelLayout(num_stages=entry.schedule.num_ranks, num_replicas=1, ranks=ranks)
        self.stage_index = layout.stage_index(global_rank)
        self._is_last = self.stage_index == layout.num_stages - 1
        transport = create_process_groups(layout, timeout_s=timeout_s).transport(torch.device("cpu"))
        transport.warm_up()
        self._executor = StageExecutor(stage_index=self.stage_index, num_stages=layout.num_stages, transport=transport)
        self._batch = entry.inputs()
        self._replayed: ReplayedStage | None = None
        if entry.is_replayed:
            self._replayed = ReplayedStage(
                entry.model,
                stage_index=self.stage_index,
                num_stages=layout.num_stages,
                num_samples=entry.num_samples,
                loss=mean_square,
            )
        else:
            self.module = entry.model.stage(self.stage_index, layout.num_stages)
            self._plain = ModuleStage(
                self.module,
                loss=mean_square if self._is_last else None,
                slices=slice_counts(entry.schedule),
                num_samples=entry.num_samples,
            )

    def run(self) -> None:
        """One step."""
        self._executor.run(self._begun(), self._schedule)

    def _begun(self) -> StageForward:
        if self._replayed is not None:
            self._replayed.begin(self._batch, self._entry.num_microbatches)
            return self._replayed
        if self.stage_index == 0:
            self._plain.begin(self._batch)
        return self._plain

    def alone(self) -> tuple[int, tuple[Seconds, ...]]:
        """The stage, and what it takes for a micro-batch and for its slices, without others."""
        model = self._entry.model
        assert isinstance(model, Sleeping), "only of stages that sleep it is known what they take"
        taken = []
        for num_samples in self._entry.unit_sizes():
            seconds = model.seconds[num_samples]
            measured = seconds_alone(
                self.module,
                inputs=model.inputs(num_samples),
                is_first=self.stage_index == 0,
                loss=mean_square if self._is_last else None,
                num_repeats=NUM_ALONE,
                weight_share=seconds.weight / seconds.backward if seconds.weight else 0.0,
            )
            taken.append(measured)
        return self.stage_index, tuple(taken)
