"""What Lightning lets each rank decide alone in a training loop, decided by all ranks together."""

from __future__ import annotations

import math
import time
from typing import Any

import lightning.pytorch as pl

from lightning_autopipe.strategy.shared_decisions import SharedDecisions


class SharedStopping:
    """``trainer.should_stop`` and a ``val_check_interval`` in time, from `install` to `remove`.

    Any code may set ``should_stop`` on one rank, and clocks differ: a rank that ends or validates while the others
    train waits for ever. So all ranks ask each other behind each batch, each validation and each epoch.

    Args:
        trainer: Whose loops.
        decisions: Asks all ranks.
    """

    def __init__(self, trainer: pl.Trainer, decisions: SharedDecisions) -> None:
        self._trainer = trainer
        self._decisions = decisions
        self._has_validated = False
        decisions.add("stop", lambda: self._trainer.should_stop)
        decisions.add("validate", self._is_due)

    def install(self) -> None:
        """Changes methods of the loops of this run; `remove` changes them back."""
        fit_loop: Any = self._trainer.fit_loop
        epoch_loop = fit_loop.epoch_loop
        should_validate = epoch_loop._should_check_val_fx
        end_batch, end_epoch = epoch_loop.on_advance_end, fit_loop.on_advance_end

        def should_check_val_fx(data_fetcher: Any) -> bool:
            trainer: Any = self._trainer
            is_due = self._share()["validate"]
            if self._interval_s is None:
                self._has_validated = bool(should_validate(data_fetcher))
                return self._has_validated
            # Lightning compares with this and the clock of its own; to be due is to have never validated.
            last_s, trainer._last_val_time = trainer._last_val_time, -math.inf if is_due else math.inf
            self._has_validated = bool(should_validate(data_fetcher))
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

    @property
    def _interval_s(self) -> float | None:
        return getattr(self._trainer, "_val_check_time_interval", None)

    def _is_due(self) -> bool:
        trainer: Any = self._trainer
        return self._interval_s is not None and time.monotonic() - trainer._last_val_time >= self._interval_s

    def _share(self) -> dict[str, bool]:
        answers = self._decisions.ask()
        self._trainer.should_stop = answers["stop"]
        return answers
