"""Known mean losses: how many terms a mean was taken over, so that micro-batches can be weighted rightly."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_autopipe.capture.absent import is_absent

_CLASS_LOSSES = frozenset({F.cross_entropy, F.nll_loss})
_ELEMENT_LOSSES = frozenset(
    {
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.kl_div,
        F.soft_margin_loss,
        F.gaussian_nll_loss,
        F.poisson_nll_loss,
    }
)
MEAN_LOSSES: frozenset[Any] = _CLASS_LOSSES | _ELEMENT_LOSSES

# Functions of one scalar that keep "the mean over n terms" what it is, up to a constant factor.
KEEPS_COUNT: frozenset[Any] = frozenset(
    {
        torch.mul,
        torch.div,
        torch.neg,
        torch.clone,
        torch.detach,
        Tensor.mul,
        Tensor.__mul__,
        Tensor.__rmul__,
        Tensor.div,
        Tensor.__truediv__,
        Tensor.mul_,
        Tensor.__imul__,
        Tensor.div_,
        Tensor.__itruediv__,
        Tensor.neg,
        Tensor.__neg__,
        Tensor.to,
        Tensor.float,
        Tensor.double,
        Tensor.clone,
        Tensor.detach,
        Tensor.mean,
        Tensor.squeeze,
        Tensor.reshape,
        Tensor.view,
        torch.mean,
        torch.squeeze,
    }
)


def num_terms(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Give n of a loss that is a mean over n terms, as a 0-dim float64 tensor without a read of its value.

    For classes, n is the number of targets that are not ignored, or the sum of their class weights; for other losses
    the number of elements. None where `reduction` is not the mean over all terms.
    """
    if kwargs.get("reduction", "mean") != "mean" or kwargs.get("reduce") is not None:
        return None
    if kwargs.get("size_average") is not None:
        return None
    if function in _CLASS_LOSSES:
        return _num_targets(*args[:5], **kwargs) if len(args) < 6 else None
    input_ = args[0] if args else kwargs["input"]
    target = args[1] if len(args) > 1 else kwargs["target"]
    if len(args) > 2 and function not in (F.gaussian_nll_loss,):
        return None
    shape = torch.broadcast_shapes(input_.shape, target.shape)  # type: ignore[no-untyped-call]
    # A fill, not a copy from the host, which would wait for the GPU.
    return torch.full((), float(shape.numel()), dtype=torch.float64, device=input_.device)


def ignores_targets(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a loss leaves out some of these (real) targets, so that a mean over samples is another mean."""
    if function not in _CLASS_LOSSES:
        return False
    target = args[1] if len(args) > 1 else kwargs["target"]
    ignore_index = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
    return not is_absent(target) and not target.is_floating_point() and bool((target == ignore_index).any())


def _num_targets(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    **_: Any,
) -> Tensor | None:
    if size_average is not None:
        return None
    with torch.no_grad():
        if target.is_floating_point():  # class probabilities: a mean over samples, whatever the weights
            positions = target.numel() // target.shape[1 if target.dim() > 1 else 0]
            return torch.full((), float(positions), dtype=torch.float64, device=target.device)
        kept = target != ignore_index
        if weight is None:
            return kept.sum().double()
        return (weight.double()[target.where(kept, 0)] * kept).sum()
