"""What Lightning lets each rank decide alone in a training loop, decided by all ranks together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl


class SharedStopping:
    """``trainer.should_stop`` and a ``val_check_interval`` in time, from `install` to `remove`.

    Any code may set ``should_stop`` on one rank, and clocks differ: a rank that ends or validates while the others
    train waits for ever. So all ranks ask each other behind each batch, each validation and each epoch.

    Args:
        trainer: Whose loops.
        on_any_rank: For each of some decisions whether it is True on some rank. Collective over all ranks.
    """

    def __init__(self, trainer: pl.Trainer, on_any_rank: Callable[[Sequence[bool]], Sequence[bool]]) -> None:
        self._trainer = trainer
        self._on_any_rank = on_any_rank
        self._has_validated = False

    def install(self) -> None:
        """Changes methods of the loops of this run; `remove` changes them back."""
        fit_loop: Any = self._trainer.fit_loop
        epoch_loop = fit_loop.epoch_loop
        should_validate = epoch_loop._should_check_val_fx
        end_batch, end_epoch = epoch_loop.on_advance_end, fit_loop.on_advance_end

        def should_check_val_fx(data_fetcher: Any) -> bool:
            trainer: Any = self._trainer
            interval_s = getattr(trainer, "_val_check_time_interval", None)
            is_due = interval_s is not None and time.monotonic() - trainer._last_val_time >= interval_s
            trainer.should_stop, is_due = self._on_any_rank((trainer.should_stop, is_due))
            if interval_s is not None:
                # Lightning compares with this and the clock of its own; to be due is to have never validated.
                last_s, trainer._last_val_time = trainer._last_val_time, -math.inf if is_due else math.inf
            self._has_validated = bool(should_validate(data_fetcher))
            if interval_s is not None:
                trainer._last_val_time = last_s
            return self._has_validated

        def on_batch_end(data_fetcher: Any) -> None:
            self._has_validated = False
            end_batch(data_fetcher)
            if self._has_validated:
                self._share()

        def on_epoch_end() -> None:
            end_epoch()
            self._share()

        epoch_loop.__dict__["_should_check_val_fx"] = should_check_val_fx
        epoch_loop.__dict__["on_advance_end"] = on_batch_end
        fit_loop.__dict__["on_advance_end"] = on_epoch_end

    def remove(self) -> None:
        """Undoes `install`."""
        fit_loop: Any = self._trainer.fit_loop
        fit_loop.epoch_loop.__dict__.pop("_should_check_val_fx", None)
        fit_loop.epoch_loop.__dict__.pop("on_advance_end", None)
        fit_loop.__dict__.pop("on_advance_end", None)

    def _share(self) -> None:
        (self._trainer.should_stop,) = self._on_any_rank((self._trainer.should_stop,))
