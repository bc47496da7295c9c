"""Gradient clipping by the norm of all stages together."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.nn.utils import clip_grad, get_total_norm
from torch.optim import Optimizer
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from lightning_autopipe.strategy.communicator import Communicator

_GROUPING = "_group_tensors_by_device_and_dtype"


class PipelineClipping:
    """Makes ``clip_grad_norm_`` and ``get_total_norm`` of ``torch.nn.utils`` take the norm over all stages.

    Between `install` and `remove`; a ``get_total_norm`` that was imported by its name before stays local.

    Lightning, a user's ``configure_gradient_clipping`` and other hooks all end there; each of them runs on every rank,
    so the call is collective over a pipeline: stages without gradients join, too. Clipping by value is each stage's own
    business, which torch refuses where there are no gradients; on a stage there may be none.

    The norm is that of one device bit for bit: the norms of single gradients are put together in the order of the
    groups and of the module, as torch puts them together. One bit more or less in it is one in every gradient.

    Args:
        plugin: Lightning's, which clips.
        module: Whose gradients are meant.
        counts: Whether this stage counts a parameter: a tied one lies on several stages and is counted on one.
        is_in_step: Whether the user's step runs, where other stages do not call what the last one calls.
        communicator: This rank's groups.
    """

    def __init__(
        self,
        plugin: Precision,
        module: nn.Module,
        *,
        counts: Callable[[Tensor], bool],
        is_in_step: Callable[[], bool],
        communicator: Communicator,
    ) -> None:
        self._plugin = plugin
        self._module = module
        self._counts = counts
        self._is_in_step = is_in_step
        self._communicator = communicator
        self._groups: Mapping[int, int] = {}
        """The optimizer's group of each parameter, by identity, while Lightning clips an optimizer's gradients."""

    def install(self) -> None:
        """Changes torch's function and the plugin; `remove` changes them back."""
        if self._communicator.layout.num_stages > 1:
            clip_grad._get_total_norm = self._total_norm
            nn.utils.get_total_norm = self._total_norm
            clip_grad.__dict__[_GROUPING] = _grouped
            self._plugin.__dict__["clip_grad_by_norm"] = self._clip

    def remove(self) -> None:
        """Undoes `install`."""
        clip_grad._get_total_norm = get_total_norm
        nn.utils.get_total_norm = get_total_norm
        clip_grad.__dict__[_GROUPING] = _group_tensors_by_device_and_dtype
        self._plugin.__dict__.pop("clip_grad_by_norm", None)

    def _clip(self, optimizer: Optimizer, clip_val: float | int) -> Any:
        self._groups = {
            id(parameter): index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }
        try:
            # As Lightning's own, but for a list: torch warns of a generator that gives nothing.
            nn.utils.clip_grad_norm_(list(self._plugin.main_params(optimizer)), float(clip_val))
        finally:
            self._groups = {}

    def _total_norm(
        self,
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if self._is_in_step():
            return get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
        own = self._norms_by_place(gradients, float(norm_type), foreach)
        found = sorted(norm for of_stage in self._communicator.gather_in_pipeline(own) for norm in of_stage)
        norms = [torch.tensor(value, dtype=getattr(torch, dtype)) for _, dtype, value in found]
        total_norm: Tensor = (
            torch.linalg.vector_norm(torch.stack(norms), float(norm_type)) if norms else torch.tensor(0.0)
        )
        if error_if_nonfinite and not math.isfinite(float(total_norm)):
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients of all stages is {float(total_norm)}, so they "
                "cannot be clipped (error_if_nonfinite=True)"
            )
        return total_norm.to(gradients[0].device) if gradients else total_norm

    def _norms_by_place(
        self, gradients: Sequence[Tensor], norm_type: float, foreach: bool | None
    ) -> list[tuple[tuple[int, int], str, float]]:
        """Of each gradient that this stage counts its place among those of one device, its dtype and its norm."""
        counted: list[Tensor] = []
        places: list[tuple[int, int]] = []
        known = {
            id(parameter.grad): (parameter, position)
            for position, parameter in enumerate(self._module.parameters())
            if parameter.grad is not None
        }
        for index, gradient in enumerate(gradients):
            if id(gradient) in known:
                parameter, position = known[id(gradient)]
                is_counted, place = self._counts(parameter), (self._groups.get(id(parameter), 0), position)
            else:  # nobody's gradient: every stage has it
                is_counted, place = self._communicator.is_last_stage, (sys.maxsize, index)
            if is_counted:
                counted.append(gradient)
                places.append(place)
        if not counted:
            return []
        norms = (
            [torch.linalg.vector_norm(gradient, norm_type) for gradient in counted]
            if foreach is False
            else torch._foreach_norm(counted, norm_type)
        )
        values = torch.stack([norm.to(torch.float64) for norm in norms]).tolist()
        names = [str(norm.dtype).removeprefix("torch.") for norm in norms]
        return list(zip(places, names, values, strict=True))


def _grouped(lists: list[list[Tensor | None]], with_indices: bool = False) -> dict[Any, Any]:
    return _group_tensors_by_device_and_dtype(lists, with_indices) if lists[0] else {}
