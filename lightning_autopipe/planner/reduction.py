"""The sums of gradients at a step's end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from lightning_autopipe.planner.cost import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A sum over ranks, in a ring: each sends 2 (N - 1) pieces of 1/N of the bytes to the next one."""

    is_tie: bool
    """Whether the members are stages that share parameters, not replicas of one stage alone."""
    members: tuple[int, ...]
    """Global ranks, in the ring's order."""
    num_bytes: float

    @property
    def hops(self) -> tuple[tuple[int, int], ...]:
        """The ring's pairs of neighbours."""
        return tuple(zip(self.members, self.members[1:] + self.members[:1], strict=True))

    @property
    def num_rounds(self) -> int:
        """Pieces that each member sends, one after the other."""
        return 2 * (len(self.members) - 1)

    @property
    def hop_bytes(self) -> float:
        """Bytes that each member sends to the next one."""
        return self.num_rounds * self.num_bytes / len(self.members)


def step_end_reductions(
    stage_ranks: Sequence[Sequence[int]],
    tied_bytes: Iterable[tuple[tuple[int, ...], float]],
    reduced_bytes: Sequence[float],
) -> list[Reduction]:
    """All sums of a step, in the order in which a rank goes through its own: ties first, as the runtime does it.

    Args:
        stage_ranks: the ranks of each stage, in the order of its ring.
        tied_bytes: stages that share parameters, with the bytes of their gradients.
        reduced_bytes: by stage, the bytes that only its own ranks sum.
    """
    found = [
        Reduction(
            is_tie=True, members=_replica_by_replica([stage_ranks[stage] for stage in stages]), num_bytes=num_bytes
        )
        for stages, num_bytes in tied_bytes
    ]
    found += [
        Reduction(is_tie=False, members=tuple(ranks), num_bytes=num_bytes)
        for ranks, num_bytes in zip(stage_ranks, reduced_bytes, strict=True)
    ]
    return [reduction for reduction in found if reduction.num_bytes > 0 and len(reduction.members) > 1]


def _replica_by_replica(stage_ranks: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """All ranks of some stages: the first one of each, then the second one of those that have it, and so on."""
    most = max(map(len, stage_ranks))
    found = (ranks[index] for index in range(most) for ranks in stage_ranks if index < len(ranks))
    return tuple(dict.fromkeys(found))  # a rank may run several of the stages


class GradientBytes:
    """Bytes of the gradients that the replicas of each stage sum.

    Args:
        cost: of the layers.
    """

    def __init__(self, cost: CostModel) -> None:
        self._num_layers, self._ties = cost.num_layers, cost.ties
        self._trainable = list(accumulate((layer.trainable_bytes for layer in cost.profile.layers), initial=0))

    def of_stages(self, cuts: tuple[int, ...]) -> list[int]:
        """By stage, those that no other stage shares."""
        trainable = self._trainable
        reduced = [trainable[stop] - trainable[start] for start, stop in pairwise((0, *cuts, self._num_layers))]
        for layers, num_bytes in self._ties:
            stages = {bisect_right(cuts, layer) for layer in layers}
            if len(stages) > 1:
                reduced[min(stages)] -= num_bytes
        return reduced
