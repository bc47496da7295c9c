"""Signals that any rank gets (the end, a requeue by SLURM) are followed by all of them between the same batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_autopipe.strategy.shared_decisions import SharedDecisions


class SharedTermination:
    """Takes the place of Lightning's handlers of SIGTERM and of SLURM's requeue signal, from `install` to `remove`.

    Lightning's own broadcast, or save a checkpoint, inside the handler, in the middle of whatever the process is doing:
    a rank that is in another collective then never returns. Here a handler sets a flag, and all ranks follow it before
    a batch is read: a loader that knows how far it has come is then saved between two batches.

    Args:
        trainer: Whose signals.
        decisions: Asks all ranks.
        before_batch: Is to call `follow`.
    """

    def __init__(self, trainer: pl.Trainer, decisions: SharedDecisions, before_batch: Callable[[], None]) -> None:
        self._trainer = trainer
        self._decisions = decisions
        self._before_batch = before_batch
        self._is_asked_to_end = False
        self._is_asked_to_requeue = False
        self._has_requeued = False
        self.is_requeueing = False
        """Whether a checkpoint that is saved now is the last one: the next thing is the end of this process."""
        decisions.add("requeue", lambda: self._is_asked_to_requeue)
        decisions.add("end", lambda: self._is_asked_to_end)

    def install(self) -> None:
        """Must come before the Trainer registers its handlers, which is after a strategy's setup."""
        connector = self._trainer._signal_connector
        connector.__dict__["_sigterm_notifier_fn"] = self._on_sigterm
        connector.__dict__["_slurm_sigusr_handler_fn"] = self._on_requeue_signal
        self._trainer.fit_loop.epoch_loop.__dict__["_broadcast_sigterm_tensor"] = self._before_batch

    def remove(self) -> None:
        """Undoes `install`."""
        connector = self._trainer._signal_connector
        connector.__dict__.pop("_sigterm_notifier_fn", None)
        connector.__dict__.pop("_slurm_sigusr_handler_fn", None)
        self._trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)

    def follow(self) -> None:
        """Saves and requeues, or ends the run, if any rank was asked to. Collective over all ranks.

        Raises:
            SIGTERMException: some rank was asked to end.
        """
        # One process asks nobody, and is up to date.
        answers = self._decisions.latest() if self._trainer.world_size > 1 else self._decisions.ask()
        requeue, end = answers["requeue"], answers["end"]
        connector = self._trainer._signal_connector
        if requeue and not self._has_requeued:
            self._has_requeued = self.is_requeueing = True  # each rank gets the signal, some of them later
            environment: Any = self._trainer._accelerator_connector.cluster_environment
            type(connector)._slurm_sigusr_handler_fn(connector, environment.requeue_signal, None)  # type: ignore[arg-type]
            self.is_requeueing = False
        if end:
            connector.received_sigterm = True
            raise SIGTERMException

    def _on_sigterm(self, signum: int, frame: Any) -> None:
        launcher = self._trainer.strategy.launcher
        if not self._is_asked_to_end and launcher is not None:
            launcher.kill(signum)
        self._is_asked_to_end = True

    def _on_requeue_signal(self, signum: int, frame: Any) -> None:
        self._is_asked_to_requeue = True
