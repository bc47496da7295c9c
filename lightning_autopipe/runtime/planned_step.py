"""The step that a plan is made from: traced on a whole batch, measured by micro-batch, cut as the plan says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_autopipe.capture.carried import CarriedState
from lightning_autopipe.capture.cuts import CutTable, find_layers, positions_after
from lightning_autopipe.capture.records import CutKey, Operation, StepTrace
from lightning_autopipe.capture.refusals import refuse_repeated_pass, refuse_too_few_layers
from lightning_autopipe.core.errors import CaptureError, ConfigurationError
from lightning_autopipe.core.profile import ModelProfile
from lightning_autopipe.runtime.batch_loss import find_rest
from lightning_autopipe.runtime.batch_splitter import BatchSplitter
from lightning_autopipe.runtime.model_profile import unmeasured_profile
from lightning_autopipe.runtime.step_capture import CaptureStore, StepCapture


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchCapture:
    """The trace of one micro-batch, where the layers of the whole batch's trace begin, and what the step takes."""

    trace: StepTrace
    table: CutTable
    layer_keys: tuple[CutKey, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class PlannedStep:
    """What is known of the step that was profiled last.

    Args:
        store: Traces it, and is told where it is cut.
        splitter: Of its batches.
        is_over_batch: Whether the loss is one over the whole batch.
    """

    def __init__(self, store: CaptureStore, splitter: BatchSplitter, *, is_over_batch: bool) -> None:
        self.unweighted_loss: Operation | None = None
        """Ignores targets that the loss's weight does not know."""
        self.cut_points_after: tuple[int, ...] = ()
        """The layers behind the modules `cut_after`."""
        self._store = store
        self._splitter = splitter
        self._is_over_batch = is_over_batch
        self._traced: tuple[str, StepTrace, CutTable] | None = None
        self._carried: CarriedState | None = None
        self._layer_keys: tuple[CutKey, ...] = ()

    def profile(
        self,
        step_name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        cut_after: Sequence[str],
        min_stages: int | None,
    ) -> ModelProfile:
        """Trace a step on one whole batch and give its layers.

        Arguments and errors are those of `Pipeline.profile`; `min_stages` is None where the step stays whole.
        """
        trace, table = self._store.trace(step_name, args, kwargs, cut_after=cut_after, is_planned_by=True)
        if not trace.operations:
            raise CaptureError(f"{step_name} uses no parameter of the module: there is nothing to pipeline.")
        if self._is_over_batch:
            self._end_layers_before_rest(trace, table, step_name, args, kwargs, cut_after)
        if min_stages is not None:
            refuse_repeated_pass(trace, step_name)
            refuse_too_few_layers(trace, table, min_stages, step_name)
        starts = [layer.start for layer in trace.layers]
        self.cut_points_after = tuple(starts.index(p) for p in positions_after(trace, table, cut_after))
        self._traced = (step_name, trace, table)
        self._carried = self._store.carried_state(trace, table, step_name, args, kwargs)
        self.unweighted_loss = None if trace.loss_index is None else trace.unweighted_loss(trace.loss_index)
        self._layer_keys = tuple(layer.key for layer in trace.layers)
        return unmeasured_profile(trace, dict(self._store.module.named_parameters()))

    def _end_layers_before_rest(
        self,
        trace: StepTrace,
        table: CutTable,
        step_name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cut_after: Sequence[str],
    ) -> None:
        """What runs once on the whole batch belongs to the last layer."""
        parts = self._splitter.split_into(step_name, args, kwargs, 2)
        if len(parts) == 1:
            return
        part_args, part_kwargs = parts[0]
        whole, part = StepCapture(trace, table), StepCapture(*self._store.trace(step_name, part_args, part_kwargs))
        batch_size, part_size = (
            self._splitter.batch_size(step_name, *one) for one in ((args, kwargs), (part_args, part_kwargs))
        )
        rest = find_rest(step_name, whole, part, (batch_size, part_size))
        positions = positions_after(trace, table, cut_after)
        for path, position in zip(cut_after, positions, strict=True):
            if position >= rest:
                raise ConfigurationError(
                    f"cut_after names {path!r}, which ends behind the place from which on {step_name} has to run on "
                    "the whole batch (loss_over='batch'); name modules before it"
                )
        trace.layers = find_layers(trace, table, positions, before=rest)

    def capture_microbatch(
        self, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatches: int
    ) -> MicrobatchCapture:
        """Trace the largest micro-batch of a batch whose step was profiled, to measure its layers.

        Raises:
            CaptureError: the step of one micro-batch cannot be traced.
        """
        assert self._layer_keys, "profile() comes first"
        micro_args, micro_kwargs = self._splitter.split_into(step_name, args, kwargs, num_microbatches)[0]
        trace, table = self._store.trace(step_name, micro_args, micro_kwargs)
        return MicrobatchCapture(
            trace=trace, table=table, layer_keys=self._layer_keys, args=micro_args, kwargs=micro_kwargs
        )

    def cut(self, names: Sequence[str]) -> None:
        """Cut the profiled step before the layers of these names, once.

        Raises:
            PlanError: the step has no such place, or cannot be cut there.
            CaptureError: it keeps state that a stage would not see.
        """
        assert self._traced is not None, "profile() comes first"
        positions = self._store.set_cuts(*self._traced, names)
        if positions and self._carried is not None and self._carried.first_use < positions[-1]:
            raise CaptureError(
                f"The step sets {', '.join(self._carried.names)} and uses it in its next call, before the last of "
                f"{len(positions) + 1} stages begins. Stages leave the step at their last cut and would not see the "
                "new value. Set it in a hook (on_train_batch_end, say) or at the step's beginning, derive it from "
                "batch_idx or global_step, or set num_stages=1."
            )
        self._traced = None
