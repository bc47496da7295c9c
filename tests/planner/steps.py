"""Small steps to simulate, and brute force over partitions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations

from lightning_autopipe.core import ClusterTopology, Device, DeviceTimes, LayerProfile, Link, ModelProfile, Schedule
from lightning_autopipe.planner import CostModel, simulate
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.objective import Objective, PipelineSetting
from lightning_autopipe.planner.workload import StageWork, StepWork, UnitWork
from lightning_autopipe.schedules import default_depths

Cuts = tuple[int, ...]


def a_device(global_rank: int, server: str = "A", **changes: float) -> Device:
    fields = {"memory_bytes": 1 << 40, "relative_speed": 1.0} | changes
    return Device(global_rank=global_rank, server=server, model="gpu", **fields)  # type: ignore[arg-type]


def servers(names: str, *links: Link) -> LinkNetwork:
    """A network of devices 0, 1, … in servers of one letter each: ``"AABB"``."""
    devices = tuple(a_device(rank, server) for rank, server in enumerate(names))
    return LinkNetwork(ClusterTopology(devices=devices, links=links))


def a_step(
    schedule: Schedule,
    times: Sequence[tuple[float, float]],
    *,
    num_bytes: float = 0,
    network: LinkNetwork | None = None,
    stash_bytes: int = 0,
) -> StepWork:
    """One replica, with rank s for stage s; slices of k take the k-th part of the time."""
    stages = tuple(
        StageWork(
            units=tuple(
                UnitWork(
                    forward_s=forward_s / k,
                    backward_s=backward_s / k,
                    sent_bytes=num_bytes / k,
                    gradient_bytes=num_bytes / k,
                )
                for k in (1, 2)
            ),
            stash_bytes=stash_bytes,
        )
        for forward_s, backward_s in times
    )
    return StepWork(
        stages=(stages,), schedules=(schedule,), network=network, ranks=(tuple(range(schedule.num_stages)),)
    )


def a_profile(forward_s: Sequence[float], backward_s: Sequence[float], **fields: object) -> ModelProfile:
    """Layers of which only the times are known."""
    times = DeviceTimes(
        device_model="the profiled one",
        microbatch_size=1.0,
        forward_s=tuple(map(float, forward_s)),
        backward_s=tuple(map(float, backward_s)),
    )
    layers = tuple(LayerProfile(name=str(index), forward_flops=1.0) for index in range(len(forward_s)))
    return ModelProfile(**({"layers": layers, "times": (times,)} | fields))  # type: ignore[arg-type]


def a_setting(profile: ModelProfile, num_stages: int, num_microbatches: int, **fields: object) -> PipelineSetting:
    return PipelineSetting(
        cost=CostModel(profile),
        num_stages=num_stages,
        num_microbatches=(num_microbatches,),
        **fields,  # type: ignore[arg-type]
    )


def the_reference_chain() -> ModelProfile:
    """Embedding, 24 blocks of attention and feed-forward halves, head."""
    forward_s = [50, *[900, 1100] * 24, 2500]
    backward_s = [60, *[1800, 2200] * 24, 5000]
    return a_profile(forward_s, backward_s)


def simulated_s(setting: PipelineSetting, cuts: Cuts, depths: tuple[int, ...] | None = None) -> float:
    """Seconds of the step by the event simulator."""
    return simulate(Objective(setting).step_work(cuts, depths or default_depths(setting.num_stages))).step_s


def brute_force(settings: Sequence[PipelineSetting]) -> float | None:
    """The shortest simulated step of all partitions in several settings; None where none fits the memory."""
    found = []
    for setting in settings:
        objective, depths = Objective(setting), default_depths(setting.num_stages)
        for cuts in combinations(range(1, objective.num_layers), setting.num_stages - 1):
            if not objective.overflow_bytes(cuts, depths):
                found.append(simulate(objective.step_work(cuts, depths)).step_s)
    return min(found, default=None)


def every_order(devices: Sequence[Device]) -> list[tuple[Device, ...]]:
    return list(permutations(devices))
