"""Which placements are worth a search of their partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_autopipe.planner.mapping_bound import Candidate
from lightning_autopipe.planner.mapping_setting import MappingSetting
from lightning_autopipe.planner.objective import Objective

_MIN_PROMISING, _MAX_PROMISING = 3, 10
_LAYERS_SEARCHED = 600
"""Layers of all models together whose partition is searched, where that makes more than the least number."""
_SIMULATED_ACTIONS = 12_000
"""Actions that are simulated to find them; so many placements, and no fewer than are given."""


def promising(setting: MappingSetting, candidates: Sequence[Candidate], *, is_simulated: bool) -> list[Candidate]:
    """The placements with the shortest steps, with the cuts that they have, and with their or with even shares.

    The bound by which placements are compared elsewhere, and the recurrence, know little of waits for shared links; a
    simulation does. Those are simulated that are best without sharing.

    Args:
        setting: what is given.
        candidates: with devices, cuts and shares.
        is_simulated: whether there is time to simulate at all.
    """
    each, more = divmod(setting.num_microbatches, setting.num_replicas)
    even = tuple(each + (index < more) for index in range(setting.num_replicas))
    candidates = [*candidates, *(replace(one, shares=even) for one in candidates if one.shares != even)]
    found: list[tuple[float, int, Objective]] = []
    for index, candidate in enumerate(candidates):
        objective = Objective(setting.pipelines(candidate.grid, candidate.shares))
        if not objective.overflow_bytes(candidate.cuts, setting.depths):
            found.append((objective.step_s(candidate.cuts, setting.depths), index, objective))
    found.sort(key=lambda one: one[:2])
    if is_simulated:
        num_actions = 2 * setting.num_stages * setting.num_microbatches
        number = max(_MIN_PROMISING, _SIMULATED_ACTIONS // num_actions)
        simulated = [
            (objective.predicted_s(candidates[index].cuts, setting.depths), index, objective)
            for _, index, objective in found[:number]
        ]
        found = [*sorted(simulated, key=lambda one: one[:2]), *found[number:]]
    num_promising = min(_MAX_PROMISING, max(_MIN_PROMISING, _LAYERS_SEARCHED // setting.cost.num_layers))
    return [candidates[index] for _, index, _ in found[:num_promising]]
