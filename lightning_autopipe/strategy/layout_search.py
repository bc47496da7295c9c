"""Chooses layout, mapping, micro-batches and schedule of a fit, before anything is made for one of them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from torch.utils.data import IterableDataset

from lightning_autopipe.core.cluster import ClusterTopology
from lightning_autopipe.core.errors import AutoPipeError, ConfigurationError
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.profile import ModelProfile
from lightning_autopipe.planner import CostModel, SearchSpace, plan_of, search
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.sizes import MICROBATCHES_PER_STAGE
from lightning_autopipe.profiling import ProfilingError
from lightning_autopipe.runtime.pipeline import Pipeline
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.measuring import measured_profile
from lightning_autopipe.strategy.options import StrategyOptions
from lightning_autopipe.strategy.planning import first_training_arguments


def leaves_something_open(options: StrategyOptions, *, world_size: int, num_nodes: int) -> bool:
    """Whether there is something to choose that changes which rank does what, or how batches are split."""
    if world_size == 1 or options.plan is not None or options.profile == "flops":
        return False
    if options.num_microbatches == "auto" or options.cluster not in (None, "auto") or num_nodes > 1:
        return True
    return options.num_stages == "auto" and options.num_replicas == "auto"


@contextlib.contextmanager
def leaving_no_trace(trainer: pl.Trainer) -> Iterator[None]:
    """Training data that are read inside are read again later: loaders, and global generators, are as before."""
    fit_loop: Any = trainer.fit_loop
    before = {name: getattr(fit_loop, name) for name in _LOADER_ATTRIBUTES}
    random_state = _collect_rng_states()
    try:
        yield
    finally:
        if fit_loop._data_fetcher is not None:
            fit_loop._data_fetcher.teardown()
        for name, value in before.items():
            setattr(fit_loop, name, value)
        _set_rng_states(random_state)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedBatch:
    """A training step on one replica's batch, as far as a rank can tell it alone."""

    profile: ModelProfile
    batch_size: int
    num_microbatches: int
    """To begin with."""


def trace_batch(
    pipeline: Pipeline, options: StrategyOptions, *, step_name: str, args: tuple[Any, ...], world_size: int
) -> TracedBatch:
    """Traces the step, and finds out how its batch is split.

    Raises:
        AutoPipeError: the step cannot be traced, cut or split.
    """
    fewest = options.num_stages if isinstance(options.num_stages, int) else 1
    profile = pipeline.profile(step_name, args, {}, cut_after=options.cut_after or (), min_stages=fewest)
    batch_size = pipeline.batch_size(step_name, args, {})
    most = max(1, batch_size // pipeline.min_samples)
    stages = options.num_stages if isinstance(options.num_stages, int) else min(world_size, profile.num_layers)
    wanted = MICROBATCHES_PER_STAGE * stages if options.num_microbatches == "auto" else options.num_microbatches
    number = min(wanted, most)
    pipeline.split_into(step_name, args, {}, number)
    return TracedBatch(profile=profile, batch_size=batch_size, num_microbatches=number)


def search_plan(
    pipeline: Pipeline,
    options: StrategyOptions,
    communicator: Communicator,
    traced: TracedBatch,
    topology: ClusterTopology,
    devices: ClusterTopology,
    *,
    step_name: str,
    args: tuple[Any, ...],
) -> tuple[PipelinePlan | None, str]:
    """Measures the layers and searches, on global rank 0; the same on all ranks. Collective.

    Args:
        pipeline: Of the whole module, traced.
        options: What the user set.
        communicator: This rank's groups.
        traced: Of the step.
        topology: What is planned for.
        devices: What there is, for the plan's own check.
        step_name: The step.
        args: What it is called with: one whole batch, the same on all ranks.

    Returns:
        The plan; or None and why: layers cannot be measured, or nothing seems to fit the memory.
    """
    try:
        profile = measured_profile(
            pipeline,
            traced.profile,
            communicator,
            step_name=step_name,
            args=args,
            kwargs={},
            num_microbatches=traced.num_microbatches,
            may_fail=False,
            sizes=None if options.num_microbatches == "auto" else (),
        )
    except ProfilingError as error:  # the first batch is planned by counted operations then
        return None, why_not(error)
    found, problem = "", ""
    if communicator.global_rank == 0:
        try:
            found = _search(pipeline, options, traced, profile, topology, devices).to_json()
        except ConfigurationError as error:
            problem = str(error)
    found, problem = communicator.broadcast_in_world((found, problem))
    return (PipelinePlan.from_json(found) if found else None), problem


def _search(
    pipeline: Pipeline,
    options: StrategyOptions,
    traced: TracedBatch,
    profile: ModelProfile,
    topology: ClusterTopology,
    devices: ClusterTopology,
) -> PipelinePlan:
    is_rule = isinstance(options.partition, str)
    cuts = None if is_rule else options.given_cuts
    space = SearchSpace(
        cost=CostModel(profile),
        network=LinkNetwork(topology),
        batch_size=float(traced.batch_size),
        num_stages=options.num_stages,
        num_replicas=options.num_replicas,
        num_microbatches="auto" if options.num_microbatches == "auto" else traced.num_microbatches,
        schedule=options.schedule_name,
        partition=str(options.partition) if is_rule else "auto",
        cuts=pipeline.cut_points_after if options.cut_after else cuts,
        min_samples=float(pipeline.min_samples),
    )
    return plan_of(search(space), space, module_fingerprint=pipeline.module_fingerprint, devices=devices.devices)


def why_not(error: Exception) -> str:
    """One line on why nothing was searched."""
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0] if isinstance(error, AutoPipeError) else f"{type(error).__name__}: {text[0]}"
