"""A profile from what was found out at several sizes, on several device models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from lightning_autopipe.core.profile import DeviceTimes, LayerBytes, LayerMeasurement, ModelProfile, SizedBytes
from lightning_autopipe.profiling.findings import LayerFindings, with_fixed_bytes


def assembled_profile(
    profile: ModelProfile,
    findings: Mapping[int, Mapping[str, LayerFindings]],
    *,
    size_in_use: int,
    reference_model: str,
    dtype: str,
) -> ModelProfile:
    """Put findings into a profile: a table of times for each device model and size, bytes of one model.

    Args:
        profile: of the same layers, without measurements.
        findings: of all layers, by samples in the micro-batch and device model; each size has the same models.
        size_in_use: whose measurements the layers have.
        reference_model: the model whose bytes count, and whose tables come first: other devices are priced by it.
        dtype: in which numbers was computed.
    """
    in_use = findings[size_in_use]
    models = [reference_model, *sorted(set(in_use) - {reference_model})]
    reference = in_use[reference_model]
    others = {size: found[reference_model] for size, found in sorted(findings.items()) if size != size_in_use}
    values = reference.values
    if others:
        farthest = max(others, key=lambda size: abs(size - size_in_use))
        values = with_fixed_bytes(values, size_in_use, others[farthest].values, farthest)
    costs = reference.optimizer
    measured = profile.with_measurements(reference.measurements())
    return replace(
        measured,
        layers=tuple(
            replace(layer, optimizer_bytes=None if costs is None else costs[index].num_bytes)
            for index, layer in enumerate(measured.layers)
        ),
        values=values,
        times=tuple(
            _times(model, size, findings[size][model], in_use[model], dtype)
            for model in models
            for size in sorted(findings)
        ),
        microbatch_size=size_in_use,
        other_sizes=tuple(
            SizedBytes(microbatch_size=size, layers=tuple(_bytes(one) for one in found.measurements()))
            for size, found in others.items()
        ),
    )


def _times(model: str, size: int, found: LayerFindings, in_use: LayerFindings, dtype: str) -> DeviceTimes:
    layers = found.measurements()
    costs = in_use.optimizer
    return DeviceTimes(
        device_model=model,
        microbatch_size=size,
        forward_s=tuple(layer.forward_s for layer in layers),
        backward_s=tuple(layer.backward_s for layer in layers),
        backward_weight_s=tuple(layer.backward_weight_s for layer in layers),
        backward_split_s=tuple(layer.backward_split_s for layer in layers),
        optimizer_s=() if costs is None else tuple(costs[index].seconds for index in range(len(layers))),
        dtype=dtype,
        overhead_s=found.overhead_s,
    )


def _bytes(layer: LayerMeasurement) -> LayerBytes:
    return LayerBytes(**{field.name: getattr(layer, field.name) for field in fields(LayerBytes)})
