"""The user's step while it runs: what it says is recorded, and told to other ranks when it has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_autopipe.core.timeline import StepEnd
from lightning_autopipe.runtime.pipeline import Pipeline
from lightning_autopipe.runtime.stage_step import StepOutcome
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.metrics import SharedMetrics
from lightning_autopipe.strategy.step_attributes import StepAttributes
from lightning_autopipe.strategy.step_exchange import StepResult, exchange_step
from lightning_autopipe.strategy.step_log import LoggedCall, LogKey, StepRecorder
from lightning_autopipe.strategy.step_watch import StepWatch


class RunningStep:
    """Surrounds every step of a module.

    Args:
        module: The user's.
        pipeline: Runs it.
        communicator: This rank's groups.
        device: Where this rank computes.
    """

    def __init__(
        self, module: pl.LightningModule, pipeline: Pipeline, communicator: Communicator, device: torch.device
    ) -> None:
        self._module = module
        self._pipeline = pipeline
        self._communicator = communicator
        self._device = device
        self._is_in_step = False
        self._is_planning = False
        pipeline.store.while_silent = self._without_loggers
        self.recorder = StepRecorder(
            module, pipeline, stage_index=communicator.stage_index, is_silent=lambda: self.is_silent
        )
        self.attributes = StepAttributes(module, communicator)
        self.metrics = SharedMetrics(
            module, communicator, is_in_step=lambda: self._is_in_step, is_silent=lambda: self.is_silent
        )

    @property
    def is_in_step(self) -> bool:
        """Whether the user's step runs: what it calls is called by some stages only."""
        return self._is_in_step

    @property
    def is_silent(self) -> bool:
        """Whether the step runs for a plan or a trace: nothing that it says or exchanges counts."""
        return self._is_planning or self._pipeline.tracing

    @contextlib.contextmanager
    def recording(self, step_name: str) -> Iterator[None]:
        """A context in which the step runs."""
        fx_name = self._module._current_fx_name
        self._module._current_fx_name = step_name
        self._is_in_step = True
        try:
            with self.recorder.recording():
                yield
        finally:
            self._is_in_step = False
            self._module._current_fx_name = fx_name

    @contextlib.contextmanager
    def planning(self, step_name: str) -> Iterator[None]:
        """A context in which the step may be traced and its parts run, of which nothing counts."""
        self._is_planning = True
        try:
            with self.recording(step_name), self._without_loggers(), torch.inference_mode(False):
                yield
        finally:
            self._is_planning = False

    @contextlib.contextmanager
    def _without_loggers(self) -> Iterator[None]:
        """A context in which what user code tells the Trainer's loggers is not written."""
        trainer: Any = self._module.trainer
        loggers = trainer.loggers
        trainer.loggers = [DummyLogger() for _ in loggers]
        try:
            yield
        finally:
            trainer.loggers = loggers

    @contextlib.contextmanager
    def counting(self, *, num_batches: int = 1) -> Iterator[None]:
        """A context in which metrics that are logged by step see what each of its batches gives them."""
        with self.attributes.watching(), self.metrics.step(self.recorder.step_metrics, num_batches=num_batches):
            yield

    def select(self, position: int) -> None:
        """What comes from now on is of one of the batches that run as one pipeline."""
        self.recorder.select(position)
        self.metrics.select(position)

    def share_step_metrics(self) -> None:
        """Tells every rank which metrics are logged by step: one that has run the step for real may know of more."""
        paths = {id(submodule): path for path, submodule in self._module.named_modules()}
        known = [paths[metric] for metric in self.recorder.step_metrics if metric in paths]
        shared = self._communicator.broadcast_in_world(sorted(known))
        self.recorder.step_metrics.clear()
        self.recorder.step_metrics.update(id(self._module.get_submodule(path)) for path in shared)

    def exchange(self, outcome: StepOutcome, *, training: bool, position: int = 0) -> StepResult:
        """Aggregates a batch over micro-batches and replicas, and logs what it logged. Collective over all ranks.

        Args:
            outcome: What the pipeline gave on this rank.
            training: Whether a missing loss is impossible.
            position: Of the batch, where several have run as one pipeline.
        """
        result = exchange_step(outcome, self._take_calls(position), self._communicator, training=training)
        self.recorder.replay(result.calls, self._device)
        return result

    def exchange_watched(
        self, outcome: StepOutcome, watch: StepWatch, *, position: int, num_samples: int, has_ties: bool
    ) -> StepResult:
        """Like `exchange`, at the end of a training step that is watched.

        Args:
            outcome: Of the last batch.
            watch: Told of the end; its notes travel along.
            position: Of the batch.
            num_samples: Of all batches.
            has_ties: Whether gradients of shared parameters were summed.
        """
        calls = self._take_calls(position)
        watch.schedule_ended(num_samples=num_samples, has_ties=has_ties)
        with watch.recorder.timed(StepEnd.EXCHANGE):
            result = exchange_step(outcome, calls, self._communicator, training=True, notes=watch.notes)
        watch.take(result.notes)
        self._pipeline.observer = None  # an evaluation may be next
        self.recorder.replay(result.calls, self._device)
        return result

    def _take_calls(self, position: int) -> dict[LogKey, LoggedCall]:
        step_values = self.metrics.step_values(position)
        calls = self.recorder.take(position)
        for call in calls.values():
            if call.metric_attribute is not None:
                call.step_value = step_values.get(call.metric_attribute)
        return calls
