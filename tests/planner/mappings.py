"""Small clusters and models to map, and the simulated step of a mapping."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_autopipe.core import ClusterTopology, CrossingValue, LayerProfile, Link, ModelProfile
from lightning_autopipe.planner import CostModel, simulate
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.mapping_setting import MappingSetting
from lightning_autopipe.planner.objective import Objective
from lightning_autopipe.planner.placements import Grid
from tests.planner.steps import a_device, a_profile

SAME = 1 + 1e-9
"""Steps whose ratio is less are equally long."""


def a_cluster(names: str, speeds: Sequence[float] = (), bandwidth: float = 1.0, **changes: float) -> ClusterTopology:
    """Servers of one letter each, ``"AABB"``, on a switch; devices in one server reach each other in no time."""
    devices = tuple(
        a_device(rank, server, relative_speed=speeds[rank] if speeds else 1.0, **changes)
        for rank, server in enumerate(names)
    )
    links = tuple(Link(a=name, b="switch", bandwidth_bytes_per_s=bandwidth) for name in dict.fromkeys(names))
    return ClusterTopology(devices=devices, links=links)


def a_model(
    times: Sequence[float], *, num_bytes: int = 0, gradient_bytes: int = 0, value_bytes: Sequence[int] = ()
) -> ModelProfile:
    """Layers of which backwards take twice as long as forwards."""
    sizes = value_bytes or [num_bytes] * (len(times) - 1)
    values = tuple(
        CrossingValue(producer=index, last_reader=index + 1, forward_bytes=size, gradient_bytes=size)
        for index, size in enumerate(sizes)
    )
    layers = tuple(
        LayerProfile(name=str(index), forward_flops=1.0, param_bytes=gradient_bytes, trainable_bytes=gradient_bytes)
        for index in range(len(times))
    )
    return a_profile(times, [2 * seconds for seconds in times], values=values, layers=layers)


def a_mapping_setting(
    profile: ModelProfile, topology: ClusterTopology, num_stages: int, num_replicas: int, num_microbatches: int
) -> MappingSetting:
    return MappingSetting(
        cost=CostModel(profile),
        network=LinkNetwork(topology),
        num_stages=num_stages,
        num_replicas=num_replicas,
        num_microbatches=num_microbatches,
    )


def simulated_s(setting: MappingSetting, grid: Grid, cuts: tuple[int, ...], shares: tuple[int, ...]) -> float:
    return simulate(Objective(setting.pipelines(grid, shares)).step_work(cuts, setting.depths)).step_s
