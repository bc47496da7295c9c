"""Chooses which device runs which stage of which replica, together with the partition and the replicas' shares."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import NoReturn

from lightning_autopipe.core.cluster import ClusterTopology
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.mapping import DeviceMapping
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.planner.mapping_bound import Candidate, MappingBound
from lightning_autopipe.planner.mapping_candidates import promising
from lightning_autopipe.planner.mapping_choice import MappingChoice
from lightning_autopipe.planner.mapping_prices import MappingPrices
from lightning_autopipe.planner.mapping_search import MappingSearch, is_less, unlike
from lightning_autopipe.planner.mapping_setting import MappingSetting
from lightning_autopipe.planner.objective import Objective
from lightning_autopipe.planner.partitioner import PartitionSearch
from lightning_autopipe.planner.placements import Grid, launcher_placement, placements
from lightning_autopipe.planner.replica import Cuts
from lightning_autopipe.planner.symmetry import distinct_orders

EFFORT_PER_DEVICE = 3_000
"""Stages and hops that a search for exchanges may price, for each device of the cluster."""
PARTITION_EFFORT = 250_000
"""Actions that may be gone through for the partition of one mapping."""
MAX_EXACT = 2_000
"""Mappings times partitions up to which all are looked at."""
_MAX_EXACT_DEVICES = 8
_MAX_ORDERS = 200
"""Orders of few devices that are all looked at, with the cuts that suit them."""
_NUM_IMPROVED = 3
"""Placements from which devices are exchanged."""
_NUM_IMPROVED_OF_FEW = 8
"""And where there are few orders of devices."""
_SHORT = 8
"""The partition of a mapping that is only compared is searched with so many times less effort."""
_SHORTER = 4
"""And where devices were exchanged after a search."""
_NEAR = 1.03
"""And searched on where its step is not longer than the best one by more than this."""
_NUM_SETTLED = 1
_FEW_LAYERS = 100
"""Up to so many, partitions of all placements that are compared are searched from all starts, which is quick then."""
_LONGER = 4
"""And the launcher's order with so many times more effort."""
_ACTIONS_LIKE_PARTITION = 50
"""All partitions are looked at where effort is left for so many actions each."""
_NUM_ROUNDS = 3
"""Of partition and exchanges in turn."""
MAX_SIMULATED = 3_000_000
"""Actions times devices up to which a mapping is simulated; above, a step is what it takes without shared links, or
the bound if that is more."""
_MAX_FINALISTS = 16
_SIMULATED_ACTIONS = 2_000
"""As many of the best partitions of a mapping are simulated as have so many actions together, but 1 to 16."""
_SAME = 1 + 1e-12


