"""Where a module's tensors lie, on a rank that holds a part of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.runtime.placement import fill_parameters


def fill_placeholders(module: nn.Module) -> None:
    """Gives placeholders memory, whose content is still to come."""
    empty = {
        name: torch.zeros(parameter.shape, dtype=parameter.dtype)
        for name, parameter in module.named_parameters()
        if is_absent(parameter)
    }
    fill_parameters(module, empty)


def move_module(module: nn.Module, device: torch.device) -> None:
    """Moves what is here to a device: parameters in place, buffers, metric states. Placeholders stay as they are."""
    for parameter in module.parameters():
        if not is_absent(parameter) and parameter.device != device:
            parameter.data = parameter.data.to(device)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(device)
    moved: dict[int, Tensor] = {}
    for submodule in module.modules():
        if isinstance(submodule, Metric):
            submodule.to(device)
            continue
        for name, buffer in submodule._buffers.items():
            if buffer is not None and buffer.device != device:
                # A buffer with two names stays one tensor.
                submodule._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))
        if isinstance(submodule, _DeviceDtypeModuleMixin):
            submodule._device = device


def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup | None, *, source: int) -> None:
    """Gives every rank of a (gloo) group the values that one global rank has, in place. Collective over the group."""
    if group is None:
        return
    with torch.no_grad():
        for tensor in tensors:
            data = tensor.data
            message = data.cpu().contiguous()
            dist.broadcast(message, src=source, group=group)
            if message.data_ptr() != data.data_ptr():
                data.copy_(message)
