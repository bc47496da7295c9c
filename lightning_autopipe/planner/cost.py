"""What work takes: the only place that prices an action."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from enum import Enum
from itertools import accumulate

from lightning_autopipe.core.cluster import Device
from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.profile import DeviceTimes, LayerMeasurement, LayerProfile, ModelProfile

_BACKWARD_FLOPS = 2.0
"""Operations of a backward for each one of its forward, where only forwards were counted: two products for one."""


class Work(Enum):
    """Kinds of work that layers are priced for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input gradient"
    """The part of the backward that the stage before waits for."""
    WEIGHT_GRADIENT = "weight gradient"
    """The rest of the backward."""
    RECOMPUTE = "recompute"
    """The forward again, in the backward."""
    OPTIMIZER = "optimizer"


class CostModel:
    """Prices layers: seconds by kind of work, device and size of the micro-batch, and bytes by cut and size.

    Times come from the profile's tables for the device's model; where there is none for it, from its first model's (or
    what was measured of the layers), divided by the device's `relative_speed`. Between two measured sizes times lie on
    a line; outside of them nothing is priced. Bytes grow with the size.

    Where nothing was measured, a forward takes as many units as floating-point operations were counted, or one a layer
    where none were, and a backward twice that. Units have no seconds, so transfers cost nothing then.

    Args:
        profile: the layers.
    """

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self.num_layers = profile.num_layers
        measured = self.measured = measurements(profile.layers)
        """What was measured of each layer, for memory; empty where nothing was."""
        self._tables: dict[str, list[DeviceTimes]] = {}
        for table in sorted(profile.times, key=lambda table: table.microbatch_size):
            self._tables.setdefault(table.device_model, []).append(table)
        if profile.times:
            self._reference = profile.times[0].device_model
        else:
            self._reference = ""
            self._tables[""] = [_own_times(profile, measured)]
        self.is_measured = bool(profile.times or measured)
        """Whether prices are seconds."""
        self.microbatch_size = profile.microbatch_size or self._tables[self._reference][-1].microbatch_size
        """Samples in the micro-batch that is meant where no size is given."""
        self._sent, self._gradients = self._bytes_by_cut(measured)
        self.ties = _ties(profile.layers)
        """The layers that use each trainable tied parameter, and the bytes of its gradient."""
        self._prefixes: dict[tuple[Work, str, float, float], tuple[float, ...]] = {}

    def work_s(
        self, work: Work, layers: range, *, device: Device | None = None, microbatch_size: float | None = None
    ) -> float:
        """Seconds (units, where nothing was measured) of one kind of work on some neighbouring layers.

        Args:
            work: what is done.
            layers: indices of the layers, contiguous.
            device: which does it; None: the one that was measured.
            microbatch_size: samples; None: `microbatch_size`.

        Raises:
            PlanError: no time is known for this size.
        """
        prefix = self.prefix_s(work, device=device, microbatch_size=microbatch_size)
        return prefix[layers.stop] - prefix[layers.start]

    def prefix_s(
        self, work: Work, *, device: Device | None = None, microbatch_size: float | None = None
    ) -> tuple[float, ...]:
        """Sums behind `work_s`: entry i is the price of the layers before i. For searches, which price many ranges."""
        size = self.microbatch_size if microbatch_size is None else microbatch_size
        model, speed = self._reference, 1.0
        if device is not None:
            if device.model in self._tables:
                model = device.model
            else:
                speed = device.relative_speed
        key = (work, model, speed, size)
        if key not in self._prefixes:
            self._prefixes[key] = tuple(
                accumulate((seconds / speed for seconds in self._layer_times(work, model, size)), initial=0.0)
            )
        return self._prefixes[key]

    def sent_bytes(self, cut: int, *, microbatch_size: float | None = None) -> int:
        """Bytes of the values that cross the cut before layer ``cut``, for one micro-batch; 0 at both ends."""
        return self.at_size(self._sent[cut], microbatch_size)

    def gradient_bytes(self, cut: int, *, microbatch_size: float | None = None) -> int:
        """Bytes of the gradients that come back across the cut before layer ``cut``; 0 at both ends."""
        return self.at_size(self._gradients[cut], microbatch_size)

    def tied_bytes(self, partition: Partition) -> dict[tuple[int, ...], int]:
        """Bytes of the gradients that stages sum because they share parameters, by the stages that do."""
        found: dict[tuple[int, ...], int] = {}
        for layer_indices, num_bytes in self.ties:
            stages = tuple(sorted({partition.layer_stage(index) for index in layer_indices}))
            if len(stages) > 1:
                found[stages] = found.get(stages, 0) + num_bytes
        return dict(sorted(found.items()))

    def at_size(self, num_bytes: int, microbatch_size: float | None) -> int:
        """Bytes of a micro-batch of some size, from those of one of the profiled size."""
        if microbatch_size is None:
            return num_bytes
        return round(num_bytes * microbatch_size / self.microbatch_size)

    def _layer_times(self, work: Work, model: str, size: float) -> Sequence[float]:
        tables = self._tables[model]
        sizes = [table.microbatch_size for table in tables]
        above = bisect_left(sizes, size)
        if work is Work.OPTIMIZER:  # once a step, whatever the micro-batch
            return _seconds(work, tables[-1])
        if above < len(sizes) and sizes[above] == size:
            return _seconds(work, tables[above])
        if not 0 < above < len(sizes):
            known = f"{sizes[0]:g}" if len(sizes) == 1 else f"{sizes[0]:g} to {sizes[-1]:g}"
            raise PlanError(
                f"no times are known for micro-batches of {size:g} samples on {model or 'this device'}: measured are "
                f"{known}; profile that size, or choose num_microbatches so that micro-batches are as large as measured"
            )
        low, high = tables[above - 1], tables[above]
        share = (size - low.microbatch_size) / (high.microbatch_size - low.microbatch_size)
        pairs = zip(_seconds(work, low), _seconds(work, high), strict=True)
        return [(1 - share) * smaller + share * larger for smaller, larger in pairs]

    def _bytes_by_cut(self, measured: Sequence[LayerMeasurement]) -> tuple[list[int], list[int]]:
        sent, gradients = [0] * (self.num_layers + 1), [0] * (self.num_layers + 1)
        if self.profile.values:
            for value in self.profile.values:
                for cut in range(value.producer + 1, value.last_reader + 1):
                    sent[cut] += value.forward_bytes
                    gradients[cut] += value.gradient_bytes
        elif self.is_measured:
            for cut, layer in enumerate(measured[:-1], start=1):
                sent[cut], gradients[cut] = layer.sent_bytes, layer.gradient_bytes
        return sent, gradients


