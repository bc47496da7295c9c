"""The process groups of a parallel layout: one for each kind of traffic, so that no kind waits behind another."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.runtime.group_cache import GroupCache, close_older_groups, groups_for
from lightning_autopipe.runtime.p2p_transport import P2PTransport


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """This process's groups. All members of a group must issue its collectives in one order."""

    layout: ParallelLayout
    global_rank: int
    timeout_s: float
    backend: str | None
    """Of all groups but `control`; None: the default group's."""
    control: dist.ProcessGroup
    """All ranks, always gloo: small CPU messages (headers, decisions, found-inf, logged values)."""
    pipeline: dist.ProcessGroup
    """The stages of this replica."""
    stage: dist.ProcessGroup
    """The replicas of this stage: gradient reduction."""
    last_stages: dist.ProcessGroup | None
    """The last stages of all replicas (metrics, logged values); None on the other stages."""
    forward_traffic: dist.ProcessGroup
    """The stages of this replica: activations only."""
    backward_traffic: dist.ProcessGroup
    """The stages of this replica: gradients of activations only."""
    ties: Mapping[tuple[int, ...], dist.ProcessGroup]
    """By the sorted stages that share parameters, this one among them: the ranks of those stages in all replicas."""

    @property
    def stage_index(self) -> int:
        """The stage that this process runs."""
        return self.layout.stage_index(self.global_rank)

    @property
    def replica_index(self) -> int:
        """The pipeline that this process is in."""
        return self.layout.replica_index(self.global_rank)

    def transport(self, device: torch.device, *, stages_per_rank: int = 1) -> P2PTransport:
        """New connections of this rank to its neighbours."""
        return P2PTransport(
            stage_index=self.stage_index,
            pipeline_ranks=self.layout.pipeline_ranks(self.replica_index),
            forward_group=self.forward_traffic,
            backward_group=self.backward_traffic,
            header_group=self.control,
            device=device,
            timeout_s=self.timeout_s,
            stages_per_rank=stages_per_rank,
        )


def create_process_groups(
    layout: ParallelLayout,
    *,
    timeout_s: float,
    tied_stages: Iterable[Collection[int]] = (),
    backend: str | None = None,
) -> ProcessGroups:
    """Create a layout's groups; all ranks of the default group call it with equal arguments.

    Called again with the same arguments it gives the same groups, as long as the default group is the same.

    Args:
        layout: Must have as many ranks as the default group.
        timeout_s: Limit of every operation of the groups.
        tied_stages: For each tied parameter the stages that hold a copy.
        backend: Of all groups but `control`; None takes the default group's.

    Raises:
        ConfigurationError: The layout does not fit the number of processes.
    """
    if dist.get_world_size() != layout.world_size:
        raise ConfigurationError(
            f"{layout.num_stages} stages x {layout.num_replicas} replicas need {layout.world_size} processes; there "
            f"are {dist.get_world_size()}: change num_stages, num_replicas or the number of devices and nodes"
        )
    stage_sets = sorted({tuple(sorted(stages)) for stages in tied_stages if len(set(stages)) > 1})
    cache = groups_of(layout, timeout_s=timeout_s, backend=backend)
    groups = cache.once(("groups", tuple(stage_sets)), lambda: _create(cache, layout, timeout_s, stage_sets, backend))
    close_older_groups()
    return groups


def groups_of(layout: ParallelLayout, *, timeout_s: float, backend: str | None) -> GroupCache:
    """All groups of a layout with these limits, for whoever makes more of them."""
    return groups_for((layout, timeout_s, backend))


def _create(
    cache: GroupCache, layout: ParallelLayout, timeout_s: float, stage_sets: list[tuple[int, ...]], backend: str | None
) -> ProcessGroups:
    global_rank = dist.get_rank()
    stage_index, replica_index = layout.stage_index(global_rank), layout.replica_index(global_rank)

    def group(description: str, ranks: Iterable[int], *, group_backend: str | None = backend) -> dist.ProcessGroup:
        return cache.new_group(ranks, timeout_s=timeout_s, backend=group_backend, what=description)

    # Every rank creates every group, its own or not, in this one order.
    control = group("control", range(layout.world_size), group_backend="gloo")
    last_stages = group("last stages", layout.stage_ranks(layout.num_stages - 1))
    by_replica = [
        {kind: group(f"{kind} {index}", layout.pipeline_ranks(index)) for kind in ("pipeline", "forward", "backward")}
        for index in range(layout.num_replicas)
    ]
    by_stage = [group(f"stage {stage}", layout.stage_ranks(stage)) for stage in range(layout.num_stages)]
    ties = {
        stages: group(f"tie {stages}", (rank for stage in stages for rank in layout.stage_ranks(stage)))
        for stages in stage_sets
    }
    own = by_replica[replica_index]
    return ProcessGroups(
        layout=layout,
        global_rank=global_rank,
        timeout_s=timeout_s,
        backend=backend,
        control=control,
        pipeline=own["pipeline"],
        stage=by_stage[stage_index],
        last_stages=last_stages if stage_index == layout.num_stages - 1 else None,
        forward_traffic=own["forward"],
        backward_traffic=own["backward"],
        ties={stages: tie for stages, tie in ties.items() if stage_index in stages},
    )
