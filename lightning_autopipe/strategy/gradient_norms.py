"""Lightning's ``grad_norm`` of all stages."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import torch
from lightning.pytorch.utilities import grads
from torch import Tensor, nn

from lightning_autopipe.strategy.communicator import Communicator

_CODE = grads.grad_norm.__code__
_own_norms: Callable[..., dict[str, Tensor]] = FunctionType(_CODE, grads.__dict__, argdefs=grads.grad_norm.__defaults__)
_installed: list[SharedGradientNorms] = []


class SharedGradientNorms:
    """Makes ``grad_norm`` of ``lightning.pytorch.utilities`` give the norms of all parameters on every rank.

    Between `install` and `remove`, wherever users have imported it to: it is the function itself that is changed. The
    call is collective over a pipeline, as hooks are called on every rank.

    Args:
        is_in_step: Whether the user's step runs, where other stages do not call what the last one calls.
        communicator: This rank's groups.
    """

    def __init__(self, *, is_in_step: Callable[[], bool], communicator: Communicator) -> None:
        self._is_in_step = is_in_step
        self._communicator = communicator

    def install(self) -> None:
        """Changes Lightning's function; `remove` changes it back."""
        if self._communicator.layout.num_stages > 1:
            _installed[:] = [self]
            grads.grad_norm.__code__ = _shared_norms.__code__

    def remove(self) -> None:
        """Undoes `install`."""
        grads.grad_norm.__code__ = _CODE
        _installed.clear()

    def norms(self, module: nn.Module, norm_type: float | str, group_separator: str) -> dict[str, Tensor]:
        """By name as Lightning gives it the norm of each gradient, and that of all together."""
        own = _own_norms(module, norm_type, group_separator)
        if self._is_in_step():
            return own
        total = f"grad_{float(norm_type)}_norm_total"
        own.pop(total, None)
        found: dict[str, Tensor] = {}
        for of_stage in self._communicator.gather_in_pipeline(own):
            found.update(of_stage)  # a tied parameter's gradient is the same on all its holders
        names = (f"grad_{float(norm_type)}_norm{group_separator}{name}" for name, _ in module.named_parameters())
        norms = {name: found[name] for name in names if name in found}
        if norms:
            norms[total] = torch.tensor(list(norms.values())).norm(float(norm_type))
        return norms


def _shared_norms(module, norm_type, group_separator="/"):  # type: ignore[no-untyped-def]
    # Its code runs as that of Lightning's function, among the names of Lightning's file.
    from lightning_autopipe.strategy.gradient_norms import _installed

    return _installed[0].norms(module, norm_type, group_separator)
