"""How much an optimizer remembers."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence

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


def _ratio(optimizer: Optimizer) -> float:
    parameter = nn.Parameter(torch.zeros(_SIDE, _SIDE))
    parameter.grad = torch.ones_like(parameter)
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**optimizer.param_groups[0], "params": [parameter]}]
    with torch.enable_grad():
        # Of the class: schedulers and Lightning put a counting `step` on the object, bound to the original.
        type(optimizer).step(trial, None)
    tensors = (tensor for _, tensor in tree.tensors(dict(trial.state[parameter])))
    return sum(_bytes(tensor) for tensor in tensors if tensor.numel() > 1) / _bytes(parameter)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
