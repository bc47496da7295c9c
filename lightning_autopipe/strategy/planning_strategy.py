"""The part of the strategy that decides what is run: a given plan, one that a search finds, or the defaults."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_autopipe.core.cluster import ClusterTopology
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.profile import ModelProfile
from lightning_autopipe.runtime.synchronized_batch_norm import first_in_training
from lightning_autopipe.strategy.cluster_of_run import MEASURE, discovered_topology, given_topology, links_measured
from lightning_autopipe.strategy.configured_model import ConfiguredModel
from lightning_autopipe.strategy.layout_search import (
    leaves_something_open,
    leaving_no_trace,
    search_plan,
    training_sample,
)
from lightning_autopipe.strategy.lightning_patches import LightningPatches
from lightning_autopipe.strategy.loader import PipelineLoader
from lightning_autopipe.strategy.options import StrategyOptions
from lightning_autopipe.strategy.out_of_memory import explained
from lightning_autopipe.strategy.planning import in_training_mode
from lightning_autopipe.strategy.process_strategy import ProcessStrategy
from lightning_autopipe.strategy.replica_limit import can_be_dealt, shareable_counts
from lightning_autopipe.strategy.session import PipelineSession


class PlanningStrategy(ProcessStrategy):
    """The session of the module at hand, and the plan that it runs by.

    A search comes before anything is made for one layout: it reads a batch ahead, traces and measures the step on it,
    and leaves no trace; what it finds is then run like a plan that the user gave.
    """

    def __init__(self, options: StrategyOptions, **components: Any) -> None:
        super().__init__(options, **components)
        self._session: PipelineSession | None = None
        self._configured = ConfiguredModel()
        self._loaders: list[PipelineLoader] = []
        self._found_profile: ModelProfile | None = None
        self._planned_cluster: ClusterTopology | None = None
        """What the plan was searched for."""
        self._workers_plan: PipelinePlan | None = None
        """Where this process has started others, what they ran by."""

    @property
    def session(self) -> PipelineSession:
        """The module as a pipeline."""
        assert self._session is not None, "setup comes first"
        return self._session

    @property
    def plan(self) -> PipelinePlan | None:
        """The plan that the module runs by; None before the first batch. Save it to use it again."""
        return self._workers_plan if self._session is None else self._session.current_plan

    @property
    def profile(self) -> ModelProfile | None:
        """What the module's layers cost, as the last planning knew it; None before the first batch.

        Save it to plan for other machines.
        """
        if self._found_profile is not None:
            return self._found_profile
        return None if self._session is None else self._session.current_profile

    def note_workers_plan(self, plan: PipelinePlan | None, profile: ModelProfile | None) -> None:
        """Takes over what processes that this one has started found; they have ended."""
        self._workers_plan, self._found_profile = plan, profile

    @property
    def trainer(self) -> pl.Trainer:
        """Whose strategy this is."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def callbacks(self) -> list[pl.Callback]:
        """The trainer's."""
        trainer: Any = self.trainer
        return trainer.callbacks  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def naming_first_error(self) -> Iterator[None]:
        """A context in which an error that another rank's failure has caused is raised as that failure.

        Lack of memory is raised with what was planned, and what to change.
        """
        stage_index = self.layout.stage_index(self.global_rank)
        with (
            super().naming_first_error(),
            explained(lambda: self.plan, self.global_rank, stage_index, self.root_device),
        ):
            yield

    @property
    def is_in_step(self) -> bool:
        return self._session is not None and self._session.running_step.is_in_step

    @property
    def is_silent(self) -> bool:
        return self._session is not None and self._session.running_step.is_silent

    def _new_session(self, module: pl.LightningModule) -> PipelineSession:
        return PipelineSession(
            module,
            options=self.options,
            plan=self.plan_to_run,
            communicator=self.communicator,
            groups=self._groups,
            device=self.root_device,
            configured=self._configured,
        )

    def _choose_plan(self, module: pl.LightningModule) -> None:
        """Checks the given plan against the devices, or searches one for a fit. Collective over all ranks."""
        given = self._given_plan
        if given is not None:
            if given.devices:
                given.require_devices(discovered_topology(self.communicator, self.root_device).devices)
            return
        plan: PipelinePlan | None = None
        is_open = leaves_something_open(self.options, world_size=self.world_size, num_nodes=self.num_nodes)
        if is_open and self.trainer.state.fn == TrainerFn.FITTING:
            with self.naming_first_error():
                plan, problem = self._search(module)
            if problem and self.is_global_zero:
                rank_zero_warn(
                    f"layout and micro-batches could not be searched, defaults are taken: {problem.rstrip('.')}. "
                    "Set num_stages, num_replicas and num_microbatches to choose them without a search"
                )
        self._run_by(plan)

    def _search(self, module: pl.LightningModule) -> tuple[PipelinePlan | None, str]:
        """A plan from a batch that is read ahead, and why there is none. Afterwards all is as before."""
        trainer, communicator = self.trainer, self.communicator
        devices = discovered_topology(communicator, self.root_device)
        topology = self._topology(devices)
        self._session = self._new_session(module)
        patches = LightningPatches(trainer, communicator)
        patches.install()
        try:
            with leaving_no_trace(trainer), in_training_mode(trainer):
                args = training_sample(trainer)
                if args is None:
                    return None, "the training data cannot be read ahead: they are a stream, or there are none"
                counts = None
                loaders = trainer.fit_loop._combined_loader
                assert loaders is not None
                may_inject = patches.used_distributed_sampler
                if self.options.num_stages == "auto" and self.options.num_replicas == "auto":
                    counts = shareable_counts(trainer, loaders, may_inject=may_inject)
                may_be_unlike = (
                    self.options.num_microbatches == "auto"
                    and self.options.loss_over != "batch"
                    and first_in_training(module) is None
                )
                with self.precision_plugin.train_step_context():
                    plan, problem = search_plan(
                        self._session,
                        args,
                        topology,
                        devices,
                        possible_replicas=counts,
                        equal_shares=not may_be_unlike
                        or not can_be_dealt(loaders, counts or [self.layout.num_replicas], may_inject=may_inject),
                    )
                self._found_profile = None if plan is None else self._session.current_profile
                self._planned_cluster = None if plan is None else topology
                return plan, problem
        finally:
            patches.remove()
            self._loaders.clear()
            self._session = None

    def _topology(self, devices: ClusterTopology) -> ClusterTopology:
        """What a fit is planned for. Collective over all ranks."""
        cluster = self.options.cluster
        if cluster not in (None, "auto", MEASURE):
            return given_topology(cluster, self.world_size)
        if cluster == MEASURE or len(devices.servers) > 1:
            return links_measured(devices, self.communicator, self.root_device, timeout_s=self.options.timeout_s)
        return devices
