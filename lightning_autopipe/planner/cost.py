"""What layers cost: the only place that prices work."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_autopipe.core.profile import LayerProfile


def layer_costs(layers: Sequence[LayerProfile]) -> tuple[float, ...]:
    """The work of each layer, in units that are comparable within one module.

    In this version it is the layer's floating-point operations in the traced forward: the backward of a layer is taken
    to cost the same multiple of its forward everywhere. Where no operation was counted at all, layers count equally.
    """
    if not any(layer.forward_flops for layer in layers):
        return (1.0,) * len(layers)
    return tuple(layer.forward_flops for layer in layers)
