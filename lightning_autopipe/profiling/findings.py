"""What is found out about the layers of a step, and what several processes have found put together."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_autopipe.capture.cuts import CutTable
from lightning_autopipe.capture.records import Layer
from lightning_autopipe.core.errors import CaptureError
from lightning_autopipe.core.profile import CrossingValue, LayerMeasurement
from lightning_autopipe.profiling.value_spec import ValueSpec


class ProfilingError(CaptureError):
    """The layers of a step cannot be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """What an optimizer takes for the parameters counted in a layer."""

    seconds: float
    num_bytes: int
    """What it remembers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFindings:
    """What one process has found out, for a micro-batch of one size: some layers, by index; or all of them."""

    num_layers: int
    layers: Mapping[int, LayerMeasurement]
    values: tuple[CrossingValue, ...]
    """Of the whole step."""
    overhead_s: float = 0.0
    """What each forward and each backward of a stage takes besides its layers."""
    optimizer: Mapping[int, OptimizerCost] | None = None
    """By layer; None where no optimizer was tried."""

    def measurements(self) -> tuple[LayerMeasurement, ...]:
        """Those of all layers, in the order of the step."""
        return tuple(self.layers[index] for index in range(self.num_layers))


def join_findings(findings: Sequence[LayerFindings]) -> LayerFindings:
    """Put together what processes have found that shared the layers of one step.

    Raises:
        ProfilingError: together they are not all layers, or not of one step.
    """
    first = findings[0]
    layers = {index: one for of_member in findings for index, one in of_member.layers.items()}
    steps = {(of_member.num_layers, of_member.values) for of_member in findings}
    if len(steps) > 1 or set(layers) != set(range(first.num_layers)):
        raise ProfilingError("the processes traced unlike steps, so that they cannot share the measuring of its layers")
    costs: dict[int, OptimizerCost] | None = {}
    for of_member in findings:
        costs = None if costs is None or of_member.optimizer is None else {**costs, **of_member.optimizer}
    overhead_s = statistics.fmean(of_member.overhead_s for of_member in findings)
    return replace(first, layers=layers, optimizer=costs, overhead_s=overhead_s)


def crossing_values(
    table: CutTable, layers: Sequence[Layer], sent: Sequence[Sequence[ValueSpec]]
) -> tuple[CrossingValue, ...]:
    """Give the values that cross the cuts between layers, each once, in the order in which they are made.

    Args:
        table: Which values cross which position.
        layers: Those of the step.
        sent: What crosses the end of each layer, as it was when the layer ran.
    """
    spans: dict[int, tuple[int, int, ValueSpec]] = {}
    for index, layer in enumerate(layers[:-1]):
        for value, spec in zip(table.crossing[layer.stop], sent[index], strict=True):
            producer, _, first_spec = spans.get(value, (index, index, spec))
            spans[value] = producer, index + 1, first_spec
    return tuple(
        CrossingValue(
            producer=producer,
            last_reader=last_reader,
            forward_bytes=spec.num_bytes,
            gradient_bytes=spec.num_bytes if spec.requires_grad else 0,
        )
        for _, (producer, last_reader, spec) in sorted(spans.items())
    )


def with_fixed_bytes(
    values: Iterable[CrossingValue], size: float, others: Iterable[CrossingValue], other_size: float
) -> tuple[CrossingValue, ...]:
    """Tell which bytes of values do not grow with the micro-batch, from the same values at two sizes.

    Where the step has other values at the other size, all bytes are taken to grow.
    """
    values, others = tuple(values), tuple(others)
    if [(v.producer, v.last_reader) for v in values] != [(v.producer, v.last_reader) for v in others]:
        return values

    def fixed(own: int, other: int) -> int:
        return min(own, max(0, round(own - size * (other - own) / (other_size - size))))

    return tuple(
        replace(
            value,
            fixed_forward_bytes=fixed(value.forward_bytes, other.forward_bytes),
            fixed_gradient_bytes=fixed(value.gradient_bytes, other.gradient_bytes),
        )
        for value, other in zip(values, others, strict=True)
    )
