"""How many micro-batches go through in halves, at the begin and at the end."""

from __future__ import annotations

import math

from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.planner.objective import Objective, PipelineSetting
from lightning_autopipe.planner.replica import Cuts, Depths
from lightning_autopipe.planner.scheduled_work import can_halve, scheduled_work
from lightning_autopipe.planner.simulator import simulated_s
from lightning_autopipe.schedules.sliced import NAME as SLICED


def choose_slices(
    setting: PipelineSetting, cuts: Cuts, depths: Depths, *, max_simulated: int = 24
) -> tuple[ScheduleSpec, float] | None:
    """The slicing with the shortest simulated step, and that step; None where halves cannot be priced.

    Stages keep no more than with whole micro-batches and the same depths: a half counts as half of one. From the
    smallest number that saves all of the startup at even stages, numbers are moved one by one, at the begin and at the
    end, as long as it helps.

    Args:
        setting: what is given; at least two stages.
        cuts: of the layers.
        depths: of the warm-up; a stage keeps at most one more.
        max_simulated: slicings that may be simulated.

    Source:
        Liu et al., *AutoPipe*, IEEE CLUSTER 2022 (slices at the begin; the number for even stages).
    """
    num_microbatches = min(setting.num_microbatches)
    if setting.num_stages < 2 or not can_halve(setting.cost, setting.microbatch_size):
        return None
    found: dict[tuple[int, int], float] = {}

    def spec(first: int, last: int) -> ScheduleSpec:
        return ScheduleSpec(name=SLICED, depths=depths, num_sliced_first=first, num_sliced_last=last)

    def step_s(first: int, last: int) -> float:
        if first < 0 or last < 0 or first + last > num_microbatches or first + last == 0:
            return math.inf
        if (first, last) not in found:
            if len(found) >= max_simulated:
                return math.inf
            found[first, last] = simulated_s(scheduled_work(setting, cuts, spec(first, last)))
        return found[first, last]

    start = min(_even_start(setting, cuts), num_microbatches // 2) or 1
    best = min(((start, 0), (start, start), (0, start)), key=lambda pair: step_s(*pair))
    while True:
        first, last = best
        moved = [(first + 1, last), (first, last + 1), (first - 1, last), (first, last - 1)]
        better = min(moved, key=lambda pair: step_s(*pair))
        if not step_s(*better) < step_s(*best):
            break
        best = better
    return spec(*best), step_s(*best)


def _even_start(setting: PipelineSetting, cuts: Cuts) -> int:
    """Half of what the first forward takes to reach the last stage, in backwards of the last stage."""
    stages = Objective(setting).step_work(cuts, (setting.num_stages,) * setting.num_stages).stages[0]
    backward_s = stages[-1].units[0].backward_s
    startup_s = sum(stage.units[0].forward_s for stage in stages[:-1])
    ranks = setting.ranks[0]
    for stage_index, stage in enumerate(stages[:-1]):
        route = setting.route(ranks[stage_index], ranks[stage_index + 1])
        startup_s += route.occupied_s(stage.units[0].sent_bytes) + route.latency_s
    return max(1, math.ceil(startup_s / (2 * backward_s))) if backward_s else 1
