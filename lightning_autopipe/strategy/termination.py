"""SIGTERM on any rank ends all of them after the same batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException


class SharedTermination:
    """Takes the place of Lightning's SIGTERM handler, between `install` and `remove`.

    Lightning's own broadcasts inside the handler, in the middle of whatever the process is doing: a rank that is in
    another collective then never returns. Here the handler sets a flag, and all ranks decide before each batch.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._is_asked = False

    def install(self) -> None:
        """Must come before the Trainer registers its handlers, which is after a strategy's setup."""
        self._trainer._signal_connector.__dict__["_sigterm_notifier_fn"] = self._on_signal
        self._trainer.fit_loop.epoch_loop.__dict__["_broadcast_sigterm_tensor"] = lambda: None

    def remove(self) -> None:
        """Undoes `install`."""
        self._trainer._signal_connector.__dict__.pop("_sigterm_notifier_fn", None)
        self._trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)

    def raise_if_asked(self, on_any_rank: Callable[[bool], bool]) -> None:
        """Ends the run if any rank was asked to. Collective over all ranks.

        Args:
            on_any_rank: Whether a decision is True on some rank.

        Raises:
            SIGTERMException: some rank was.
        """
        if on_any_rank(self._is_asked):
            self._trainer._signal_connector.received_sigterm = True
            raise SIGTERMException

    def _on_signal(self, signum: int, frame: Any) -> None:
        launcher = self._trainer.strategy.launcher
        if not self._is_asked and launcher is not None:
            launcher.kill(signum)
        self._is_asked = True
