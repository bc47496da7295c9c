"""The processes of a run: how many stages and replicas, and the groups between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.planner import resolve_sizes
from lightning_autopipe.runtime.process_groups import ProcessGroups
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.options import StrategyOptions

_cached: tuple[dist.ProcessGroup, dict[Any, Any]] | None = None
"""The default group, and what was made for it; another default group means that the processes met anew."""


def given_plan(options: StrategyOptions) -> PipelinePlan | None:
    """The plan that the user gave.

    Raises:
        PlanError: its file is not valid.
    """
    if options.plan is None or isinstance(options.plan, PipelinePlan):
        return options.plan
    return PipelinePlan.load(options.plan)


def resolve_layout(options: StrategyOptions, plan: PipelinePlan | None, world_size: int) -> ParallelLayout:
    """Stages and replicas for a number of processes.

    Raises:
        ConfigurationError: they do not fit the number.
        PlanError: the plan is for another number.
    """
    if plan is not None:
        plan.require(module_fingerprint=plan.module_fingerprint, world_size=world_size)
        return plan.layout
    sizes = resolve_sizes(
        num_stages=options.num_stages, num_replicas=options.num_replicas, world_size=world_size, batch_size=1
    )
    return ParallelLayout(num_stages=sizes.num_stages, num_replicas=sizes.num_replicas)


def make_communicator(groups: ProcessGroups | None, layout: ParallelLayout, device: torch.device) -> Communicator:
    """This rank's groups for objects, made once for each layout. Collective over all ranks.

    Args:
        groups: The runtime's groups; None where there is one process.
        layout: Stages and replicas.
        device: Where received accelerator tensors are put.
    """
    if groups is None:
        return Communicator(layout=layout, global_rank=0, device=device)
    global_rank = groups.global_rank
    known = _known()
    key = ("objects", layout, groups.timeout_s)
    if key not in known:

        def gloo_group(ranks: Iterable[int], what: str) -> dist.ProcessGroup:
            group: dist.ProcessGroup = dist.new_group(
                sorted(ranks),
                timeout=timedelta(seconds=groups.timeout_s),
                backend="gloo",
                group_desc=f"autopipe objects {what}",
            )
            return group

        # Every rank makes every group, its own or not, in this one order.
        pipelines = [gloo_group(layout.pipeline_ranks(r), f"pipeline {r}") for r in range(layout.num_replicas)]
        stages = [gloo_group(layout.stage_ranks(s), f"stage {s}") for s in range(layout.num_stages)]
        known[key] = pipelines[groups.replica_index], stages[groups.stage_index]
    pipeline_group, replica_group = known[key]
    return Communicator(
        layout=layout,
        global_rank=global_rank,
        device=device,
        world_group=groups.control,
        pipeline_group=pipeline_group if layout.num_stages > 1 else None,
        replica_group=replica_group if layout.num_replicas > 1 else None,
    )


def with_ties(groups: ProcessGroups, tied_stages: Iterable[Collection[int]], backend: str | None) -> ProcessGroups:
    """The same groups and one for each set of stages that share parameters. Collective over all ranks.

    The plan tells the ties, and is made long after the groups.
    """
    layout = groups.layout
    known = _known()
    ties: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for stages in sorted({tuple(sorted(set(stages))) for stages in tied_stages}):
        key = ("tie", layout, groups.timeout_s, backend, stages)
        if key not in known:
            known[key] = dist.new_group(
                sorted(rank for stage in stages for rank in layout.stage_ranks(stage)),
                timeout=timedelta(seconds=groups.timeout_s),
                backend=backend,
                group_desc=f"autopipe tie {stages}",
            )
        if groups.stage_index in stages:
            ties[stages] = known[key]
    return replace(groups, ties=ties)


def _known() -> dict[Any, Any]:
    global _cached
    world = dist.group.WORLD
    assert world is not None, "init_process_group comes first"
    if _cached is None or _cached[0] is not world:
        _cached = (world, {})
    return _cached[1]
