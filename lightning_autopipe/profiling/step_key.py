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


def step_digest(trace: StepTrace, module: nn.Module, layer_names: Sequence[str]) -> str:
    """Identify what a traced step computes: operations, constants, shapes, flags, and where its layers begin."""
    modules = dict(module.named_modules())
    lines = [*layer_names, *(f"{name} {p.requires_grad}" for name, p in module.named_parameters())]
    lines += [f"{name} {type(sub).__qualname__} {sub.training}" for name, sub in modules.items()]
    for op in trace.operations:
        shapes = [(tuple(trace.values[v].absent.shape), trace.values[v].absent.dtype) for v in op.made.values()]
        constants = [repr(c) if isinstance(c, PLAIN) else type(c).__qualname__ for c in op.constants]
        lines.append(f"{op.name} {op.module_path} {op.reads} {op.parameters} {op.buffers} {constants} {shapes}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def leaf_shapes(arguments: Any) -> list[str]:
    """Describe the leaves of a batch, with the shapes and dtypes of tensors."""
    return [
        f"{'.'.join(map(str, path))}: {(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)}"
        for path, leaf in tree.walk(arguments)
    ]


def compute_dtype(module: nn.Module, device: torch.device) -> torch.dtype:
    """Give the numbers that most work is done in: autocast's, else those of most parameters."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    sizes: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.get_default_dtype())


def precision_key(device: torch.device) -> str:
    """Describe the settings that decide in which numbers, and by which kernels, operations run."""
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return (
        f"autocast {autocast}, gradients {torch.is_grad_enabled()}, matmul {torch.get_float32_matmul_precision()}, "
        f"deterministic {torch.are_deterministic_algorithms_enabled()}, cudnn tuned {torch.backends.cudnn.benchmark}"
    )


def optimizer_key(optimizers: Sequence[Optimizer]) -> list[str]:
    """Describe optimizers by their kinds and the settings that a step's work may depend on."""
    described = []
    for optimizer in optimizers:
        groups = [
            [f"{name}={value}" for name, value in sorted(group.items()) if name not in _NOT_WORK and _is_plain(value)]
            + [str(len(group["params"]))]
            for group in optimizer.param_groups
        ]
        described.append(f"{type(optimizer).__module__}.{type(optimizer).__qualname__} {groups}")
    return described


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*PLAIN, tuple, list))
