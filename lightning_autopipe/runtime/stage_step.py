"""One stage of one step, unit by unit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.absent import AbsentValueError
from lightning_autopipe.capture.draws import DrawKey
from lightning_autopipe.capture.program import StageProgram
from lightning_autopipe.capture.replay import StageRun, TraceMismatchError
from lightning_autopipe.core.errors import CaptureError
from lightning_autopipe.runtime.backward import without_autocast
from lightning_autopipe.runtime.batch_loss import JoinedValues, find_joints, find_rest
from lightning_autopipe.runtime.loss import weighted_loss
from lightning_autopipe.runtime.stage import StageForward, StageOutput
from lightning_autopipe.runtime.step_capture import StepCapture, shape_key, state_key
from lightning_autopipe.runtime.units import Unit
from lightning_autopipe.runtime.views import are_views_apart

if TYPE_CHECKING:
    from lightning_autopipe.runtime.pipeline import Pipeline


class _UnitResult(NamedTuple):
    output: Any
    weight: Tensor
    loss: Tensor | None


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    """What one step of one replica gave; all but `sizes` and `is_over_batch` on the last stage only.

    `sizes` are the samples of each unit (micro-batch, or slice of one). `weights` are 0-dim float64 tensors: the weight
    of each unit's loss. `losses` are 0-dim and detached. Where the loss was taken over the whole batch there is one of
    each. The gradients are those of `loss_scale * sum(weight * loss)`; where `loss_scale` is None, of the only loss
    itself; in both cases of what `finish_loss` makes of it.
    """

    sizes: tuple[int, ...]
    is_over_batch: bool = False
    loss_scale: float | None = 1.0
    finish_loss: Callable[[Tensor], Tensor] | None = None
    weights_are_samples: bool = True
    """Whether every loss so far was weighted by its samples, and by nothing that the step's code told."""
    _results: dict[int, _UnitResult] = field(default_factory=dict)

    def add(self, unit_index: int, *, output: Any, weight: Tensor, loss: Tensor | None) -> None:
        """Take what the last stage made of one unit, in any order."""
        self._results[unit_index] = _UnitResult(output, weight, loss)

    @property
    def outputs(self) -> list[Any]:
        """What the step returned for each unit, in the order of the batch."""
        return [result.output for result in self._in_order()]

    @property
    def weights(self) -> list[Tensor]:
        """The weight of each unit's loss."""
        return [result.weight for result in self._in_order()]

    @property
    def losses(self) -> list[Tensor]:
        """The loss of each unit that has one."""
        return [result.loss for result in self._in_order() if result.loss is not None]

    def _in_order(self) -> list[_UnitResult]:
        return [self._results[unit_index] for unit_index in sorted(self._results)]

    @property
    def output_sizes(self) -> tuple[int, ...]:
        """Samples in each of the outputs."""
        return (sum(self.sizes),) if self.is_over_batch else self.sizes

    @property
    def sizes_by_index(self) -> tuple[int, ...]:
        """Samples by number of the unit; what runs on the whole batch has the one behind the last unit's."""
        return (*self.sizes, sum(self.sizes)) if self.is_over_batch else self.sizes

    def gradient_divisor(self, total_weight: float) -> float:
        """Give what to divide the gradients by, summed over replicas, for those of the mean loss.

        Args:
            total_weight: Sum of the weights over all micro-batches and replicas; where it is 0, so are the gradients.
        """
        return 1.0 if self.loss_scale is None or not total_weight else total_weight * self.loss_scale

    def weights_by_index(self, weights: Sequence[float]) -> list[float]:
        """Give the weights of losses by number of the unit; one without a loss counts by its samples."""
        return [*map(float, self.sizes), *weights] if self.is_over_batch and weights else list(weights)


