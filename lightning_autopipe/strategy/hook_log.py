"""``self.log`` in hooks, between the steps of a pipeline.

Hooks run on every stage, but each sees its own part: gradients of its own parameters, what its own end of a step has
kept. So what hooks log is *recorded* and told to the other stages of the pipeline before anything reads it: where
several stages logged a name, the last stage's value counts; a name that one stage logged is logged by all of them.
Over replicas it is as under any data-parallel strategy: each has its own value, unless ``sync_dist=True``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from torchmetrics import Metric

from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.step_log import check_as_lightning_does

_active: list[HookLog] = []
"""What is installed. Modules hold functions that look here, so that they can still be copied and pickled."""

_NOT_HOOKS = frozenset({"training_step", "validation_step", "test_step", "predict_step", "backward", "optimizer_step"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One ``self.log`` of a hook."""

    hook: str
    name: str
    value: float
    dtype: torch.dtype
    dataloader_idx: int | None
    arguments: dict[str, Any]
    """Of the original ``log``, without name and value."""


class HookLog:
    """Takes the place of a module's ``log`` outside steps, between `install` and `remove`.

    Args:
        trainer: Of the run.
        communicator: This rank's groups.
    """

    def __init__(self, trainer: pl.Trainer, communicator: Communicator) -> None:
        self._trainer: Any = trainer
        self._module: pl.LightningModule = trainer.lightning_module
        self._communicator = communicator
        self._original: Callable[..., None] = self._module.log
        self._signature = inspect.signature(pl.LightningModule.log.__get__(self._module))  # the user's may take *args
        self._waiting: list[_Call] = []
        self._has_batch_hooks = False

    def install(self) -> None:
        """Begins to record. Collective over each pipeline."""
        if self._communicator.layout.num_stages == 1:
            return
        # Callbacks too: they log through the module. Some ranks may have others.
        has_hooks = _overrides_batch_hooks(self._module, self._trainer.callbacks)
        with self._communicator.guard():
            self._has_batch_hooks = any(self._communicator.gather_in_pipeline(has_hooks))
        _active.append(self)
        attributes = vars(self._module)
        attributes["log"] = partial(_log, self._module)
        attributes.setdefault("on_train_epoch_end", partial(_end_train_epoch, self._module))
        connector = self._trainer._logger_connector
        on_batch_end, on_epoch_end = connector.on_batch_end, connector.on_epoch_end

        def batch_end() -> None:
            self.flush_batch()
            on_batch_end()

        def epoch_end() -> None:
            self.flush()
            on_epoch_end()

        connector.__dict__["on_batch_end"] = batch_end
        connector.__dict__["on_epoch_end"] = epoch_end

    def remove(self) -> None:
        """Undoes `install`."""
        if self not in _active:
            return
        _active.remove(self)
        vars(self._module).pop("log", None)
        if getattr(vars(self._module).get("on_train_epoch_end"), "func", None) is _end_train_epoch:
            del vars(self._module)["on_train_epoch_end"]
        self._trainer._logger_connector.__dict__.pop("on_batch_end", None)
        self._trainer._logger_connector.__dict__.pop("on_epoch_end", None)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Records what a hook logs; a torchmetrics object is logged as ever, its value is that of all ranks."""
        try:
            arguments = dict(self._signature.bind(*args, **kwargs).arguments)
        except TypeError:
            self._original(*args, **kwargs)  # says it in its own name
            raise
        if isinstance(arguments["value"], Metric) or arguments.get("sync_dist_group") is not None:
            self._original(*args, **kwargs)
            return
        checked = check_as_lightning_does(self._module, self._original, arguments)
        if checked is None:
            return
        _, value = checked
        results = self._trainer._results
        if results.batch is None:
            arguments.setdefault("batch_size", 1)  # as Lightning takes it there; it is logged when there is a batch
        self._waiting.append(
            _Call(
                hook=str(self._module._current_fx_name),
                name=arguments["name"],
                value=float(value),
                dtype=value.dtype,
                dataloader_idx=results.dataloader_idx,
                arguments={name: given for name, given in arguments.items() if name not in ("name", "value")},
            )
        )

    def flush_batch(self) -> None:
        """Like `flush`; nothing is exchanged where no code of the user's runs between steps."""
        if self._has_batch_hooks:
            self.flush()

    def flush(self) -> None:
        """Logs on all stages what hooks have logged on any of them. Collective over each pipeline."""
        if self not in _active:
            return
        waiting, self._waiting = self._waiting, []
        with self._communicator.guard():
            by_stage: list[list[_Call]] = self._communicator.gather_in_pipeline(waiting)
        hook, results = self._module._current_fx_name, self._trainer._results
        for call in _merged(by_stage):
            self._module._current_fx_name = call.hook
            dataloader_idx, results.dataloader_idx = results.dataloader_idx, call.dataloader_idx
            value = torch.tensor(call.value, dtype=call.dtype, device=self._communicator.device)
            try:
                self._original(call.name, value, **call.arguments)
            finally:
                self._module._current_fx_name, results.dataloader_idx = hook, dataloader_idx


def _merged(by_stage: Sequence[Sequence[_Call]]) -> list[_Call]:
    """One call for each that some stage has made; the last stage's first."""
    merged: dict[tuple[str, str, int], _Call] = {}
    for calls in reversed(by_stage):
        counts: dict[tuple[str, str], int] = {}
        for call in calls:
            key = (call.hook, call.name)
            counts[key] = counts.get(key, 0) + 1
            merged.setdefault((*key, counts[key]), call)
    return list(merged.values())


def _log(module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
    if _active and _active[-1]._module is module:
        _active[-1].log(*args, **kwargs)
    else:
        type(module).log(module, *args, **kwargs)


def _end_train_epoch(module: pl.LightningModule) -> None:
    """The module's hook; what it logs is there before the callbacks that monitor."""
    type(module).on_train_epoch_end(module)
    if _active and _active[-1]._module is module:
        _active[-1].flush()


def _overrides_batch_hooks(module: pl.LightningModule, callbacks: Iterable[pl.Callback]) -> bool:
    """Whether code of the user's runs between steps, in a hook in which Lightning allows to log by step."""
    hooks = [
        hook
        for hook, options in _FxValidator.functions.items()
        if options and True in options["allowed_on_step"] and hook not in _NOT_HOOKS
    ]
    return any(_is_users(getattr(owner, hook, None)) for owner in (module, *callbacks) for hook in hooks)


def _is_users(hook: Any) -> bool:
    function = inspect.unwrap(hook.func if isinstance(hook, partial) else hook) if callable(hook) else None
    function = getattr(function, "__func__", function)
    if function is None:
        return False
    name = function.__module__ if isinstance(function, FunctionType) else type(function).__module__
    return not str(name).startswith(("lightning.", "pytorch_lightning."))
