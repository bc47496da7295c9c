"""Lightning's `ModelPruning`, on ranks that keep a part of the module.

It compares the values of all parameters with one another, and gives what it prunes other names in the middle of a fit.
So its own code sees the whole module on every rank, as on one device; the next batch leaves each rank its part again.
The masks stay whole everywhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod

from lightning_autopipe.capture.absent import absent_like, computing_shapes, is_absent

_ORIGINAL = "_orig"
"""What `torch.nn.utils.prune` adds to the name of a parameter that it puts under a mask."""


class Parts(Protocol):
    """A module of which each rank has a part."""

    def owns(self, name: str) -> bool:
        """Whether this rank's stage trains a parameter, by its first name."""

    def of_claimant(self, value: Tensor, claim: int) -> Tensor | None:
        """The value that the first stage has with the largest claim, in host memory; None: all are 0. Collective."""


def pruning_callbacks(callbacks: Iterable[pl.Callback]) -> list[Any]:
    """Those that prune."""
    return [callback for callback in callbacks if isinstance(callback, ModelPruning)]


def name_under_mask(name: str) -> str:
    """What a parameter is called while it is pruned."""
    return name + _ORIGINAL


def name_without_mask(name: str) -> str:
    """What a parameter is called when it is not pruned."""
    return name.removesuffix(_ORIGINAL)


class PruningOfWhole:
    """Lets `ModelPruning` prune the whole module.

    Args:
        callbacks: The Trainer's.
        module: The user's.
        parts: What of it is where.
        whole: A context in which it is whole on every rank and may give its parameters other names.
    """

    def __init__(
        self,
        callbacks: Iterable[pl.Callback],
        module: nn.Module,
        *,
        parts: Parts,
        whole: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._callbacks = pruning_callbacks(callbacks)
        self._module = module
        self._parts = parts
        self._whole = whole
        self._left: dict[tuple[nn.Module, str], weakref.ref[Tensor]] = {}
        """The masked parameters that no forward had put there yet when they were last noted."""

    def install(self) -> None:
        """Changes methods of the callbacks; `remove` changes them back."""
        self._note_masked()
        for callback in self._callbacks:
            vars(callback).update(self._changes_of(callback))

    def remove(self) -> None:
        """Undoes `install`."""
        for callback in self._callbacks:
            for name in self._changes_of(callback):
                vars(callback).pop(name, None)
        for module, name in _pruned(self._module) if self._callbacks else ():
            parameter, mask = module.get_parameter(name_under_mask(name)), module.get_buffer(f"{name}_mask")
            if is_absent(getattr(module, name)) and not is_absent(parameter):  # gathered on this rank
                setattr(module, name, mask.to(dtype=parameter.dtype) * parameter)

    def _changes_of(self, callback: Any) -> dict[str, Callable[..., None]]:
        return {
            "apply_pruning": partial(self._prune, callback),
            "apply_lottery_ticket_hypothesis": partial(self._reset, callback),
            "make_pruning_permanent": partial(self._make_permanent, callback),
            "on_save_checkpoint": partial(_save, callback),
        }

    def _prune(self, callback: Any, amount: float) -> None:
        self._share_masked()
        with self._whole():
            type(callback).apply_pruning(callback, amount)
        for module, name in _pruned(self._module):
            if not self._parts.owns(self._name_of(module, name)):
                masked = getattr(module, name)
                setattr(module, name, absent_like(masked.detach(), "another stage of the pipeline", masked.device))
        self._note_masked()

    def _reset(self, callback: Any) -> None:
        # Lightning's reset may let parameters share memory with the copies that they are reset to, which are trained
        # from then on: the copy of the rank that trains a parameter counts.
        for entry in callback._original_layers.values():
            for index, name in entry["names"]:
                copied = getattr(entry["data"], name)
                is_trained = self._parts.owns(self._name_of(*callback._parameters_to_prune[index]))
                shared = self._parts.of_claimant(copied.detach(), int(is_trained))
                if shared is not None and not is_trained:
                    copied.data = shared.to(copied.device)
        with self._whole():
            type(callback).apply_lottery_ticket_hypothesis(callback)

    def _make_permanent(self, callback: Any, module: nn.Module) -> None:
        if next(_pruned(module), None) is None:
            return
        with self._whole():
            type(callback).make_pruning_permanent(callback, module)

    def _note_masked(self) -> None:
        if self._callbacks:
            self._left = {(module, name): weakref.ref(getattr(module, name)) for module, name in _pruned(self._module)}

    def _share_masked(self) -> None:
        """Gives every rank the masked parameters as the last forward has left them: they are what is pruned next.

        Which stage that is does not follow from who has the parameter, where it is tied: it has put a new tensor there.
        Where none has since the last pruning, the owner has what that has left.
        """
        for (module, name), left in self._left.items():
            masked = getattr(module, name)
            claim = 0
            if not is_absent(masked):
                claim = 2 if masked is not left() else int(self._parts.owns(self._name_of(module, name)))
            shared = self._parts.of_claimant(masked.detach(), claim)
            if shared is not None:
                setattr(module, name, shared)

    def _name_of(self, module: nn.Module, name: str) -> str:
        parameter = module._parameters.get(name_under_mask(name), module._parameters.get(name))
        return next(name for name, other in self._module.named_parameters() if other is parameter)


def _save(callback: Any, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
    # Lightning asks the module at hand for its state, which is a part here. What is absent stays so under its mask.
    state = dict(checkpoint["state_dict"])
    vars(module)["state_dict"] = lambda *args, **kwargs: state
    try:
        with computing_shapes():
            type(callback).on_save_checkpoint(callback, trainer, module, checkpoint)
    finally:
        del vars(module)["state_dict"]


def _pruned(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for submodule in module.modules():
        for hook in submodule._forward_pre_hooks.values():
            if isinstance(hook, BasePruningMethod):
                yield submodule, hook._tensor_name
