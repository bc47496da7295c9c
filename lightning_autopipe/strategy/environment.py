"""The processes of a run: how many stages and replicas, and the groups between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from hashlib import sha256

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection

from lightning_autopipe.core.errors import ConfigurationError, PipelineRuntimeError
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.planner import resolve_sizes
from lightning_autopipe.runtime.meeting import meet
from lightning_autopipe.runtime.members import Member
from lightning_autopipe.runtime.process_groups import ProcessGroups, groups_of
from lightning_autopipe.schedules.catalog import check_trainable
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.options import StrategyOptions

_LONGEST_TEXT = 100


def given_plan(options: StrategyOptions) -> PipelinePlan | None:
    """The plan that the user gave.

    Raises:
        PlanError: its file is not valid.
        ConfigurationError: its schedule does not train, or takes other numbers.
    """
    if options.plan is None:
        return None
    plan = options.plan if isinstance(options.plan, PipelinePlan) else PipelinePlan.load(options.plan)
    if plan.mapping.num_replicas is not None:
        check_trainable(plan.schedule, plan.num_stages, plan.num_microbatches)
    return plan


def settings_as_text(options: StrategyOptions, plan: PipelinePlan | None) -> dict[str, str]:
    """What the user set, to be compared between processes; of a plan, and of what is long, its digest."""
    texts = {field.name: repr(getattr(options, field.name)) for field in fields(options)}
    texts["plan"] = "None" if plan is None else plan.to_json()
    return {
        name: text if len(text) <= _LONGEST_TEXT else f"one with digest {sha256(text.encode()).hexdigest()[:12]}"
        for name, text in texts.items()
    }


def resolve_layout(options: StrategyOptions, plan: PipelinePlan | None, world_size: int) -> ParallelLayout:
    """Stages and replicas for a number of processes.

    Raises:
        ConfigurationError: they do not fit the number.
        PlanError: the plan is for another number.
    """
    if plan is not None:
        plan.require_world(world_size)
        return plan.layout
    sizes = resolve_sizes(
        num_stages=options.num_stages, num_replicas=options.num_replicas, world_size=world_size, batch_size=1
    )
    return ParallelLayout(num_stages=sizes.num_stages, num_replicas=sizes.num_replicas)


def check_place(own: Member, devices: Sequence[torch.device]) -> None:
    """Checks what one process can tell alone of its rank and its devices.

    Raises:
        ConfigurationError: it has no place in the run, or no device.
    """
    if not 0 <= own.global_rank < own.world_size:
        raise ConfigurationError(
            f"this process has global rank {own.global_rank}, but the world size is {own.world_size}: set RANK (or "
            f"SLURM_PROCID) to 0 to {own.world_size - 1}, or WORLD_SIZE (SLURM_NTASKS) to the number of processes"
        )
    if own.num_devices > 1 and not 0 <= own.local_rank < own.num_devices:
        raise ConfigurationError(
            f"this process has local rank {own.local_rank} on node {own.node_rank}, but the Trainer has "
            f"{own.num_devices} devices there: set devices={own.local_rank + 1} or more, or start {own.num_devices} "
            "processes (torchrun --nproc-per-node, srun --ntasks-per-node)"
        )
    others = sorted({device.type for device in devices if device.type != "cuda"})
    if own.backend == "nccl" and others:
        raise ConfigurationError(
            f"process_group_backend='nccl' connects GPUs, but the devices are of type {', '.join(others)}: leave it "
            "unset, or set 'gloo', or the Trainer's accelerator='gpu'"
        )
    if own.backend == "nccl" and len(set(devices)) < len(devices):
        raise ConfigurationError(
            f"several of the parallel_devices {[str(device) for device in devices]} are one GPU, and NCCL refuses two "
            "processes on one GPU: set process_group_backend='gloo', or name each GPU once"
        )


def join_processes(environment: ClusterEnvironment, own: Member, *, device: torch.device, timeout_s: float) -> None:
    """Meets the other processes of the run and starts the default process group with them.

    Raises:
        ConfigurationError: the processes do not fit together.
        PipelineRuntimeError: some did not come, or cannot be reached.
    """
    own = replace(own, accelerator_id=accelerator_id(device))
    store = meet(
        own,
        address=environment.main_address,
        port=environment.main_port,
        timeout_s=timeout_s,
        launched_by=type(environment).__name__,
    )
    try:
        _init_dist_connection(
            environment,
            own.backend,
            store=store,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if own.backend == "nccl" else None,
        )
    except RuntimeError as error:
        raise PipelineRuntimeError(
            f"{own} met all {own.world_size} processes, but cannot join them over {own.backend}: {error}. On a machine "
            f"with several networks, set {own.backend.upper()}_SOCKET_IFNAME to the interface that reaches the others"
        ) from error


def accelerator_id(device: torch.device) -> str | None:
    """What tells an accelerator from all others; None on a CPU."""
    if device.type != "cuda":
        return None
    return f"GPU {torch.cuda.get_device_properties(device).uuid}"


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
    cache = groups_of(layout, timeout_s=groups.timeout_s, backend=groups.backend)

    def make() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        def gloo_group(ranks: Iterable[int], what: str) -> dist.ProcessGroup:
            return cache.new_group(ranks, timeout_s=groups.timeout_s, backend="gloo", what=f"objects {what}")

        # Every rank makes every group, its own or not, in this one order.
        pipelines = [gloo_group(layout.pipeline_ranks(r), f"pipeline {r}") for r in range(layout.num_replicas)]
        stages = [gloo_group(layout.stage_ranks(s), f"stage {s}") for s in range(layout.num_stages)]
        return pipelines[groups.replica_index], stages[groups.stage_index]

    pipeline_group, replica_group = cache.once("objects", make)
    return Communicator(
        layout=layout,
        global_rank=global_rank,
        device=device,
        world_group=groups.control,
        pipeline_group=pipeline_group if layout.num_stages > 1 else None,
        replica_group=replica_group if layout.num_replicas > 1 else None,
    )


def with_ties(groups: ProcessGroups, tied_stages: Iterable[Collection[int]]) -> ProcessGroups:
    """The same groups and one for each set of stages that share parameters. Collective over all ranks.

    The plan tells the ties, and is made long after the groups.
    """
    layout = groups.layout
    cache = groups_of(layout, timeout_s=groups.timeout_s, backend=groups.backend)
    ties: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for stages in sorted({tuple(sorted(set(stages))) for stages in tied_stages}):
        ranks = [rank for stage in stages for rank in layout.stage_ranks(stage)]
        make = partial(cache.new_group, ranks, timeout_s=groups.timeout_s, backend=groups.backend, what=f"tie {stages}")
        group = cache.once(("tie", stages), make)
        if groups.stage_index in stages:
            ties[stages] = group
    return replace(groups, ties=ties)


def statistics_group(groups: ProcessGroups) -> dist.ProcessGroup:
    """The replicas of this stage, for the statistics of batch normalization. Collective over all ranks.

    They are exchanged while gradients are summed in the group `stage`.
    """
    layout = groups.layout
    cache = groups_of(layout, timeout_s=groups.timeout_s, backend=groups.backend)
    new_group = partial(cache.new_group, timeout_s=groups.timeout_s, backend=groups.backend)
    by_stage = [
        cache.once(
            ("statistics", stage),
            partial(new_group, layout.stage_ranks(stage), what=f"statistics {stage}"),
        )
        for stage in range(layout.num_stages)
    ]
    return by_stage[groups.stage_index]
