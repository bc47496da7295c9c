"""Gradient clipping by the norm of all stages together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_autopipe.strategy.communicator import Communicator


def clip_grad_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    counts: Callable[[Tensor], bool],
    communicator: Communicator,
) -> float:
    """Scales the gradients so that their 2-norm over all stages is at most ``max_norm``; gives the norm before.

    Equals ``torch.nn.utils.clip_grad_norm_`` on the whole module. Collective over a pipeline: stages without
    gradients join, too.

    Args:
        parameters: This stage's.
        max_norm: The bound.
        counts: Whether this stage counts a parameter: a tied one lies on several stages and is counted on one.
        communicator: This rank's groups.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    own_norm = torch.nn.utils.get_total_norm(
        [parameter.grad for parameter in with_gradient if counts(parameter) and parameter.grad is not None]
    )
    total_norm = math.sqrt(communicator.sum_in_pipeline(float(own_norm) ** 2))
    torch.nn.utils.clip_grads_with_norm_(with_gradient, max_norm, torch.tensor(total_norm, dtype=torch.float64))
    return total_norm


class PipelineClipping:
    """Makes a precision plugin's ``clip_grad_by_norm`` global, between `install` and `remove`.

    Lightning and a user's ``configure_gradient_clipping`` both end there. Clipping by value needs nothing.
    """

    def __init__(self, plugin: Precision, *, counts: Callable[[Tensor], bool], communicator: Communicator) -> None:
        self._plugin = plugin
        self._counts = counts
        self._communicator = communicator

    def install(self) -> None:
        """Changes this plugin object; `remove` changes it back."""
        self._plugin.__dict__["clip_grad_by_norm"] = self._clip

    def remove(self) -> None:
        """Undoes `install`."""
        self._plugin.__dict__.pop("clip_grad_by_norm", None)

    def _clip(self, optimizer: Optimizer, clip_val: float | int) -> Any:
        parameters = self._plugin.main_params(optimizer)
        clip_grad_norm(parameters, float(clip_val), counts=self._counts, communicator=self._communicator)
