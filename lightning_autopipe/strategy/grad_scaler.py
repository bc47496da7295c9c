"""The loss scale of ``16-mixed``, one for all stages: float16 overflows on one of them, all skip the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer


def scaler_of(plugin: Precision) -> GradScaler | None:
    """What scales losses, under a plugin of Lightning's that does."""
    return getattr(plugin, "scaler", None)


class SharedScaling:
    """Makes a plugin's scaler look for infinite gradients on all ranks together, between `install` and `remove`.

    Scales start alike and change by what was found, so they stay alike; a stage without gradients asks the others, too.
    The scaler stays the user's own object, whose state Lightning saves and loads.

    Args:
        plugin: Lightning's; nothing is done where it scales nothing.
        any_rank: For each decision whether it is True on any rank. Collective over all ranks.
    """

    def __init__(self, plugin: Precision, any_rank: Callable[[Sequence[bool]], list[bool]]) -> None:
        self._scaler = scaler_of(plugin)
        self._any_rank = any_rank

    def install(self) -> None:
        """Changes the scaler; `remove` changes it back."""
        if self._scaler is not None:
            self._scaler.__dict__["_unscale_grads_"] = partial(self._unscale, self._scaler._unscale_grads_)

    def remove(self) -> None:
        """Undoes `install`."""
        if self._scaler is not None:
            self._scaler.__dict__.pop("_unscale_grads_", None)

    def _unscale(
        self,
        unscale_own: Callable[..., dict[torch.device, Tensor]],
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        # Also called for fused optimizers, which unscale gradients inside their step.
        found = unscale_own(optimizer, inv_scale, found_inf, allow_fp16)
        is_found = self._any_rank([any(bool(one) for one in found.values())])[0]
        return {found_inf.device: torch.full_like(found_inf, float(is_found))}
