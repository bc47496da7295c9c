"""Which of a pipeline's devices runs which stage, together with the partition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from lightning_autopipe.core.cluster import Device
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.planner.cost import Work
from lightning_autopipe.planner.objective import Objective, PipelineSetting
from lightning_autopipe.planner.order_proof import OrderProof, is_provable
from lightning_autopipe.planner.partitioner import EFFORT, MAX_EXACT, PartitionChoice, PartitionSearch
from lightning_autopipe.planner.replica import Depths, pipeline_bound_s
from lightning_autopipe.planner.starts import quick_cuts
from lightning_autopipe.schedules.one_f_one_b import default_depths

PROOF_EFFORT = 300_000
"""Stages of partial choices that branch and bound may look at."""
_MAX_ORDERS = 5_000
"""Orders that are all compared by their bound, with cuts that are quick to know."""
_MAX_ORDERS_WITH_LINKS = 1_000
"""And where links make all devices unlike."""
_NUM_COMPARED = 64
"""Orders that are compared by their step with such cuts."""
_NUM_STARTED = 16
"""Orders of which each is tried with its best start."""
_NUM_SEARCHED = 8
"""Orders for which partitions are searched."""
_SAME = 1 + 1e-12

Order = tuple[Device, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOrderChoice:
    """Devices in the order of the stages that they run, and the partition for that."""

    devices: Order
    choice: PartitionChoice
    lower_bound_s: float = 0.0
    """What a step takes at least in any order with any partition, as far as that is known; without links only."""

    @property
    def is_exact(self) -> bool:
        """Whether no other order of the devices with any other partition has a shorter step, with these depths."""
        return self.lower_bound_s > 0 and self.choice.step_s <= self.lower_bound_s * _SAME


def choose_device_order(
    setting: PipelineSetting,
    *,
    depths: Depths | None = None,
    effort: int = EFFORT,
    max_exact: int = MAX_EXACT,
    proof_effort: int = PROOF_EFFORT,
) -> DeviceOrderChoice:
    """The order of the devices of one pipeline, and the partition, with the shortest step.

    Devices that are alike are not told apart where no links do. Where there are few orders and partitions, all are
    looked at, those with the least bounds first. Else partitions are searched for the orders with the best starts, and
    from the best one devices are swapped in pairs as long as that helps; without links, branch and bound then looks for
    a better one, or proves that there is none.

    Args:
        setting: with one replica, whose devices may be put in any order.
        depths: of the warm-up; None: as many micro-batches as stages follow.
        effort: actions that may be simulated in all.
        max_exact: number of orders times partitions up to which all are looked at.
        proof_effort: stages that may be looked at for the proof; 0: none is tried.

    Raises:
        ConfigurationError: there are more stages than layers, or nothing was found that fits the memory.
    """
    assert len(setting.devices) == 1, "one pipeline at a time; replicas are placed by the device mapper"
    depths = depths or default_depths(setting.num_stages)
    devices = setting.devices[0]
    orders = _orders(devices, by_rank=setting.network is not None)
    num_partitions = math.comb(setting.cost.num_layers - 1, setting.num_stages - 1)
    if orders is not None and len(orders) * num_partitions <= max_exact:
        return _best_of_all(setting, orders, depths)
    if orders is None or (len(orders) > _MAX_ORDERS_WITH_LINKS and setting.network is not None):
        by_speed = sorted(devices, key=lambda device: (device.relative_speed, device.memory_bytes), reverse=True)
        orders = [devices, tuple(by_speed), tuple(reversed(by_speed))]
    if setting.network is None and len(orders) > _NUM_COMPARED:
        orders = _promising(setting, orders, depths)
    searches = [_search(setting, order, depths, effort // (2 * _NUM_SEARCHED)) for order in orders]
    for search in searches:
        search.consider(search.quick_start())
    searches = sorted(searches, key=_value)[:_NUM_STARTED]
    for search in searches:
        for cuts in search.bound_starts():
            search.consider(cuts)
    searches.sort(key=_value)
    for search in searches[:_NUM_SEARCHED]:
        search.look_around(search.starts())
    best = _swapped(setting, min(searches[:_NUM_SEARCHED], key=_value), depths, effort // 2)
    if best.objective.shares_links:
        return _best_of_simulated([best, *searches[:_NUM_SEARCHED]])
    return _proven(setting, _order_of(best), best.choice(is_exact=False), proof_effort)


def _proven(setting: PipelineSetting, order: Order, choice: PartitionChoice, effort: int) -> DeviceOrderChoice:
    """The choice, or a better one, with what is proven of it."""
    if setting.network is not None or not effort or not is_provable(setting):
        return DeviceOrderChoice(devices=order, choice=choice)
    proof = OrderProof(setting, choice.depths, order, choice.partition.cut_points, choice.step_s).run(effort=effort)
    partition = Partition(cut_points=proof.cuts, num_layers=setting.cost.num_layers)
    return DeviceOrderChoice(
        devices=proof.devices,
        choice=replace(choice, partition=partition, step_s=proof.step_s, is_exact=proof.is_exact),
        lower_bound_s=proof.lower_bound_s,
    )


def _orders(devices: Sequence[Device], *, by_rank: bool) -> list[Order] | None:
    """All orders that differ; None where they are too many to try."""
    kinds: dict[object, list[Device]] = {}
    for device in devices:
        kind = device.global_rank if by_rank else (device.model, device.relative_speed, device.memory_bytes)
        kinds.setdefault(kind, []).append(device)
    num_orders = math.factorial(len(devices))
    for alike in kinds.values():
        num_orders //= math.factorial(len(alike))
    if num_orders > _MAX_ORDERS:
        return None
    orders: list[Order] = [()]
    for _ in devices:
        orders = [
            (*order, alike[used])
            for order in orders
            for alike in kinds.values()
            if (used := sum(device in alike for device in order)) < len(alike)
        ]
    return orders


def _promising(setting: PipelineSetting, orders: Sequence[Order], depths: Depths) -> list[Order]:
    """The orders with the least bounds, without links; sums over layers are made once for each kind and stage."""
    size, num_microbatches = setting.microbatch_size, setting.num_microbatches[0]
    times: dict[object, tuple[tuple[float, ...], tuple[float, ...]]] = {}
    weights: dict[object, list[float]] = {}
    bounds = []
    for index, order in enumerate(orders):
        kinds = [(device.model, device.relative_speed) for device in order]
        for stage_index, (kind, device) in enumerate(zip(kinds, order, strict=True)):
            if kind not in times:
                forward = setting.cost.prefix_s(Work.FORWARD, device=device, microbatch_size=size)
                times[kind] = forward, setting.cost.prefix_s(Work.BACKWARD, device=device, microbatch_size=size)
            if (kind, stage_index) not in weights:
                backwards = num_microbatches - 1
                forwards = max(0, backwards - depths[stage_index])
                pairs = zip(*times[kind], strict=True)
                weights[kind, stage_index] = [forwards * f + backwards * b for f, b in pairs]
        cuts = quick_cuts([weights[kind, stage_index] for stage_index, kind in enumerate(kinds)])
        edges = (0, *cuts, setting.cost.num_layers)
        stages = [
            (forward[stop] - forward[start], backward[stop] - backward[start])
            for (forward, backward), (start, stop) in zip(map(times.__getitem__, kinds), pairwise(edges), strict=True)
        ]
        bounds.append((pipeline_bound_s(stages, [0.0] * len(cuts), depths, num_microbatches), index))
    return [orders[index] for _, index in sorted(bounds)[:_NUM_COMPARED]]


def _best_of_all(setting: PipelineSetting, orders: Sequence[Order], depths: Depths) -> DeviceOrderChoice:
    searches = [_search(setting, order, depths, 0) for order in orders]
    bounds = sorted(
        (search.objective.bound_s(cuts, depths), index, cuts)
        for index, search in enumerate(searches)
        for cuts in combinations(range(1, search.num_layers), search.num_stages - 1)
    )
    shortest_s = math.inf
    for bound_s, index, cuts in bounds:
        if bound_s > shortest_s * _SAME:
            break
        searches[index].consider(cuts)
        if not searches[index].overflow_bytes:
            shortest_s = min(shortest_s, searches[index].step_s)
    best = min(searches, key=_value)
    if not best.objective.shares_links:
        choice = best.choice(is_exact=True)
        return DeviceOrderChoice(devices=_order_of(best), choice=choice, lower_bound_s=choice.step_s)
    return _best_of_simulated(searches)


def _best_of_simulated(searches: Sequence[PartitionSearch]) -> DeviceOrderChoice:
    """Of the orders that promise most the one that is best where transfers share links."""
    found = [
        DeviceOrderChoice(devices=_order_of(search), choice=search.choice(is_exact=False))
        for search in sorted(searches, key=_value)[:_NUM_SEARCHED]
        if not search.overflow_bytes
    ]
    if not found:
        min(searches, key=_value).choice(is_exact=False)  # raises: nothing fits
    return min(found, key=lambda one: one.choice.step_s)


def _swapped(setting: PipelineSetting, best: PartitionSearch, depths: Depths, effort: int) -> PartitionSearch:
    """Swaps devices in pairs, with the partition found so far and the starts of the new order, while that helps."""
    num_left = effort
    tried = {_kinds(_order_of(best))}
    improved = True
    while improved and num_left > 0:
        improved = False
        for first, second in combinations(range(setting.num_stages), 2):
            order = list(_order_of(best))
            order[first], order[second] = order[second], order[first]
            kinds = _kinds(tuple(order))
            if kinds in tried or num_left <= 0:
                continue
            tried.add(kinds)
            search = _search(setting, tuple(order), depths, max(1, effort // 50))
            search.look_around([best.best, search.quick_start()])
            num_left -= search.objective.num_priced_actions
            if _value(search) < _value(best):
                best, improved = search, True
                break
    return best


def _kinds(order: Order) -> tuple[object, ...]:
    return tuple((device.model, device.relative_speed, device.memory_bytes, device.global_rank) for device in order)


def _search(setting: PipelineSetting, order: Order, depths: Depths, effort: int) -> PartitionSearch:
    return PartitionSearch(Objective(replace(setting, devices=(order,))), depths, effort=effort)


def _order_of(search: PartitionSearch) -> Order:
    return search.objective.setting.devices[0]


def _value(search: PartitionSearch) -> tuple[float, float]:
    return search.overflow_bytes, search.step_s
