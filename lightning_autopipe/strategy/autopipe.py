"""The strategy: what Lightning calls, handed to the parts that do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.seed import _set_rng_states
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn

from lightning_autopipe.core.cluster import ClusterTopology
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.runtime.window import StepCall
from lightning_autopipe.strategy.checkpoint_strategy import CheckpointStrategy
from lightning_autopipe.strategy.loader import PipelineLoader
from lightning_autopipe.strategy.options import DEFAULT_TIMEOUT_S, Auto, PartitionRule, StrategyOptions
from lightning_autopipe.strategy.planning import first_training_arguments, in_training_mode, random_state
from lightning_autopipe.strategy.predictions import silence_writers, unsilence_writers
from lightning_autopipe.strategy.refusals import refuse_other_namespace
from lightning_autopipe.strategy.replica_shares import dealt
from lightning_autopipe.strategy.training_steps import TRAINING_STEP
from lightning_autopipe.strategy.watching import make_watch


class AutoPipeStrategy(CheckpointStrategy):
    """Trains an unchanged LightningModule as a pipeline of stages, one a process: ``Trainer(strategy="autopipe_h")``.

    Every option takes ``"auto"`` or its default; a value whose feature is still to come is refused.

    Args:
        num_stages: Stages of each pipeline; ``"auto"`` is what trains most samples per second and fits the memory.
        num_replicas: Pipelines side by side, each on its own share of the data, with batches of its own as under DDP;
            ``"auto"`` is searched with ``num_stages``, or what a given ``num_stages`` leaves.
        num_microbatches: Micro-batches per replica and step; ``"auto"`` is searched. More of them idle less; fewer are
            larger.
        schedule: ``"1f1b"`` keeps few micro-batches alive at once, ``"gpipe"`` all of them; ``"sliced_1f1b"`` runs the
            first and last ones in halves, ``"interleaved_1f1b"`` several stages a process, ``"zero_bubble"`` gradients
            of parameters where there are gaps; ``"auto"`` is the fastest one where numbers are searched, else 1F1B.
        partition: ``"auto"`` is the shortest step by what layers cost, ``"uniform"`` equally many layers on each stage,
            ``"parameters"`` parameters as even as possible; or the layer index at which each later stage begins.
        profile: ``"measured"``: layers cost the time they take on this device; ``"flops"``: their floating-point
            operations; ``"auto"`` measures before a fit on several stages.
        cut_after: Paths of the modules after which stages end, such as ``["net.h.5"]`` for two stages.
        plan: A plan, or the JSON file of one, to use instead of making one.
        cluster: Devices and links that a fit is planned for: a topology, the file of one, or an example's name; None or
            ``"auto"`` is what hosts tell of themselves, and what is measured between servers; ``"measure"`` measures on
            one server, too.
        split_batch: By leaf of the batch (keys joined by dots) the dimension that counts samples, or None for a leaf
            that stays whole: only for leaves whose meaning tracing cannot tell.
        loss_over: ``"microbatch"`` for a loss that is a mean over samples; ``"batch"`` for one that compares them
            (contrastive): what follows the layers then runs once on the whole batch, under GPipe.
        verify: ``"auto"`` proves on one micro-batch that the stages give the numbers of the uncut step, where memory
            allows it; True in any case; False not.
        gather_after_fit: After ``fit`` the module on global rank 0 is whole; False saves its memory.
        deferred_batch_norm: True updates the running statistics of batch normalization once per step, by the whole
            batch over all micro-batches and replicas.
        merge_accumulation: True runs the batches of an accumulation window as one longer pipeline, when the last of
            them is there. ``training_step`` of those before it then gives a NaN, which is neither logged nor
            propagated, and ``backward`` does nothing.
        shard_optimizer: True lets each replica of a stage keep a share of its optimizer state (ZeRO-1), with the same
            numbers; parameters go round after each step.
        checkpoint_format: ``"consolidated"`` is one file in the format of a plain module; ``"sharded"`` a folder
            that all ranks write at once (``autopipe consolidate`` makes a file of it); ``"sharded_async"`` writes it
            while training goes on.
        recompute: ``"auto"`` or False; True is still to come.
        trace: A folder for what steps 5 to 7 of a fit are measured to do, beside what was predicted, as a trace to open
            in Perfetto and a picture; figures of all steps then go to the Trainer's loggers.
        replan: ``"warn"`` tells where stages take other times than planned for long, with what a new plan would gain;
            False does not.
        start_method: How Lightning starts the processes where no cluster's launcher does: ``"popen"`` runs the script
            again; ``"fork"``, ``"spawn"`` and ``"forkserver"`` start them from this process; ``"auto"`` is ``"fork"``
            in notebooks, else ``"popen"``.
        process_group_backend: ``"gloo"`` or ``"nccl"``; None is NCCL on CUDA devices, else gloo.
        timeout: How long a rank waits for another one before the run ends with an error; a timedelta, or seconds.
        accelerator: As in every Lightning strategy, and so the remaining ones.
        parallel_devices: This machine's devices.
        cluster_environment: Who starts the processes.
        checkpoint_io: How checkpoints are written.
        precision_plugin: How numbers are represented.

    Raises:
        ConfigurationError: a value is not allowed, still to come, or contradicts another one.
        PlanError: the plan's file is not valid.
    """

    strategy_name = "autopipe_h"

    def __init__(
        self,
        *,
        num_stages: int | Auto = "auto",
        num_replicas: int | Auto = "auto",
        num_microbatches: int | Auto = "auto",
        schedule: str = "auto",
        partition: PartitionRule | Partition | Sequence[int] = "auto",
        profile: str = "auto",
        cut_after: Sequence[str] | None = None,
        plan: str | Path | PipelinePlan | None = None,  # Path, not PathLike: jsonargparse would read the file
        cluster: str | Path | ClusterTopology | None = None,
        split_batch: Mapping[str, int | None] | None = None,
        loss_over: str = "microbatch",
        verify: bool | Auto = "auto",
        gather_after_fit: bool = True,
        deferred_batch_norm: bool | Auto = False,
        merge_accumulation: bool | Auto = False,
        shard_optimizer: bool | Auto = False,
        checkpoint_format: str = "consolidated",
        recompute: bool | Auto = "auto",
        trace: str | Path | None = None,
        replan: str | bool = "warn",
        start_method: str = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta | float = DEFAULT_TIMEOUT_S,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        options = StrategyOptions(
            num_stages=num_stages,
            num_replicas=num_replicas,
            num_microbatches=num_microbatches,
            schedule=schedule,
            partition=partition,
            profile=profile,
            cut_after=cut_after,
            plan=plan,
            cluster=cluster,
            split_batch=split_batch,
            loss_over=loss_over,
            verify=verify,
            gather_after_fit=gather_after_fit,
            deferred_batch_norm=deferred_batch_norm,
            merge_accumulation=merge_accumulation,
            shard_optimizer=shard_optimizer,
            checkpoint_format=checkpoint_format,
            recompute=recompute,
            trace=trace,
            replan=replan,
            start_method=start_method,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        for name, component, kind in (
            ("accelerator", accelerator, pl.accelerators.Accelerator),
            ("cluster_environment", cluster_environment, ClusterEnvironment),
            ("checkpoint_io", checkpoint_io, CheckpointIO),
            ("precision_plugin", precision_plugin, Precision),
        ):
            refuse_other_namespace(name, component, kind)
        super().__init__(
            options,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._random_state_after_peek: list[dict[str, Any]] = []
        self._is_first_step = False

    def __repr__(self) -> str:
        # Lightning shows it where the Trainer of its other name is given this strategy.
        return (
            f"<{type(self).__name__} for {pl.__name__}.Trainer: import it from lightning_autopipe.strategy for "
            "lightning.pytorch, from lightning_autopipe.pytorch_lightning for pytorch_lightning>"
        )

    # Data ---------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        # By replica and not by rank: the samples' augmentation must not depend on the number of stages.
        _auto_add_worker_init_fn(dataloader, self.communicator.replica_index)
        is_predicting = self.trainer.state.fn == TrainerFn.PREDICTING
        plan = self.plan_to_run
        if plan is not None and plan.has_unlike_replicas and self.trainer.training:
            dataloader = dealt(
                dataloader,
                replica_microbatches=plan.replica_microbatches,
                replica_index=self.communicator.replica_index,
            )
        loader = PipelineLoader(
            dataloader,
            self.communicator,
            replicas_end_together=not is_predicting,
            remember_first=self._session is None or not self._session.is_ready,
            before_iteration=self.resume_random_state,
        )
        self._loaders.append(loader)
        return loader

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        with self.naming_first_error():
            if self.communicator.is_first_stage:
                batch = super().batch_to_device(batch, device, dataloader_idx)
            return self.communicator.broadcast_in_pipeline(batch, stage_index=0)

    # Steps --------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._make_ready(TRAINING_STEP, args, kwargs)
        session = self.session
        call = StepCall(
            args=args,
            kwargs=kwargs,
            step=self.trainer.fit_loop.epoch_loop.total_batch_idx,
            finish_loss=self.finish_loss,
        )
        if self._is_accumulating and session.training.can_store:
            return session.training.store(call)
        with self.naming_first_error(), self.precision_plugin.train_step_context():
            self._watch_step()
            return session.training.run(call, reduce=not self._is_accumulating)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._make_ready("validation_step", args, kwargs)
        with self.naming_first_error(), self.precision_plugin.val_step_context():
            return self.session.run_evaluation_step("validation_step", args, kwargs, step=self._evaluated_batches())

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._make_ready("test_step", args, kwargs)
        with self.naming_first_error(), self.precision_plugin.test_step_context():
            return self.session.run_evaluation_step("test_step", args, kwargs, step=self._evaluated_batches())

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._make_ready("predict_step", args, kwargs)
        with self.naming_first_error(), self.precision_plugin.predict_step_context():
            return self.session.run_prediction_step(
                args,
                kwargs,
                step=self.trainer.predict_loop.batch_progress.total.ready,
                whole=self.trainer.predict_loop.return_predictions,
            )

    def _evaluated_batches(self) -> int:
        loop: Any = self.trainer._active_loop
        ready: int = loop.batch_progress.total.ready
        return ready

    def _make_ready(self, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plans and places at the first batch of a run."""
        session = self.session
        if session.is_ready:
            return
        with self.naming_first_error():
            if session.planned_step is None:
                self._plan_from(step_name, args, kwargs)
            session.make_ready()
        for loader in self._loaders:
            loader.forget_first()

    def _plan_from(self, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trainer = self.trainer
        if trainer.state.fn == TrainerFn.FITTING and step_name != TRAINING_STEP:
            with in_training_mode(trainer):
                with random_state(self._random_state_at_start, self._random_state_after_peek):
                    first = first_training_arguments(trainer)
                if first is not None:
                    with self.precision_plugin.train_step_context():
                        self.session.plan(TRAINING_STEP, first, {})
                    return
        with self.precision_plugin.forward_context():
            self.session.plan(step_name, args, kwargs)

    def _watch_step(self) -> None:
        session = self.session
        if self._is_first_step:
            self._is_first_step = False
            session.training.watch = make_watch(self.trainer, session, self.options, self._planned_cluster)
        if session.training.watch is not None:
            session.training.watch.begin_step()
            session.pipeline.observer = session.training.watch.recorder

    # Hooks --------------------------------------------------------------------

    def on_train_start(self) -> None:
        self._is_first_step = True
        if self._random_state_after_peek:
            _set_rng_states(self._random_state_after_peek.pop())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._resumed_random_state = None
        if batch_idx == 0:
            self.session.training.forget_stored()  # of an epoch that was ended in the middle of a window
        if self.world_size == 1:
            self._follow_signals()  # several processes do so before they read the batch

    def on_train_end(self) -> None:
        watch = self.session.training.watch
        if watch is not None:
            with self.naming_first_error():
                watch.end()

    def on_validation_start(self) -> None:
        self._sync_buffers()

    def on_test_start(self) -> None:
        self._sync_buffers()

    def on_predict_start(self) -> None:
        self._sync_buffers()
        if not self.communicator.is_last_stage:
            silence_writers(self.callbacks)

    def on_predict_end(self) -> None:
        unsilence_writers(self.callbacks)

    def _sync_buffers(self) -> None:
        if self.session.planned_step is not None:
            self.session.placed_module.sync_written_buffers()
