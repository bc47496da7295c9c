"""One run of each kind of layer: what crosses its ends, what its forward keeps, the most that is alive."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.cuts import CutTable
from lightning_autopipe.capture.proof import proven_program
from lightning_autopipe.capture.records import Layer, StepTrace
from lightning_autopipe.profiling.groups import layer_signature
from lightning_autopipe.profiling.layer_replay import LayerOutput, LayerRunner
from lightning_autopipe.profiling.memory import LiveBytes, SavedTensors, StorageSet
from lightning_autopipe.profiling.stand_ins import in_memory
from lightning_autopipe.profiling.stopwatch import Stopwatch
from lightning_autopipe.profiling.value_spec import ValueSpec


@dataclass(slots=True, kw_only=True)
class LayerGroup:
    """Equal layers: one is run for all of them. `layers` are their indices in the step."""

    runner: LayerRunner
    received: tuple[ValueSpec, ...]
    parameters: tuple[Tensor, ...]
    forward_flops: float
    layers: list[int] = field(default_factory=list)
    sent: tuple[ValueSpec, ...] = ()
    root_specs: tuple[ValueSpec | None, ...] = ()
    activation_bytes: int = 0
    received_kept_bytes: int = 0
    sent_kept_bytes: int = 0
    peak_bytes: int = 0
    has_split_backward: bool = False
    """Whether its backward has parts for what came in and for parameters, which can be run apart."""

    def sample_received(self, device: torch.device) -> tuple[Tensor, ...]:
        """Give stand-ins for what crosses the layer's start."""
        return tuple(spec.sample(device) for spec in self.received)

    def sample_gradients(self, device: torch.device) -> list[Tensor | None]:
        """Give what a backward begins with: gradients for what crosses the end, None for the loss."""
        return [None if spec is None else spec.sample_gradient(device) for spec in self.root_specs]

    @property
    def hands_gradients_back(self) -> bool:
        """Whether its backward has a part for what came in."""
        return any(spec.requires_grad for spec in self.received)

    @property
    def has_weight_gradients(self) -> bool:
        """Whether its backward has a part for parameters."""
        return any(parameter.requires_grad for parameter in self.parameters)

    def clear_gradients(self) -> None:
        """Drop the gradients of the layer's parameters."""
        for parameter in self.parameters:
            parameter.grad = None


def survey_layers(
    trace: StepTrace,
    table: CutTable,
    module: nn.Module,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    device: torch.device,
) -> list[LayerGroup]:
    """Run one of each kind of layer once, in the order of the step.

    What crosses into a layer is shaped by what the layer before it has sent, not by the trace: dtypes under autocast,
    strides, `requires_grad`.
    """
    groups: dict[Hashable, LayerGroup] = {}
    parameters = dict(module.named_parameters())
    crossing: tuple[ValueSpec, ...] = ()
    for index, layer in enumerate(trace.layers):
        key = (layer_signature(trace, table, module, layer), crossing)
        group = groups.get(key)
        if group is None:
            program = proven_program(
                trace,
                table,
                module,
                step,
                args,
                kwargs,
                start=layer.start,
                stop=None if layer.stop == len(trace.operations) else layer.stop,
                device=device,
            )
            group = groups[key] = LayerGroup(
                runner=LayerRunner(program, step, args, kwargs),
                received=crossing,
                parameters=tuple(parameters[name] for name in layer.parameters),
                forward_flops=layer.forward_flops,
            )
            with in_memory(group.parameters):
                _run_once(group, layer, module, device)
                group.clear_gradients()
        group.layers.append(index)
        crossing = group.sent
    return list(groups.values())


def _run_once(group: LayerGroup, layer: Layer, module: nn.Module, device: torch.device) -> None:
    for parameter in group.parameters:
        # As from the second micro-batch on: gradients are there and are added to.
        if parameter.requires_grad and torch.is_grad_enabled():
            parameter.grad = torch.zeros_like(parameter)
    received = group.sample_received(device)
    batch = group.runner.fresh_batch()
    stopwatch = Stopwatch(torch.device("cpu"))
    # A clone of a received value that the layer writes in place is made before the layer begins.
    resident = StorageSet((*module.parameters(), *module.buffers(), *(t for _, t in tree.tensors(batch))))
    with LiveBytes() as live:
        with SavedTensors() as saved:
            output = group.runner.forward(batch, received, stopwatch)
        group.sent = tuple(ValueSpec.of(tensor) for tensor in output.sent)
        _count_saved(group, saved, resident, received, output)
        group.root_specs = tuple(None if root is output.loss else ValueSpec.of(root) for root in output.roots())
        group.runner.backward(output, group.sample_gradients(device), stopwatch)
        del output
    group.peak_bytes = live.peak_bytes
    group.has_split_backward = bool(group.root_specs) and group.hands_gradients_back and group.has_weight_gradients


def _count_saved(
    group: LayerGroup, saved: SavedTensors, resident: StorageSet, received: Sequence[Tensor], output: LayerOutput
) -> None:
    kept = saved.storages(without=resident)
    into, out_of = StorageSet(received), StorageSet(output.sent)
    group.activation_bytes = sum(storage.nbytes() for storage in kept)
    group.received_kept_bytes = sum(storage.nbytes() for storage in kept if storage in into)
    group.sent_kept_bytes = sum(storage.nbytes() for storage in kept if storage in out_of)
