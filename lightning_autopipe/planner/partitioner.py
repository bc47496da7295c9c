"""Shares layers between stages so that the simulated step is as short as possible."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.planner.cheap_cuts import Fits, cheap_cuts, cheapest_cuts, lopsided_cuts
from lightning_autopipe.planner.cut_moves import CheaperCuts, shifted, slid
from lightning_autopipe.planner.min_max import check_enough_layers, min_max_partition
from lightning_autopipe.planner.objective import Objective, PipelineSetting
from lightning_autopipe.planner.replica import Cuts, Depths
from lightning_autopipe.planner.starts import MinMaxTable, quick_cuts
from lightning_autopipe.schedules.one_f_one_b import default_depths

MAX_EXACT = 20_000
"""Partitions that are all looked at, where there are not more."""
EFFORT = 2_000_000
"""Actions that a search may simulate."""
ACTIONS_LIKE_SIMULATION = 20
"""An action of the simulator takes as long as so many of the recurrence."""
NUM_FINALISTS = 16
"""Partitions that are simulated with shared links, of which the recurrence knows nothing."""
_SAME = 1 + 1e-12
"""Steps whose ratio is less are equally long."""
_NEAR = 1.02
"""Partitions are improved on while their steps are not longer than the best one by more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionChoice:
    """A partition, the warm-up depths that it is for, and what they are worth."""

    partition: Partition
    depths: Depths
    """Warm-up of each stage in micro-batches."""
    step_s: float
    """Seconds of a step."""
    is_exact: bool
    """Whether no other choice is better: of partitions with these depths, or of both where both were searched."""


def choose_partition(
    setting: PipelineSetting, *, depths: Depths | None = None, effort: int = EFFORT, max_exact: int = MAX_EXACT
) -> PartitionChoice:
    """The partition with the shortest step for given warm-up depths; of equally short ones the most even.

    Where there are few partitions it is the best one. Else it is searched: from min-max starts (by time, and by what a
    stage adds to the step), first by AutoPipe's moves around the master stage, then by moving runs of cuts by a layer
    until none shortens the step.

    Args:
        setting: what is given.
        depths: of the warm-up; None: as many micro-batches as stages follow.
        effort: actions that may be simulated in all.
        max_exact: number of partitions up to which all are looked at.

    Raises:
        ConfigurationError: there are more stages than layers, or no partition was found that fits the memory.

    Source:
        Liu et al., *AutoPipe*, IEEE CLUSTER 2022: min-max start, simulation, master stage, moves.
    """
    search = PartitionSearch(Objective(setting), depths or default_depths(setting.num_stages), effort=effort)
    return search.run(max_exact=max_exact)


