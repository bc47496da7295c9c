"""Warns where stages have become slower or faster than planned, with what a new plan would gain."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from statistics import median

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_autopipe.core.cluster import ClusterTopology
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.quantities import duration_text
from lightning_autopipe.core.stage_times import StageTimes, sum_stage_times
from lightning_autopipe.planner.replanning import Replanning, StageRatio, planned_stage_times, replan, stage_ratios
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.step_watch import WatchedStep

NUM_STEPS = 50
"""Steps whose median counts: what makes one of them slow is no reason to plan anew."""
THRESHOLD = 0.2
"""By what share forwards and backwards of a stage must differ from the plan to be told."""
_ENOUGH_GAIN = 0.02
"""A new plan that gains less is not worth a restart."""
_ANEW = "plan anew from times measured anew (without plan=, and with LIGHTNING_AUTOPIPE_CACHE=off)"
_SILENT = "set replan=False to hear no more of it"

_log = logging.getLogger(__name__)


class ReplanningWatch:
    """Compares medians over some steps with the plan, again and again; rank 0 warns, once for each new finding.

    A finding is what there is to gain: other cuts, or none.

    What the ranks tell each other travels with a step's report; an error in here ends nothing but the watch.

    Args:
        communicator: Who this rank is.
        plan: What is run; its layers were measured.
        cluster: What the plan was made for, where that is known.
    """

    def __init__(
        self, communicator: Communicator, plan: Callable[[], PipelinePlan], cluster: ClusterTopology | None
    ) -> None:
        self._communicator = communicator
        self._plan, self._cluster = plan, cluster
        self._steps: list[tuple[StageTimes, ...]] = []
        self._planned: tuple[StageTimes, ...] = ()
        self._latest: dict[tuple[int, int], StageTimes] = {}
        self._warned: dict[tuple[int, int], float] = {}
        self._told: set[tuple[int, ...] | None] = set()
        """What was found to be gained: by these cuts, by none, or (None) not known."""
        self._is_broken = False

    def before_step(self, number: int) -> None:
        """Nothing to do."""

    def after_step(self, watched: WatchedStep) -> None:
        plan = self._plan()
        numbers = plan.replica_microbatches or (plan.num_microbatches,) * self._communicator.layout.num_replicas
        num_microbatches = numbers[self._communicator.replica_index]
        # Sizes of micro-batches are planned by the largest one or by the mean.
        missing = (plan.microbatch_size or 0.0) * num_microbatches - watched.num_samples
        if not -1 < missing < num_microbatches:
            return
        ran = ((what, ended_s - started_s) for what, _, started_s, ended_s in watched.step.ran)
        self._steps.append(sum_stage_times(self._communicator.global_rank, ran))

    def note(self) -> tuple[StageTimes, ...] | None:
        if len(self._steps) < NUM_STEPS:
            return None
        steps, self._steps = self._steps, []
        return tuple(
            StageTimes(
                global_rank=of_stage[0].global_rank,
                stage_index=of_stage[0].stage_index,
                forward_s=median(times.forward_s for times in of_stage),
                backward_s=median(times.backward_s for times in of_stage),
            )
            for of_stage in zip(*steps, strict=True)
        )

    def take(self, notes: list[tuple[StageTimes, ...]]) -> None:
        if not notes or self._communicator.global_rank != 0 or self._is_broken:
            return
        try:
            warning = self._judge([times for of_rank in notes for times in of_rank])
        except Exception as error:  # advice must not end a run
            self._is_broken = True
            _log.warning("stage times cannot be compared with the plan: %s: %s", type(error).__name__, error)
            return
        if warning:
            rank_zero_warn(warning)

    def end(self) -> None:
        """Nothing to do."""

    def _judge(self, measured: Iterable[StageTimes]) -> str:
        plan = self._plan()
        self._planned = self._planned or planned_stage_times(plan, cluster=self._cluster)
        # Replicas whose batches differ come to their medians in different steps.
        self._latest.update({times.place: times for times in measured})
        if len(self._latest) < len(self._planned):
            return ""
        ratios = stage_ratios(self._planned, self._latest.values())
        state = {ratio.times.place: ratio.whole for ratio in ratios}
        if all(abs(whole / self._warned.get(place, 1.0) - 1) <= THRESHOLD for place, whole in state.items()):
            return ""
        self._warned = state
        worst = max(ratios, key=lambda ratio: abs(ratio.whole - 1))
        if abs(worst.whole - 1) <= THRESHOLD:
            return ""  # as planned again
        found = replan(plan, ratios, cluster=self._cluster)
        finding = None if found is None else tuple(found.partition.cut_points) if found.gain >= _ENOUGH_GAIN else ()
        if finding in self._told:
            return ""  # on a busy machine times go up and down, and there is nothing new to do
        self._told.add(finding)
        return _text(worst, len(ratios), found)


def _text(worst: StageRatio, num_stages: int, found: Replanning | None) -> str:
    times, share = worst.times, abs(worst.whole - 1)
    planned_s = times.compute_s / worst.whole
    text = (
        f"stage {times.stage_index} (global rank {times.global_rank}) takes {100 * share:.0f} % "
        f"{'longer' if worst.whole > 1 else 'less'} than planned: {duration_text(times.compute_s)} instead of "
        f"{duration_text(planned_s)} of forwards and backwards a step (median of {NUM_STEPS} steps; the most of "
        f"{num_stages} stages). "
    )
    if found is None:
        return text + f"A new plan may be faster: {_ANEW}, or {_SILENT}"
    if found.gain < _ENOUGH_GAIN:
        return text + f"With these times no other cut is notably faster; {_SILENT}"
    cuts = list(found.partition.cut_points)
    return text + (
        f"With these times a step takes {duration_text(found.step_s)}; with partition={cuts} it would take "
        f"{duration_text(found.new_step_s)} ({100 * found.gain:.0f} % less). Resume from a checkpoint with that, or "
        f"{_ANEW}, or {_SILENT}"
    )
