"""The loss of one micro-batch and its weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.capture.replay import terms_of
from lightning_autopipe.core.errors import BatchError


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedLoss:
    """`loss` as the step gave it, its `weight` (0-dim, float64), and what to back-propagate: their scaled product."""

    loss: Tensor | None
    weight: Tensor
    to_backpropagate: Tensor | None
    is_by_samples: bool = True
    """Whether the weight is the number of samples, for want of anything else."""


def weighted_loss(
    result: Any,
    num_samples: int,
    *,
    training: bool,
    connect_to: Sequence[Tensor],
    step_name: str,
    scale: float | None = 1.0,
) -> WeightedLoss:
    """Find the loss in what a step returned, and its weight.

    The weight is the step's own `loss_weight`, or the number of terms of a known mean loss, or the number of samples.
    Where it is zero the loss, which may be NaN, is replaced by a zero connected to `connect_to`, so that backward runs
    and gives zeros. What is back-propagated is the loss times its weight times `scale`, or the loss itself where
    `scale` is None.

    Raises:
        BatchError: training without a loss, a loss that is no scalar, or a weight that is no number >= 0.
    """
    loss, given = _find(result)
    if loss is None or loss.dim() != 0:
        if training:
            what = f"no loss ({type(result).__name__})" if loss is None else f"a loss of shape {tuple(loss.shape)}"
            skip = " None, which skips a batch under Lightning, cannot: the other stages have begun with it."
            raise BatchError(
                f"{step_name} returned {what}; return a scalar tensor, or a mapping with a scalar 'loss'."
                f"{skip if result is None else ''}"
            )
        return WeightedLoss(loss=None, weight=_number(float(num_samples), loss), to_backpropagate=None)
    weight = _weight(loss, given, num_samples, step_name)
    by = given is None and not isinstance(terms_of(loss), Tensor)
    if not training:
        return WeightedLoss(loss=loss, weight=weight, to_backpropagate=None, is_by_samples=by)
    if _is_known_zero(weight, given):
        zero = _connected_zero(connect_to, loss)
        return WeightedLoss(loss=zero, weight=weight, to_backpropagate=zero, is_by_samples=by)
    if scale is None:
        return WeightedLoss(loss=loss, weight=weight, to_backpropagate=loss, is_by_samples=by)
    scaled = loss * (weight * scale).to(loss)
    return WeightedLoss(loss=loss, weight=weight, to_backpropagate=scaled, is_by_samples=by)


def _find(result: Any) -> tuple[Tensor | None, Any]:
    if isinstance(result, Tensor):
        return result, None
    if isinstance(result, Mapping):
        loss = result.get("loss")
        return (loss if isinstance(loss, Tensor) else None), result.get("loss_weight")
    return None, None


def _weight(loss: Tensor, given: Any, num_samples: int, step_name: str) -> Tensor:
    if given is None:
        terms = terms_of(loss)
        return terms if isinstance(terms, Tensor) else _number(float(num_samples), loss)
    if isinstance(given, Tensor):
        if given.numel() != 1:
            raise BatchError(f"{step_name} returned a loss_weight of shape {tuple(given.shape)}; return one number.")
        weight = given.detach().reshape(()).double()
        value = None if weight.is_cuda else float(weight)
    else:
        value = float(given)
        weight = _number(value, loss)
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise BatchError(f"{step_name} returned loss_weight={value}; it must be a finite number of at least 0.")
    return weight


def _is_known_zero(weight: Tensor, given: Any) -> bool:
    """Read the weight where that costs no wait for a GPU, or where the user gave it and only a read can save a NaN.

    The known losses need no read: their backward gives zeros when all targets are ignored.
    """
    if weight.is_cuda and not isinstance(given, Tensor):
        return False
    return float(weight) == 0.0


def _connected_zero(tensors: Sequence[Tensor], loss: Tensor) -> Tensor:
    zero = torch.zeros_like(loss, requires_grad=False)
    for tensor in tensors:
        if tensor.requires_grad and not is_absent(tensor) and tensor.numel() > 0:
            zero = zero + (tensor.reshape(-1)[:1] * 0).sum().to(loss.dtype)
    return zero


def _number(value: float, like: Tensor | None) -> Tensor:
    return torch.full((), value, dtype=torch.float64, device=None if like is None else like.device)