class StageStep(StageForward):
    """One stage of one step.

    Args:
        pipeline: Whose stage it is.
        stage_index: Which one.
        step_name: The method of the module.
        units: The micro-batches or slices of the step, in the order of the batch.
        parts: Arguments of each unit's step.
        outcome: Filled by the last stage.
        training: Whether losses are back-propagated.
        step: Number of the step, which keys its random draws.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        stage_index: int,
        step_name: str,
        units: Sequence[Unit],
        parts: Sequence[Any],
        outcome: StepOutcome,
        training: bool,
        step: int,
    ) -> None:
        self._pipeline = pipeline
        self._store = pipeline.store
        self._stage_index = stage_index
        self._step_name = step_name
        self._step_function = getattr(pipeline.module, step_name)
        self._units = units
        self._parts = list(parts)
        self._outcome = outcome
        self._training = training
        self._step = step
        self.num_units_before = 0
        """Of other batches, which this step runs behind."""
        self._is_last = stage_index == pipeline.num_stages - 1
        self._state = (step_name, state_key(pipeline.module))
        self._signatures = [(self._state, shape_key(args, kwargs)) for args, kwargs in parts]
        self._captures: list[StepCapture] = []
        for signature, (args, kwargs) in zip(self._signatures, parts, strict=True):
            capture = self._store.capture(signature, step_name, args, kwargs)
            self._program(capture, args, kwargs)  # all tracing comes before the first wait
            self._captures.append(capture)

    def signature(self, unit_index: int) -> Hashable:
        return self._signatures[unit_index]

    def forward(self, unit_index: int, received: tuple[Tensor, ...]) -> StageOutput:
        program, run = self._run(unit_index, received)
        if not self._is_last:
            return StageOutput(sent=run.sent)
        return StageOutput(loss=self._end(unit_index, program, run.result, self._outcome.sizes[unit_index], received))

    def _end(
        self, unit_index: int, program: StageProgram, result: Any, num_samples: int, received: Sequence[Tensor]
    ) -> Tensor | None:
        """Take what the step returned; give the weighted loss to back-propagate."""
        used = program.parameter_names
        parameters = [p for name, p in self._pipeline.module.named_parameters() if name in used]
        weighted = weighted_loss(
            result,
            num_samples,
            training=self._training,
            connect_to=[*received, *parameters],
            step_name=self._step_name,
            scale=self._outcome.loss_scale,
        )
        loss = None if weighted.loss is None else weighted.loss.detach()
        output = tree.map_tensors(Tensor.detach, result)
        self._outcome.add(unit_index, output=output, weight=weighted.weight, loss=loss)
        self._outcome.weights_are_samples &= weighted.is_by_samples
        last, finish = weighted.to_backpropagate, self._outcome.finish_loss
        return last if last is None or finish is None else finish(last)

    def _key(self, unit: Unit) -> DrawKey:
        pipeline = self._pipeline
        microbatch_index, slice_index = unit
        return DrawKey(
            seed=pipeline.seed,
            step=self._step,
            replica_index=pipeline.replica_index,
            microbatch_index=microbatch_index,
            slice_index=slice_index,
        )

    def _bounds(self, capture: StepCapture) -> tuple[int, int | None]:
        return capture.bounds_of(self._stage_index)

    def _program(self, capture: StepCapture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StageProgram:
        return self._store.program(capture, *self._bounds(capture), self._step_name, args, kwargs)

    def _run(self, unit_index: int, received: Sequence[Tensor]) -> tuple[StageProgram, StageRun]:
        """Replay; where the step takes another path than the traced one, trace again and replay that."""
        self._pipeline.microbatch_index = unit_index
        self._pipeline.batch_norm.begin_microbatch(self._stage_index, self.num_units_before + unit_index)
        args, kwargs = self._parts[unit_index]
        if self._training:
            self._parts[unit_index] = None  # each runs once
        key = self._key(self._units[unit_index])
        program = self._program(self._captures[unit_index], args, kwargs)
        try:
            return program, self._replay(program, args, kwargs, received, key)
        except TraceMismatchError as mismatch:
            other = None
            if mismatch.can_retry:
                signature = self._signatures[unit_index]
                other = self._store.other_path(signature, self._step_name, args, kwargs, key)
            if other is None:
                raise
            program = self._program(other, args, kwargs)
            self._pipeline.batch_norm.begin_microbatch(self._stage_index, self.num_units_before + unit_index)
            return program, self._replay(program, args, kwargs, received, key)

    def _replay(
        self,
        program: StageProgram,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        received: Sequence[Tensor],
        key: DrawKey,
    ) -> StageRun:
        try:
            return program.run(self._step_function, args, kwargs, received, key)
        except AbsentValueError as error:
            end_reason = program.trace.end_reason
            if not self._is_last or end_reason is None:
                raise
            raise CaptureError(
                f"{self._step_name} reads a value ({end_reason}) and then uses the model again, of which other stages "
                f"have a part: {error} A pipeline passes through the model once a step. Do what comes then in a step "
                "of its own, or set num_stages=1."
            ) from error


class WholeBatchLastStage(StageStep):
    """The last stage where the loss is one over the whole batch: the rest of the step runs behind the last micro-batch.

    Args:
        pipeline, step_name, units, parts, outcome, training, step: As of `StageStep`.
        batch: Arguments of the whole batch's step.

    Raises:
        CaptureError: the step has no place from which on it could run on the whole batch.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        step_name: str,
        units: Sequence[Unit],
        parts: Sequence[Any],
        outcome: StepOutcome,
        training: bool,
        step: int,
        *,
        batch: Any,
    ) -> None:
        store = pipeline.store
        state = (step_name, state_key(pipeline.module))
        whole, part = (store.capture((state, shape_key(*one)), step_name, *one) for one in (batch, parts[0]))
        sizes = (sum(outcome.sizes), outcome.sizes[0])
        self._rest = find_rest(step_name, whole, part, sizes)
        if self._rest < part.bounds_of(pipeline.num_stages - 1)[0]:
            raise CaptureError(
                f"loss_over='batch': the last stage begins behind the place from which on {step_name} has to run on "
                "the whole batch. Use fewer stages (num_stages=), or loss_over='microbatch'."
            )
        super().__init__(pipeline, pipeline.num_stages - 1, step_name, units, parts, outcome, training, step)
        self._rest_program = store.program(whole, self._rest, None, step_name, *batch)
        joints = find_joints(whole, part, self._rest, sizes)
        num_views = max(joint.num_views for joint in joints)
        is_apart = False
        if num_views > 1:
            key = state, shape_key(*batch)
            if key not in pipeline.view_orders:
                pipeline.view_orders[key] = are_views_apart(
                    pipeline.module, step_name, batch, parts, outcome.sizes, num_views
                )
            is_apart = pipeline.view_orders[key]
        self._values = JoinedValues(joints, are_views_apart=is_apart)
        self._batch = batch

    def _bounds(self, capture: StepCapture) -> tuple[int, int | None]:
        return capture.bounds_of(self._stage_index)[0], self._rest

    def forward(self, unit_index: int, received: tuple[Tensor, ...]) -> StageOutput:
        self._values.add(unit_index, self._run(unit_index, received)[1].sent)
        if len(self._values) == len(self._captures):
            self._run_rest()
        return StageOutput(roots=functools.partial(self._values.roots, unit_index))

    def _run_rest(self) -> None:
        after_all = len(self._captures)
        self._pipeline.microbatch_index = after_all
        self._pipeline.batch_norm.begin_microbatch(self._stage_index, after_all)
        joined = self._values.join()
        args, kwargs = self._batch
        run = self._rest_program.run(self._step_function, args, kwargs, joined, self._key((after_all, None)))
        loss = self._end(after_all, self._rest_program, run.result, sum(self._outcome.sizes), joined)
        if loss is not None and loss.requires_grad:
            with without_autocast():
                loss.backward()  # type: ignore[no-untyped-call]
