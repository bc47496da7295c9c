"""Chooses layout, mapping, micro-batches and schedule of a fit, before anything is made for one of them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from lightning_autopipe.core.cluster import ClusterTopology
from lightning_autopipe.core.errors import AutoPipeError, ConfigurationError
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.profile import ModelProfile
from lightning_autopipe.planner import CostModel, SearchSpace, plan_of, search
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.schedule_choice import OTHER_KINDS
from lightning_autopipe.planner.sizes import MICROBATCHES_PER_STAGE
from lightning_autopipe.profiling import ProfilingError
from lightning_autopipe.profiling.sizes import half_size
from lightning_autopipe.schedules.sliced import NAME as SLICED
from lightning_autopipe.strategy.data_state import preserved_data_state
from lightning_autopipe.strategy.measuring import measured_profile
from lightning_autopipe.strategy.options import StrategyOptions
from lightning_autopipe.strategy.planning import first_training_arguments, warn_of_batch_norm
from lightning_autopipe.strategy.session import PipelineSession
from lightning_autopipe.strategy.training_steps import TRAINING_STEP


def leaves_something_open(options: StrategyOptions, *, world_size: int, num_nodes: int) -> bool:
    """Whether there is something to choose that changes which rank does what, or how batches are split."""
    if world_size == 1 or options.plan is not None or options.profile == "flops":
        return False
    if options.num_microbatches == "auto" or options.cluster not in (None, "auto") or num_nodes > 1:
        return True
    return options.num_stages == "auto" and options.num_replicas == "auto"


@contextlib.contextmanager
def leaving_no_trace(trainer: pl.Trainer) -> Iterator[None]:
    """Training data that are read inside are read again later: loaders and all generators are as before."""
    fit_loop: Any = trainer.fit_loop
    owners = (fit_loop._data_source.instance, getattr(trainer, "datamodule", None), trainer.lightning_module)
    before = {name: getattr(fit_loop, name) for name in _LOADER_ATTRIBUTES}
    random_state = _collect_rng_states()
    try:
        with preserved_data_state(owners):
            yield
    finally:
        if fit_loop._data_fetcher is not None:
            fit_loop._data_fetcher.teardown()
        for name, value in before.items():
            setattr(fit_loop, name, value)
        _set_rng_states(random_state)


_BATCH_NORM_SAMPLES = 8
"""Samples that a searched micro-batch has at least where batch normalization takes statistics of it."""

_LOADER_ATTRIBUTES = ("_combined_loader", "_data_fetcher", "max_batches", "_last_train_dl_reload_epoch")


def training_sample(trainer: pl.Trainer) -> tuple[Any, ...] | None:
    """What ``training_step`` would be called with first; None where there is nothing, or it could not be read again.

    Collective. Call it inside `leaving_no_trace`.
    """
    with warnings.catch_warnings():  # they come again when the data are loaded to train
        warnings.simplefilter("ignore")
        trainer.fit_loop.setup_data()
        combined = trainer.fit_loop._combined_loader
        if combined is None:
            return None
        datasets = [getattr(loader, "dataset", None) for loader in combined.flattened]
        if any(dataset is None or isinstance(dataset, IterableDataset) for dataset in datasets):
            return None
        return first_training_arguments(trainer)


def search_plan(
    session: PipelineSession,
    args: tuple[Any, ...],
    topology: ClusterTopology,
    devices: ClusterTopology,
    *,
    possible_replicas: tuple[int, ...] | None = None,
    equal_shares: bool = True,
) -> tuple[PipelinePlan | None, str]:
    """Searches a plan for a fit. Collective over all ranks; the module stays as it is.

    Global rank 0 searches, and tells the others. The session's profile is that of the search afterwards.

    Args:
        session: Of the module, for any layout.
        args: What ``training_step`` is called with, with a whole batch of one replica.
        topology: What is planned for.
        devices: What there is, which the plan is to be checked against when it is used again.
        possible_replicas: Numbers of replicas that the data can be shared by; None: any.
        equal_shares: Whether all replicas take equally many micro-batches: the data cannot be dealt otherwise.

    Returns:
        The plan; or None and why: the step cannot be traced, its layers cannot be measured, or nothing seems to fit
        the memory.
    """
    communicator = session.communicator
    args = communicator.broadcast_in_world(args)
    with session.running_step.planning(TRAINING_STEP):
        traced: _TracedBatch | None = None
        problem = ""
        try:
            traced = _trace(session, args)
        except Exception as error:  # of the user's code, too: the first batch is planned later, with all hooks run
            problem = _why_not(error)
        problem = next(filter(None, communicator.gather_in_world(problem)), "")
        if problem or traced is None:
            return None, problem
        try:
            session.current_profile = measured_profile(
                session.pipeline,
                traced.profile,
                communicator,
                step_name=TRAINING_STEP,
                args=args,
                kwargs={},
                num_microbatches=traced.num_microbatches,
                may_fail=False,
                sizes=None if session.options.num_microbatches == "auto" else _halves(session, traced),
                optimizers=_assumed_optimizers(session.module),
            )
        except ProfilingError as error:  # the first batch is planned by counted operations then
            return None, _why_not(error)
        text = ""
        if communicator.global_rank == 0:
            try:
                text = _search(session, traced, topology, devices, possible_replicas, equal_shares).to_json()
            except Exception as error:  # the others wait for an answer; what cannot be run is refused later, by all
                problem = str(error) if isinstance(error, ConfigurationError) else _why_not(error)
        text, problem = communicator.broadcast_in_world((text, problem))
    plan = PipelinePlan.from_json(text) if text else None
    is_chosen = session.options.num_microbatches == "auto" and session.options.deferred_batch_norm is not True
    if plan is not None and is_chosen and plan.num_microbatches > 1 and communicator.global_rank == 0:
        warn_of_batch_norm(session.module, plan.num_microbatches)
    return plan, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class _TracedBatch:
    """A training step on one replica's batch, as far as a rank can tell it alone."""

    profile: ModelProfile
    batch_size: int
    num_microbatches: int
    """To begin with."""


