"""What layers cost: the only place that prices work."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_autopipe.core.profile import LayerMeasurement, LayerProfile


def layer_costs(layers: Sequence[LayerProfile]) -> tuple[float, ...]:
    """The work of each layer for one micro-batch, in units that are comparable within one module.

    Where layers were measured it is the seconds of forward and backward. Else it is the floating-point operations of
    the traced forward: the backward of a layer is then taken to cost the same multiple of its forward everywhere. Where
    no operation was counted at all, layers count equally.
    """
    measured = measurements(layers)
    if measured:
        return tuple(layer.forward_s + layer.backward_s for layer in measured)
    if not any(layer.forward_flops for layer in layers):
        return (1.0,) * len(layers)
    return tuple(layer.forward_flops for layer in layers)


def measurements(layers: Sequence[LayerProfile]) -> tuple[LayerMeasurement, ...]:
    """What was measured of each layer; empty unless all were, and took any time."""
    measured = tuple(layer.measured for layer in layers if layer.measured is not None)
    if len(measured) < len(layers) or not any(layer.forward_s + layer.backward_s for layer in measured):
        return ()
    return measured
