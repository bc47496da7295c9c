"""The three places where Lightning has no hook for a strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lightning_autopipe.strategy.communicator import Communicator


class LightningPatches:
    """Attributes on objects of one run, between `install` and `remove`; no class or module of Lightning is changed.

    * One replica needs no distributed sampler: the data come in the order that they have on one device. (Lightning
      would shuffle them.)
    * Ranks that do not load must not call the user's ``on_before_batch_transfer`` with a stand-in.
    * When an epoch ends, values of torchmetrics objects are computed on all ranks at once; otherwise the progress bar
      would ask for them on rank 0 first, and wait there for ranks that are elsewhere. What steps have kept in the
      module is shared then, too.
    """

    def __init__(
        self, trainer: pl.Trainer, communicator: Communicator, *, share_attributes: Callable[[], None] | None = None
    ) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._communicator = communicator
        self._share_attributes = share_attributes
        self.used_distributed_sampler = trainer._accelerator_connector.use_distributed_sampler

    def install(self) -> None:
        """Sets the attributes; `remove` takes them back."""
        connector = self._trainer._logger_connector
        epoch_end_reached = connector.epoch_end_reached

        def epoch_end_reached_on_all_ranks() -> None:
            epoch_end_reached()
            self._compute_metrics()
            if self._share_attributes is not None:
                self._share_attributes()

        predict_loop: Any = self._trainer.predict_loop
        end_prediction = predict_loop._on_predict_epoch_end

        def end_prediction_on_all_ranks() -> Any:
            if self._share_attributes is not None:
                self._share_attributes()
            return end_prediction()

        connector.__dict__["epoch_end_reached"] = epoch_end_reached_on_all_ranks
        predict_loop.__dict__["_on_predict_epoch_end"] = end_prediction_on_all_ranks
        if self._communicator.layout.num_replicas == 1:
            self._trainer._accelerator_connector.use_distributed_sampler = False
        if not self._communicator.is_first_stage:
            self._module.__dict__["_on_before_batch_transfer"] = _leave_batch

    def remove(self) -> None:
        """Undoes `install`."""
        self._trainer._logger_connector.__dict__.pop("epoch_end_reached", None)
        self._trainer.predict_loop.__dict__.pop("_on_predict_epoch_end", None)
        self._trainer._accelerator_connector.use_distributed_sampler = self.used_distributed_sampler
        self._module.__dict__.pop("_on_before_batch_transfer", None)

    def _compute_metrics(self) -> None:
        results = self._trainer._results
        if results is None:
            return
        for _, result in results.valid_items():
            if not result.is_tensor and result.meta.on_epoch and result._computed is None:
                result.compute()


def _leave_batch(batch: Any, dataloader_idx: int = 0) -> Any:
    return batch