def choose_mapping(
    setting: MappingSetting,
    *,
    effort: int | None = None,
    partition_effort: int = PARTITION_EFFORT,
    max_exact: int = MAX_EXACT,
    fold: bool = True,
) -> MappingChoice:
    """The mapping, with its partition and shares of micro-batches, that has the shortest simulated step.

    Up to 8 devices and where there are few mappings and partitions, all are looked at, those with the least bounds
    first. Else placements are compared by their bound with the cuts that suit each; from the best ones devices are
    exchanged; for those the partition is searched, and devices exchanged again for it; what is best then is simulated.

    Args:
        setting: what is given.
        effort: stages and hops that may be priced in exchanges; None: in proportion to the number of devices.
        partition_effort: actions that may be gone through for each partition.
        max_exact: number of mappings times partitions up to which all are looked at.
        fold: whether alike devices are folded together; without, the same is found more slowly.

    Raises:
        ConfigurationError: there are more stages than layers or nothing was found that fits the memory; no links lead
            from one device to another.
    """
    if setting.num_stages > setting.cost.num_layers:
        raise ConfigurationError(
            f"{setting.num_stages} stages for {setting.cost.num_layers} layers: each stage owns at least one; set "
            "fewer stages (num_stages)"
        )
    if effort is None:
        effort = EFFORT_PER_DEVICE * setting.topology.world_size
    chooser = _Chooser(setting, effort, partition_effort, max_exact, fold)
    best = chooser.best()
    free = chooser.free(best)
    return chooser.choice(best, min(best.step_s, free.step_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    grid: Grid
    cuts: Cuts
    shares: tuple[int, ...]
    step_s: float
    is_exact: bool = False
    is_simulated: bool = True


class _Chooser:
    def __init__(self, setting: MappingSetting, effort: int, partition_effort: int, max_exact: int, fold: bool) -> None:
        self._setting, self._effort, self._partition_effort = setting, effort, partition_effort
        self._max_exact, self._fold = max_exact, fold
        self._prices = MappingPrices(setting)
        self._num_scored = 0

    def best(self) -> _Found:
        """The best mapping with rank 0 on the last stage of replica 0."""
        orders = self._few_orders(keeps_rank_0=True)
        if orders is not None and self._are_few(orders):
            return self._best_of_all(orders)
        search = self._search(keeps_rank_0=True)
        ranked = search.best_of(self._starts(orders))
        starts = ranked[: _NUM_IMPROVED_OF_FEW if orders else _NUM_IMPROVED]
        # The launcher's order is always among them: a mapping is never worse than none.
        launcher = search.evaluated(launcher_placement(self._setting.num_stages, self._setting.num_replicas))
        improved = [search.improved(candidate, effort=self._effort // (2 * len(starts))) for candidate in starts]
        candidates = unlike([launcher, *improved])
        found: list[_Found] = []
        for candidate in candidates:
            below_s = _NEAR * min((one.step_s for one in found), default=math.inf)
            one = self._partitioned(candidate, self._partition_effort // _SHORT, below_s)
            found += [one] if one is not None else []
        if not found:
            self._refuse(candidates[-1])
        found.sort(key=lambda one: one.step_s)
        near = [one for one in found if one.step_s <= _NEAR * found[0].step_s]
        settled = [found[0], *(self._settled(search, one) for one in near[:_NUM_SETTLED])]
        self._num_scored += search.num_scored
        return self._compared(ranked, launcher, min(settled, key=lambda one: one.step_s))

    def _compared(self, candidates: list[Candidate], launcher: Candidate, best: _Found) -> _Found:
        """The best one, or a placement whose simulated step is shorter, with cuts that are improved to the end."""
        effort, is_small = self._partition_effort // _SHORT, self._setting.cost.num_layers <= _FEW_LAYERS
        for candidate in promising(self._setting, candidates, is_simulated=self._is_simulated):
            best = self._partitioned(candidate, effort, best.step_s, has_starts=is_small) or best
        effort = self._partition_effort * (_LONGER if is_small else 1)
        best = self._partitioned(launcher, effort, best.step_s) or best
        last = replace(launcher, grid=best.grid, cuts=best.cuts, shares=best.shares)
        return self._partitioned(last, effort // 2, best.step_s, has_starts=False) or best

    @property
    def _num_actions(self) -> int:
        return 2 * self._setting.num_stages * self._setting.num_microbatches

    @property
    def _is_simulated(self) -> bool:
        return self._num_actions * self._setting.topology.world_size <= MAX_SIMULATED

    def free(self, best: _Found) -> _Found:
        """The best mapping with rank 0 on any stage or none, begun from the best one with it in its place, too."""
        orders = self._few_orders(keeps_rank_0=False)
        if orders is not None and self._are_few(orders):
            return self._best_of_all(orders)
        search = self._search(keeps_rank_0=False)
        start = search.evaluated(best.grid, best.cuts)
        starts = [start, *search.best_of(self._starts(orders))[:1]]
        improved = [search.improved(candidate, effort=self._effort // (4 * len(starts))) for candidate in starts]
        for candidate in unlike(improved):
            if is_less(candidate.score, start.score):  # else it promises no more than is there already
                best = self._partitioned(candidate, self._partition_effort // _SHORTER, best.step_s) or best
        self._num_scored += search.num_scored
        return best

    def _search(self, *, keeps_rank_0: bool) -> MappingSearch:
        return MappingSearch(prices=self._prices, keeps_rank_0=keeps_rank_0, fold=self._fold)

    def _starts(self, orders: list[Grid] | None) -> list[Grid]:
        setting = self._setting
        found = placements(setting.topology, setting.num_stages, setting.num_replicas).values()
        return [*found, *(orders or ())]

    def _are_few(self, orders: list[Grid]) -> bool:
        setting = self._setting
        num_partitions = math.comb(setting.cost.num_layers - 1, setting.num_stages - 1) if setting.cuts is None else 1
        return len(orders) * num_partitions <= self._max_exact

    def _all_cuts(self) -> Iterator[Cuts]:
        setting = self._setting
        if setting.cuts is not None:
            return iter((setting.cuts,))
        return combinations(range(1, setting.cost.num_layers), setting.num_stages - 1)

    def _few_orders(self, *, keeps_rank_0: bool) -> list[Grid] | None:
        """All mappings without those that mirror others; None where they are many."""
        setting = self._setting
        num_stages, num_replicas = setting.num_stages, setting.num_replicas
        if setting.topology.world_size > _MAX_EXACT_DEVICES:
            return None
        most = max(_MAX_ORDERS, self._max_exact // math.comb(setting.cost.num_layers - 1, num_stages - 1))
        orders = every_grid(
            setting.topology, num_stages, num_replicas, fold=self._fold, first=0 if keeps_rank_0 else None
        )
        found = list(islice(orders, most + 1))
        return found if len(found) <= most else None

    def _best_of_all(self, grids: list[Grid]) -> _Found:
        setting, prices = self._setting, self._prices
        search = MappingSearch(prices=prices, keeps_rank_0=False, fold=self._fold)
        candidates = sorted(
            (search.evaluated(grid, cuts) for grid in grids for cuts in self._all_cuts()),
            key=lambda candidate: candidate.score[:2],
        )
        self._num_scored += search.num_scored
        best: _Found | None = None
        for candidate in candidates:
            if best is not None and candidate.score[1] > best.step_s * _SAME:
                break
            objective = Objective(setting.pipelines(candidate.grid, candidate.shares))
            if objective.overflow_bytes(candidate.cuts, setting.depths):
                continue
            step_s = objective.predicted_s(candidate.cuts, setting.depths)
            if best is None or step_s < best.step_s:
                best = _Found(
                    grid=candidate.grid, cuts=candidate.cuts, shares=candidate.shares, step_s=step_s, is_exact=True
                )
        if best is None:
            self._refuse(candidates[0])
        return best

    def _settled(self, search: MappingSearch, best: _Found) -> _Found:
        """The best partition for a mapping, and the best mapping for that, in turn."""
        effort = self._partition_effort
        candidate = search.evaluated(best.grid, best.cuts)
        for _ in range(_NUM_ROUNDS):
            better = self._partitioned(candidate, effort, best.step_s)
            if better is None and effort < self._partition_effort:
                break
            best = better or best
            effort = self._partition_effort // _SHORTER
            start = search.evaluated(best.grid, best.cuts)
            candidate = search.improved(start, effort=self._effort // 4, keeps_cuts=True)
            if (candidate.grid, candidate.shares) == (best.grid, best.shares):
                break
        return best

    def _partitioned(
        self, candidate: Candidate, effort: int, below_s: float, *, has_starts: bool = True
    ) -> _Found | None:
        """The best partition for a mapping that is found; None where none fits or the step is not below a limit.

        What it takes without sharing links is known sooner, and never above what it takes with that.
        """
        setting = self._setting
        objective = Objective(setting.pipelines(candidate.grid, candidate.shares))
        partitions = PartitionSearch(objective, setting.depths, effort=effort)
        num_partitions = math.comb(setting.cost.num_layers - 1, setting.num_stages - 1)
        if num_partitions <= effort // _ACTIONS_LIKE_PARTITION and setting.cuts is None:
            partitions.look_at_all()
        else:
            starts = partitions.starts() if has_starts else []
            partitions.look_around([candidate.cuts, *starts], around_masters=has_starts)
        if partitions.overflow_bytes or partitions.step_s * _SAME >= below_s:
            return None
        is_simulated = self._is_simulated or not objective.shares_links
        cuts, step_s = partitions.best, partitions.step_s
        if is_simulated:
            num_finalists = max(1, min(_MAX_FINALISTS, _SIMULATED_ACTIONS // self._num_actions))
            choice = partitions.choice(is_exact=False, num_finalists=num_finalists)
            cuts, step_s = choice.partition.cut_points, choice.step_s
        else:  # links are shared at least as far as the bound knows it
            step_s = max(step_s, MappingBound(self._prices, candidate.grid, cuts, candidate.shares).score()[1])
        if step_s * _SAME >= below_s:
            return None
        return _Found(grid=candidate.grid, cuts=cuts, shares=candidate.shares, step_s=step_s, is_simulated=is_simulated)

    def _refuse(self, candidate: Candidate) -> NoReturn:
        """Raises what the partitioner says of a mapping for which nothing fits."""
        objective = Objective(self._setting.pipelines(candidate.grid, candidate.shares))
        search = PartitionSearch(objective, self._setting.depths, effort=self._partition_effort)
        search.run()
        raise ConfigurationError("no mapping was found that fits the devices' memory; set more stages (num_stages)")

    def choice(self, best: _Found, free_step_s: float) -> MappingChoice:
        """What is told of the best mapping."""
        setting = self._setting
        mapping = DeviceMapping(stage_ranks=tuple(zip(*best.grid, strict=True)))
        return MappingChoice(
            mapping=mapping,
            partition=Partition(cut_points=best.cuts, num_layers=setting.cost.num_layers),
            depths=setting.depths,
            setting=setting.pipelines(best.grid, best.shares),
            step_s=best.step_s,
            free_step_s=free_step_s,
            lower_bound_s=self._prices.lower_bound_s(),
            is_exact=best.is_exact,
            is_simulated=best.is_simulated,
            num_scored=self._num_scored,
            idle_ranks=mapping.idle_ranks(setting.topology.world_size),
        )


def every_grid(
    topology: ClusterTopology, num_stages: int, num_replicas: int, *, fold: bool, first: int | None
) -> Iterator[Grid]:
    """All mappings; of those that differ by exchanges of alike devices or by turning the ring of replicas, one.

    The order of replicas is that of the ring that sums their gradients, so it counts, but not where it begins.
    """
    for order in distinct_orders(topology, num_stages * num_replicas, fold=fold, first=first):
        grid = tuple(tuple(reversed(order[begin : begin + num_stages])) for begin in range(0, len(order), num_stages))
        if first is not None or not fold or order[0] == min(ranks[-1] for ranks in grid):
            yield grid
