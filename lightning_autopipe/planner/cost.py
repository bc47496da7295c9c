"""What work takes: the only place that prices an action."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from itertools import accumulate

from lightning_autopipe.core.cluster import Device, is_same_model
from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.profile import DeviceTimes, LayerBytes, LayerMeasurement, LayerProfile, ModelProfile
from lightning_autopipe.planner.size_fit import SizeFit

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
    SPLIT = "split"
    """What both parts take more than one backward."""
    RECOMPUTE = "recompute"
    """The forward again, in the backward."""
    OPTIMIZER = "optimizer"


class CostModel:
    """Prices layers: seconds by kind of work, device and size of the micro-batch, and bytes by cut and size.

    Times come from the profile's tables for the device's model; where there is none for it, from its first model's (or
    what was measured of the layers), divided by the device's `relative_speed`. Tables in other numbers than the first
    one's do not count. Between two measured sizes times are fitted (`SizeFit`); outside of them nothing is priced.
    Bytes lie on a line between two measured sizes, and beyond them; where one size was measured, they grow with it.

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
            if table.dtype == profile.times[0].dtype:
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
        known = [
            (self.microbatch_size, measured),
            *((sized.microbatch_size, sized.layers) for sized in profile.other_sizes),
        ]
        self._known_bytes: list[tuple[float, Sequence[LayerBytes]]] = sorted(known, key=lambda pair: pair[0])
        self._bytes: dict[float, tuple[LayerBytes, ...]] = {self.microbatch_size: measured}
        self._cuts: dict[float, tuple[list[int], list[int]]] = {}
        self._known_models: dict[str, str | None] = {}
        self._fits: dict[tuple[str, Work], list[SizeFit]] = {}
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

    def action_s(
        self, work: Work, layers: range, *, device: Device | None = None, microbatch_size: float | None = None
    ) -> float:
        """Seconds of a stage's forward or backward: its layers, and what it takes besides them; see `work_s`."""
        overhead_s = self.overhead_s(device=device, microbatch_size=microbatch_size)
        return overhead_s + self.work_s(work, layers, device=device, microbatch_size=microbatch_size)

    def prefix_s(
        self, work: Work, *, device: Device | None = None, microbatch_size: float | None = None
    ) -> tuple[float, ...]:
        """Sums behind `work_s`: entry i is the price of the layers before i. For searches, which price many ranges."""
        key = self._key(work, device, microbatch_size)
        if key not in self._prefixes:
            seconds = self.layers_s(work, device=device, microbatch_size=microbatch_size)
            self._prefixes[key] = tuple(accumulate(seconds, initial=0.0))
        return self._prefixes[key]

    def layers_s(
        self, work: Work, *, device: Device | None = None, microbatch_size: float | None = None
    ) -> tuple[float, ...]:
        """The price of each layer by itself; see `work_s`."""
        work, model, speed, size = self._key(work, device, microbatch_size)
        return tuple(seconds / speed for seconds in self._layer_times(work, model, size))

    def _key(self, work: Work, device: Device | None, size: float | None) -> tuple[Work, str, float, float]:
        """What a price depends on: the model whose tables count, and what they are divided by."""
        model, speed = self._reference, 1.0
        if device is not None:
            known = self._known_model(device.model)
            if known is None:
                speed = device.relative_speed
            else:
                model = known
        return work, model, speed, self.microbatch_size if size is None else size

    def overhead_s(self, *, device: Device | None = None, microbatch_size: float | None = None) -> float:
        """What each forward and each backward of a stage takes besides its layers."""
        _, model, speed, size = self._key(Work.FORWARD, device, microbatch_size)
        nearest = min(self._tables[model], key=lambda table: abs(table.microbatch_size - size))
        return nearest.overhead_s / speed

    @property
    def known_sizes(self) -> tuple[float, float]:
        """Samples of the smallest and of the largest micro-batch that every profiled device model has times for."""
        if not self.profile.times:
            return self.microbatch_size, self.microbatch_size
        by_model = [[table.microbatch_size for table in tables] for tables in self._tables.values()]
        return max(map(min, by_model)), min(map(max, by_model))

    @property
    def can_split_backward(self) -> bool:
        """Whether it was measured what the gradients of parameters take by themselves."""
        return any(self.layers_s(Work.WEIGHT_GRADIENT))

    def sent_bytes(self, cut: int, *, microbatch_size: float | None = None) -> int:
        """Bytes of the values that cross the cut before layer ``cut``, for one micro-batch; 0 at both ends."""
        return self._bytes_by_cut(microbatch_size)[0][cut]

    def gradient_bytes(self, cut: int, *, microbatch_size: float | None = None) -> int:
        """Bytes of the gradients that come back across the cut before layer ``cut``; 0 at both ends."""
        return self._bytes_by_cut(microbatch_size)[1][cut]

    def tied_bytes(self, partition: Partition) -> dict[tuple[int, ...], int]:
        """Bytes of the gradients that stages sum because they share parameters, by the stages that do."""
        found: dict[tuple[int, ...], int] = {}
        for layer_indices, num_bytes in self.ties:
            stages = tuple(sorted({partition.layer_stage(index) for index in layer_indices}))
            if len(stages) > 1:
                found[stages] = found.get(stages, 0) + num_bytes
        return dict(sorted(found.items()))

    def layer_bytes(self, microbatch_size: float | None = None) -> tuple[LayerBytes, ...]:
        """What each layer keeps and hands on for a micro-batch of some size; empty where nothing was measured."""
        size = self.microbatch_size if microbatch_size is None else microbatch_size
        if size not in self._bytes:
            self._bytes[size] = tuple(_bytes_at(size, self._known_bytes, index) for index in range(len(self.measured)))
        return self._bytes[size]

    def _known_model(self, name: str) -> str | None:
        """The model that there are tables of, for a device's; None where there are none.

        Cluster files name models as people do, profiles as drivers do.
        """
        if name not in self._known_models:
            alike = [known for known in self._tables if is_same_model(name, known) or is_same_model(known, name)]
            self._known_models[name] = name if name in self._tables else next(iter(alike), None)
        return self._known_models[name]

    def _layer_times(self, work: Work, model: str, size: float) -> Sequence[float]:
        tables = self._tables[model]
        if work is Work.OPTIMIZER:  # once a step, whatever the micro-batch
            return tables[-1].optimizer_s or (0.0,) * self.num_layers
        sizes = [table.microbatch_size for table in tables]
        if not sizes[0] <= size <= sizes[-1]:
            known = f"{sizes[0]:g}" if len(sizes) == 1 else f"{sizes[0]:g} to {sizes[-1]:g}"
            raise PlanError(
                f"no times are known for micro-batches of {size:g} samples on {model or 'this device'}: measured are "
                f"{known}; profile that size, or choose num_microbatches so that micro-batches are as large as measured"
            )
        if work in (Work.FORWARD, Work.RECOMPUTE):
            return self._fitted(Work.FORWARD, model, size)
        whole = self._fitted(Work.BACKWARD, model, size)
        if work is Work.BACKWARD:
            return whole
        shares = _shares(tables, size, "backward_split_s" if work is Work.SPLIT else "backward_weight_s")
        part = [share * seconds for share, seconds in zip(shares, whole, strict=True)]
        if work is not Work.INPUT_GRADIENT:
            return part
        return [seconds - weight for seconds, weight in zip(whole, part, strict=True)]

    def _fitted(self, work: Work, model: str, size: float) -> list[float]:
        if (model, work) not in self._fits:
            tables = self._tables[model]
            sizes = [table.microbatch_size for table in tables]
            columns = zip(*(t.forward_s if work is Work.FORWARD else t.backward_s for t in tables), strict=True)
            self._fits[model, work] = [SizeFit(sizes, seconds) for seconds in columns]
        return [fit.at(size) for fit in self._fits[model, work]]

    def _bytes_by_cut(self, microbatch_size: float | None) -> tuple[list[int], list[int]]:
        size = self.microbatch_size if microbatch_size is None else microbatch_size
        if size in self._cuts:
            return self._cuts[size]
        sent, gradients = [0] * (self.num_layers + 1), [0] * (self.num_layers + 1)
        if self.profile.values:
            growth = size / self.microbatch_size
            for value in self.profile.values:
                forward = _grown(value.forward_bytes, value.fixed_forward_bytes, growth)
                gradient = _grown(value.gradient_bytes, value.fixed_gradient_bytes, growth)
                for cut in range(value.producer + 1, value.last_reader + 1):
                    sent[cut] += forward
                    gradients[cut] += gradient
        else:
            for cut, layer in enumerate(self.layer_bytes(size)[:-1], start=1):
                sent[cut], gradients[cut] = layer.sent_bytes, layer.gradient_bytes
        self._cuts[size] = sent, gradients
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
        weight, split = zip(*((layer.backward_weight_s, layer.backward_split_s) for layer in measured), strict=True)
    else:
        forward = [layer.forward_flops for layer in profile.layers]
        if not any(forward):
            forward = [1.0] * profile.num_layers
        backward = [_BACKWARD_FLOPS * flops for flops in forward]
        weight, split = (), ()
    return DeviceTimes(
        device_model="the profiled device",
        microbatch_size=profile.microbatch_size or 1.0,
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        backward_weight_s=weight,
        backward_split_s=split,
    )


