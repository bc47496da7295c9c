"""One run of a pipeline's schedule: for one batch, or for a window of several."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.preserve import preserved_random_state
from lightning_autopipe.runtime.stage import StageForward
from lightning_autopipe.runtime.stage_step import StageStep, StepOutcome, WholeBatchLastStage
from lightning_autopipe.runtime.units import unit_sizes, units_of
from lightning_autopipe.runtime.window import BatchEnds, StepCall, WindowStage, units_by_batch

if TYPE_CHECKING:
    from lightning_autopipe.runtime.pipeline import Pipeline


class WindowRun:
    """The batches of a window, split into the units of their schedule, and then run.

    Args:
        pipeline: Whose stages run.
        step_name: The method of the module.
        calls: What it is called with for each batch.
        training: Whether losses are back-propagated.

    Raises:
        BatchError: it cannot be told how a batch is split.
        PlanError: the schedule slices micro-batches of a module with batch normalization in training.
    """

    def __init__(self, pipeline: Pipeline, step_name: str, calls: Sequence[StepCall], *, training: bool) -> None:
        assert len(calls) == 1 or pipeline.loss_over != "batch", "a loss over the batch keeps all activations"
        self._pipeline = pipeline
        self._step_name = step_name
        self._calls = calls
        self._training = training
        self._batches = [(call.args, call.kwargs) for call in calls]
        splitter = pipeline.splitter
        splits = [splitter.split_of(step_name, *batch) for batch in self._batches]
        sizes = [splitter.sizes(split, batch) for split, batch in zip(splits, self._batches, strict=True)]
        self._num_microbatches = [len(of_batch) for of_batch in sizes]
        num_microbatches = sum(self._num_microbatches)
        self._is_over_batch = pipeline.loss_over == "batch" and num_microbatches > 1
        if training:
            self._schedule = pipeline.schedule.for_training(
                sizes, pipeline.num_stages, is_over_batch=self._is_over_batch, min_samples=splitter.min_samples
            )
        else:
            self._schedule = pipeline.schedule.forward_only(pipeline.num_stages, num_microbatches)
        self._units = units_by_batch(units_of(self._schedule), self._num_microbatches)
        self._outcomes: list[StepOutcome] = []
        self._parts: list[list[Any]] = []
        for call, batch, split, units, of_batch in zip(calls, self._batches, splits, self._units, sizes, strict=True):
            own_sizes = unit_sizes(units, of_batch)
            outcome = StepOutcome(
                sizes=own_sizes,
                is_over_batch=self._is_over_batch,
                loss_scale=call.loss_scale,
                finish_loss=call.finish_loss,
            )
            if len(outcome.output_sizes) == 1 and pipeline.layout.num_replicas == 1:
                outcome.loss_scale = None
            self._outcomes.append(outcome)
            self._parts.append(split.split(batch, own_sizes))

    def run(
        self,
        *,
        before_last_backward: Callable[[], None] | None,
        before_unit: Callable[[int], None] | None,
        after_batch: Callable[[StepOutcome], None] | None,
    ) -> list[StepOutcome]:
        """Run it, once; gives the outcome of each batch. The arguments are those of `Pipeline.run_window`."""
        pipeline = self._pipeline
        runner = pipeline.runner
        stage_indices = runner.stage_indices(self._schedule)
        observer = pipeline.observer
        if after_batch is not None and len(self._calls) > 1:
            assert len(runner.executors) == 1, "stages that share a process do not end a batch together"
            outcomes = self._outcomes  # and not all of `self`: the executor keeps its observer
            observer = BatchEnds(
                self._schedule,
                pipeline.stage_index,
                self._num_microbatches,
                lambda position: after_batch(outcomes[position]),
                observer,
            )
        with preserved_random_state(), self._statistics(stage_indices), self._synchronization(stage_indices):
            # A stage may write into its batch; others in this process must not see it.
            is_shared = len(stage_indices) > 1
            stages = {
                index: self._stage(
                    index, tree.map_tensors(Tensor.clone, self._parts) if is_shared else self._parts, before_unit
                )
                for index in stage_indices
            }
            runner.run(stages, self._schedule, observer=observer, before_last_backward=before_last_backward)
        return self._outcomes

    def _statistics(self, stage_indices: range) -> contextlib.AbstractContextManager[None]:
        """Of batch normalization, which only training changes."""
        pipeline = self._pipeline
        if not self._training:
            return contextlib.nullcontext()
        return pipeline.batch_norm.training_step(pipeline.store.owners, stage_indices, lambda: pipeline.tracing)

    def _synchronization(self, stage_indices: range) -> contextlib.AbstractContextManager[None]:
        """Of batch normalization over replicas: evaluations never communicate."""
        pipeline = self._pipeline
        if not self._training or pipeline.synchronizer is None:
            return contextlib.nullcontext()
        return pipeline.synchronizer.training_step(
            pipeline.store.owners,
            stage_indices,
            num_microbatches=sum(self._num_microbatches),
            microbatch_index=lambda: pipeline.microbatch_index,
            is_silent=lambda: pipeline.tracing,
        )

    def _stage(
        self, stage_index: int, parts: list[list[Any]], before_unit: Callable[[int], None] | None
    ) -> StageForward:
        pipeline, step_name, training = self._pipeline, self._step_name, self._training
        if self._is_over_batch and stage_index == pipeline.num_stages - 1:
            return WholeBatchLastStage(
                pipeline,
                step_name,
                self._units[0],
                parts[0],
                self._outcomes[0],
                training,
                self._calls[0].step,
                batch=self._batches[0],
            )
        steps, num_before = [], 0
        for call, units, own, outcome in zip(self._calls, self._units, parts, self._outcomes, strict=True):
            step = StageStep(pipeline, stage_index, step_name, units, own, outcome, training, call.step)
            step.num_units_before = num_before
            steps.append(step)
            num_before += len(units)
        return steps[0] if len(steps) == 1 else WindowStage(steps, [len(own) for own in self._units], before_unit)
