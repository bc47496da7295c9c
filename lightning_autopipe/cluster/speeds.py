"""How fast devices are, from times of the layers themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_autopipe.core.cluster import ClusterTopology
from lightning_autopipe.core.errors import ConfigurationError


def relative_speeds(seconds_by_rank: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """How fast each rank is on the layers themselves, the fastest 1.0.

    Ranks may have measured different layers, as long as they are joined by common ones: seconds are fitted as
    ``work(layer) / speed(rank)``, longer layers counting more.

    Args:
        seconds_by_rank: Of each rank, seconds by name of layer.

    Raises:
        ConfigurationError: a time that is not a finite number above zero, or ranks without a layer in common.
    """
    logs: list[dict[str, float]] = []
    for global_rank, seconds in enumerate(seconds_by_rank):
        for name, value in seconds.items():
            if not (math.isfinite(value) and value > 0):
                raise ConfigurationError(f"rank {global_rank}, layer {name!r}: {value!r} s; a time is finite and > 0")
        logs.append({name: math.log(value) for name, value in seconds.items()})
    _check_common(logs)
    weights = {
        name: max(seconds[name] for seconds in seconds_by_rank if name in seconds)
        for name in {name for seconds in seconds_by_rank for name in seconds}
    }
    speeds = [0.0] * len(logs)
    ranks_of = {name: [rank for rank, own in enumerate(logs) if name in own] for name in weights}
    for _ in range(10_000):
        work = {
            name: sum(logs[rank][name] + speeds[rank] for rank in ranks) / len(ranks)
            for name, ranks in ranks_of.items()
        }
        before = speeds
        speeds = [
            sum(weights[name] * (work[name] - value) for name, value in own.items())
            / sum(weights[name] for name in own)
            for own in logs
        ]
        speeds = [speed - max(speeds) for speed in speeds]
        if max(abs(new - old) for new, old in zip(speeds, before, strict=True)) < 1e-12:
            break
    return tuple(math.exp(speed) for speed in speeds)


def with_speeds(topology: ClusterTopology, speeds: Sequence[float]) -> ClusterTopology:
    """The same cluster with the speeds of its devices, by global rank.

    Raises:
        ConfigurationError: another number of speeds than devices.
    """
    if len(speeds) != topology.world_size:
        raise ConfigurationError(f"{len(speeds)} speeds for {topology.world_size} devices; each device has one")
    devices = tuple(
        replace(device, relative_speed=speed) for device, speed in zip(topology.devices, speeds, strict=True)
    )
    return replace(topology, devices=devices)


def _check_common(logs: Sequence[Mapping[str, float]]) -> None:
    """Refuse ranks whose speeds cannot be compared."""
    if not logs:
        raise ConfigurationError("no ranks; speeds are those of at least one rank")
    reached, names = {0}, set(logs[0])
    while True:
        new = {rank for rank, own in enumerate(logs) if rank not in reached and names & set(own)}
        if not new:
            break
        reached |= new
        names.update(name for rank in new for name in logs[rank])
    apart = [rank for rank in range(len(logs)) if rank not in reached or not logs[rank]]
    if apart:
        raise ConfigurationError(
            f"ranks {apart} have measured no layer that joins them to rank 0; speeds need layers in common"
        )