class PartitionSearch:
    """One search, for fixed depths and devices.

    Args:
        objective: prices partitions.
        depths: of the warm-up.
        effort: actions that may be simulated.
    """

    def __init__(self, objective: Objective, depths: Depths, *, effort: int = EFFORT) -> None:
        self.objective, self.depths = objective, depths
        self.num_stages, self.num_layers = objective.setting.num_stages, objective.num_layers
        self.best: Cuts = ()
        self.overflow_bytes: float = math.inf
        """Of the best partition: 0 where it fits."""
        self.step_s = math.inf
        """Of the best partition."""
        self._unevenness = (math.inf, math.inf)
        self._steps: dict[Cuts, float] = {}  # of those that were simulated; the others are as bad as their bound
        self._last_action = objective.num_priced_actions + effort
        check_enough_layers(self.num_stages, self.num_layers)
        self._adds = objective.bound_weights(depths)
        self._table: MinMaxTable | None = None
        entries = self._adds[1]
        self._cheaper = CheaperCuts(entries) if any(map(any, entries)) else None

    def run(self, *, max_exact: int = MAX_EXACT, num_finalists: int = NUM_FINALISTS) -> PartitionChoice:
        """The best partition that is found; see `choose_partition`."""
        if self.objective.setting.cuts is not None:
            self.look_around([])
            return self.choice(is_exact=True)
        num_partitions = math.comb(self.num_layers - 1, self.num_stages - 1)
        is_exact = num_partitions <= (
            max_exact // ACTIONS_LIKE_SIMULATION if self.objective.shares_links else max_exact
        )
        if is_exact:
            self.look_at_all()
        else:
            self.look_around(self.starts())
        return self.choice(is_exact=is_exact, num_finalists=num_finalists)

    def choice(self, *, is_exact: bool, num_finalists: int = NUM_FINALISTS) -> PartitionChoice:
        """The best partition so far.

        Args:
            is_exact: whether all were looked at, so that as many are simulated with shared links as could be best.
            num_finalists: how many are simulated with shared links where not all were looked at.

        Raises:
            ConfigurationError: none was found that fits the memory.
        """
        if self.overflow_bytes:
            raise ConfigurationError(self._why_nothing_fits())
        if self.objective.shares_links:
            self._simulate_finalists(len(self._steps) if is_exact else num_finalists)
        return PartitionChoice(
            partition=Partition(cut_points=self.best, num_layers=self.num_layers),
            depths=self.depths,
            step_s=self.step_s,
            is_exact=is_exact,
        )

    def _simulate_finalists(self, num_finalists: int) -> None:
        """Chooses between the best partitions by the simulator: sharing links only lengthens what they promise."""
        finalists = sorted((step_s, cuts) for cuts, step_s in self._steps.items())
        self.step_s = math.inf
        for promised_s, cuts in finalists:
            if promised_s >= self.step_s or not num_finalists:
                break
            if self.objective.overflow_bytes(cuts, self.depths):
                continue
            num_finalists -= 1
            step_s = self.objective.predicted_s(cuts, self.depths)
            if step_s < self.step_s:
                self.best, self.step_s = cuts, step_s

    def consider(self, cuts: Cuts) -> bool:
        """Looks at a partition; True where it is the best so far. It is simulated only where it could be."""
        if cuts in self._steps:
            return False
        objective, depths = self.objective, self.depths
        overflow_bytes = objective.overflow_bytes(cuts, depths)
        if overflow_bytes > self.overflow_bytes:
            self._steps[cuts] = math.inf
            return False
        step_s = objective.bound_s(cuts, depths)
        # Where nothing fits yet, memory is what counts.
        if not overflow_bytes and (self.overflow_bytes or step_s <= self.step_s * _SAME):
            step_s = objective.step_s(cuts, depths)
        self._steps[cuts] = step_s
        if overflow_bytes == self.overflow_bytes and step_s * _SAME >= self.step_s:
            if step_s > self.step_s * _SAME or self._unevenness_of(cuts) >= self._unevenness:
                return False
        self.best, self.overflow_bytes, self.step_s = cuts, overflow_bytes, step_s
        self._unevenness = self._unevenness_of(cuts)
        return True

    def _unevenness_of(self, cuts: Cuts) -> tuple[float, float]:
        stages = self.objective.stage_s(cuts)
        return max(stages), sum(seconds**2 for seconds in stages)

    @property
    def is_over(self) -> bool:
        """Whether as much was simulated as may be."""
        return self.objective.num_priced_actions >= self._last_action

    # All of them -----------------------------------------------------------

    def look_at_all(self) -> None:
        """Finds the best partition of all: those with the least bounds first, until a bound is above the best step."""
        self.consider(self._even_start())
        bounds = sorted(
            (self.objective.bound_s(cuts, self.depths), cuts)
            for cuts in combinations(range(1, self.num_layers), self.num_stages - 1)
        )
        for bound_s, cuts in bounds:
            if not self.overflow_bytes and bound_s > self.step_s * _SAME and not self.objective.shares_links:
                break
            self.consider(cuts)

    # Around some -----------------------------------------------------------

    def starts(self) -> list[Cuts]:
        """Where to begin: the most even partition, both ends of the two kinds of min-max ones, and more with links."""
        by_time = _both_ends(MinMaxTable(self.objective.stage_prefixes()), self.num_stages, self.num_layers)
        starts = [self._even_start(), *self.bound_starts(), *by_time]
        if self._cheaper is not None:
            starts += [*self._cheapest(), *cheap_cuts(*self._adds), *lopsided_cuts(self.num_stages, self.num_layers)]
        return list(dict.fromkeys(starts))

    @property
    def _by_bound(self) -> MinMaxTable:
        if self._table is None:
            self._table = MinMaxTable(*self._adds)
        return self._table

    def quick_start(self) -> Cuts:
        """About as good as the bound starts, and much quicker to know."""
        return quick_cuts(*self._adds)

    def bound_starts(self) -> list[Cuts]:
        """The best of the starts: min-max by what a stage adds to the step."""
        return _both_ends(self._by_bound, self.num_stages, self.num_layers)

    def look_around(self, starts: list[Cuts], *, around_masters: bool = True) -> None:
        """Improves on some partitions until nothing is found any more, or as much was simulated as may be."""
        if self.objective.setting.cuts is not None:
            self.consider(self.objective.setting.cuts)
            return
        if around_masters and any(self.objective.overflow_bytes(cuts, self.depths) for cuts in starts):
            starts = list(dict.fromkeys([*starts, *self._cheapest(self._fits)]))
        for cuts in starts:
            self.consider(cuts)
        if around_masters:
            self._move_around_masters(starts, effort=(self._last_action - self.objective.num_priced_actions) // 2)
        while not self.is_over and any(self.consider(cuts) for cuts in self._neighbours(self.best)):
            pass

    def _move_around_masters(self, starts: list[Cuts], *, effort: int) -> None:
        queue = deque(starts)
        queued = set(starts)
        last_action = self.objective.num_priced_actions + effort
        while queue and self.objective.num_priced_actions < last_action:
            cuts = queue.popleft()
            if self._steps[cuts] > self.step_s * _NEAR:
                continue
            for moved in self._moves(cuts):
                if moved not in queued:
                    queued.add(moved)
                    self.consider(moved)
                    queue.append(moved)

    def _master_stage(self, cuts: Cuts) -> int:
        """The stage whose own work makes the step as long as it is; of equal ones the last."""
        edges = (0, *cuts, self.num_layers)
        adds = [
            weight[edges[stage + 1]] - weight[edges[stage]] + entry[edges[stage]]
            for stage, (weight, entry) in enumerate(zip(*self._adds, strict=True))
        ]
        return max(range(len(adds)), key=lambda stage: (adds[stage], stage))

    def _moves(self, cuts: Cuts) -> Iterator[Cuts]:
        """AutoPipe's moves: relieve the master stage, or the stages behind it."""
        master = self._master_stage(cuts)
        edges = (0, *cuts, self.num_layers)
        for stage_index in range(master + 1, self.num_stages - 1):  # A: a layer towards the master, behind it
            if edges[stage_index + 2] - edges[stage_index + 1] > 1:
                yield (*cuts[:stage_index], cuts[stage_index] + 1, *cuts[stage_index + 1 :])
        if edges[master + 1] - edges[master] > 1:
            if master > 0:  # B: its first layer to those before
                first = self._by_bound.cuts(master, edges[master] + 1, early=False)
                yield (*first, edges[master] + 1, *cuts[master:])
            if master < self.num_stages - 1:  # C: its last layer to the next one
                first = self._by_bound.cuts(master + 1, edges[master + 1] - 1, early=False)
                moved = (*first, edges[master + 1] - 1, *cuts[master + 1 :])
                if self._master_stage(moved) <= master:
                    yield moved

    def _neighbours(self, cuts: Cuts) -> Iterator[Cuts]:
        yield from shifted(cuts, self.num_layers, range(1, 2))
        if self._cheaper is not None:
            yield from self._cheaper.jumped(cuts)
            if not self.overflow_bytes:
                alone_s = min(prefix[-1] for prefix in self.objective.stage_prefixes())
                yield from slid(cuts, *self._adds, self.step_s - alone_s)
        yield from shifted(cuts, self.num_layers, range(2, self.num_stages))

    def _cheapest(self, fits: Fits | None = None) -> list[Cuts]:
        return cheapest_cuts(*self._adds, self.objective.stage_prefixes(), self._by_bound.lightest, fits)

    def _fits(self, stage_index: int, start: int, stop: int) -> bool:
        return not self.objective.stage_overflow_bytes(stage_index, start, stop, self.depths[stage_index])

    def _even_start(self) -> Cuts:
        prefix = self.objective.stage_prefixes()[0]
        costs = [after - before for before, after in pairwise(prefix)]
        return min_max_partition(costs, self.num_stages).cut_points

    def _why_nothing_fits(self) -> str:
        objective = self.objective
        edges = (0, *self.best, self.num_layers)
        stages = [
            (objective.stage_overflow_bytes(stage, edges[stage], edges[stage + 1], self.depths[stage]), stage)
            for stage in range(self.num_stages)
        ]
        overflow, stage = max(stages)
        return (
            "no partition was found that fits the devices' memory: the best one lacks "
            f"{self.overflow_bytes / 2**20:.1f} MiB, of which {overflow / 2**20:.1f} MiB on stage {stage} (layers "
            f"{edges[stage]} to {edges[stage + 1] - 1}, {self.depths[stage] + 1} micro-batches in flight); set more "
            "stages (num_stages), or more and so smaller micro-batches (num_microbatches)"
        )


def _both_ends(table: MinMaxTable, num_stages: int, num_layers: int) -> list[Cuts]:
    return [table.cuts(num_stages, num_layers, early=early) for early in (True, False)]
