"""One LightningModule as a pipeline, from the first batch to the end of the last run."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console

from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.profile import ModelProfile
from lightning_autopipe.runtime.process_groups import ProcessGroups
from lightning_autopipe.runtime.synchronized_batch_norm import BatchNormSynchronizer, synchronized_layers
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.configured_model import ConfiguredModel
from lightning_autopipe.strategy.environment import statistics_group
from lightning_autopipe.strategy.options import StrategyOptions
from lightning_autopipe.strategy.placed_module import PlacedModule
from lightning_autopipe.strategy.planning import make_pipeline, plan_pipeline
from lightning_autopipe.strategy.rank_gradients import gradients_of_rank
from lightning_autopipe.strategy.running_step import RunningStep
from lightning_autopipe.strategy.step_exchange import exchange_prediction
from lightning_autopipe.strategy.training_steps import TrainingSteps
from lightning_autopipe.visualization import plan_table


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
        configured: What of the module has no values yet.
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
        configured: ConfiguredModel,
    ) -> None:
        self.module = module
        self.options = options
        self.communicator = communicator
        self.device = device
        self.is_ready = False
        self.planned_step: str | None = None
        self.current_plan: PipelinePlan | None = None
        self.current_profile: ModelProfile | None = None
        self._given_plan = plan
        self._groups = groups
        self.pipeline = make_pipeline(module, options, plan, communicator, groups, device)
        is_shared = options.shards_optimizer and communicator.layout.num_replicas > 1
        self.placed_module = PlacedModule(
            module,
            self.pipeline,
            communicator,
            device,
            configured,
            sharing_group=groups.stage if is_shared and groups is not None else None,
        )
        self.running_step = RunningStep(module, self.pipeline, communicator, device)
        self.training = TrainingSteps(
            self.pipeline, self.running_step, communicator, device, merges_accumulation=options.merges_accumulation
        )

    def plan(self, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plans from a step and one replica's batch. Collective over all ranks."""
        args, kwargs = self.communicator.broadcast_in_world((args, kwargs))
        with self.running_step.planning(step_name):
            self.current_plan, self.current_profile = plan_pipeline(
                self.pipeline,
                self.options,
                self._given_plan,
                self.communicator,
                step_name=step_name,
                args=args,
                kwargs=kwargs,
                optimizers=[whole.optimizer for whole in self.placed_module.optimizers],
            )
            batch_size = self.pipeline.splitter.batch_size(step_name, args, kwargs)
        self.planned_step = step_name
        shares = self.current_plan.replica_microbatches or (1,) * self.communicator.layout.num_replicas
        self.training.note_total_weight(batch_size * sum(shares) / shares[0])  # the batch is replica 0's
        self.running_step.share_step_metrics()
        if self.communicator.global_rank == 0:
            # As text in notebooks, too: what a process that was forked from one displays is lost.
            width = None if Console().is_terminal else 120
            Console(width=width, force_jupyter=False).print(plan_table(self.current_plan))

    def make_ready(self) -> None:
        """Leaves this rank its own part of the planned module, on its device. Collective over all ranks."""
        self.placed_module.place()
        self.training.gradients = gradients_of_rank(
            self.module,
            self.pipeline,
            self.communicator,
            self._groups,
        )
        self.pipeline.synchronizer = self._synchronizer()
        self.is_ready = True

    def _synchronizer(self) -> BatchNormSynchronizer | None:
        """Of batch normalization over replicas, not before all is planned, measured and proven."""
        groups = self._groups
        if groups is None or groups.layout.num_replicas == 1 or not synchronized_layers(self.module):
            return None
        return BatchNormSynchronizer(self.module, statistics_group(groups))

    def run_evaluation_step(self, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, step: int) -> Any:
        """Runs ``validation_step`` or ``test_step`` on one batch."""
        with self.running_step.recording(step_name), self.running_step.counting():
            outcome = self.pipeline.run(step_name, args, kwargs, training=False, step=step)
        return self.running_step.exchange(outcome, training=False).output

    def run_prediction_step(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, step: int, whole: bool) -> Any:
        """Runs ``predict_step`` on one batch."""
        with self.running_step.recording("predict_step"), self.running_step.attributes.watching():
            outcome = self.pipeline.run("predict_step", args, kwargs, training=False, step=step)
        return exchange_prediction(outcome, self.communicator, whole=whole)

    def end_run(self) -> None:
        """Moves everything to host memory; the next run's first batch makes ready again."""
        self.training.forget_stored()
        self.placed_module.leave_device()
        self.is_ready = False
