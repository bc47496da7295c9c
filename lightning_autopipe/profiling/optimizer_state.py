"""How much an optimizer remembers, and copies of it to try."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.preserve import preserved_random_state

ADAM_STATE_RATIO = 2.0
"""Adam and AdamW keep two numbers for each parameter."""

_SIDE = 64


def optimizer_state_ratio(optimizers: Sequence[Optimizer]) -> float:
    """Give the bytes of optimizer state for each byte of trainable parameters.

    Found out with one step of a copy on a small matrix; where that fails, and without an optimizer, AdamW's.
    """
    try:
        with preserved_random_state():
            return max((_ratio(optimizer) for optimizer in optimizers), default=ADAM_STATE_RATIO)
    except Exception:  # a user's optimizer may need anything
        return ADAM_STATE_RATIO


class TrialOptimizer:
    """A copy of an optimizer on other parameters, without state, hooks and schedulers of its own.

    Args:
        optimizer: which stays as it is.
        parameters: with their gradients, by the position of the group whose settings they have.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[tuple[int, nn.Parameter]]) -> None:
        self._kind = type(optimizer)
        self._copy = copy.copy(optimizer)
        self._copy.state = defaultdict(dict)
        groups: dict[int, dict[str, Any]] = {}
        for index, parameter in parameters:
            group = groups.setdefault(index, {**optimizer.param_groups[index], "params": []})
            group["params"].append(parameter)
        self._copy.param_groups = list(groups.values())

    def step(self) -> None:
        """Take a step."""
        with torch.enable_grad():
            # Of the class: schedulers and Lightning put a counting `step` on the object, bound to the original.
            self._kind.step(self._copy, None)

    @property
    def state_bytes(self) -> int:
        """What it remembers by now; single numbers do not count."""
        tensors = (tensor for _, tensor in tree.tensors([dict(state) for state in self._copy.state.values()]))
        return sum(num_bytes(tensor) for tensor in tensors if tensor.numel() > 1)


def num_bytes(tensor: Tensor) -> int:
    """Size of a tensor's numbers."""
    return tensor.numel() * tensor.element_size()


def _ratio(optimizer: Optimizer) -> float:
    parameter = nn.Parameter(torch.zeros(_SIDE, _SIDE))
    parameter.grad = torch.ones_like(parameter)
    trial = TrialOptimizer(optimizer, [(0, parameter)])
    trial.step()
    return trial.state_bytes / num_bytes(parameter)