def _shares(tables: Sequence[DeviceTimes], size: float, column: str) -> list[float]:
    """What each layer has in a column against its backward: on a line between sizes; 0 where it was not measured."""
    above = bisect_left([table.microbatch_size for table in tables], size)
    high = tables[above]
    if high.microbatch_size == size:
        return _shares_of(high, column)
    low = tables[above - 1]
    part = (size - low.microbatch_size) / (high.microbatch_size - low.microbatch_size)
    pairs = zip(_shares_of(low, column), _shares_of(high, column), strict=True)
    return [(1 - part) * a + part * b for a, b in pairs]


def _shares_of(table: DeviceTimes, column: str) -> list[float]:
    parts = getattr(table, column) or (0.0,) * len(table.backward_s)
    return [part / whole if whole else 0.0 for part, whole in zip(parts, table.backward_s, strict=True)]


def _bytes_at(size: float, known: Sequence[tuple[float, Sequence[LayerBytes]]], index: int) -> LayerBytes:
    """A layer's bytes at a size: on the line through its neighbours, or through the two nearest where it has one."""
    if len(known) == 1:
        known_size, layers = known[0]
        return _on_line(0.0, None, known_size, layers[index], size)
    above = min(max(bisect_left([known_size for known_size, _ in known], size), 1), len(known) - 1)
    (low_size, low), (high_size, high) = known[above - 1 : above + 1]
    return _on_line(low_size, low[index], high_size, high[index], size)


def _on_line(low_size: float, low: LayerBytes | None, high_size: float, high: LayerBytes, size: float) -> LayerBytes:
    part = (size - low_size) / (high_size - low_size)

    def at(name: str) -> int:
        first: int = 0 if low is None else getattr(low, name)
        last: int = getattr(high, name)
        return max(0, round(first + part * (last - first)))

    return LayerBytes(**{field.name: at(field.name) for field in fields(LayerBytes)})


def _grown(num_bytes: int, fixed_bytes: int, growth: float) -> int:
    return fixed_bytes + round((num_bytes - fixed_bytes) * growth)
