"""Proves that no order of unlike devices with any partition is better than what was found, or finds what is."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, replace

from lightning_autopipe.core.cluster import Device
from lightning_autopipe.planner.objective import Objective, PipelineSetting
from lightning_autopipe.planner.order_tables import OrderTables, Used
from lightning_autopipe.planner.replica import Cuts, Depths

_MAX_TABLE = 150_000
"""Devices used, times kinds of them, times layers: some seconds; 8 devices of 3 kinds and 177 layers are 25,488."""
_SAME = 1 + 1e-12

_Turns = tuple[float, float, float, float, float, float]
"""Of a stage that is chosen: what it takes without waits; the longest forward and backward of it and those before; the
way through the stages chosen behind it; and the longest first and last wait that turn around there."""


def is_provable(setting: PipelineSetting) -> bool:
    """Whether the tables for a proof are of a size that is quick to make."""
    kinds = Counter((device.model, device.relative_speed, device.memory_bytes) for device in setting.devices[0])
    num_states = math.prod(number + 1 for number in kinds.values())
    return num_states * len(kinds) * setting.cost.num_layers <= _MAX_TABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What became of the attempt."""

    devices: tuple[Device, ...]
    """In the best order."""
    cuts: Cuts
    step_s: float
    is_exact: bool
    """Whether no other order and partition is better."""
    lower_bound_s: float
    """What none is below; `step_s` where that `is_exact`."""
    num_visited: int
    """Stages of partial choices that were looked at."""