def measurements(layers: Sequence[LayerProfile]) -> tuple[LayerMeasurement, ...]:
    """What was measured of each layer; empty unless all were, and took any time."""
    measured = tuple(layer.measured for layer in layers if layer.measured is not None)
    if len(measured) < len(layers) or not any(layer.forward_s + layer.backward_s for layer in measured):
        return ()
    return measured


def _ties(layers: Sequence[LayerProfile]) -> tuple[tuple[tuple[int, ...], int], ...]:
    users: dict[str, list[int]] = {}
    num_bytes: dict[str, int] = {}
    for index, layer in enumerate(layers):
        for name in layer.parameters:
            users.setdefault(name, []).append(index)
        num_bytes.update({tied.name: tied.num_bytes for tied in layer.tied if tied.is_trainable})
    return tuple((tuple(users.get(name, ())), num_bytes[name]) for name in num_bytes)


def _own_times(profile: ModelProfile, measured: Sequence[LayerMeasurement]) -> DeviceTimes:
    if measured:
        forward = [layer.forward_s for layer in measured]
        backward = [layer.backward_s for layer in measured]
    else:
        forward = [layer.forward_flops for layer in profile.layers]
        if not any(forward):
            forward = [1.0] * profile.num_layers
        backward = [_BACKWARD_FLOPS * flops for flops in forward]
    return DeviceTimes(
        device_model="the profiled device",
        microbatch_size=profile.microbatch_size or 1.0,
        forward_s=tuple(forward),
        backward_s=tuple(backward),
    )


def _seconds(work: Work, table: DeviceTimes) -> Sequence[float]:
    """Seconds of each layer; where the backward was not measured in two parts, all of it is the input's gradient."""
    if work in (Work.FORWARD, Work.RECOMPUTE):
        return table.forward_s
    if work is Work.BACKWARD:
        return table.backward_s
    if work is Work.OPTIMIZER:
        return table.optimizer_s or (0.0,) * len(table.forward_s)
    weight = table.backward_weight_s or (0.0,) * len(table.forward_s)
    if work is Work.WEIGHT_GRADIENT:
        return weight
    return [whole - part for whole, part in zip(table.backward_s, weight, strict=True)]
