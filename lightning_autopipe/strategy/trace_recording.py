"""Records some steps of a fit on all ranks, and has rank 0 write them down."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_autopipe.core.cluster import ClusterTopology
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.schedule import Action
from lightning_autopipe.runtime.clocks import AlignedClock, ClockReading, read_clocks
from lightning_autopipe.runtime.measured_timeline import measured_timeline
from lightning_autopipe.runtime.timeline_recorder import RankStep
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.figure_log import peak_memory_bytes
from lightning_autopipe.strategy.step_watch import WatchedStep
from lightning_autopipe.strategy.trace_files import RecordedSteps, step_numbers, write_trace

FIRST_STEP, NUM_STEPS = 5, 3
"""Recorded are so many steps from this one on (the first is 1): the first few are slower, and none is like another."""

_log = logging.getLogger(__name__)


class TraceRecording:
    """Between two steps the clocks are compared, before the first that is recorded and after the last; then all is
    collected. Nothing is exchanged within a step.

    Args:
        folder: Where global rank 0 writes.
        communicator: All ranks.
        device: Whose memory counts.
        plan: What is run.
        cluster: What the plan was made for, where that is known.
    """

    def __init__(
        self,
        folder: str | Path,
        communicator: Communicator,
        device: torch.device,
        plan: Callable[[], PipelinePlan],
        cluster: ClusterTopology | None,
    ) -> None:
        self._folder = folder
        self._communicator = communicator
        self._device = device
        self._plan, self._cluster = plan, cluster
        self._begin: tuple[ClockReading, ...] = ()
        self._steps: dict[int, RankStep] = {}
        self._is_written = False

    def before_step(self, number: int) -> None:
        if number == FIRST_STEP:
            self._begin = read_clocks(self._communicator.world_group)
        elif number == FIRST_STEP + NUM_STEPS:
            self._finish()

    def after_step(self, watched: WatchedStep) -> None:
        if FIRST_STEP <= watched.number < FIRST_STEP + NUM_STEPS:
            self._steps[watched.number] = watched.step

    def note(self) -> None:
        """Nothing to tell."""

    def take(self, notes: list[None]) -> None:
        """Nothing was told."""

    def end(self) -> None:
        if self._steps:
            self._finish()
        elif not self._is_written:
            rank_zero_warn(
                f"no trace is written to {str(self._folder)!r}: the fit ended before step {FIRST_STEP}, where "
                "recording begins (a window of merge_accumulation=True is one step). Train on more batches, or leave "
                "trace unset"
            )

    def _finish(self) -> None:
        """Collective over all ranks."""
        communicator = self._communicator
        end = read_clocks(communicator.world_group)
        peak = peak_memory_bytes(self._device) if self._device.type == "cuda" else 0
        steps, self._steps, self._is_written = self._steps, {}, True
        gathered = communicator.gather_in_world((steps, peak))
        if communicator.global_rank != 0:
            return
        clocks = {
            rank: AlignedClock(begin=before, end=after)
            for rank, (before, after) in enumerate(zip(self._begin, end, strict=True))
        }
        try:
            self._write(clocks, [steps for steps, _ in gathered], tuple(peak for _, peak in gathered))
        except Exception as error:  # a fit must not end because of what is written about it
            _log.warning("the trace could not be written to %s: %s: %s", self._folder, type(error).__name__, error)

    def _write(self, clocks: dict[int, AlignedClock], steps: list[dict[int, RankStep]], peaks: tuple[int, ...]) -> None:
        layout = self._communicator.layout
        plan = self._plan()
        ranks = tuple(
            layout.pipeline_ranks(replica_index) * plan.schedule.stages_per_rank
            for replica_index in range(layout.num_replicas)
        )
        recorded = RecordedSteps(
            timelines={
                number: measured_timeline(
                    {rank: of_rank[number] for rank, of_rank in enumerate(steps)},
                    clocks,
                    ranks,
                    peak_bytes=peaks if any(peaks) else (),
                )
                for number in steps[0]
            },
            ranks=ranks,
            clock_error_s=2 * max(clock.error_s for clock in clocks.values()),
            clock_drift_s=max(abs(clock.drift_s) for clock in clocks.values()),
        )
        write_trace(self._folder, recorded, _as_long(plan, recorded), self._cluster)
        rank_zero_info(f"autopipe: {step_numbers(list(steps[0]))} traced, see {self._folder}")


def _as_long(plan: PipelinePlan, recorded: RecordedSteps) -> PipelinePlan:
    """The plan for as many micro-batches as ran: a merged window has those of several batches."""
    number = 1 + max(
        event.action.microbatch_index
        for timeline in recorded.timelines.values()
        for event in timeline.events
        if isinstance(event.action, Action)
    )
    if number % plan.num_microbatches or plan.replica_microbatches:
        return plan
    return replace(plan, num_microbatches=number)
