"""One replica's stages, priced on their devices and on the links between them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from lightning_autopipe.core.cluster import Device
from lightning_autopipe.planner.cost import CostModel, Work
from lightning_autopipe.planner.links import Route
from lightning_autopipe.planner.recurrence import Hop, one_f_one_b_ends

Cuts = tuple[int, ...]
"""The layer at which each stage after the first begins."""
Depths = tuple[int, ...]
"""Forwards of each stage before its first forward-backward pair."""


class ReplicaPrices:
    """Prices of any cuts of the layers between one replica's stages.

    Args:
        cost: of the layers.
        devices: of each stage; None: the profiled one.
        routes: over each boundary, there and back.
        num_microbatches: M.
        microbatch_size: samples; None: as profiled.
    """

    def __init__(
        self,
        cost: CostModel,
        devices: Sequence[Device | None],
        routes: Sequence[tuple[Route, Route]],
        *,
        num_microbatches: int,
        microbatch_size: float | None,
    ) -> None:
        self.num_microbatches = num_microbatches
        self._num_layers = cost.num_layers

        def prefixes(work: Work) -> list[tuple[float, ...]]:
            return [cost.prefix_s(work, device=device, microbatch_size=microbatch_size) for device in devices]

        self._forward, self._backward, self._optimizer = map(prefixes, (Work.FORWARD, Work.BACKWARD, Work.OPTIMIZER))
        self._overhead_s = [cost.overhead_s(device=device, microbatch_size=microbatch_size) for device in devices]
        self.has_optimizer = any(prefix[-1] > 0 for prefix in self._optimizer)
        cuts = range(cost.num_layers + 1)
        sent = tuple(cost.sent_bytes(cut, microbatch_size=microbatch_size) for cut in cuts)
        returned = tuple(cost.gradient_bytes(cut, microbatch_size=microbatch_size) for cut in cuts)
        self._out = [_hops_of(there, sent) for there, _ in routes]
        self._back = [_hops_of(back, returned) for _, back in routes]
        self._has_hops = any(any(hop) for hops in (*self._out, *self._back) for hop in hops)

    def stage_s(self, cuts: Cuts) -> list[tuple[float, float]]:
        """Seconds of forward and backward of one micro-batch on each stage."""
        edges = (0, *cuts, self._num_layers)
        return [
            (overhead_s + forward[stop] - forward[start], overhead_s + backward[stop] - backward[start])
            for forward, backward, overhead_s, (start, stop) in zip(
                self._forward, self._backward, self._overhead_s, pairwise(edges), strict=True
            )
        ]

    def optimizer_s(self, cuts: Cuts) -> list[float]:
        """Seconds of each stage's optimizer step."""
        edges = (0, *cuts, self._num_layers)
        return [
            prefix[stop] - prefix[start] for prefix, (start, stop) in zip(self._optimizer, pairwise(edges), strict=True)
        ]

    def ends(self, cuts: Cuts, depths: Depths) -> list[float]:
        """When each stage has run all its forwards and backwards."""
        forward_s, backward_s = zip(*self.stage_s(cuts), strict=True)
        out, back = self._hops(cuts)
        return one_f_one_b_ends(
            forward_s,
            backward_s,
            depths=depths,
            num_microbatches=self.num_microbatches,
            forward_hops=out,
            backward_hops=back,
        )

    def bound_s(self, cuts: Cuts, depths: Depths) -> float:
        """What forwards and backwards take at least; see `pipeline_bound_s`."""
        out, back = self._hops(cuts)
        crossings = [sum(there) + sum(returned) for there, returned in zip(out, back, strict=True)] or [0.0] * len(cuts)
        return pipeline_bound_s(self.stage_s(cuts), crossings, depths, self.num_microbatches)

    def weights(self, stage_index: int, forwards: float, backwards: float) -> list[float]:
        """Prefix sums over the layers of so many forwards and backwards on a stage."""
        pairs = zip(self._forward[stage_index], self._backward[stage_index], strict=True)
        return [forwards * forward + backwards * backward for forward, backward in pairs]

    def entries(self, stage_index: int) -> list[float]:
        """By layer, what one crossing there and back takes where a stage begins at it."""
        if stage_index == 0:
            return [0.0] * (self._num_layers + 1)
        pairs = zip(self._out[stage_index - 1], self._back[stage_index - 1], strict=True)
        return [sum(there) + sum(back) for there, back in pairs]

    def _hops(self, cuts: Cuts) -> tuple[list[Hop], list[Hop]]:
        if not self._has_hops:
            return [], []
        out = [hops[cut] for hops, cut in zip(self._out, cuts, strict=True)]
        back = [hops[cut] for hops, cut in zip(self._back, cuts, strict=True)]
        return out, back


def pipeline_bound_s(
    stages: Sequence[tuple[float, float]], crossings: Sequence[float], depths: Depths, num_microbatches: int
) -> float:
    """What 1F1B takes at least: the longest of some paths that a step has through every stage.

    All begin with micro-batch 0 and end with the last one, between here and stage 0. In between the stage computes all
    the time, or waits for the way of one micro-batch to the last stage and back, k times: with a depth of w there are
    w forwards less and w backwards less to run on each way but the first, on which one kind of them is less.

    Args:
        stages: seconds of forward and backward of one micro-batch.
        crossings: what one micro-batch takes there and back, by boundary.
        depths: of the warm-up.
        num_microbatches: M.
    """
    behind = sum(forward + backward for forward, backward in stages) + sum(crossings)
    before = bound = 0.0
    for (forward, backward), depth, crossing in zip(stages, depths, (*crossings, 0.0), strict=True):
        both = forward + backward
        behind -= both  # the way to the last stage and back
        longest = num_microbatches * both
        num_overlapped = min(depth, num_microbatches - 1)
        once = longest - num_overlapped * (backward if forward > backward else forward) + behind
        if once > longest:
            longest = once
        most_ways = (num_microbatches - 1) // (depth + 1) + 1
        if most_ways > 1:
            # Linear in the number of ways: the most is at one of both ends.
            longest = max(
                longest,
                (num_microbatches - depth) * both + 2 * behind,
                (num_microbatches - (most_ways - 1) * depth) * both + most_ways * behind,
            )
        bound = max(bound, before + longest)
        before += both + crossing
        behind -= crossing
    return bound


@lru_cache(maxsize=4096)
def _hops_of(route: Route, num_bytes_by_cut: tuple[float, ...]) -> tuple[Hop, ...]:
    """By cut, what a message takes; many pairs of devices are joined alike."""
    return tuple(_hop(route, num_bytes) for num_bytes in num_bytes_by_cut)


def _hop(route: Route, num_bytes: float) -> Hop:
    return Hop(route.occupied_s(num_bytes), route.latency_s) if num_bytes > 0 else Hop(0.0, 0.0)
