"""Prices of the parts of a mapping: a replica on its devices, and a ring of a stage's replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from lightning_autopipe.planner.cheap_cuts import cheap_cuts
from lightning_autopipe.planner.cost import Work
from lightning_autopipe.planner.links import Route
from lightning_autopipe.planner.mapping_setting import MappingSetting
from lightning_autopipe.planner.memory import stage_memory
from lightning_autopipe.planner.placements import Grid
from lightning_autopipe.planner.reduction import GradientBytes, Reduction
from lightning_autopipe.planner.replica import Cuts, pipeline_bound_s
from lightning_autopipe.planner.shares import share_microbatches
from lightning_autopipe.planner.starts import NUM_HALVINGS, quick_cuts

Loads = tuple[tuple[int, float], ...]
"""Channels, and the seconds for which each is occupied in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPrice:
    """What one replica takes at least, and its loads of links."""

    end_s: tuple[float, ...]
    """Before when no stage has computed everything."""
    optimizer_s: tuple[float, ...]
    loads: Loads


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPrice:
    """What the sum of one stage's gradients takes at least, and its loads of links."""

    seconds: float
    loads: Loads


class MappingPrices:
    """Prices parts of mappings by sums over layers that are made once for each kind of device.

    Args:
        setting: what is given.
    """

    def __init__(self, setting: MappingSetting) -> None:
        self.setting = setting
        self._num_layers = setting.cost.num_layers
        cost, size = setting.cost, setting.microbatch_size
        devices = setting.topology.devices
        kinds = {(device.model, device.relative_speed): device for device in devices}
        numbers = {kind: number for number, kind in enumerate(kinds)}
        self.kinds = tuple(numbers[device.model, device.relative_speed] for device in devices)
        """By rank, a number; equal ones take equally long for everything."""
        works = (Work.FORWARD, Work.BACKWARD, Work.OPTIMIZER)
        self._prefixes = [
            [cost.prefix_s(work, device=device, microbatch_size=size) for work in works] for device in kinds.values()
        ]
        cuts = range(self._num_layers + 1)
        self._sent = [cost.sent_bytes(cut, microbatch_size=size) for cut in cuts]
        self._returned = [cost.gradient_bytes(cut, microbatch_size=size) for cut in cuts]
        self._gradients = GradientBytes(cost)
        self._trainable = list(accumulate((layer.trainable_bytes for layer in cost.profile.layers), initial=0))
        self._bandwidths = [channel.bandwidth_bytes_per_s for channel in setting.network.channels]
        self._stage_bytes: dict[tuple[int, int], list[int]] = {}
        self._weights: dict[tuple[int, int, int], list[float]] = {}
        self._entries: dict[tuple[Route, Route], list[float]] = {}
        self.num_priced = 0
        """Stages and hops that were gone through: what a search has cost so far."""

    @property
    def num_channels(self) -> int:
        """Directions of links."""
        return len(self._bandwidths)

    def replica(self, ranks: Sequence[int], cuts: Cuts, num_microbatches: int) -> ReplicaPrice:
        """A replica's price with these devices, stage by stage."""
        stages, crossings, loads, optimizer_s, out_s = [], [], [], [], [0.0]
        route = self.setting.network.route
        edges = (0, *cuts, self._num_layers)
        self.num_priced += len(ranks)
        for rank, (start, stop) in zip(ranks, pairwise(edges), strict=True):
            forward, backward, optimizer = self._prefixes[self.kinds[rank]]
            stages.append((forward[stop] - forward[start], backward[stop] - backward[start]))
            optimizer_s.append(optimizer[stop] - optimizer[start])
        for cut, (a, b) in zip(cuts, pairwise(ranks), strict=True):
            there, back = route(a, b), route(b, a)
            sent, returned = self._sent[cut], self._returned[cut]
            there_s = _message_s(there, sent)
            crossings.append(there_s + _message_s(back, returned))
            out_s.append(there_s)
            loads += self._occupied(there, num_microbatches * sent)
            loads += self._occupied(back, num_microbatches * returned)
        end_s, before = [], 0.0
        for (forward_s, backward_s), arrives_s in zip(stages, out_s, strict=True):
            before += arrives_s
            end_s.append(before + num_microbatches * (forward_s + backward_s))
            before += forward_s
        # All gradients end at the first stage.
        end_s[0] = pipeline_bound_s(stages, crossings, self.setting.depths, num_microbatches)
        return ReplicaPrice(end_s=tuple(end_s), optimizer_s=tuple(optimizer_s), loads=tuple(loads))

    def rings(self, grid: Sequence[Sequence[int]], cuts: Cuts, stages: Sequence[int]) -> list[RingPrice]:
        """The price of some stages' sums of gradients."""
        if len(grid) == 1:
            return [RingPrice(seconds=0.0, loads=())] * len(stages)
        reduced_bytes = self._gradients.of_stages(cuts)
        found = []
        self.num_priced += len(stages) * len(grid)
        for stage_index in stages:
            members = tuple(ranks[stage_index] for ranks in grid)
            ring = Reduction(is_tie=False, members=members, num_bytes=reduced_bytes[stage_index])
            hop_bytes, num_rounds, seconds, loads = ring.hop_bytes, ring.num_rounds, 0.0, []
            if hop_bytes > 0:
                for hop in ring.hops:
                    route = self.setting.network.route(*hop)
                    seconds = max(seconds, route.occupied_s(hop_bytes) + num_rounds * route.latency_s)
                    loads += self._occupied(route, hop_bytes)
            found.append(RingPrice(seconds=seconds, loads=tuple(loads)))
        return found

    def overflow_bytes(self, grid: Sequence[Sequence[int]], cuts: Cuts, shares: Sequence[int]) -> int:
        """By how much all stages together exceed their devices' memory."""
        devices, depths = self.setting.topology.devices, self.setting.depths
        overflow = 0
        for stage_index, (start, stop) in enumerate(pairwise((0, *cuts, self._num_layers))):
            peaks = self._peaks(start, stop, depths[stage_index])
            for ranks, number in zip(grid, shares, strict=True):
                lacking = peaks[min(depths[stage_index] + 1, number)] - devices[ranks[stage_index]].memory_bytes
                if lacking > 0:
                    overflow += lacking
        return overflow

    def lower_bound_s(self) -> float:
        """What no mapping can be below, with the fastest devices, work shared as one likes and no links.

        A replica takes at least T + c t: its way T of one micro-batch through all stages, and c = M - 1 micro-batches
        on a stage that takes t for one, less the forwards, or backwards, that its depth lets run in the meantime.
        Weighted by (A v - 1) / c for stages on devices of speed v, which are to sum up to 1, that is at least A times
        the work of a micro-batch. Of all replicas together, A is at least what makes A v - 1 sum up to all c.
        """
        setting = self.setting
        times = [
            [f1 - f0 + b1 - b0 for (f0, f1), (b0, b1) in zip(pairwise(forward), pairwise(backward), strict=True)]
            for forward, backward, _ in self._prefixes
        ]
        reference = times[0]
        # A device is as fast as on the layer that it is fastest at.
        speeds = [
            max((ours / its for ours, its in zip(reference, layers, strict=True) if its > 0), default=0.0)
            for layers in times
        ]
        needed = setting.num_stages * setting.num_replicas
        fastest = sorted((speeds[kind] for kind in self.kinds), reverse=True)[:needed]
        alone_s: float = sum(min(of_layer) for of_layer in zip(*times, strict=True))
        overlap = max(setting.depths) * self._largest_share_of_shorter()
        most_added = setting.num_microbatches - setting.num_replicas * (1 + overlap)
        rate = max(setting.num_microbatches / sum(fastest), _least_rate(fastest, most_added)) if any(fastest) else 0.0
        return max(rate * sum(reference), alone_s) + setting.exchange_s

    def _largest_share_of_shorter(self) -> float:
        """Of forward and backward the shorter one's share of both, at most, in any layers."""
        most = []
        for work, other in ((0, 1), (1, 0)):
            layers = (zip(pairwise(of[work]), pairwise(of[other]), strict=True) for of in self._prefixes)
            most.append(
                max(
                    ((w1 - w0) / both for of in layers for (w0, w1), (o0, o1) in of if (both := w1 - w0 + o1 - o0)),
                    default=0.0,
                )
            )
        return min(0.5, *most)

    # Cuts and shares for a grid ---------------------------------------------

    def shares(self, grid: Sequence[Sequence[int]], cuts: Cuts) -> tuple[int, ...]:
        """Micro-batches of each replica, by the time that each takes for one."""
        if self.setting.equal_shares:
            return self.even_shares()
        route, edges = self.setting.network.route, (0, *cuts, self._num_layers)
        fills, periods = [], []
        self.num_priced += len(grid) * len(edges)
        for ranks in grid:
            fill = period = 0.0
            for rank, (start, stop) in zip(ranks, pairwise(edges), strict=True):
                forward, backward, _ = self._prefixes[self.kinds[rank]]
                seconds = forward[stop] - forward[start] + backward[stop] - backward[start]
                fill += seconds
                period = max(period, seconds)
            for cut, (a, b) in zip(cuts, pairwise(ranks), strict=True):
                for way, num_bytes in ((route(a, b), self._sent[cut]), (route(b, a), self._returned[cut])):
                    fill += _message_s(way, num_bytes)
                    period = max(period, way.occupied_s(num_bytes))
            fills.append(fill)
            periods.append(period)
        return share_microbatches(self.setting.num_microbatches, fills, periods)

    def even_shares(self) -> tuple[int, ...]:
        """As equal as they can be."""
        each, more = divmod(self.setting.num_microbatches, self.setting.num_replicas)
        return tuple(each + (index < more) for index in range(self.setting.num_replicas))

    def cuts(self, grid: Grid, shares: Sequence[int]) -> Cuts:
        """Cuts with which no stage adds much more to the step than it must, quickly; see `quick_cuts`."""
        if self.setting.cuts is not None:
            return self.setting.cuts
        weights, entries = self._stage_weights(grid, shares)
        self.num_priced += (NUM_HALVINGS // 3 + len(grid)) * len(weights)
        return quick_cuts(weights, entries)

    def other_cuts(self, grid: Grid, shares: Sequence[int]) -> list[Cuts]:
        """Cuts that may be better where links are slow: at which little crosses, and with sums of gradients as work."""
        if self.setting.cuts is not None:
            return []
        weights, entries = self._stage_weights(grid, shares)
        found = list(cheap_cuts(weights, entries))
        if len(grid) > 1:
            stages = zip(weights, zip(*grid, strict=True), strict=True)
            found.append(quick_cuts([self._with_sums(weight, ranks) for weight, ranks in stages], entries))
        self.num_priced += (NUM_HALVINGS // 3 + len(grid)) * len(weights) * len(found)
        return list(dict.fromkeys(found))

    def _stage_weights(self, grid: Grid, shares: Sequence[int]) -> tuple[list[list[float]], list[list[float]]]:
        """By stage, what layers add on the replica where they add most, and what beginning at each layer takes."""
        depths, network = self.setting.depths, self.setting.network
        weights, entries = [], []
        for stage_index, depth in enumerate(depths):
            kinds = {(self.kinds[ranks[stage_index]], number) for ranks, number in zip(grid, shares, strict=True)}
            weights.append(max((self._weight(kind, number, depth) for kind, number in kinds), key=_last))
            if stage_index == 0:
                entries.append([0.0] * (self._num_layers + 1))
                continue
            pairs = {ranks[stage_index - 1 : stage_index + 1] for ranks in grid}
            ways = {(network.route(a, b), network.route(b, a)) for a, b in pairs}
            entries.append(max((self._entry(there, back) for there, back in ways), key=max))
        return weights, entries

    def _with_sums(self, weight: Sequence[float], members: tuple[int, ...]) -> list[float]:
        ring = Reduction(is_tie=False, members=members, num_bytes=1.0)
        byte_s = max(self.setting.network.route(*hop).occupied_s(ring.hop_bytes) for hop in ring.hops)
        return [seconds + byte_s * num_bytes for seconds, num_bytes in zip(weight, self._trainable, strict=True)]

    def _weight(self, kind: int, num_microbatches: int, depth: int) -> list[float]:
        key = (kind, num_microbatches, depth)
        if key not in self._weights:
            forward, backward, _ = self._prefixes[kind]
            backwards, forwards = max(1, num_microbatches - 1), max(0, num_microbatches - 1 - depth)
            self._weights[key] = [forwards * f + backwards * b for f, b in zip(forward, backward, strict=True)]
        return self._weights[key]

    def _entry(self, there: Route, back: Route) -> list[float]:
        if (there, back) not in self._entries:
            pairs = zip(self._sent, self._returned, strict=True)
            crossings = [_message_s(there, sent) + _message_s(back, returned) for sent, returned in pairs]
            self._entries[there, back] = crossings
        return self._entries[there, back]

    # Links and memory --------------------------------------------------------

    def _occupied(self, route: Route, num_bytes: float) -> list[tuple[int, float]]:
        return [(channel, num_bytes / self._bandwidths[channel]) for channel in route.channels] if num_bytes else []

    def _peaks(self, start: int, stop: int, depth: int) -> list[int]:
        """Bytes of a stage by micro-batches in flight, from 0 to one more than the depth."""
        peaks = self._stage_bytes.get((start, stop), [])
        if len(peaks) < depth + 2:
            setting = self.setting
            memory = stage_memory(
                setting.cost,
                range(start, stop),
                num_microbatches=setting.num_microbatches,
                microbatch_size=setting.microbatch_size,
                optimizer_state_ratio=setting.optimizer_state_ratio,
                optimizer_shares=setting.optimizer_shares,
            )
            peaks = self._stage_bytes[start, stop] = [memory.peak_bytes(number) for number in range(depth + 2)]
        return peaks


def _message_s(route: Route, num_bytes: float) -> float:
    return num_bytes / route.bandwidth_bytes_per_s + route.latency_s if num_bytes > 0 else 0.0


def _last(values: Sequence[float]) -> float:
    return values[-1]


def _least_rate(speeds: Sequence[float], total: float) -> float:
    """The A for which the sum of all A v - 1 that are positive is ``total``; speeds fall."""
    rate = 0.0
    speed = 0.0
    for number, one in enumerate(speeds, start=1):
        speed += one
        rate = (total + number) / speed
        if number < len(speeds) and rate * speeds[number] <= 1:
            break
    return rate
