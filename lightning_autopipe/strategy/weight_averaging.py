"""Lightning's callbacks that average weights, on ranks that keep a part of the module.

`WeightAveraging` (so `EMAWeightAveraging`) and `StochasticWeightAveraging` copy the whole module before a fit, and then
go through the parameters of copy and module side by side. Here the copy is placed as the module is (`PlacedModule`),
and the callback's own code is given what is here of both. In checkpoints the average is whole, as on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.strategy.placement import move_module
from lightning_autopipe.strategy.state_gathering import whole_state_dict

_WeightAveraging: Any = getattr(pl.callbacks, "WeightAveraging", ())  # since Lightning 2.6

GatherState = Callable[[nn.Module], Mapping[str, Tensor]]
"""What the other stages own of a copy, by name, on global rank 0. Collective over its pipeline."""


def averaging_callbacks(callbacks: Iterable[pl.Callback]) -> list[Any]:
    """Those that average weights."""
    return [callback for callback in callbacks if isinstance(callback, (_WeightAveraging, StochasticWeightAveraging))]


def average_parts(
    callbacks: Iterable[pl.Callback], gather: GatherState, *, gathers_module: bool = False
) -> list[nn.Module]:
    """Lets callbacks that average weights work on parts; gives their copies, to be placed as the module is.

    The changes are on the callbacks and their copies alone, and do no harm where a module is whole.

    Args:
        callbacks: The Trainer's, after their ``setup``.
        gather: Brings a copy's state together when a checkpoint is written.
        gathers_module: Whether checkpoints are made of parts, so that a second state of the module is to be gathered.
    """
    copies: list[nn.Module] = []
    for callback in averaging_callbacks(callbacks):
        average = callback._average_model
        if average is None:
            continue
        if isinstance(callback, _WeightAveraging):
            _change_weight_averaging(callback, average, gather, gathers_module=gathers_module)
            copies.append(average.module)
        else:
            _change_stochastic_weight_averaging(callback, average, gather)
            copies.append(average)
    return copies


class AveragesOfParts:
    """Lets `WeightAveraging` build and copy a module of `configure_model` whose large parameters have no values yet.

    It calls that hook itself, in its ``setup``, where Lightning's own context for it is not entered.

    Args:
        callbacks: The Trainer's.
        building: A context for what makes the module, with a list to which the copy is added.
        recording: A context for what reads or writes parameters before the first batch.
    """

    def __init__(
        self,
        callbacks: Iterable[pl.Callback],
        building: Callable[[], AbstractContextManager[list[nn.Module]]],
        recording: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._callbacks = [
            callback for callback in averaging_callbacks(callbacks) if isinstance(callback, _WeightAveraging)
        ]
        self._building = building
        self._recording = recording

    def install(self) -> None:
        """Changes methods of the callbacks; `remove` changes them back."""
        for callback in self._callbacks:
            vars(callback)["setup"] = partial(self._set_up, callback)
            vars(callback)["on_load_checkpoint"] = partial(self._load, callback)

    def remove(self) -> None:
        """Undoes `install`."""
        for callback in self._callbacks:
            vars(callback).pop("setup", None)
            vars(callback).pop("on_load_checkpoint", None)

    def _set_up(self, callback: Any, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        set_up = partial(type(callback).setup, callback, trainer, module, stage)
        if not is_overridden("configure_model", module):
            set_up()
            return
        with self._building() as built:
            set_up()
            if callback._average_model is not None:
                built.append(callback._average_model)

    def _load(self, callback: Any, *args: Any) -> None:
        with self._recording():
            type(callback).on_load_checkpoint(callback, *args)


class _Part:
    """What this rank has of a module, for code that goes through its tensors."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        # Not by `parameters`: of a copy that is what this gives.
        named = self._module.named_parameters(recurse=recurse)
        return (parameter for _, parameter in named if not is_absent(parameter))

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        return self._module.buffers(recurse)


def _change_weight_averaging(callback: Any, average: Any, gather: GatherState, *, gathers_module: bool) -> None:
    copy = average.module

    def update_parameters(model: nn.Module) -> None:
        type(average).update_parameters(average, _Part(model))

    def on_save_checkpoint(trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        type(callback).on_save_checkpoint(callback, trainer, module, checkpoint)
        checkpoint["state_dict"] = whole_state_dict(copy, gather(copy))
        if gathers_module:
            checkpoint["current_model_state"] = whole_state_dict(module, gather(module))

    vars(copy)["parameters"] = vars(average)["parameters"] = _Part(copy).parameters
    vars(average)["update_parameters"] = update_parameters
    vars(callback)["on_save_checkpoint"] = on_save_checkpoint
    for name in ("_swap_models", "_copy_average_to_current"):
        vars(callback)[name] = partial(_on_part, getattr(type(callback), name), callback)


def _change_stochastic_weight_averaging(callback: Any, average: Any, gather: GatherState) -> None:
    def to(device: torch.device | str) -> nn.Module:
        move_module(average, torch.device(device))
        return average  # type: ignore[no-any-return]

    def state_dict() -> dict[str, Any]:
        return {
            **type(callback).state_dict(callback),
            "average_model_state": whole_state_dict(average, gather(average)),
        }

    vars(average)["to"] = to
    vars(callback)["state_dict"] = state_dict
    for name in ("update_parameters", "transfer_weights"):
        vars(callback)[name] = partial(_on_parts, getattr(type(callback), name))


def _on_part(method: Callable[..., None], callback: Any, module: nn.Module) -> None:
    method(callback, _Part(module))


def _on_parts(function: Callable[..., None], one: nn.Module, other: nn.Module, *args: Any) -> None:
    function(_Part(one), _Part(other), *args)
