"""What a trace tells of its layers without a measurement."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lightning_autopipe.capture.records import StepTrace
from lightning_autopipe.core.profile import LayerProfile, ModelProfile, TiedParameter


def unmeasured_profile(trace: StepTrace, parameters: Mapping[str, Tensor]) -> ModelProfile:
    """Give the bytes and counted operations of a trace's layers; a tied parameter counts in the first layer.

    Args:
        trace: Of a step, with its layers.
        parameters: Those of the module, by first name.
    """
    counted: set[str] = set()
    layers = []
    for layer in trace.layers:
        own = [parameters[name] for name in layer.parameters if name not in counted]
        tied = [(name, parameters[name]) for name in layer.parameters if name in counted]
        counted.update(layer.parameters)
        trainable = [p for p in own if p.requires_grad]
        layers.append(
            LayerProfile(
                name=str(layer.key),
                forward_flops=layer.forward_flops,
                param_bytes=sum(p.numel() * p.element_size() for p in own),
                trainable_bytes=sum(p.numel() * p.element_size() for p in trainable),
                boundary_bytes=layer.boundary_bytes,
                parameters=layer.parameters,
                num_parameters=sum(p.numel() for p in own),
                num_trainable_parameters=sum(p.numel() for p in trainable),
                tied=tuple(
                    TiedParameter(name=name, num_bytes=p.numel() * p.element_size(), is_trainable=p.requires_grad)
                    for name, p in tied
                ),
            )
        )
    return ModelProfile(layers=tuple(layers))
