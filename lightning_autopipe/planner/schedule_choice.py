"""Which kind of schedule, and with which numbers, has the shortest step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.planner.min_max import min_max_partition
from lightning_autopipe.planner.objective import Objective, PipelineSetting
from lightning_autopipe.planner.replica import Cuts, Depths
from lightning_autopipe.planner.scheduled_work import scheduled_work
from lightning_autopipe.planner.simulator import simulate, simulated_s
from lightning_autopipe.planner.slices import choose_slices
from lightning_autopipe.planner.starts import quick_cuts
from lightning_autopipe.schedules.interleaved import NAME as INTERLEAVED
from lightning_autopipe.schedules.sliced import NAME as SLICED
from lightning_autopipe.schedules.zero_bubble import NAME as ZERO_BUBBLE

OTHER_KINDS = (SLICED, INTERLEAVED, ZERO_BUBBLE)
"""Schedules beside 1F1B of any depths, of which GPipe is the deepest."""
_MOST_STAGES_PER_RANK = 4
_MAX_MOVES = 40
"""Moves of a cut that are simulated for each number of stages a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleChoice:
    """A schedule, the cuts that it was looked at with, and its step."""

    schedule: ScheduleSpec
    cuts: Cuts
    step_s: float


def choose_schedule(
    setting: PipelineSetting, cuts: Cuts, depths: Depths, *, kinds: Collection[str] = OTHER_KINDS
) -> ScheduleChoice | None:
    """The schedule of these kinds with the shortest simulated step; None where none can be priced, or fits the memory.

    Args:
        setting: what is given; at least two stages, one for each rank.
        cuts: of the layers, as good ones for 1F1B.
        depths: of the warm-up of 1F1B with these cuts, which fit the memory.
        kinds: names of schedules, of `OTHER_KINDS`.
    """
    found = [
        choice
        for kind, choose in ((SLICED, _sliced), (ZERO_BUBBLE, _zero_bubble), (INTERLEAVED, _interleaved))
        if kind in kinds and (choice := choose(setting, cuts, depths)) is not None
    ]
    return min(found, key=lambda choice: choice.step_s, default=None)


def _sliced(setting: PipelineSetting, cuts: Cuts, depths: Depths) -> ScheduleChoice | None:
    found = choose_slices(setting, cuts, depths)
    return None if found is None else ScheduleChoice(schedule=found[0], cuts=cuts, step_s=found[1])


def _zero_bubble(setting: PipelineSetting, cuts: Cuts, depths: Depths) -> ScheduleChoice | None:
    """Gradients of parameters that wait fill the drain: the later stages may keep as much as the first, if it fits."""
    if not setting.cost.can_split_backward:
        return None
    found = []
    for limits in dict.fromkeys((depths, _as_deep_as_fits(setting, cuts, max(depths)))):
        spec = ScheduleSpec(name=ZERO_BUBBLE, depths=limits)
        step_s = simulated_s(scheduled_work(setting, cuts, spec))
        found.append(ScheduleChoice(schedule=spec, cuts=cuts, step_s=step_s))
    return min(found, key=lambda choice: choice.step_s)


def _as_deep_as_fits(setting: PipelineSetting, cuts: Cuts, most: int) -> Depths:
    """For each stage the depth up to ``most`` that its devices have the memory for; never rising."""
    edges = (0, *cuts, setting.cost.num_layers)
    objective = Objective(setting)
    depths: list[int] = []
    for stage_index in range(setting.num_stages):
        depth = depths[-1] if depths else most
        place = (stage_index, edges[stage_index], edges[stage_index + 1])
        while depth and setting.devices and objective.stage_overflow_bytes(*place, depth):
            depth -= 1
        depths.append(depth)
    return tuple(depths)


def _interleaved(setting: PipelineSetting, cuts: Cuts, depths: Depths) -> ScheduleChoice | None:
    """Several stages a rank: for each number of them even stages, then cuts are moved as long as that helps."""
    num_ranks, num_layers = setting.num_stages, setting.cost.num_layers
    found: list[ScheduleChoice] = []
    if setting.cuts is not None:
        return None
    for stages_per_rank in range(2, min(_MOST_STAGES_PER_RANK, num_layers // num_ranks) + 1):
        spec = ScheduleSpec(name=INTERLEAVED, stages_per_rank=stages_per_rank)
        prefixes = Objective(setting.with_stages_per_rank(stages_per_rank)).stage_prefixes()
        even = min_max_partition([after - before for before, after in pairwise(prefixes[0])], len(prefixes))
        starts = (
            _simulated(setting, ScheduleChoice(schedule=spec, cuts=start, step_s=0.0))
            for start in dict.fromkeys((even.cut_points, quick_cuts(prefixes)))
        )
        best = _with_moved_cuts(setting, min(starts, key=lambda choice: choice.step_s))
        if _fits(setting, best):
            found.append(best)
    return min(found, key=lambda choice: choice.step_s, default=None)


def _with_moved_cuts(setting: PipelineSetting, best: ScheduleChoice) -> ScheduleChoice:
    """Moves one cut by one layer, the next one in turn, until a whole round has helped nothing."""
    num_cuts, num_layers = len(best.cuts), setting.cost.num_layers
    moves = [(index, change) for index in range(num_cuts) for change in (-1, 1)]
    num_tried = since_better = position = 0
    while since_better < len(moves) and num_tried < _MAX_MOVES:
        index, change = moves[position % len(moves)]
        position += 1
        since_better += 1
        cuts = (*best.cuts[:index], best.cuts[index] + change, *best.cuts[index + 1 :])
        if sorted(set(cuts)) != list(cuts) or cuts[0] < 1 or cuts[-1] >= num_layers:
            continue
        num_tried += 1
        moved = _simulated(setting, replace(best, cuts=cuts))
        if moved.step_s < best.step_s:
            best, since_better = moved, 0
            position -= 1  # the same move again
    return best


def _simulated(setting: PipelineSetting, choice: ScheduleChoice) -> ScheduleChoice:
    return replace(choice, step_s=simulated_s(scheduled_work(setting, choice.cuts, choice.schedule)))


def _fits(setting: PipelineSetting, choice: ScheduleChoice) -> bool:
    peak_bytes = simulate(scheduled_work(setting, choice.cuts, choice.schedule)).peak_bytes
    return all(
        peak_bytes[device.global_rank] <= device.memory_bytes for of_replica in setting.devices for device in of_replica
    )