def _trace(session: PipelineSession, args: tuple[Any, ...]) -> _TracedBatch:
    """Traces the step, and finds out how its batch is split."""
    pipeline, options = session.pipeline, session.options
    num_stages = options.num_stages if isinstance(options.num_stages, int) else None
    profile = pipeline.profile(TRAINING_STEP, args, {}, cut_after=options.cut_after or (), min_stages=num_stages or 1)
    batch_size = pipeline.splitter.batch_size(TRAINING_STEP, args, {})
    stages = num_stages or min(session.communicator.layout.world_size, profile.num_layers)
    wanted = MICROBATCHES_PER_STAGE * stages if options.num_microbatches == "auto" else options.num_microbatches
    number = min(wanted, max(1, batch_size // pipeline.splitter.min_samples))
    pipeline.splitter.split_into(TRAINING_STEP, args, {}, number)
    return _TracedBatch(profile=profile, batch_size=batch_size, num_microbatches=number)


def _halves(session: PipelineSession, traced: _TracedBatch) -> list[int]:
    """The size of slices, where they may be chosen."""
    may_slice = session.pipeline.splitter.min_samples == 1 and session.options.schedule in ("auto", SLICED)
    return half_size(traced.batch_size, traced.num_microbatches) if may_slice else []


def _assumed_optimizers(module: nn.Module) -> list[Optimizer]:
    """AdamW, in the place of the user's own optimizer: that is made for the layout that is found."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [torch.optim.AdamW(trainable)] if trainable else []


def _search(
    session: PipelineSession,
    traced: _TracedBatch,
    topology: ClusterTopology,
    devices: ClusterTopology,
    possible_replicas: tuple[int, ...] | None,
    equal_shares: bool,
) -> PipelinePlan:
    pipeline, options = session.pipeline, session.options
    assert session.current_profile is not None
    num_layers = session.current_profile.num_layers
    if isinstance(options.partition, Partition) and options.partition.num_layers != num_layers:
        raise ConfigurationError(
            f"partition is one of {options.partition.num_layers} layers, but the module has {num_layers}"
        )
    space = SearchSpace(
        cost=CostModel(session.current_profile),
        network=LinkNetwork(topology),
        batch_size=float(traced.batch_size),
        num_stages=options.num_stages,
        num_replicas=options.num_replicas,
        possible_replicas=possible_replicas,
        equal_shares=equal_shares,
        num_microbatches="auto" if options.num_microbatches == "auto" else traced.num_microbatches,
        schedule=options.schedule_name,
        # Batch normalization takes its statistics from what runs at a time.
        kinds=tuple(kind for kind in OTHER_KINDS if pipeline.splitter.min_samples == 1 or kind != SLICED),
        partition=options.partition if isinstance(options.partition, str) else "auto",
        shards_optimizer=options.shards_optimizer,
        cuts=pipeline.planned_step.cut_points_after if options.cut_after else options.given_cuts,
        # Statistics of fewer are too noisy to be chosen without being asked for.
        min_samples=float(min(_BATCH_NORM_SAMPLES, traced.batch_size) if pipeline.splitter.min_samples > 1 else 1),
    )
    found = search(space)
    return plan_of(found, space, module_fingerprint=pipeline.module_fingerprint, devices=devices.devices)


def _why_not(error: Exception) -> str:
    """One line on why nothing was searched."""
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0] if isinstance(error, AutoPipeError) else f"{type(error).__name__}: {text[0]}"
