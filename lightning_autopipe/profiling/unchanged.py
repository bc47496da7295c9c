"""Running parts of a step for real, and leaving everything as it was."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.capture.preserve import PreservedState, preserved_random_state
from lightning_autopipe.profiling.stand_ins import has_memory

_REGISTRIES = frozenset({"_parameters", "_modules"})


@contextlib.contextmanager
def unchanged(module: nn.Module, written_parameters: Collection[str]) -> Iterator[None]:
    """Undo at the end what the body did to a module, its gradients, its flags and to random state.

    Within, parameters have no gradients and no hooks on accumulated gradients. Put back are the attributes of all
    submodules and what their lists and dicts hold; the content of buffers, of other tensors among the attributes (a
    metric's state) and of the parameters named in `written_parameters`. Unlike while a step is traced, operations run
    at full speed: nothing observes them.
    """
    parameters = dict(module.named_parameters())
    tensors = [tensor for tensor in state_tensors(module) if not is_absent(tensor)]
    written = [parameters[name] for name in written_parameters if not is_absent(parameters[name])]
    tensors += [parameter for parameter in written if has_memory(parameter)]
    gradients = [(p, p.grad) for p in parameters.values()]
    hooks = [by_id for p in parameters.values() if (by_id := p._post_accumulate_grad_hooks)]
    registered = [dict(by_id) for by_id in hooks]
    marks = [(tensor.__dict__, dict(tensor.__dict__)) for tensor in (*tensors, *parameters.values())]
    contents = [(tensor, tensor.detach().clone()) for tensor in tensors]
    state = PreservedState(module)
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        for by_id in hooks:
            by_id.clear()
        with preserved_random_state():
            yield
    finally:
        state.restore()
        for tensor, content in contents:
            with torch.inference_mode(tensor.is_inference()):
                tensor.data.copy_(content)
        for attributes, attributes_before in marks:
            attributes.clear()
            attributes.update(attributes_before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for by_id, before in zip(hooks, registered, strict=True):
            by_id.update(before)


def state_tensors(module: nn.Module) -> list[Tensor]:
    """Tensors among the attributes of all submodules, but for parameters; each once."""
    found: dict[int, Tensor] = {}

    def collect(value: Any) -> None:
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter):
                found[id(value)] = value
        elif isinstance(value, dict):
            for item in value.values():
                collect(item)
        elif isinstance(value, (list, tuple, deque)) and len(value) < 10_000:
            for item in value:
                collect(item)

    for submodule in module.modules():
        for name, value in submodule.__dict__.items():
            if name not in _REGISTRIES:
                collect(value)
    return list(found.values())


@contextlib.contextmanager
def on_device(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Have a whole module on `device` for a while: parameters (in place), buffers, other tensors among its attributes.

    Raises:
        MemoryError: `device` is an accelerator without room for it.
    """
    parameters = [p for p in module.parameters() if not is_absent(p)]
    if all(p.device == device for p in parameters):
        yield
        return
    tensors = [*parameters, *(t for t in state_tensors(module) if not is_absent(t))]
    num_bytes = sum(t.numel() * t.element_size() for t in tensors if has_memory(t))
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        # The rest is for one layer's gradients and activations.
        if num_bytes > 0.6 * free_bytes:
            raise MemoryError(
                f"the whole module ({num_bytes / 2**30:.1f} GiB) does not fit on {device} beside what a layer needs "
                f"({free_bytes / 2**30:.1f} GiB are free)"
            )
    homes = [(tensor, tensor.data) for tensor in tensors]
    # What a LightningModule and a metric say of themselves.
    told = [(sub.__dict__, sub.__dict__["_device"]) for sub in module.modules() if "_device" in sub.__dict__]
    try:
        for tensor, data in homes:
            tensor.data = data.to(device)
        for attributes, _ in told:
            attributes["_device"] = device
        yield
    finally:
        for tensor, data in homes:
            tensor.data = data
        for attributes, told_device in told:
            attributes["_device"] = told_device
