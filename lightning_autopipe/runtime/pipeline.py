"""A LightningModule as a pipeline: splits a batch, replays the step's stages, runs the schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autopipe.capture.interception import current
from lightning_autopipe.capture.replay import terms_of
from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.profile import ModelProfile
from lightning_autopipe.core.schedule import Schedule
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.runtime.batch_splitter import BatchSplitter
from lightning_autopipe.runtime.deferred_batch_norm import BatchNormStatistics
from lightning_autopipe.runtime.executor import ExecutionObserver
from lightning_autopipe.runtime.ownership import Ownership
from lightning_autopipe.runtime.placement import fill_parameters, release_parameters
from lightning_autopipe.runtime.planned_schedule import PlannedSchedule, refuse_sliced_batch_norm
from lightning_autopipe.runtime.planned_step import PlannedStep
from lightning_autopipe.runtime.stage_runner import StageRunner
from lightning_autopipe.runtime.stage_step import StepOutcome
from lightning_autopipe.runtime.step_capture import CaptureStore, module_fingerprint
from lightning_autopipe.runtime.synchronized_batch_norm import BatchNormSynchronizer, refuse_unlike_replicas
from lightning_autopipe.runtime.transport import Transport
from lightning_autopipe.runtime.window import StepCall
from lightning_autopipe.runtime.window_run import WindowRun


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
        self.seed = seed
        self.device = device or torch.device("cpu")
        self.microbatch_index = 0
        """Number of the unit (micro-batch, or slice of one) that runs, in the order of the batch."""
        self.module_fingerprint = module_fingerprint(module)
        self.loss_over = loss_over
        self.view_orders: dict[Hashable, bool] = {}  # of steps that pass several views of each sample at once
        self.batch_norm = batch_norm or BatchNormStatistics(module)
        self.synchronizer: BatchNormSynchronizer | None = None
        """Of batch normalization over replicas; None: each replica by itself, as where planning measures and proves."""
        self.store = CaptureStore(module, self.device, is_cut=layout.num_stages > 1)
        self.splitter = BatchSplitter(
            self.store, num_microbatches=num_microbatches, given=split_batch, trusts_sizes=loss_over == "batch"
        )
        self.planned_step = PlannedStep(self.store, self.splitter, is_over_batch=loss_over == "batch")
        self.ownership = Ownership(self.store, layout.num_stages)
        self.schedule = PlannedSchedule(schedule, num_ranks=layout.num_stages, make_schedule=make_schedule)
        self.runner = StageRunner(num_ranks=layout.num_stages, stage_index=self.stage_index, transport=transport)
        self.observer: ExecutionObserver | None = None
        """Told of every action that this process runs, of training and evaluation alike; None: no cost."""

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
        least = None if self.num_stages == 1 else self.num_stages if min_stages is None else min_stages
        profile = self.planned_step.profile(step_name, args, kwargs, cut_after=cut_after, min_stages=least)
        return replace(profile, module_fingerprint=self.module_fingerprint)

    @property
    def num_microbatches(self) -> int:
        """Of this replica's batch."""
        return self.splitter.num_microbatches

    def silent(self) -> contextlib.AbstractContextManager[None]:
        """Give a context in which `tracing` is true, for runs of the step's parts that must not count."""
        return self.store.silent()

    def set_plan(self, plan: PipelinePlan) -> None:
        """Cut the profiled step as the plan says.

        Raises:
            PlanError: the plan is for another module, another step or another layout, or it slices micro-batches of a
                module with batch normalization in training, or gives replicas unlike numbers of them where it is
                synchronized.
            CaptureError: the step keeps state that a stage of this plan would not see.
        """
        plan.require_module(self.module_fingerprint)
        plan.require_world(self.layout.world_size)
        if plan.layout != self.layout:
            raise PlanError(f"The plan's layout is {plan.layout}, but the pipeline runs as {self.layout}.")
        refuse_sliced_batch_norm(plan.schedule, self.splitter.min_samples)
        refuse_unlike_replicas(plan, self.module)
        self.num_stages = self.layout.num_stages * plan.schedule.stages_per_rank
        self.runner.set_num_stages(self.num_stages)
        self.planned_step.cut([plan.layers[index].name for index in plan.partition.cut_points])
        self.schedule.spec = plan.schedule
        self.splitter.num_microbatches = plan.microbatches_of(self.replica_index)

    def in_process(self, *, is_cut: bool = True, num_microbatches: int = 1) -> Pipeline:
        """Give a pipeline that runs this one's stages, or the step uncut, in this process; the module must be whole."""
        twin = Pipeline(
            self.module,
            layout=ParallelLayout(num_stages=self.num_stages if is_cut else 1),
            global_rank=0,
            transport=None,
            num_microbatches=num_microbatches,
            make_schedule=self.schedule.make_schedule,
            seed=self.seed,
            device=self.device,
            split_batch=self.splitter.given,
            loss_over=self.loss_over,
        )
        twin.store.share_plan(self.store, is_cut=is_cut)
        return twin

    # ----- placement

    def place(self, copies: Sequence[nn.Module] = ()) -> None:
        """Turn the parameters of other stages into placeholders without storage, those of the module's copies too."""
        if self.num_stages == 1:
            return
        for module in (self.module, *copies):
            release_parameters(
                module,
                self.ownership.owned_parameters(self.stage_index),
                lambda name: f"stage {self.ownership.parameter_owner(name)} of the pipeline",
                self.device,
            )
        self.store.clear()

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Give placeholders their storage back, in place."""
        self.store.clear()  # a trace's graph would keep hold of them
        fill_parameters(self.module, values)

    # ----- running

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """Bytes that this process has sent to the next rank of its pipeline so far, and to the previous one."""
        return self.runner.sent_bytes

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
        window = WindowRun(self, step_name, calls, training=training)
        return window.run(before_last_backward=before_last_backward, before_unit=before_unit, after_batch=after_batch)
