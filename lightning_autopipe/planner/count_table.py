"""Layers and devices, both in a row, shared between stages so that no stage is busy for long."""

from __future__ import annotations

import copy
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from lightning_autopipe.core.cluster import Device, rank_of_point
from lightning_autopipe.planner.cost import CostModel, Work
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.memory import StageMemory, stage_memory
from lightning_autopipe.planner.reduction import Reduction
from lightning_autopipe.planner.replica import Cuts

Counts = tuple[int, ...]
"""Ranks of each stage."""
_PRECISION = 1e-3
"""Of the least limit."""


class _Stage(NamedTuple):
    """Layers start to stop - 1 on some neighbouring devices of the row."""

    start: int
    stop: int
    first: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Neighbouring devices of the row that run one stage."""

    kinds: tuple[tuple[Sequence[float], Sequence[float], int], ...]
    """By kind of device: sums over layers of forward and backward, and of the optimizer; and how many there are."""
    ring_s_per_byte: float
    """Of the gradients that they sum."""
    ring_latency_s: float
    """Of all rounds."""
    crossing_s_per_byte: tuple[float, float]
    """From the stage before, and back to it, where each device takes its share of the bytes."""
    memory_bytes: int
    """Of the smallest one."""
    num_in_flight: int
    """Micro-batches that each of them holds under `default_windows`."""


class CountTable:
    """Partitions and counts for devices in a row: in the order of ranks, or as `of` says.

    A stage is busy for its micro-batches, dealt by speed, then the ring of its gradients and the optimizer; its links
    at least for what crosses. Limits of memory count with the micro-batches that `default_windows` holds.

    Args:
        cost: of the layers.
        network: devices and links.
        num_microbatches: of a step.
        microbatch_size: samples; None: as profiled.
        optimizer_state_ratio: bytes of optimizer state for each byte of trainable parameters.

    Source:
        Narayanan et al., *PipeDream*, SOSP 2019, and Tarnawski et al., *Piper*, NeurIPS 2021, minimise the longest time
        of a stage with replicas of its own; here by the least limit that stages can hold, from the last stage on.
    """

    def __init__(
        self,
        cost: CostModel,
        network: LinkNetwork,
        *,
        num_microbatches: int,
        microbatch_size: float | None = None,
        optimizer_state_ratio: float = 2.0,
    ) -> None:
        self._cost, self._network = cost, network
        self._order = tuple(range(network.topology.world_size))
        self._num_microbatches, self._size = num_microbatches, microbatch_size
        self._state_ratio = optimizer_state_ratio
        self._num_layers = cost.num_layers
        cuts = range(cost.num_layers + 1)
        self._sent = [cost.sent_bytes(cut, microbatch_size=microbatch_size) for cut in cuts]
        self._returned = [cost.gradient_bytes(cut, microbatch_size=microbatch_size) for cut in cuts]
        self._trainable_bytes = list(accumulate((of.trainable_bytes for of in cost.profile.layers), initial=0))
        self._groups: dict[tuple[int, int], _Group] = {}
        self._memories: dict[tuple[int, int], StageMemory] = {}
        self._busy: dict[_Stage, float] = {}

    def of(self, order: Sequence[int]) -> CountTable:
        """The same for other ranks, or in another order; those of the last stage come first."""
        other = copy.copy(self)
        other._order, other._groups, other._busy = tuple(order), {}, {}
        return other

    def best(self, num_stages: int) -> tuple[Cuts, Counts, float] | None:
        """Cuts and counts whose longest stage is about as short as it can be, with its seconds; None: nothing fits."""
        choices = [self._useful_counts()] * num_stages
        return self._least(choices)

    def best_cuts(self, counts: Counts) -> tuple[Cuts, Counts, float] | None:
        """The same with given counts."""
        return self._least([[count] for count in reversed(counts)])

    def _useful_counts(self) -> list[int]:
        """All counts for few devices; for many, steps of about an eighth."""
        counts: list[int] = []
        count = 1
        while count <= min(len(self._order), self._num_microbatches):
            counts.append(count)
            count += max(1, count // 8)
        return counts

    def _least(self, choices: Sequence[Sequence[int]]) -> tuple[Cuts, Counts, float] | None:
        """The least limit, halved towards, with what holds it.

        Args:
            choices: counts to choose from for each stage, the last one first.
        """
        found = self._within(sys.float_info.max, choices)
        if found is None:
            return None
        low, high = 0.0, max(map(self._busy_s, found))
        while high - low > _PRECISION * high:
            limit_s = (low + high) / 2
            better = self._within(limit_s, choices)
            if better is None:
                low = limit_s
            else:
                found, high = better, max(map(self._busy_s, better))
        return (
            tuple(stage.start for stage in found[1:]),
            tuple(stage.num_ranks for stage in found),
            high,
        )

    def _within(self, limit_s: float, choices: Sequence[Sequence[int]]) -> list[_Stage] | None:
        """Stages that are busy for no longer than a limit, first to last."""
        num_stages, num_devices = len(choices), len(self._order)
        # For each number of devices used, counted from the last stage: the least layer at which a stage can begin then,
        # and the stages from there. To be further is better: later stages never gain by having less.
        reached: dict[int, tuple[int, tuple[_Stage, ...]]] = {0: (self._num_layers, ())}
        for num_before, counts in zip(range(num_stages - 1, -1, -1), choices, strict=True):
            behind, reached = reached, {}
            for first, (stop, stages) in behind.items():
                for count in counts:
                    used = first + count
                    if used > num_devices - num_before:
                        break
                    start = max(num_before, self._reach(stop, first, count, limit_s))
                    if start < stop and (used not in reached or start < reached[used][0]):
                        reached[used] = start, (_Stage(start, stop, first, count), *stages)
        return next((list(stages) for start, stages in reached.values() if start == 0), None)

    def _reach(self, stop: int, first: int, count: int, limit_s: float) -> int:
        """The least layer at which a stage that ends before ``stop`` can begin; ``stop`` where none can."""
        low, high = 0, stop
        while low < high:
            start = (low + high) // 2
            if self._busy_s(_Stage(start, stop, first, count)) <= limit_s:
                high = start
            else:
                low = start + 1
        while high < stop and self._crossing_s(_Stage(high, stop, first, count)) > limit_s:
            high += 1
        return high

    def _busy_s(self, stage: _Stage) -> float:
        """Seconds for which the devices of a stage compute and sum gradients; infinite where they have no room."""
        if stage not in self._busy:
            self._busy[stage] = self._price(stage)
        return self._busy[stage]

    def _price(self, stage: _Stage) -> float:
        start, stop, first, count = stage
        group = self._group(first, count)
        if self._memory(start, stop).peak_bytes(group.num_in_flight) > group.memory_bytes:
            return math.inf
        rate, optimizer_s = 0.0, 0.0
        for times, optimizer, number in group.kinds:
            seconds = times[stop] - times[start]
            rate += number / seconds if seconds > 0 else math.inf
            optimizer_s = max(optimizer_s, optimizer[stop] - optimizer[start])
        num_turns = self._num_microbatches if len(group.kinds) > 1 else count * -(-self._num_microbatches // count)
        num_bytes = self._trainable_bytes[stop] - self._trainable_bytes[start]
        ring_s = num_bytes * group.ring_s_per_byte + group.ring_latency_s if num_bytes else 0.0
        return num_turns / rate + ring_s + optimizer_s

    def _crossing_s(self, stage: _Stage) -> float:
        """Seconds for which the links to the stage before are busy at least, in the direction that takes longer."""
        there, back = self._group(stage.first, stage.num_ranks).crossing_s_per_byte
        return self._num_microbatches * max(self._sent[stage.start] * there, self._returned[stage.start] * back)

    def _group(self, first: int, count: int) -> _Group:
        if (first, count) in self._groups:
            return self._groups[first, count]
        ranks, route = self._order[first : first + count], self._network.route
        devices = [self._network.topology.devices[rank] for rank in ranks]
        kinds = Counter((device.model, device.relative_speed) for device in devices)
        examples = {(device.model, device.relative_speed): device for device in devices}
        ring = Reduction(is_tie=False, members=ranks, num_bytes=1)
        hops = [route(*hop) for hop in ring.hops] if count > 1 else []
        before = self._order[first + count : first + count + 1] or ranks[-1:]
        found = _Group(
            kinds=tuple((*self._prefixes(examples[kind]), number) for kind, number in kinds.items()),
            ring_s_per_byte=max((hop.occupied_s(ring.hop_bytes) for hop in hops), default=0.0),
            ring_latency_s=ring.num_rounds * max((hop.latency_s for hop in hops), default=0.0),
            crossing_s_per_byte=self._crossing_s_per_byte(before[0], ranks),
            memory_bytes=min(device.memory_bytes for device in devices),
            num_in_flight=min(-(-(first + count) // count), -(-self._num_microbatches // count)),
        )
        self._groups[first, count] = found
        return found

    def _crossing_s_per_byte(self, before: int, ranks: Sequence[int]) -> tuple[float, float]:
        """Seconds of the fullest channel, there and back, but for the link of the device before: it is one of many."""
        network = self._network
        own = 1 if rank_of_point(network.point(before)) is not None else 0
        there, back = Counter[int](), Counter[int]()
        for rank in ranks:
            there.update(network.route(before, rank).channels[own:])
            back.update(network.route(rank, before).channels[: -own or None])
        there_s, back_s = (
            max(
                (number / network.channels[channel].bandwidth_bytes_per_s for channel, number in of.items()),
                default=0.0,
            )
            for of in (there, back)
        )
        return there_s / len(ranks), back_s / len(ranks)

    def _prefixes(self, device: Device) -> tuple[Sequence[float], Sequence[float]]:
        forward, backward, optimizer = (
            self._cost.prefix_s(work, device=device, microbatch_size=self._size)
            for work in (Work.FORWARD, Work.BACKWARD, Work.OPTIMIZER)
        )
        return [f + b for f, b in zip(forward, backward, strict=True)], optimizer

    def _memory(self, start: int, stop: int) -> StageMemory:
        if (start, stop) not in self._memories:
            self._memories[start, stop] = stage_memory(
                self._cost,
                range(start, stop),
                num_microbatches=self._num_microbatches,
                microbatch_size=self._size,
                optimizer_state_ratio=self._state_ratio,
            )
        return self._memories[start, stop]
