"""What a step takes at least with a mapping, kept up while devices change places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_autopipe.planner.mapping_prices import Loads, MappingPrices
from lightning_autopipe.planner.placements import Grid
from lightning_autopipe.planner.replica import Cuts

_SCORED_LIKE_PRICED = 8
"""So many stages of replicas are compared in the time in which one is priced."""

Place = tuple[int, int]
"""A replica and a stage; replica -1 is that of idle devices, with their positions for stages."""
Score = tuple[int, float, float]
"""Bytes that do not fit, the bound in seconds, and the time that all parts and links together are busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Devices, cuts and shares."""

    score: Score
    grid: Grid
    idle: tuple[int, ...]
    """Ranks that run nothing."""
    cuts: Cuts
    shares: tuple[int, ...]
    """Micro-batches of each replica."""


class MappingBound:
    """A bound of the step that exchanges of devices change in the time for the replicas and rings they are in.

    The step is not over before every replica has computed everything, its gradients are summed, and every link has
    carried its bytes: those of sums after those of stages. No transfer waits for another in it, except that a link
    carries one byte after the other.

    Args:
        prices: of replicas and rings.
        grid: to begin with.
        cuts: of the layers.
        shares: micro-batches of each replica.
    """

    def __init__(self, prices: MappingPrices, grid: Grid, cuts: Cuts, shares: Sequence[int]) -> None:
        self._prices, self.cuts, self.shares = prices, cuts, tuple(shares)
        used = {rank for ranks in grid for rank in ranks}
        idle = [rank for rank in range(prices.setting.topology.world_size) if rank not in used]
        self._rows = [*(list(ranks) for ranks in grid), idle]  # so that replica -1 is that of idle devices
        self._loads = [0.0] * prices.num_channels
        self._ring_loads = [0.0] * prices.num_channels
        self._num_replicas = len(grid)
        stages = range(len(grid[0]))
        self._replicas = [
            prices.replica(ranks, cuts, number) for ranks, number in zip(self._rows[:-1], self.shares, strict=True)
        ]
        self._rings = prices.rings(self._rows[:-1], cuts, stages)
        for replica in self._replicas:
            _add(self._loads, replica.loads, 1.0)
        for ring in self._rings:
            _add(self._ring_loads, ring.loads, 1.0)

    def rank(self, place: Place) -> int:
        """The rank in a place."""
        return self._rows[place[0]][place[1]]

    def exchange(self, a: Place, b: Place) -> None:
        """Exchanges the devices in two places; doing it again undoes it."""
        rows = self._rows
        rows[a[0]][a[1]], rows[b[0]][b[1]] = rows[b[0]][b[1]], rows[a[0]][a[1]]
        places = [place for place in (a, b) if place[0] >= 0]
        for replica_index in sorted({replica_index for replica_index, _ in places}):
            _add(self._loads, self._replicas[replica_index].loads, -1.0)
            replica = self._prices.replica(rows[replica_index], self.cuts, self.shares[replica_index])
            self._replicas[replica_index] = replica
            _add(self._loads, replica.loads, 1.0)
        if self._num_replicas > 1:
            stages = sorted({stage_index for _, stage_index in places})
            for stage_index, ring in zip(stages, self._prices.rings(rows[:-1], self.cuts, stages), strict=True):
                _add(self._ring_loads, self._rings[stage_index].loads, -1.0)
                self._rings[stage_index] = ring
                _add(self._ring_loads, ring.loads, 1.0)

    def score(self) -> Score:
        """How good the mapping is; less is better."""
        replicas, rings = self._replicas, self._rings
        self._prices.num_priced += len(replicas) * len(rings) // _SCORED_LIKE_PRICED
        ends = [max(of_stage) for of_stage in zip(*(replica.end_s for replica in replicas), strict=True)]
        optimizers = [max(of_stage) for of_stage in zip(*(replica.optimizer_s for replica in replicas), strict=True)]
        bound_s = max(
            end + ring.seconds + optimizer for end, ring, optimizer in zip(ends, rings, optimizers, strict=True)
        )
        busy_s = sum(replica.end_s[0] for replica in replicas) + sum(ring.seconds for ring in rings)
        busy_s += sum(self._loads)
        if self._num_replicas > 1:
            together = max(map(float.__add__, self._loads, self._ring_loads), default=0.0)
            bound_s = max(bound_s, together, min(ends) + max(self._ring_loads, default=0.0))
            busy_s += sum(self._ring_loads)
        else:
            bound_s = max(bound_s, max(self._loads, default=0.0))
        overflow = self._prices.overflow_bytes(self._rows[:-1], self.cuts, self.shares)
        return overflow, bound_s + self._prices.setting.exchange_s, busy_s

    def places(self) -> list[Place]:
        """All places, those of idle devices last."""
        rows = [*enumerate(self._rows[:-1]), (-1, self._rows[-1])]
        return [(index, position) for index, row in rows for position in range(len(row))]

    def critical_places(self) -> list[Place]:
        """Places of the replica that ends last, and of the stage whose gradients are summed last."""
        replicas, rings = self._replicas, self._rings
        slowest = max(range(len(replicas)), key=lambda index: replicas[index].end_s[0])
        places = [(slowest, stage_index) for stage_index in range(len(rings))]
        if self._num_replicas > 1:
            ends = [max(of_stage) for of_stage in zip(*(replica.end_s for replica in replicas), strict=True)]
            latest = max(range(len(rings)), key=lambda stage: ends[stage] + rings[stage].seconds)
            places += [(index, latest) for index in range(len(replicas)) if index != slowest]
        return places

    @property
    def grid(self) -> Grid:
        """The mapping as it is now."""
        return tuple(tuple(ranks) for ranks in self._rows[:-1])

    def candidate(self) -> Candidate:
        """The mapping as it is now, with its score."""
        return Candidate(
            score=self.score(), grid=self.grid, idle=tuple(self._rows[-1]), cuts=self.cuts, shares=self.shares
        )


def _add(sums: list[float], loads: Loads, factor: float) -> None:
    for channel, seconds in loads:
        sums[channel] += factor * seconds
