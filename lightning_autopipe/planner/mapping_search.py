"""Searches mappings by their bound: placements, then exchanges of devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

from lightning_autopipe.planner.mapping_bound import Candidate, MappingBound, Place, Score
from lightning_autopipe.planner.mapping_prices import MappingPrices
from lightning_autopipe.planner.placements import Grid, with_rank_0_last
from lightning_autopipe.planner.replica import Cuts
from lightning_autopipe.planner.symmetry import twin_classes

_LESS = 1 - 1e-9
"""A bound is better where it is less by more than what sums are rounded by."""


@dataclass(slots=True, kw_only=True)
class MappingSearch:
    """Candidates for a setting.

    Args:
        prices: of what is given.
        keeps_rank_0: whether rank 0 runs the last stage of replica 0.
        fold: whether exchanges of twins are left out.
    """

    prices: MappingPrices
    keeps_rank_0: bool = True
    fold: bool = True
    num_scored: int = 0
    """Mappings that were looked at."""
    _twins: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        network = self.prices.setting.network
        self._twins = twin_classes(network) if self.fold else tuple(range(network.topology.world_size))

    def evaluated(self, grid: Grid, cuts: Cuts | None = None) -> Candidate:
        """A placement with the cuts and shares that suit it.

        Args:
            grid: devices; put right where rank 0 must run the last stage.
            cuts: to keep; None: they are found anew.
        """
        if self.keeps_rank_0:
            grid = with_rank_0_last(grid)
        found = self._bound(grid, cuts).candidate()
        others = self.prices.other_cuts(grid, found.shares) if cuts is None else ()
        return min([found, *(self._bound(grid, other).candidate() for other in others)], key=_score)

    def _bound(self, grid: Grid, cuts: Cuts | None = None) -> MappingBound:
        self.num_scored += 1
        prices = self.prices
        if cuts is None:
            cuts = prices.cuts(grid, prices.even_shares())
            shares = prices.shares(grid, cuts)
            if shares != prices.even_shares():
                cuts = prices.cuts(grid, shares)
        return MappingBound(prices, grid, cuts, prices.shares(grid, cuts))

    def best_of(self, grids: Iterable[Grid]) -> list[Candidate]:
        """Placements, the best one first."""
        right = {with_rank_0_last(grid) if self.keeps_rank_0 else grid: None for grid in grids}
        return unlike(sorted((self.evaluated(grid) for grid in right), key=_score))

    def improved(self, candidate: Candidate, *, effort: int, keeps_cuts: bool = False) -> Candidate:
        """Exchanges devices, and stages of all replicas, as long as that helps; then turns runs of stages around.

        Devices that take equally long are exchanged with cuts and shares as they are; for unlike ones both are found
        anew, unless cuts are kept. Where a bound stays the same, less work for devices and links is better: it leaves
        room for the next one.

        Args:
            candidate: to begin with.
            effort: stages and hops that may be priced.
            keeps_cuts: whether cuts stay as they are.
        """
        last = self.prices.num_priced + effort
        bound = MappingBound(self.prices, candidate.grid, candidate.cuts, candidate.shares)
        best = bound.score()
        is_better = True
        while is_better and self.prices.num_priced < last:
            is_better = False
            for grid in self._turned(bound.grid):
                if self.prices.num_priced >= last:
                    break
                other = self._bound(grid, bound.cuts if keeps_cuts else None)
                if is_less(score := other.score(), best):
                    bound, best, is_better = other, score, True
            for a, b in self._pairs(bound):
                if self.prices.num_priced >= last:
                    break
                if not self._may_exchange(bound, a, b):
                    continue
                other, score = self._exchanged(bound, a, b, keeps_cuts=keeps_cuts)
                if is_less(score, best):
                    bound, best, is_better = other, score, True
                elif other is bound:
                    bound.exchange(a, b)
            if is_better:
                continue
            for grid in self._with_runs_reversed(bound.grid):
                if self.prices.num_priced >= last:
                    break
                other = self._bound(grid, bound.cuts if keeps_cuts else None)
                if is_less(score := other.score(), best):
                    bound, best, is_better = other, score, True
                    break
        return bound.candidate()

    def _exchanged(self, bound: MappingBound, a: Place, b: Place, *, keeps_cuts: bool) -> tuple[MappingBound, Score]:
        """The bound itself, changed, where only places change; else another one."""
        kinds = self.prices.kinds
        if keeps_cuts or kinds[bound.rank(a)] == kinds[bound.rank(b)]:
            self.num_scored += 1
            bound.exchange(a, b)
            return bound, bound.score()
        rows = [list(ranks) for ranks in bound.grid]
        for place, rank in ((a, bound.rank(b)), (b, bound.rank(a))):
            if place[0] >= 0:
                rows[place[0]][place[1]] = rank
        other = self._bound(tuple(map(tuple, rows)))
        return other, other.score()

    def _may_exchange(self, bound: MappingBound, a: Place, b: Place) -> bool:
        x, y = bound.rank(a), bound.rank(b)
        return self._twins[x] != self._twins[y] and not (self.keeps_rank_0 and 0 in (x, y))

    def _pairs(self, bound: MappingBound) -> Iterator[tuple[Place, Place]]:
        """All pairs of places but idle ones; those first of which one is where the bound comes from."""
        places = bound.places()
        critical = bound.critical_places()
        is_critical = set(critical)
        for a in critical:
            yield from ((a, b) for b in places if b > a or b not in is_critical)
        others = [place for place in places if place not in is_critical]
        yield from ((a, b) for a, b in combinations(others, 2) if a[0] >= 0 or b[0] >= 0)

    def _turned(self, grid: Grid) -> Iterator[Grid]:
        """Stages of all replicas in other orders: two exchanged, and all the other way around; replicas exchanged."""
        num_replicas, num_stages = len(grid), len(grid[0])
        found = []
        if num_replicas > 1:
            for a, b in combinations(range(num_stages), 2):
                order = list(range(num_stages))
                order[a], order[b] = b, a
                found.append(tuple(tuple(ranks[index] for index in order) for ranks in grid))
        found.append(tuple(ranks[::-1] for ranks in grid))
        for a, b in combinations(range(num_replicas), 2):
            rows = list(grid)
            rows[a], rows[b] = rows[b], rows[a]
            found.append(tuple(rows))
        for turned in found:
            yield with_rank_0_last(turned) if self.keeps_rank_0 else turned

    def _with_runs_reversed(self, grid: Grid) -> Iterator[Grid]:
        """Some neighbouring stages the other way around, in all replicas: what no exchange of two can bring about."""
        num_stages = len(grid[0])
        for begin, end in combinations(range(num_stages + 1), 2):
            if 2 < end - begin < num_stages:
                turned = tuple((*ranks[:begin], *ranks[begin:end][::-1], *ranks[end:]) for ranks in grid)
                turned = with_rank_0_last(turned) if self.keeps_rank_0 else turned
                if self._classes(turned) != self._classes(grid):
                    yield turned

    def _classes(self, grid: Grid) -> list[list[int]]:
        return [[self._twins[rank] for rank in ranks] for ranks in grid]


def _score(candidate: Candidate) -> Score:
    return candidate.score


def is_less(score: Score, than: Score) -> bool:
    """Whether a score is better by more than what sums are rounded by."""
    if score[0] != than[0]:
        return score[0] < than[0]
    if score[1] < than[1] * _LESS:
        return True
    return score[1] * _LESS <= than[1] and score[2] < than[2] * _LESS


def unlike(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates without those that are as good as another one with the same cuts: mirror images, mostly."""
    found: dict[object, Candidate] = {}
    for candidate in candidates:
        overflow, bound_s, busy_s = candidate.score
        found.setdefault((candidate.cuts, overflow, f"{bound_s:.9e}", f"{busy_s:.9e}"), candidate)
    return list(found.values())
