"""Simulated timelines to show."""

from __future__ import annotations

from lightning_autopipe.core import ClusterTopology, Device, DeviceMapping, Link, Partition, Schedule, Timeline
from lightning_autopipe.planner import CostModel, simulate
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.unequal import unequal_step_work
from lightning_autopipe.planner.workload import StageWork, StepWork, UnitWork
from lightning_autopipe.schedules import one_f_one_b
from tests.planner.mappings import a_model

NUM_BYTES = 1 << 20


def a_cluster(world_size: int, bandwidth_bytes_per_s: float = 1e9) -> ClusterTopology:
    """Ranks in servers A and B by turns, all at one switch."""
    return ClusterTopology(
        devices=tuple(
            Device(global_rank=rank, server="AB"[rank % 2], model="gpu", memory_bytes=1 << 34)
            for rank in range(world_size)
        ),
        links=tuple(
            Link(a=f"rank {rank}", b="switch", bandwidth_bytes_per_s=bandwidth_bytes_per_s)
            for rank in range(world_size)
        ),
    )


def a_timeline(
    num_stages: int,
    num_microbatches: int,
    num_replicas: int = 1,
    *,
    schedule: Schedule | None = None,
    bandwidth_bytes_per_s: float | None = 1e9,
    optimizer_s: float = 0.005,
    exchange_s: float = 0.0,
    is_tied: bool = False,
) -> Timeline:
    """Forwards of 10 ms, or 11 on odd stages, and backwards of twice that."""
    schedule = schedule or one_f_one_b(num_stages, num_microbatches)
    stages = tuple(
        StageWork(
            units=tuple(
                UnitWork(
                    forward_s=0.01 * (1 + 0.1 * (stage % 2)) / k,
                    backward_s=0.02 * (1 + 0.1 * (stage % 2)) / k,
                    sent_bytes=NUM_BYTES / k,
                    gradient_bytes=NUM_BYTES / k,
                )
                for k in (1, 2)
            ),
            optimizer_s=optimizer_s,
            reduced_bytes=NUM_BYTES,
            fixed_bytes=(stage + 1) << 20,
        )
        for stage in range(num_stages)
    )
    network = None
    if bandwidth_bytes_per_s is not None:
        network = LinkNetwork(a_cluster(num_stages * num_replicas, bandwidth_bytes_per_s))
    return simulate(
        StepWork(
            stages=(stages,) * num_replicas,
            schedules=(schedule,) * num_replicas,
            network=network,
            exchange_s=exchange_s,
            tied_bytes=(((0, num_stages - 1), NUM_BYTES),) if is_tied else (),
        )
    )


def an_unlike_timeline() -> Timeline:
    """Two ranks, then one, for six micro-batches, with links."""
    profile = a_model([3.0, 1.0, 1.0], num_bytes=1)
    partition = Partition(cut_points=(1,), num_layers=3)
    mapping = DeviceMapping(stage_ranks=((2, 1), (0,)))
    network = LinkNetwork(a_cluster(3, bandwidth_bytes_per_s=2.0))
    return simulate(unequal_step_work(CostModel(profile), partition, mapping, network=network, num_microbatches=6))
