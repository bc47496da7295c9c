"""Training steps of a pipeline: the windows of batches that run as one, and what their gradients are divided by."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_autopipe.core.errors import BatchError
from lightning_autopipe.core.timeline import StepEnd
from lightning_autopipe.runtime.pipeline import Pipeline
from lightning_autopipe.runtime.stage_step import StepOutcome
from lightning_autopipe.runtime.window import StepCall
from lightning_autopipe.strategy.batch_weights import WaitingBatches
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.rank_gradients import RankGradients
from lightning_autopipe.strategy.running_step import RunningStep
from lightning_autopipe.strategy.step_exchange import StepResult
from lightning_autopipe.strategy.step_watch import StepWatch

TRAINING_STEP = "training_step"


class TrainingSteps:
    """Runs ``training_step``, and keeps its gradients until ``backward``.

    Args:
        pipeline: Runs the step.
        running_step: What surrounds it.
        communicator: This rank's groups.
        device: Where this rank computes.
        merges_accumulation: Whether the batches of an accumulation window wait for its last one.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        running_step: RunningStep,
        communicator: Communicator,
        device: torch.device,
        *,
        merges_accumulation: bool,
    ) -> None:
        self.gradients: RankGradients | None = None
        """None before the module is placed."""
        self.watch: StepWatch | None = None
        """Sees the training steps of a fit; None: nobody wants to know."""
        self._pipeline = pipeline
        self._running_step = running_step
        self._communicator = communicator
        self._device = device
        self._merges_accumulation = merges_accumulation
        self._loss_scale = 1.0
        self._gradient_divisors = [1.0]
        self._weights_are_samples: bool | None = None
        """Whether losses are weighted by samples, and by nothing that the step tells; None before the first step."""
        self._stored: list[StepCall] = []
        """Batches of an accumulation window that wait for its last one."""

    def counts_in_norm(self, parameter: Tensor) -> bool:
        """Whether this stage counts a parameter in a norm over all stages: a tied one counts once."""
        return self.gradients is None or self.gradients.counts_in_norm(parameter)

    # Windows ------------------------------------------------------------------

    @property
    def can_store(self) -> bool:
        """Whether batches of an accumulation window can wait for its last one: a first step has told what weighs."""
        return self._merges_accumulation and self._weights_are_samples is not None

    @property
    def has_stored(self) -> bool:
        """Whether batches wait."""
        return bool(self._stored)

    def store(self, call: StepCall) -> Tensor:
        """Keeps a batch for the last one of its accumulation window; gives the loss that nobody may use."""
        self._stored.append(call)
        return torch.tensor(math.nan, device=self._device)

    def forget_stored(self) -> None:
        """Drops batches whose window has not come to its end, as what was accumulated is dropped."""
        self._stored = []

    # Steps --------------------------------------------------------------------

    def run(self, call: StepCall, *, reduce: bool) -> Any:
        """Runs forward and backward of one batch, and of those that were stored before it, as one pipeline.

        The gradients wait for `commit_gradients`.
        """
        assert self.gradients is not None
        ledger = self.gradients.ledger
        calls, self._stored = [*self._stored, call], []
        # Where weights are known beforehand, the gradients of all batches can be summed as they come.
        totals = self._total_samples(calls) if len(calls) > 1 and self._weights_are_samples else None
        scales = [self._loss_scale] * len(calls) if totals is None else [1 / total for total in totals]
        calls = [replace(one, loss_scale=scale) for one, scale in zip(calls, scales, strict=True)]
        is_apart = len(calls) > 1 and totals is None
        waiting = WaitingBatches(ledger, self._communicator)
        with (
            ledger.schedule(reduce=reduce and not is_apart) as before_last_backward,
            self._running_step.recording(TRAINING_STEP),
            self._running_step.counting(num_batches=len(calls)),
        ):
            outcomes = self._pipeline.run_window(
                TRAINING_STEP,
                calls,
                training=True,
                before_last_backward=before_last_backward,
                before_unit=self._running_step.select,
                after_batch=waiting.set_apart if is_apart else None,
            )
        results = self._exchange(outcomes)
        self._weights_are_samples = all(result.weights_are_samples for result in results)
        if totals is None:
            divisors = [
                outcome.gradient_divisor(result.total_weight) for outcome, result in zip(outcomes, results, strict=True)
            ]
            self._gradient_divisors = divisors[-len(waiting) - 1 :]
        else:
            self._gradient_divisors = [1.0]
            _check_samples(totals, results)
        self.note_total_weight(results[-1].total_weight)
        if not all(result.total_weight for result in results) and self._communicator.global_rank == 0:
            warnings.warn(
                "the loss of this batch has no weight in any micro-batch or replica (no target that counts, or a "
                "loss_weight of 0): its gradients are zero",
                stacklevel=2,
            )
        return results[-1].output

    def commit_gradients(self, *, reduce: bool) -> None:
        """Adds the last training step's gradients to those of the parameters."""
        assert self.gradients is not None
        has_sums = reduce and self._communicator.layout.num_replicas > 1
        watch = self.watch if has_sums else None
        with contextlib.nullcontext() if watch is None else watch.recorder.timed(StepEnd.GRADIENTS):
            self.gradients.ledger.commit(divisors=self._gradient_divisors, reduce=reduce)

    def note_total_weight(self, total_weight: float) -> None:
        """Scale the next losses by about what this one's gradients are divided by.

        By a power of two, which rounds nothing. All ranks know the total, so they scale alike.
        """
        if total_weight > 0:
            self._loss_scale = 2.0 ** -round(math.log2(total_weight))

    def _total_samples(self, calls: Sequence[StepCall]) -> list[int]:
        """Of each batch over all replicas. Collective over replicas."""
        own = [self._pipeline.splitter.batch_size(TRAINING_STEP, call.args, call.kwargs) for call in calls]
        return [sum(sizes) for sizes in zip(*self._communicator.gather_over_replicas(own), strict=True)]

    def _exchange(self, outcomes: Sequence[StepOutcome]) -> list[StepResult]:
        """Logs what each batch logged, in their order, as they would by themselves."""
        assert self.gradients is not None
        running_step, last, watch = self._running_step, len(outcomes) - 1, self.watch
        results = [
            running_step.exchange(outcome, training=True, position=position)
            for position, outcome in enumerate(outcomes)
            if watch is None or position < last
        ]
        if watch is not None:
            num_samples = sum(sum(outcome.sizes) for outcome in outcomes)
            results.append(
                running_step.exchange_watched(
                    outcomes[last],
                    watch,
                    position=last,
                    num_samples=num_samples,
                    has_ties=self.gradients.has_ties,
                )
            )
        return results


def _check_samples(totals: Sequence[int], results: Sequence[StepResult]) -> None:
    """Raises where a batch's losses were weighted otherwise than it was taken for granted.

    Raises:
        BatchError: they were.
    """
    for total, result in zip(totals, results, strict=True):
        if result.total_weight != total:
            raise BatchError(
                f"a batch's losses weigh {result.total_weight:g}, but it has {total} samples, by which losses were "
                "weighted before: training_step returns a loss_weight, or takes a known mean loss, for some batches "
                "only. Return a loss_weight for all of them, or set merge_accumulation=False"
            )