class OrderProof:
    """Branch and bound over devices and layers of one stage after the other, without links.

    A step takes at least what a micro-batch takes through all stages and back, and the most that a stage adds to it.
    The least of that is known for the stages that are left over, by `OrderTables`. Besides, a stage computes all
    micro-batches but those that its depth lets run while it waits for the first way behind it and for the last one; a
    way turns around on any stage, earlier for as many forwards, or backwards, as that one's depth. Partial choices
    whose bound is not below the best step are left out; of whole ones the step is priced.

    Args:
        setting: with one replica and no links.
        depths: of the warm-up.
        devices: in the best order that is known.
        cuts: of the best partition that is known for it; it fits the memory.
        step_s: of that.
    """

    def __init__(
        self, setting: PipelineSetting, depths: Depths, devices: tuple[Device, ...], cuts: Cuts, step_s: float
    ) -> None:
        self._setting, self._depths, self._best = setting, depths, (devices, cuts, step_s)
        self._num_layers, self._num_stages = setting.cost.num_layers, setting.num_stages
        self._num_microbatches = setting.num_microbatches[0]
        kinds: dict[object, list[Device]] = {}
        for device in devices:
            kinds.setdefault((device.model, device.relative_speed, device.memory_bytes), []).append(device)
        self._kinds = list(kinds.values())
        self._objectives: dict[tuple[int, ...], Objective] = {}
        self._num_visited = self._most_visited = 0

    def run(self, *, effort: int) -> Proof:
        """Goes through all that could be better.

        Args:
            effort: stages of partial choices that may be looked at.
        """
        self._tables = OrderTables(self._setting, self._depths, self._kinds, self._limit_s)
        nothing = (0,) * len(self._kinds)
        lower_bound_s = self._tables.least_s(nothing, 0, 0.0, math.inf) + self._setting.exchange_s
        self._most_visited = effort
        self._visit(nothing, 0, 0.0, 0.0, (), (), ())
        devices, cuts, step_s = self._best
        is_exact = self._num_visited < effort
        return Proof(
            devices=devices,
            cuts=cuts,
            step_s=step_s,
            is_exact=is_exact,
            lower_bound_s=step_s if is_exact else min(step_s, lower_bound_s),
            num_visited=self._num_visited,
        )

    @property
    def _limit_s(self) -> float:
        """Seconds below which a step is better."""
        return self._best[2] / _SAME - self._setting.exchange_s

    # Branches ----------------------------------------------------------------

    def _visit(
        self,
        used: Used,
        start: int,
        through_s: float,
        added_s: float,
        turns: tuple[_Turns, ...],
        order: tuple[int, ...],
        cuts: Cuts,
    ) -> None:
        """Tries all devices and ends for the next stage.

        Args:
            used: devices of the stages so far.
            start: the next stage's first layer.
            through_s: of one micro-batch through the stages so far.
            added_s: the most that one of them adds.
            turns: of the stages so far.
            order: kinds of devices so far.
            cuts: ends of the stages so far.
        """
        stage_index = len(order)
        if stage_index == self._num_stages:
            self._consider(order, cuts[:-1])
            return
        num_more = self._num_stages - stage_index - 1
        tables = self._tables
        for kind, following in tables.following(used):
            adds, times, forward = tables.adds[kind][stage_index], tables.times[kind], tables.forwards[kind]
            last = bisect_right(adds, adds[start] + self._limit_s - through_s) - 1
            ends = range(start + 1, min(last, self._num_layers - num_more) + 1) if num_more else (self._num_layers,)
            for stop in ends:
                self._num_visited += 1
                if self._num_visited >= self._most_visited:
                    return
                limit_s, seconds = self._limit_s, times[stop] - times[start]
                if through_s + self._num_microbatches * seconds >= limit_s:
                    break
                forward_s = forward[stop] - forward[start]
                further, most_s = self._further(turns, through_s, forward_s, seconds - forward_s)
                through, added = through_s + seconds, max(added_s, adds[stop] - adds[start])
                if through + tables.least_s(following, stop, added, most_s) < limit_s:
                    self._visit(following, stop, through, added, further, (*order, kind), (*cuts, stop))

    def _further(
        self, turns: tuple[_Turns, ...], through_s: float, forward_s: float, backward_s: float
    ) -> tuple[tuple[_Turns, ...], float]:
        """Turns with one more stage, and what the stages left over may take at most."""
        depth, seconds, limit_s = self._depths[len(turns)], forward_s + backward_s, self._limit_s
        further, most_s = [], math.inf
        longest_forward_s, longest_backward_s = forward_s, backward_s
        for base_s, forwards_s, backwards_s, way_s, first_s, last_s in turns:
            longest_forward_s, longest_backward_s = max(forwards_s, forward_s), max(backwards_s, backward_s)
            way_s += seconds
            first_s, last_s = max(first_s, way_s + depth * forwards_s), max(last_s, way_s + depth * backwards_s)
            further.append((base_s, forwards_s, backwards_s, way_s, first_s, last_s))
        num_computed = self._num_microbatches - depth
        first_s, last_s, way_s = depth * longest_forward_s, depth * longest_backward_s, 0.0
        if num_computed < 2:  # too few micro-batches for two waits
            num_computed, first_s, last_s, way_s = self._num_microbatches, 0.0, 0.0, -math.inf
        own_s = through_s + num_computed * seconds
        further.append((own_s, longest_forward_s, longest_backward_s, way_s, first_s, last_s))
        for base_s, _, _, way_s, first_s, last_s in further:
            longer, left_s = max(first_s, last_s), limit_s - base_s
            if first_s + last_s >= left_s:
                return (), 0.0
            most_s = min(most_s, (left_s - longer if 2 * longer >= left_s else left_s / 2) - way_s)
        return tuple(further), most_s

    def _consider(self, order: tuple[int, ...], cuts: Cuts) -> None:
        """Prices a whole choice, and keeps it where it is the best."""
        if order not in self._objectives:
            left = [list(kind) for kind in self._kinds]
            devices = tuple(left[kind].pop(0) for kind in order)
            self._objectives[order] = Objective(replace(self._setting, devices=(devices,)))
        objective = self._objectives[order]
        if objective.bound_s(cuts, self._depths) >= self._best[2] or objective.overflow_bytes(cuts, self._depths):
            return
        step_s = objective.step_s(cuts, self._depths)
        if step_s * _SAME < self._best[2]:
            self._best = objective.setting.devices[0], cuts, step_s
