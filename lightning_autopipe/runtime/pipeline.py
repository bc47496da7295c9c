"""A LightningModule as a pipeline: splits a batch, replays the step's stages, runs the schedule."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.carried import CarriedState
from lightning_autopipe.capture.cuts import CutTable, find_layers, positions_after
from lightning_autopipe.capture.interception import current
from lightning_autopipe.capture.preserve import preserved_random_state
from lightning_autopipe.capture.records import CutKey, Operation, StepTrace
from lightning_autopipe.capture.refusals import refuse_repeated_pass, refuse_too_few_layers
from lightning_autopipe.capture.replay import terms_of
from lightning_autopipe.core.errors import CaptureError, ConfigurationError, PlanError
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.profile import ModelProfile
from lightning_autopipe.core.schedule import Schedule
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.runtime.batch import BatchSplit, assume_split, find_split, microbatch_sizes, structure_of
from lightning_autopipe.runtime.batch_loss import find_rest
from lightning_autopipe.runtime.deferred_batch_norm import BatchNormStatistics
from lightning_autopipe.runtime.executor import ExecutionObserver, StageExecutor
from lightning_autopipe.runtime.in_process import InProcessPipeline
from lightning_autopipe.runtime.model_profile import unmeasured_profile
from lightning_autopipe.runtime.placement import fill_parameters, release_parameters
from lightning_autopipe.runtime.stage import StageForward
from lightning_autopipe.runtime.stage_step import StageStep, StepOutcome, WholeBatchLastStage
from lightning_autopipe.runtime.step_capture import CaptureStore, StepCapture, module_fingerprint
from lightning_autopipe.runtime.transport import Transport
from lightning_autopipe.runtime.units import forwards_first, halve_no_single_samples, unit_sizes, units_of
from lightning_autopipe.runtime.window import BatchEnds, StepCall, WindowStage, units_by_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchCapture:
    """The trace of one micro-batch, where the layers of the whole batch's trace begin, and what the step takes."""

    trace: StepTrace
    table: CutTable
    layer_keys: tuple[CutKey, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Pipeline:
    """One module's steps, cut into stages.

    With a transport it runs the stage of `global_rank`; without one it runs all stages in this process. A step's
    gradients are those of the weighted sum of the replica's losses: the caller sums over replicas, and divides by the
    outcome's `gradient_divisor`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        layout: ParallelLayout,
        global_rank: int,
        transport: Transport | None,
        num_microbatches: int,
        make_schedule: Callable[[str | ScheduleSpec, int, int], Schedule],
        schedule: str | ScheduleSpec = "1f1b",
        seed: int = 0,
        device: torch.device | None = None,
        split_batch: Mapping[str, int | None] | None = None,
        loss_over: str = "microbatch",
        batch_norm: BatchNormStatistics | None = None,
    ) -> None:
        self.module = module
        self.layout = layout
        self.num_stages = layout.num_stages
        """Of the whole pipeline: as many as ranks, or a multiple where the plan has each of them run several."""
        self.stage_index = layout.stage_index(global_rank)
        """This rank's place in the pipeline, which is its first stage."""
        self.replica_index = layout.replica_index(global_rank)
        self.num_microbatches = num_microbatches
        self.seed = seed
        self.device = device or torch.device("cpu")
        self.microbatch_index = 0
        """Number of the unit (micro-batch, or slice of one) that runs, in the order of the batch."""
        self.module_fingerprint = module_fingerprint(module)
        self._make_schedule = make_schedule
        self._schedule = schedule
        self._split_batch = split_batch
        self.loss_over = loss_over
        self.view_orders: dict[Hashable, bool] = {}  # of steps that pass several views of each sample at once
        self.batch_norm = batch_norm or BatchNormStatistics(module)
        self._splits: dict[Hashable, BatchSplit] = {}
        self._schedules: dict[Hashable, Schedule] = {}
        self.store = CaptureStore(module, self.device, is_cut=layout.num_stages > 1)
        self._carried: CarriedState | None = None
        self.unweighted_loss: Operation | None = (
            None  # of the profile: ignores targets that the loss's weight does not know
        )
        self.cut_points_after: tuple[int, ...] = ()  # of the profile: the layers behind the modules `cut_after`
        self._planning_trace: tuple[str, StepTrace, CutTable] | None = None
        self._layer_keys: tuple[CutKey, ...] = ()
        self._first_name = _first_names(module)
        self._transport = transport
        self._is_local = transport is None
        self.observer: ExecutionObserver | None = None
        """Told of every action that this process runs, of training and evaluation alike; None: no cost."""
        if transport is None:
            self._local = InProcessPipeline(layout.num_stages)
            self._executors = self._local.executors
        else:
            self._executor = StageExecutor(
                stage_index=self.stage_index, num_stages=self.num_stages, transport=transport
            )
            self._executors = (self._executor,)

    # ----- planning

    def profile(
        self,
        step_name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        cut_after: Sequence[str] = (),
        min_stages: int | None = None,
    ) -> ModelProfile:
        """Trace a step on one whole batch and give its layers; nothing changes.

        Args:
            step_name: the method of the module.
            args: what it is called with.
            kwargs: keyword arguments alike.
            cut_after: paths of modules after whose last calls layers end.
            min_stages: into how many it must be possible to cut it; None: those of the layout.

        Raises:
            BatchError: a training step returns no loss.
            CaptureError: the step cannot be traced or cut.
            ConfigurationError: it cannot be cut into so many stages, or after one of the modules.
        """
        trace, table = self.store.trace(step_name, args, kwargs, cut_after=cut_after, is_planned_by=True)
        if not trace.operations:
            raise CaptureError(f"{step_name} uses no parameter of the module: there is nothing to pipeline.")
        if self.loss_over == "batch":
            self._end_layers_before_rest(trace, table, step_name, args, kwargs, cut_after)
        if self.num_stages > 1:
            refuse_repeated_pass(trace, step_name)
            refuse_too_few_layers(trace, table, self.num_stages if min_stages is None else min_stages, step_name)
        starts = [layer.start for layer in trace.layers]
        self.cut_points_after = tuple(starts.index(p) for p in positions_after(trace, table, cut_after))
        self._planning_trace = (step_name, trace, table)
        self._carried = self.store.carried_state(trace, table, step_name, args, kwargs)
        self.unweighted_loss = None if trace.loss_index is None else trace.unweighted_loss(trace.loss_index)
        self._layer_keys = tuple(layer.key for layer in trace.layers)
        profile = unmeasured_profile(trace, dict(self.module.named_parameters()))
        return replace(profile, module_fingerprint=self.module_fingerprint)

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
        parts = self.split_into(step_name, args, kwargs, 2)
        if len(parts) == 1:
            return
        part_args, part_kwargs = parts[0]
        whole, part = StepCapture(trace, table), StepCapture(*self.store.trace(step_name, part_args, part_kwargs))
        batch_size, part_size = (self.batch_size(step_name, *one) for one in ((args, kwargs), parts[0]))
        rest = find_rest(step_name, whole, part, (batch_size, part_size))
        positions = positions_after(trace, table, cut_after)
        for path, position in zip(cut_after, positions, strict=True):
            if position >= rest:
                raise ConfigurationError(
                    f"cut_after names {path!r}, which ends behind the place from which on {step_name} has to run on "
                    "the whole batch (loss_over='batch'); name modules before it"
                )
        trace.layers = find_layers(trace, table, positions, before=rest)

    def batch_size(self, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Give the number of samples of a batch, having found out how it is split.

        Raises:
            BatchError: that cannot be told.
        """
        return self._split_of(step_name, args, kwargs).batch_size((args, kwargs))

    def capture_microbatch(
        self, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatches: int
    ) -> MicrobatchCapture:
        """Trace the largest micro-batch of a batch whose step was profiled, to measure its layers.

        Raises:
            CaptureError: the step of one micro-batch cannot be traced.
        """
        assert self._layer_keys, "profile() comes first"
        micro_args, micro_kwargs = self.split_into(step_name, args, kwargs, num_microbatches)[0]
        trace, table = self.store.trace(step_name, micro_args, micro_kwargs)
        return MicrobatchCapture(
            trace=trace, table=table, layer_keys=self._layer_keys, args=micro_args, kwargs=micro_kwargs
        )

    def split_into(
        self, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatches: int
    ) -> list[Any]:
        """Split a batch as it would be with that many micro-batches."""
        self.num_microbatches, before = num_microbatches, self.num_microbatches
        try:
            split = self._split_of(step_name, args, kwargs)
        finally:
            self.num_microbatches = before
        batch = (args, kwargs)
        sizes = microbatch_sizes(split.batch_size(batch), num_microbatches, min_samples=self.min_samples)
        return split.split(batch, sizes)

    @property
    def min_samples(self) -> int:
        """The fewest samples of a micro-batch: batch normalization has no statistics of one."""
        return 2 if any(isinstance(m, _BatchNorm) and m.training for m in self.module.modules()) else 1

    def silent(self) -> contextlib.AbstractContextManager[None]:
        """Give a context in which `tracing` is true, for runs of the step's parts that must not count."""
        return self.store.silent()

    def set_plan(self, plan: PipelinePlan) -> None:
        """Cut the profiled step as the plan says.

        Raises:
            PlanError: the plan is for another module, another step or another layout, or it slices micro-batches of a
                module with batch normalization in training.
            CaptureError: the step keeps state that a stage of this plan would not see.
        """
        planned = self._planning_trace
        assert planned is not None, "profile() comes first"
        plan.require_module(self.module_fingerprint)
        plan.require_world(self.layout.world_size)
        if plan.layout != self.layout:
            raise PlanError(f"The plan's layout is {plan.layout}, but the pipeline runs as {self.layout}.")
        self._refuse_sliced_batch_norm(plan.schedule)
        self._set_stages_per_rank(plan.schedule.stages_per_rank)
        positions = self.store.set_cuts(*planned, [plan.layers[index].name for index in plan.partition.cut_points])
        if positions and self._carried is not None and self._carried.first_use < positions[-1]:
            raise CaptureError(
                f"The step sets {', '.join(self._carried.names)} and uses it in its next call, before the last of "
                f"{self.num_stages} stages begins. Stages leave the step at their last cut and would not see the "
                "new value. Set it in a hook (on_train_batch_end, say) or at the step's beginning, derive it from "
                "batch_idx or global_step, or set num_stages=1."
            )
        self._planning_trace = None
        self._schedule = plan.schedule
        self.num_microbatches = plan.microbatches_of(self.replica_index)

    def _set_stages_per_rank(self, stages_per_rank: int) -> None:
        self.num_stages = self.layout.num_stages * stages_per_rank
        self._schedules.clear()
        if self._is_local:
            self._local = InProcessPipeline(self.num_stages)
            self._executors = self._local.executors
        else:
            self._executor.num_stages = self.num_stages
            if stages_per_rank > 1:
                assert self._transport is not None
                self._transport.close_circle()

    def in_process(self, *, is_cut: bool = True, num_microbatches: int = 1) -> Pipeline:
        """Give a pipeline that runs this one's stages, or the step uncut, in this process; the module must be whole."""
        twin = Pipeline(
            self.module,
            layout=ParallelLayout(num_stages=self.num_stages if is_cut else 1),
            global_rank=0,
            transport=None,
            num_microbatches=num_microbatches,
            make_schedule=self._make_schedule,
            seed=self.seed,
            device=self.device,
            split_batch=self._split_batch,
            loss_over=self.loss_over,
        )
        twin.store.share_plan(self.store, is_cut=is_cut)
        return twin

    def parameter_owner(self, name: str) -> int:
        """Give the first place in the pipeline that uses a parameter; the last where the planned step does nowhere."""
        return min(self._owners(name))

    def owned_parameters(self, stage_index: int) -> frozenset[str]:
        """Names (each of a tied parameter's) of the parameters that a place's stages use."""
        return frozenset(name for name in self._first_name if stage_index in self._owners(name))

    def in_order_of_use(self, named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Give the same parameters in the order in which the planned step first uses them."""
        position = {name: index for index, name in enumerate(self.store.owners)}
        return dict(sorted(named.items(), key=lambda item: position.get(item[0], len(position))))

    def parameters_of_later_stages(self) -> frozenset[str]:
        """Names of the parameters here that this place's first stage, whose backwards end last, does not use."""
        if self.num_stages == self.layout.num_stages:
            return frozenset()
        own = self.owned_parameters(self.stage_index)
        return frozenset(name for name in own if self.stage_index not in self.store.owners.get(name, ()))

    def owned_buffers(self, stage_index: int) -> frozenset[str]:
        """Names of the buffers that the step writes at this place; all others are equal everywhere."""
        names = (name for name, _ in self.module.named_buffers())
        return frozenset(name for name in names if stage_index in self._places(self.store.owners.get(name, ())))

    def _owners(self, name: str) -> frozenset[int]:
        return self._places(self.store.owners.get(self._first_name.get(name, name), (self.num_stages - 1,)))

    def _places(self, stage_indices: Iterable[int]) -> frozenset[int]:
        """Where stages run: they go round the ranks of the pipeline."""
        return frozenset(stage_index % self.layout.num_stages for stage_index in stage_indices)

    # ----- placement

    def place(self) -> None:
        """Turn the parameters of other stages into placeholders without storage."""
        if self.num_stages == 1:
            return
        release_parameters(
            self.module,
            self.owned_parameters(self.stage_index),
            lambda name: f"stage {self.parameter_owner(name)} of the pipeline",
            self.device,
        )
        self.store.clear()

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Give placeholders their storage back, in place."""
        self.store.clear()  # a trace's graph would keep hold of them
        fill_parameters(self.module, values)

    # ----- running

    @property
    def is_last_stage(self) -> bool:
        """Whether this process runs the end of the step."""
        return self._is_local or self.stage_index == self.layout.num_stages - 1

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """Bytes that this process has sent to the next rank of its pipeline so far, and to the previous one."""
        return (0, 0) if self._transport is None else self._transport.sent_bytes

    @property
    def tracing(self) -> bool:
        """Whether a trace runs on shapes: nothing may be logged then."""
        return self.store.tracing

    def value_weight(self, tensor: Tensor) -> Tensor | None:
        """Give the number of terms of a mean loss that the running micro-batch computed, where it is known."""
        terms = terms_of(tensor)
        return terms if isinstance(terms, Tensor) else None

    def owned_call(self, function: Callable[..., None], *tensors: Tensor) -> None:
        """Run `function(*tensors)` on the one stage that owns the tensors; on the last stage where none is computed."""
        mode = current()
        if mode is None:
            function(*tensors)
        else:
            mode.counted_call(lambda: None if self.tracing else function(*tensors), tensors)

    def run(
        self,
        step_name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        training: bool,
        step: int,
        loss_scale: float = 1.0,
        before_last_backward: Callable[[], None] | None = None,
    ) -> StepOutcome:
        """Run the schedule for one batch. Global random state is afterwards as before.

        Args:
            step_name: the method of the module, `training_step` say.
            args: what Lightning passes to it; the batch is the first.
            kwargs: keyword arguments alike.
            training: whether losses are back-propagated.
            step: number of the step, which keys its random draws.
            loss_scale: what weighted losses are multiplied by; equal in all replicas. With about one over the total
                weight, hooks on gradients see them as large as they are on one device.
            before_last_backward: called once, when this process turns to the last action that gives parameter
                gradients; never where none does.
        """
        call = StepCall(args=args, kwargs=kwargs, step=step, loss_scale=loss_scale)
        (outcome,) = self.run_window(step_name, [call], training=training, before_last_backward=before_last_backward)
        return outcome

    def run_window(
        self,
        step_name: str,
        calls: Sequence[StepCall],
        *,
        training: bool,
        before_last_backward: Callable[[], None] | None = None,
        before_unit: Callable[[int], None] | None = None,
        after_batch: Callable[[StepOutcome], None] | None = None,
    ) -> list[StepOutcome]:
        """Run one schedule for several batches, as one longer pipeline. Gives the outcome of each.

        Args:
            step_name: the method of the module.
            calls: what it is called with for each batch.
            training: whether losses are back-propagated.
            before_last_backward: as of `run`.
            before_unit: called with the position of a batch before each forward of its units.
            after_batch: called with the outcome of each batch but the last, when all its gradients are there and none
                of the next one.

        Raises:
            PlanError: `after_batch` is wanted, but the schedule's backwards of one batch run among those of the next.
        """
        assert len(calls) == 1 or self.loss_over != "batch", "a loss over the batch keeps all activations of a window"
        batches = [(call.args, call.kwargs) for call in calls]
        splits = [self._split_of(step_name, *batch) for batch in batches]
        of_batches = [
            microbatch_sizes(split.batch_size(batch), self.num_microbatches, min_samples=self.min_samples)
            for split, batch in zip(splits, batches, strict=True)
        ]
        num_microbatches = [len(sizes) for sizes in of_batches]
        all_sizes = [size for sizes in of_batches for size in sizes]
        is_over_batch = self.loss_over == "batch" and len(all_sizes) > 1
        spec: str | ScheduleSpec = "forward_only"
        if training:
            # A batch behind another may have a single sample anywhere.
            to_halve = all_sizes if len(calls) == 1 or min(all_sizes) > 1 else [1] * len(all_sizes)
            spec = "gpipe" if is_over_batch else halve_no_single_samples(self._schedule, to_halve)
            self._refuse_sliced_batch_norm(spec)
        schedule = self._schedule_of(spec, len(all_sizes))
        units = units_by_batch(units_of(schedule), num_microbatches)
        outcomes, parts = [], []
        for call, batch, split, own_units, sizes in zip(calls, batches, splits, units, of_batches, strict=True):
            own_sizes = unit_sizes(own_units, sizes)
            outcome = StepOutcome(sizes=own_sizes, is_over_batch=is_over_batch, loss_scale=call.loss_scale)
            if len(outcome.output_sizes) == 1 and self.layout.num_replicas == 1:
                outcome.loss_scale = None
            outcomes.append(outcome)
            parts.append(split.split(batch, own_sizes))

        def stage_step(stage_index: int, of_batches: list[list[Any]]) -> StageForward:
            if is_over_batch and stage_index == self.num_stages - 1:
                return WholeBatchLastStage(
                    self, step_name, units[0], of_batches[0], outcomes[0], training, calls[0].step, batch=batches[0]
                )
            steps, num_before = [], 0
            for call, own_units, own, outcome in zip(calls, units, of_batches, outcomes, strict=True):
                step = StageStep(self, stage_index, step_name, own_units, own, outcome, training, call.step)
                step.num_units_before = num_before
                steps.append(step)
                num_before += len(own_units)
            return steps[0] if len(steps) == 1 else WindowStage(steps, [len(own) for own in units], before_unit)

        stage_indices = range(self.num_stages) if self._is_local else schedule.stages_of(self.stage_index)
        statistics = (
            self.batch_norm.training_step(self.store.owners, stage_indices, lambda: self.tracing)
            if training
            else contextlib.nullcontext()
        )
        observer = self.observer
        if after_batch is not None and len(calls) > 1:
            assert len(self._executors) == 1, "stages that share a process do not end a batch together"
            observer = BatchEnds(
                schedule, self.stage_index, num_microbatches, lambda position: after_batch(outcomes[position]), observer
            )
        with preserved_random_state(), statistics:
            for executor in self._executors:
                executor.observer = observer
            # A stage may write into its batch; others in this process must not see it.
            is_shared = len(stage_indices) > 1
            own_steps = {
                index: stage_step(index, tree.map_tensors(Tensor.clone, parts) if is_shared else parts)
                for index in stage_indices
            }
            if self._is_local:
                self._local.run(list(own_steps.values()), schedule, before_last_backward=before_last_backward)
            else:
                self._executor.run(own_steps, schedule, before_last_backward=before_last_backward)
        return outcomes

    def _schedule_of(self, spec: str | ScheduleSpec, num_microbatches: int) -> Schedule:
        """Give one and the same object for equal arguments: the executor knows it again."""
        key = spec, num_microbatches
        if key not in self._schedules:
            if isinstance(spec, str) and self.num_stages > self.layout.num_stages:
                planned = self._make_schedule(self._schedule, self.num_stages, num_microbatches)
                self._schedules[key] = forwards_first(planned, spec, with_backwards=spec != "forward_only")
            else:
                self._schedules[key] = self._make_schedule(spec, self.num_stages, num_microbatches)
        return self._schedules[key]

    def _refuse_sliced_batch_norm(self, spec: str | ScheduleSpec) -> None:
        if isinstance(spec, ScheduleSpec) and spec.is_sliced and self.min_samples > 1:
            raise PlanError(
                f"The plan's schedule ({spec}) runs halves of micro-batches, but the module has batch normalization in "
                "training mode: each half would be normalized by statistics of its own. Plan without slices (another "
                "schedule=), or freeze the normalization with eval()."
            )

    def _split_of(self, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchSplit:
        key = (step_name, structure_of((args[:1], kwargs)), self.num_microbatches > 1)
        split = self._splits.get(key)
        if split is None:
            split = self._splits[key] = self._find_split(step_name, args, kwargs)
        return split

    def _find_split(self, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchSplit:
        if self.num_microbatches == 1:
            return assume_split((args[:1], kwargs))
        whole, _ = self.store.trace(step_name, args, kwargs)

        def probe(batch: Any) -> frozenset[int] | None:
            try:
                with warnings.catch_warnings():  # of shapes that are tried only
                    warnings.simplefilter("ignore")
                    trace, _ = self.store.trace(step_name, (*batch[0], *args[1:]), batch[1])
            except CaptureError:
                return None
            if _kind_of_end(trace) != _kind_of_end(whole):
                return None
            # Where the whole batch's trace ended early, an error of shapes may look alike: it comes at another place.
            same_place = whole.end_reason is None or len(trace.operations) == len(whole.operations)
            return trace.inputs_read if same_place else None

        return find_split((args[:1], kwargs), probe, given=self._split_batch, trusts_sizes=self.loss_over == "batch")


def _first_names(module: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def _kind_of_end(trace: StepTrace) -> str | None:
    return None if trace.end_reason is None else trace.end_reason.split()[0]
