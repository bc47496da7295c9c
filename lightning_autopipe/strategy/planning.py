"""From the module and the first batch to a plan."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_unflatten

from lightning_autopipe.core.errors import ConfigurationError, PlanError
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.profile import ModelProfile
from lightning_autopipe.planner import make_plan, resolve_sizes
from lightning_autopipe.profiling import optimizer_state_ratio
from lightning_autopipe.profiling.sizes import half_size
from lightning_autopipe.runtime.batch_norm_moments import ReplicaMoments
from lightning_autopipe.runtime.deferred_batch_norm import BatchNormStatistics
from lightning_autopipe.runtime.pipeline import Pipeline
from lightning_autopipe.runtime.process_groups import ProcessGroups
from lightning_autopipe.schedules import get_schedule
from lightning_autopipe.schedules.interleaved import NAME as INTERLEAVED
from lightning_autopipe.schedules.sliced import NAME as SLICED
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.measuring import measured_profile
from lightning_autopipe.strategy.options import StrategyOptions
from lightning_autopipe.strategy.verification import verify_on_one_rank

NO_BATCH = object()


def make_pipeline(
    module: nn.Module,
    options: StrategyOptions,
    plan: PipelinePlan | None,
    communicator: Communicator,
    groups: ProcessGroups | None,
    device: torch.device,
) -> Pipeline:
    """The module as a pipeline that has no plan yet. Collective over all ranks: they draw from one seed.

    Args:
        module: The whole module.
        options: What the user set.
        plan: What the user gave, if anything.
        communicator: This rank's groups.
        groups: The runtime's groups; None where there is one process.
        device: Where this rank computes.
    """
    schedule = options.schedule_name if plan is None else plan.schedule.name
    if options.loss_over == "batch" and schedule not in ("auto", "gpipe"):
        raise PlanError(f"loss_over='batch' needs a plan with schedule 'gpipe'; this one has {schedule!r}")
    if options.merges_accumulation and schedule == "gpipe":
        raise options.gpipe_window_error()
    seed = int(os.environ.get("PL_GLOBAL_SEED") or torch.initial_seed() % 2**63)
    has_neighbours = groups is not None and communicator.layout.num_stages > 1
    has_replicas = groups is not None and communicator.layout.num_replicas > 1
    batch_norm = BatchNormStatistics(
        module,
        deferred=options.deferred_batch_norm is True,
        over_replicas=ReplicaMoments(groups.stage, communicator.gather_over_replicas)
        if groups is not None and has_replicas
        else None,
    )
    transport = None
    if groups is not None and has_neighbours:
        transport = groups.transport(device)
        transport.warm_up()
    return Pipeline(
        module,
        layout=communicator.layout,
        global_rank=communicator.global_rank,
        transport=transport,
        num_microbatches=1,
        make_schedule=get_schedule,
        schedule="1f1b" if schedule == "auto" else schedule,
        seed=communicator.broadcast_in_world(seed),
        device=device,
        split_batch=options.split_batch,
        loss_over=options.loss_over,
        batch_norm=batch_norm,
    )


def plan_pipeline(
    pipeline: Pipeline,
    options: StrategyOptions,
    plan: PipelinePlan | None,
    communicator: Communicator,
    *,
    step_name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    optimizers: Sequence[Optimizer] = (),
) -> tuple[PipelinePlan, ModelProfile]:
    """Traces a step on the first batch, plans, and tells the pipeline. Collective over all ranks.

    Gives the plan, and the profile of the module's layers: measured, where a plan was made from measurements.

    Args:
        pipeline: Of the whole module.
        options: What the user set.
        plan: What the user gave; None makes one.
        communicator: This rank's groups.
        step_name: The step to plan for.
        args: What it is called with: one whole batch, the same on all ranks.
        kwargs: Keyword arguments alike.
        optimizers: Those of a fit, whose memory is predicted.

    Raises:
        CaptureError: the step cannot be traced or cut; or its layers not be measured, though the user asked for it.
        BatchError: its batch cannot be split.
        PlanError: the given plan does not fit the module.
        ConfigurationError: there are more stages than layers.
    """
    profile = pipeline.profile(step_name, args, kwargs, cut_after=options.cut_after or ())
    takes_more = options.schedule == INTERLEAVED  # several stages a rank, any number of them
    if options.cut_after and len(options.cut_after) != communicator.layout.num_stages - 1 and not takes_more:
        raise ConfigurationError(
            f"cut_after names {len(options.cut_after)} modules, which makes {len(options.cut_after) + 1} stages, but "
            f"there are {communicator.layout.num_stages}; name {communicator.layout.num_stages - 1}, or set num_stages="
            f"{len(options.cut_after) + 1} and start as many processes"
        )
    batch_size = pipeline.splitter.batch_size(step_name, args, kwargs)
    if step_name == "training_step" and communicator.global_rank == 0:
        _warn_of_unknown_weight(pipeline)
    layout = communicator.layout
    wanted = (
        plan.num_microbatches if options.num_microbatches == "auto" and plan is not None else options.num_microbatches
    )
    if wanted != "auto" and wanted > batch_size and communicator.global_rank == 0:
        warnings.warn(
            f"num_microbatches={wanted} is more than a replica's first batch has samples ({batch_size}): such a batch "
            f"runs as {batch_size} micro-batch{'es' if batch_size > 1 else ''} of one sample. Set num_microbatches to "
            f"at most {batch_size}, or a larger batch_size",
            stacklevel=2,
        )
    if plan is None:
        sizes = resolve_sizes(
            num_stages=layout.num_stages,
            num_replicas=layout.num_replicas,
            num_microbatches=options.num_microbatches,
            world_size=layout.world_size,
            batch_size=max(1, batch_size // pipeline.splitter.min_samples),
        )
        is_chosen = options.num_microbatches != "auto" or options.deferred_batch_norm is True
        if not is_chosen and sizes.num_microbatches > 1 and communicator.global_rank == 0:
            warn_of_batch_norm(pipeline.module, sizes.num_microbatches)
        # Says on every rank why it cannot be done.
        pipeline.splitter.split_into(step_name, args, kwargs, sizes.num_microbatches)
        # With one stage there is nothing to balance, and an evaluation is planned again before a fit.
        is_worth_it = layout.num_stages > 1 and step_name == "training_step"
        halves = half_size(batch_size, sizes.num_microbatches) if options.schedule == SLICED else []
        if options.profile == "measured" or (options.profile == "auto" and is_worth_it):
            profile = measured_profile(
                pipeline,
                profile,
                communicator,
                step_name=step_name,
                args=args,
                kwargs=kwargs,
                num_microbatches=sizes.num_microbatches,
                may_fail=options.profile == "auto",
                sizes=None if options.num_microbatches == "auto" else halves,
                optimizers=optimizers,
            )
        plan = make_plan(
            profile,
            num_stages=layout.num_stages,
            num_replicas=layout.num_replicas,
            num_microbatches=sizes.num_microbatches,
            schedule=options.schedule_name,
            module_fingerprint=pipeline.module_fingerprint,
            partition=pipeline.planned_step.cut_points_after if options.cut_after else options.partition,
            optimizer_state_ratio=optimizer_state_ratio(optimizers),
            shards_optimizer=options.shards_optimizer,
        )
    # Every rank has planned alike, or there is a reason to stop: ranks that cut at different places would hang.
    chosen = PipelinePlan.from_json(communicator.broadcast_in_world(plan.to_json()))
    if chosen != plan:
        place = first_difference(json.loads(plan.to_json()), json.loads(chosen.to_json()))
        raise PlanError(
            f"global rank {communicator.global_rank} traced another step than global rank 0: the module, its arguments "
            f"or its flags differ between processes ({place}). Build the same module on every rank"
        )
    pipeline.set_plan(plan)
    if step_name == "training_step" and options.verify is not False:
        verify_on_one_rank(
            pipeline,
            plan,
            communicator,
            step_name=step_name,
            args=args,
            kwargs=kwargs,
            in_any_case=options.verify is True,
        )
    return plan, profile


def first_difference(own: Any, other: Any, place: str = "plan") -> str:
    """Where two documents of JSON differ first, and the two values."""
    if isinstance(own, dict) and isinstance(other, dict):
        parts = [(f"{place}.{key}", own.get(key), other.get(key)) for key in own]
    elif isinstance(own, list) and isinstance(other, list) and len(own) == len(other):
        parts = [(f"{place}[{index}]", *pair) for index, pair in enumerate(zip(own, other, strict=True))]
    else:
        return f"{place}: {own!r} here, {other!r} there"
    return next((first_difference(a, b, where) for where, a, b in parts if a != b), f"{place}: nothing")


def first_training_arguments(trainer: pl.Trainer) -> tuple[Any, ...] | None:
    """What ``training_step`` will be called with first; None where there is nothing to train on. Collective.

    The batch comes from the iteration that training will use, and will be served there again.
    """
    fit_loop = trainer.fit_loop
    module = trainer.lightning_module
    with _training_stage(trainer):
        fit_loop.setup_data()
        combined = fit_loop._combined_loader
        # One after the other is what Lightning refuses to train on, later.
        if combined is None or fit_loop.max_batches == 0 or combined._mode == "sequential":
            return None
        for loader in combined.flattened:
            epoch: Any = fit_loop.epoch_progress.current
            _set_sampler_epoch(loader, epoch.processed)
        leaves = [_peek(loader) for loader in combined.flattened]
        if any(leaf is NO_BATCH for leaf in leaves):
            return None
        # A copy: the hooks may write into the batch, and will see it again when it is trained on.
        batch = copy.deepcopy(tree_unflatten(leaves, combined._spec))
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return (batch, 0) if takes_index else (batch,)


@contextlib.contextmanager
def in_training_mode(trainer: pl.Trainer) -> Iterator[None]:
    """The module as ``training_step`` will find it, in the middle of a validation."""
    module = trainer.lightning_module
    modes = {submodule: submodule.training for submodule in module.modules()}
    captured = trainer.fit_loop.epoch_loop.val_loop._module_mode
    if captured.mode:
        captured.restore(module)
    else:
        module.train()
    try:
        with _training_stage(trainer), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for submodule, mode in modes.items():
            submodule.training = mode


@contextlib.contextmanager
def random_state(state: dict[str, Any] | None, after: list[dict[str, Any]]) -> Iterator[None]:
    """Draws from the global generators as they were in ``state``; appends how they were left, and puts all back."""
    if state is None:
        yield
        return
    before = _collect_rng_states()
    _set_rng_states(state)
    try:
        yield
        after.append(_collect_rng_states())
    finally:
        _set_rng_states(before)


@contextlib.contextmanager
def _training_stage(trainer: pl.Trainer) -> Iterator[None]:
    stage = trainer.state.stage
    trainer.state.stage = RunningStage.TRAINING
    try:
        yield
    finally:
        trainer.state.stage = stage


def _peek(loader: Any) -> Any:
    try:
        return loader.peek()
    except StopIteration:
        return NO_BATCH


def _warn_of_unknown_weight(pipeline: Pipeline) -> None:
    loss = pipeline.planned_step.unweighted_loss
    if loss is not None:
        warnings.warn(
            f"{loss.name} in {loss.module_path or 'training_step'} ignores some targets, but training_step returns a "
            "loss that combines it with something else: over how many targets it is a mean is not known. Micro-batches "
            "and replicas are weighted by their samples, which is another mean. Return "
            '{"loss": loss, "loss_weight": n} with the number of targets that count',
            stacklevel=2,
        )


def warn_of_batch_norm(module: nn.Module, num_microbatches: int) -> None:
    """Warns where statistics depend on a number of micro-batches that the user did not choose."""
    for name, submodule in module.named_modules():
        if isinstance(submodule, nn.modules.batchnorm._BatchNorm) and submodule.training:
            warnings.warn(
                f"{name} is a {type(submodule).__name__}: it takes its statistics from one of {num_microbatches} "
                "micro-batches, not from the whole batch. Set num_microbatches yourself to say how many are fine "
                "(1 for whole batches), or deferred_batch_norm=True for running statistics of the whole batch",
                stacklevel=2,
            )
            return
