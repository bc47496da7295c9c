"""One LightningModule as a pipeline, from the first batch to the end of the last run."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from rich.console import Console
from torch import Tensor
from torch.optim import Optimizer

from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.core.errors import BatchError
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.profile import ModelProfile
from lightning_autopipe.core.timeline import StepEnd
from lightning_autopipe.runtime.gradient_reduction import GradientReducer
from lightning_autopipe.runtime.process_groups import ProcessGroups
from lightning_autopipe.runtime.stage_step import StepOutcome
from lightning_autopipe.runtime.tied_parameters import TiedParameters
from lightning_autopipe.runtime.window import StepCall
from lightning_autopipe.strategy.batch_weights import WaitingBatches
from lightning_autopipe.strategy.checkpoint import StateGatherer
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.environment import with_ties
from lightning_autopipe.strategy.gradients import GradientLedger
from lightning_autopipe.strategy.metrics import SharedMetrics
from lightning_autopipe.strategy.optimizers import WholeOptimizer
from lightning_autopipe.strategy.options import StrategyOptions
from lightning_autopipe.strategy.placement import broadcast_tensors, move_module
from lightning_autopipe.strategy.planning import make_pipeline, plan_pipeline
from lightning_autopipe.strategy.step_exchange import StepResult, exchange_prediction, exchange_step
from lightning_autopipe.strategy.step_log import StepRecorder
from lightning_autopipe.strategy.step_watch import StepWatch
from lightning_autopipe.visualization import plan_table

_log = logging.getLogger(__name__)

TRAINING_STEP = "training_step"


class PipelineSession:
    """What belongs to one module on this rank; lives from run to run (fit, validate, ...).

    A run begins with the whole module or with what an earlier run has placed, `is_ready` from its first batch on.

    Args:
        module: The user's.
        options: What the user set.
        plan: What the user gave; None makes one from the first batch.
        communicator: Groups for objects.
        groups: The runtime's groups; None where there is one process.
        device: Where this rank computes.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        options: StrategyOptions,
        plan: PipelinePlan | None,
        communicator: Communicator,
        groups: ProcessGroups | None,
        device: torch.device,
    ) -> None:
        self.module = module
        self.communicator = communicator
        self.device = device
        self.is_ready = False
        self.is_placed = False
        """Whether some rank has placeholders. Rank 0 may be whole all the same, after a fit."""
        self.planned_step: str | None = None
        self.current_plan: PipelinePlan | None = None
        self.current_profile: ModelProfile | None = None
        self.optimizers: list[WholeOptimizer] = []
        self.watch: StepWatch | None = None
        """Sees the training steps of a fit; None: nobody wants to know."""
        self._loss_scale = 1.0
        self._gradient_divisors = [1.0]
        self._weights_are_samples: bool | None = None
        """Whether losses are weighted by samples, and by nothing that the step tells; None before the first step."""
        self._stored: list[StepCall] = []
        """Batches of an accumulation window that wait for its last one."""
        self.options = options
        self._given_plan = plan
        self._groups = groups
        self._is_in_step = False
        self._is_planning = False
        self._ledger: GradientLedger | None = None
        self._ties: TiedParameters | None = None
        self._uncounted: set[int] = set()
        self.pipeline = make_pipeline(module, options, plan, communicator, groups, device)
        self.recorder = StepRecorder(
            module, self.pipeline, stage_index=communicator.stage_index, is_silent=lambda: self.is_silent
        )
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
        return self._is_planning or self.pipeline.tracing

    # Before the first step ----------------------------------------------------

    def note_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Notes what the optimizers of a fit look like on the whole module.

        Raises:
            ConfigurationError: one of them cannot work on stages.
        """
        self.optimizers = [WholeOptimizer(optimizer, self.module) for optimizer in optimizers]
        if self.is_placed:
            self._prune_optimizers()

    @contextlib.contextmanager
    def planning(self, step_name: str) -> Iterator[None]:
        """A context in which the step may be traced and its parts run, of which nothing counts."""
        self._is_planning = True
        try:
            with self._running(step_name), torch.inference_mode(False):
                yield
        finally:
            self._is_planning = False

    def plan(self, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plans from a step and one replica's batch. Collective over all ranks."""
        args, kwargs = self.communicator.broadcast_in_world((args, kwargs))
        with self.planning(step_name):
            self.current_plan, self.current_profile = plan_pipeline(
                self.pipeline,
                self.options,
                self._given_plan,
                self.communicator,
                step_name=step_name,
                args=args,
                kwargs=kwargs,
                optimizers=[whole.optimizer for whole in self.optimizers],
            )
            batch_size = self.pipeline.splitter.batch_size(step_name, args, kwargs)
        self.planned_step = step_name
        shares = self.current_plan.replica_microbatches or (1,) * self.communicator.layout.num_replicas
        self._note_total_weight(batch_size * sum(shares) / shares[0])  # the batch is replica 0's
        self._share_step_metrics()
        if self.communicator.global_rank == 0:
            Console(width=None if Console().is_terminal else 120).print(plan_table(self.current_plan))

    def _share_step_metrics(self) -> None:
        """Tells every rank which metrics are logged by step: one that has run the step for real may know of more."""
        paths = {id(submodule): path for path, submodule in self.module.named_modules()}
        known = [paths[metric] for metric in self.recorder.step_metrics if metric in paths]
        shared = self.communicator.broadcast_in_world(sorted(known))
        self.recorder.step_metrics.clear()
        self.recorder.step_metrics.update(id(self.module.get_submodule(path)) for path in shared)

    def make_ready(self) -> None:
        """Leaves this rank its own part of the planned module, on its device. Collective over all ranks."""
        with torch.inference_mode(False), torch.no_grad():
            if not self.is_placed:
                # Processes that were not seeded alike have built different modules.
                tensors = (*self.module.parameters(), *self.module.buffers())
                broadcast_tensors(tensors, self.communicator.world_group, source=0)
            self.pipeline.place()
            self.is_placed = self.communicator.layout.num_stages > 1
            move_module(self.module, self.device)
            self._prune_optimizers()
            _optimizers_to_device([whole.optimizer for whole in self.optimizers], self.device)
        self._reduce_gradients_over_ranks()
        self.is_ready = True

    def _prune_optimizers(self) -> None:
        owned = self.pipeline.ownership.owned_parameters(self.communicator.stage_index)
        for whole in self.optimizers:
            whole.prune(owned.__contains__)

    def _reduce_gradients_over_ranks(self) -> None:
        layout = self.communicator.layout
        stages_by_name = {
            name: stages for name, parameter in self.module.named_parameters() if len(stages := self._holders(name)) > 1
        }
        self._ties = None
        replicas = None
        if self._groups is not None:
            if stages_by_name:
                groups = with_ties(self._groups, stages_by_name.values(), self.options.process_group_backend)
                self._ties = TiedParameters(stages_by_name, groups)
            if layout.num_replicas > 1:
                name = f"the replicas of stage {self.communicator.stage_index}"
                replicas = GradientReducer(self._groups.stage, name=name)
        own = self.pipeline.ownership.in_order_of_use(
            {name: p for name, p in self.module.named_parameters() if not is_absent(p)}
        )
        self._uncounted = {
            id(parameter) for name, parameter in own.items() if self._ties and not self._ties.is_counted(name)
        }
        complete = self.pipeline.ownership.parameters_of_later_stages(self.pipeline.stage_index)
        self._ledger = GradientLedger(own, replicas=replicas, ties=self._ties, complete=complete)

    def _holders(self, name: str) -> tuple[int, ...]:
        stages = range(self.communicator.layout.num_stages)
        return tuple(stage for stage in stages if name in self.pipeline.ownership.owned_parameters(stage))

    def counts_in_norm(self, parameter: Tensor) -> bool:
        """Whether this stage counts a parameter in a norm over all stages: a tied one counts once."""
        return id(parameter) not in self._uncounted

    # Steps --------------------------------------------------------------------

    @contextlib.contextmanager
    def _running(self, step_name: str) -> Iterator[None]:
        fx_name = self.module._current_fx_name
        self.module._current_fx_name = step_name
        self._is_in_step = True
        try:
            with self.recorder.recording():
                yield
        finally:
            self._is_in_step = False
            self.module._current_fx_name = fx_name

    @property
    def can_store(self) -> bool:
        """Whether batches of an accumulation window can wait for its last one: a first step has told what weighs."""
        return self.options.merges_accumulation and self._weights_are_samples is not None

    @property
    def has_stored(self) -> bool:
        """Whether batches wait."""
        return bool(self._stored)

    def store(self, call: StepCall) -> Tensor:
        """Keeps a batch for the last one of its accumulation window; gives the loss that nobody may use."""
        self._stored.append(call)
        return torch.tensor(math.nan, device=self.device)

    def forget_stored(self) -> None:
        """Drops batches whose window has not come to its end, as what was accumulated is dropped."""
        self._stored = []

    def run_training_step(self, call: StepCall, *, reduce: bool, accumulated_batches: int) -> Any:
        """Runs forward and backward of one batch, and of those that were stored before it, as one pipeline.

        The gradients wait for `commit_gradients`.
        """
        assert self._ledger is not None
        calls, self._stored = [*self._stored, call], []
        # Where weights are known beforehand, the gradients of all batches can be summed as they come.
        totals = self._total_samples(calls) if len(calls) > 1 and self._weights_are_samples else None
        scales = [self._loss_scale] * len(calls) if totals is None else [1 / total for total in totals]
        calls = [replace(one, loss_scale=scale) for one, scale in zip(calls, scales, strict=True)]
        is_apart = len(calls) > 1 and totals is None
        waiting = WaitingBatches(self._ledger, self.communicator, accumulated_batches)
        with (
            self._ledger.schedule(reduce=reduce and not is_apart) as before_last_backward,
            self._running(TRAINING_STEP),
            self.metrics.step(self.recorder.step_metrics, num_batches=len(calls)),
        ):
            outcomes = self.pipeline.run_window(
                TRAINING_STEP,
                calls,
                training=True,
                before_last_backward=before_last_backward,
                before_unit=self._select_batch,
                after_batch=waiting.set_apart if is_apart else None,
            )
        results = self._exchange_window(outcomes)
        self._weights_are_samples = all(result.weights_are_samples for result in results)
        if totals is None:
            divisors = [
                outcome.gradient_divisor(result.total_weight) for outcome, result in zip(outcomes, results, strict=True)
            ]
            self._gradient_divisors = divisors[-len(waiting) - 1 :]
        else:
            self._gradient_divisors = [1.0]
            _check_samples(totals, results)
        self._note_total_weight(results[-1].total_weight)
        if not all(result.total_weight for result in results) and self.communicator.global_rank == 0:
            warnings.warn(
                "the loss of this batch has no weight in any micro-batch or replica (no target that counts, or a "
                "loss_weight of 0): its gradients are zero",
                stacklevel=2,
            )
        return results[-1].output

    def _total_samples(self, calls: Sequence[StepCall]) -> list[int]:
        """Of each batch over all replicas. Collective over replicas."""
        own = [self.pipeline.splitter.batch_size(TRAINING_STEP, call.args, call.kwargs) for call in calls]
        return [sum(sizes) for sizes in zip(*self.communicator.gather_over_replicas(own), strict=True)]

    def _select_batch(self, position: int) -> None:
        self.recorder.select(position)
        self.metrics.select(position)

    def _exchange_window(self, outcomes: Sequence[StepOutcome]) -> list[StepResult]:
        """Logs what each batch logged, in their order, as they would by themselves."""
        watch, self.watch = self.watch, None
        before = [
            self._exchange(outcome, training=True, position=position) for position, outcome in enumerate(outcomes[:-1])
        ]
        self.watch = watch
        num_samples = sum(sum(outcome.sizes) for outcome in outcomes)
        last = self._exchange(outcomes[-1], training=True, position=len(before), num_samples=num_samples)
        return [*before, last]

    def run_evaluation_step(self, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, step: int) -> Any:
        """Runs ``validation_step`` or ``test_step`` on one batch."""
        with self._running(step_name), self.metrics.step(self.recorder.step_metrics):
            outcome = self.pipeline.run(step_name, args, kwargs, training=False, step=step)
        return self._exchange(outcome, training=False).output

    def run_prediction_step(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, step: int, whole: bool) -> Any:
        """Runs ``predict_step`` on one batch."""
        with self._running("predict_step"):
            outcome = self.pipeline.run("predict_step", args, kwargs, training=False, step=step)
        return exchange_prediction(outcome, self.communicator, whole=whole)

    def commit_gradients(self, *, accumulated_batches: int, reduce: bool) -> None:
        """Adds the last training step's gradients to those of the parameters."""
        assert self._ledger is not None
        has_sums = reduce and self.communicator.layout.num_replicas > 1
        with self._timed(StepEnd.GRADIENTS) if has_sums else contextlib.nullcontext():
            divisors = [divisor * accumulated_batches for divisor in self._gradient_divisors]
            self._ledger.commit(divisors=divisors, reduce=reduce)

    def _timed(self, what: StepEnd) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.watch is None else self.watch.recorder.timed(what)

    def _note_total_weight(self, total_weight: float) -> None:
        """Scale the next losses by about what this one's gradients are divided by.

        By a power of two, which rounds nothing. All ranks know the total, so they scale alike.
        """
        if total_weight > 0:
            self._loss_scale = 2.0 ** -round(math.log2(total_weight))

    def _exchange(
        self, outcome: StepOutcome, *, training: bool, position: int = 0, num_samples: int | None = None
    ) -> StepResult:
        step_values = self.metrics.step_values(position)
        calls = self.recorder.take(position)
        for call in calls.values():
            if call.metric_attribute is not None:
                call.step_value = step_values.get(call.metric_attribute)
        watch = self.watch if training else None
        if watch is None:
            result = exchange_step(outcome, calls, self.communicator, training=training)
        else:
            watch.schedule_ended(num_samples=num_samples or sum(outcome.sizes), has_ties=self._ties is not None)
            with watch.recorder.timed(StepEnd.EXCHANGE):
                result = exchange_step(outcome, calls, self.communicator, training=training, notes=watch.notes)
            watch.take(result.notes)
            self.pipeline.observer = None  # an evaluation may be next
        self.recorder.replay(result.calls, self.device)
        return result

    # State --------------------------------------------------------------------

    @property
    def gatherer(self) -> StateGatherer:
        """Brings the stages' state to rank 0."""
        owners = {
            name: stage
            for stage in reversed(range(self.communicator.layout.num_stages))
            for name in self.pipeline.ownership.owned_buffers(stage)
        }
        return StateGatherer(
            self.module,
            self.communicator,
            parameter_owner=self.pipeline.ownership.parameter_owner,
            buffer_owner=owners.get,
        )

    def gather_on_rank_zero(self) -> None:
        """Makes the module whole on global rank 0. Collective over replica 0's pipeline."""
        if self.is_placed:
            self._fill(self.gatherer.gather_tensors())

    def gather_everywhere(self) -> None:
        """Makes the module whole on every rank. Collective over each pipeline."""
        if not self.is_placed:
            return
        self._fill(self.gatherer.gather_tensors_everywhere())
        self.is_placed = False

    def sync_written_buffers(self) -> None:
        """Gives every replica the buffers that replica 0's steps have written (running statistics)."""
        stage_index = self.communicator.stage_index
        written = self.pipeline.ownership.owned_buffers(stage_index)
        broadcast_tensors(
            [buffer for name, buffer in self.module.named_buffers() if name in written],
            self.communicator.replica_group,
            source=self.communicator.layout.global_rank(stage_index, 0),
        )

    def end_run(self) -> None:
        """Moves everything to host memory; the next run's first batch makes ready again."""
        self.forget_stored()
        move_module(self.module, torch.device("cpu"))
        _optimizers_to_device([whole.optimizer for whole in self.optimizers], torch.device("cpu"))
        self.is_ready = False

    def _fill(self, values: dict[str, Tensor]) -> None:
        # Traces hold on to placeholders, and what is in use gets a new object: the first call lets go of them.
        self.pipeline.restore({})
        gc.collect()
        self.pipeline.restore(values)
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                if name in values:
                    buffer.copy_(values[name])


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
