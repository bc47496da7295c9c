"""What the measurements of a step depend on, as text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.records import StepTrace
from lightning_autopipe.profiling.groups import PLAIN

_NOT_WORK = frozenset({"params", "param_names", "lr", "initial_lr"})


def measurement_key(
    trace: StepTrace,
    module: nn.Module,
    *,
    fingerprint: str,
    layer_names: Sequence[str],
    arguments: Any,
    sizes: Sequence[int],
    optimizers: Sequence[Optimizer],
    device: torch.device,
) -> dict[str, Any]:
    """Give what measurements depend on, but for the devices, as values of JSON.

    Args:
        trace: of the micro-batch in use.
        module: whose step it is.
        fingerprint: of the module's parameters.
        layer_names: of the step and where its layers begin.
        arguments: what the step takes, with the whole batch.
        sizes: of micro-batches that are to be measured.
        optimizers: that are to be measured.
        device: where.
    """
    return {
        "module": fingerprint,
        "operations": _step_digest(trace, module, layer_names),
        "batch": _leaf_shapes(arguments),
        "microbatch_sizes": list(sizes),
        "precision": _precision(device),
        "optimizers": [_optimizer(optimizer) for optimizer in optimizers],
        "torch": torch.__version__,
    }


def compute_dtype(module: nn.Module, device: torch.device) -> torch.dtype:
    """Give the numbers that most work is done in: autocast's, else those of most parameters."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    sizes: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.get_default_dtype())


def _step_digest(trace: StepTrace, module: nn.Module, layer_names: Sequence[str]) -> str:
    """Identify what a traced step computes: operations, constants, shapes, flags, and where its layers begin."""
    modules = dict(module.named_modules())
    lines = [*layer_names, *(f"{name} {p.requires_grad}" for name, p in module.named_parameters())]
    lines += [f"{name} {type(sub).__qualname__} {sub.training}" for name, sub in modules.items()]
    for op in trace.operations:
        shapes = [(tuple(trace.values[v].absent.shape), trace.values[v].absent.dtype) for v in op.made.values()]
        constants = [repr(c) if isinstance(c, PLAIN) else type(c).__qualname__ for c in op.constants]
        lines.append(f"{op.name} {op.module_path} {op.reads} {op.parameters} {op.buffers} {constants} {shapes}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _leaf_shapes(arguments: Any) -> list[str]:
    """Describe the leaves of a batch, with the shapes and dtypes of tensors."""
    return [
        f"{'.'.join(map(str, path))}: {(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)}"
        for path, leaf in tree.walk(arguments)
    ]


def _precision(device: torch.device) -> str:
    """Describe the settings that decide in which numbers, and by which kernels, operations run."""
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return (
        f"autocast {autocast}, gradients {torch.is_grad_enabled()}, matmul {torch.get_float32_matmul_precision()}, "
        f"deterministic {torch.are_deterministic_algorithms_enabled()}, cudnn tuned {torch.backends.cudnn.benchmark}"
    )


def _optimizer(optimizer: Optimizer) -> str:
    """Describe an optimizer by its kind and the settings that a step's work may depend on."""
    groups = []
    for group in optimizer.param_groups:
        settings = {name: value for name, value in sorted(group.items()) if name not in _NOT_WORK and _is_plain(value)}
        groups.append(f"{settings} {len(group['params'])}")
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__} {groups}"


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*PLAIN, tuple, list))
