"""Shares layers between stages and chooses how far each stage runs ahead, together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations_with_replacement

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.planner.objective import Objective, PipelineSetting
from lightning_autopipe.planner.partitioner import (
    ACTIONS_LIKE_SIMULATION,
    EFFORT,
    MAX_EXACT,
    PartitionChoice,
    PartitionSearch,
)
from lightning_autopipe.planner.replica import Cuts, Depths

_SLOPES = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 0.75, 0.5, 0.0)
"""Micro-batches of warm-up for each stage that follows; below 1 for where memory is short."""
_NUM_IMPROVED = 3
"""Choices of depths that are improved on."""
_NUM_COMPARED = 2
"""Partitions that are simulated with shared links for each choice of depths; more for the one that is taken."""
_SAME = 1 + 1e-12


def choose_partition_and_depths(
    setting: PipelineSetting, *, effort: int = EFFORT, max_exact: int = MAX_EXACT
) -> PartitionChoice:
    """The partition and the warm-up depths with the shortest step; of equally short ones those that keep least.

    Deeper warm-ups let uneven stages and slow links wait less, as far as memory allows it. Where there are few choices
    of depths and partitions, all are looked at. Else a partition is searched for several slopes of the depth over the
    stages; depths and cuts of the best of these are improved in turn. At last every depth is lowered as far as the step
    stays as short.

    Args:
        setting: what is given.
        effort: actions that may be simulated in all.
        max_exact: number of partitions up to which all are looked at for each choice of depths.

    Raises:
        ConfigurationError: there are more stages than layers, or nothing was found that fits the memory.
    """
    objective = Objective(setting)
    found: list[PartitionChoice] = []
    failure: ConfigurationError | None = None
    num_stages, num_microbatches = setting.num_stages, max(setting.num_microbatches)
    num_choices = math.comb(num_stages + num_microbatches - 1, num_stages)
    num_choices *= math.comb(max(0, objective.num_layers - 1), num_stages - 1)
    is_exact = num_choices <= (max_exact // ACTIONS_LIKE_SIMULATION if objective.shares_links else max_exact)
    is_exact = is_exact and 2 * num_choices * num_stages * num_microbatches <= effort
    starts = list(dict.fromkeys(_all_depths(num_stages, num_microbatches) if is_exact else _starts(objective)))
    for depths in starts:
        try:
            search = PartitionSearch(objective, depths, effort=effort // (2 * len(starts)))
            found.append(search.run(max_exact=max_exact, num_finalists=_NUM_COMPARED))
        except ConfigurationError as error:
            failure = failure or error
    if failure is not None and not found:
        raise failure
    found.sort(key=lambda choice: choice.step_s)
    if is_exact:
        return _trimmed(objective, found[0], is_exact=True)
    improved = [_improved(objective, choice, effort // (2 * _NUM_IMPROVED)) for choice in found[:_NUM_IMPROVED]]
    best = min(improved, key=lambda choice: choice.step_s)
    if objective.shares_links:
        search = PartitionSearch(objective, best.depths, effort=effort // (2 * _NUM_IMPROVED))
        search.look_around([best.partition.cut_points])
        best = min(best, search.choice(is_exact=False), key=lambda choice: choice.step_s)
    return _trimmed(objective, best, is_exact=False)


def _all_depths(num_stages: int, num_microbatches: int) -> Iterator[Depths]:
    """All depths that never rise and make a difference."""
    return combinations_with_replacement(range(num_microbatches - 1, -1, -1), num_stages)


def _starts(objective: Objective) -> Iterator[Depths]:
    """By slope, without and with as many micro-batches more as the crossings behind a stage last."""
    stages = range(objective.setting.num_stages)
    most = max(objective.setting.num_microbatches) - 1
    for slope in _SLOPES:
        by_slope = [math.ceil(slope * (stages.stop - 1 - stage)) for stage in stages]
        for for_links in ([0] * len(stages), _depths_for_links(objective)):
            yield tuple(min(most, depth + more) for depth, more in zip(by_slope, for_links, strict=True))


def _depths_for_links(objective: Objective) -> list[int]:
    """For each cut behind a stage as many micro-batches as a crossing there and back lasts on an even stage."""
    num_stages = objective.setting.num_stages
    stage_s = sum(prefix[-1] for prefix in objective.stage_prefixes()) / num_stages**2
    _, entries = objective.bound_weights((0,) * num_stages)
    depths = [0]
    for stage_index in range(num_stages - 1, 0, -1):
        crossing_s = sorted(entries[stage_index])[objective.num_layers // 2]
        depths.append(depths[-1] + (math.ceil(crossing_s / stage_s) if stage_s else 0))
    return depths[::-1]


def _improved(objective: Objective, choice: PartitionChoice, effort: int) -> PartitionChoice:
    """Makes the warm-up of the first stages deeper, and moves cuts for that, in turn, as long as it helps."""
    cuts, depths, step_s = choice.partition.cut_points, choice.depths, choice.step_s
    last_action = objective.num_priced_actions + effort
    while objective.num_priced_actions < last_action:
        deeper = _deeper(objective, cuts, depths, step_s)
        if deeper is None:
            break
        search = PartitionSearch(objective, deeper, effort=last_action - objective.num_priced_actions)
        search.look_around([cuts])
        moved = search.choice(is_exact=False, num_finalists=_NUM_COMPARED)
        cuts, depths, step_s = moved.partition.cut_points, deeper, moved.step_s
    return _choice(objective, cuts, depths, is_exact=False)


def _deeper(objective: Objective, cuts: Cuts, depths: Depths, step_s: float) -> Depths | None:
    """Depths that shorten the step with the same cuts: those of the first stages, as many as help, one deeper."""
    most = max(objective.setting.num_microbatches) - 1
    for num_deeper in range(len(depths), 0, -1):
        deeper = (*(min(most, depth + 1) for depth in depths[:num_deeper]), *depths[num_deeper:])
        if deeper != depths and not objective.overflow_bytes(cuts, deeper):
            if objective.bound_s(cuts, deeper) < step_s and objective.predicted_s(cuts, deeper) * _SAME < step_s:
                return deeper
    return None


def _trimmed(objective: Objective, choice: PartitionChoice, *, is_exact: bool) -> PartitionChoice:
    """The shallowest depths, from the last stage to the first, with which the step is as short."""
    cuts, depths = choice.partition.cut_points, choice.depths
    for stage_index in range(len(depths) - 1, -1, -1):
        least = depths[stage_index + 1] if stage_index + 1 < len(depths) else 0
        while depths[stage_index] > least:
            shallower = (*depths[:stage_index], depths[stage_index] - 1, *depths[stage_index + 1 :])
            if objective.predicted_s(cuts, shallower) > choice.step_s * _SAME:
                break
            depths = shallower
    return _choice(objective, cuts, depths, is_exact=is_exact)


def _choice(objective: Objective, cuts: Cuts, depths: Depths, *, is_exact: bool) -> PartitionChoice:
    return PartitionChoice(
        partition=Partition(cut_points=cuts, num_layers=objective.num_layers),
        depths=depths,
        step_s=objective.predicted_s(cuts, depths),
        is_exact=is_exact,
    )
