"""Ways to lay devices out over stages and replicas, to begin a search with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lightning_autopipe.core.cluster import ClusterTopology, Device
from lightning_autopipe.core.layout import ParallelLayout

Grid = tuple[tuple[int, ...], ...]
"""``grid[r][s]``: the global rank that runs stage s of replica r."""

_POLICIES = ("append", "fresh", "scatter")


def launcher_placement(num_stages: int, num_replicas: int) -> Grid:
    """Ranks in the order in which the launcher counts them."""
    layout = ParallelLayout(num_stages=num_stages, num_replicas=num_replicas)
    return tuple(layout.pipeline_ranks(replica_index) for replica_index in range(num_replicas))


def placements(topology: ClusterTopology, num_stages: int, num_replicas: int) -> dict[str, Grid]:
    """The launcher's placement, and others by name; of equal ones the first name stays.

    Devices are dealt to groups, from servers in the order of their ranks, the fastest first, or the slowest first. A
    group is all replicas of a stage, so that gradients are summed nearby, or all stages of a replica, so that stages
    talk nearby; groups are dealt from the last to the first or from the first to the last.

    - ``append``: as many as possible from a server that is partly used, if there is one.
    - ``fresh``: as many as possible from a server that is not used yet, if there is one.
    - ``scatter``: from all servers in turn.

    Source:
        The three policies are DAPPLE's (Fan et al., PPoPP 2021), there for the replicas of a stage.
    """
    found = {"launcher": launcher_placement(num_stages, num_replicas)}
    for order_name, servers in server_orders(topology).items():
        for policy in _POLICIES:
            for by_stage in (True, False):
                num_groups, size = (num_stages, num_replicas) if by_stage else (num_replicas, num_stages)
                groups = list(_deal(servers, policy, num_groups, size))
                of = "stages" if by_stage else "replicas"
                for direction in ("backwards", "forwards"):
                    name = f"{policy}, {of}, {direction}, {order_name}"
                    found[name] = _grid(groups, by_stage=by_stage, backwards=direction == "backwards")
    unlike = {grid: name for name, grid in reversed(found.items())}
    return {name: grid for grid, name in reversed(unlike.items())}


def with_rank_0_last(grid: Grid) -> Grid:
    """The same, but rank 0 runs the last stage of replica 0: it changes places with the device of its replica there.

    Replicas are turned around their ring, which changes nothing else.
    """
    rows = [list(ranks) for ranks in grid]
    index = next((index for index, ranks in enumerate(rows) if 0 in ranks), None)
    if index is None:
        index = 0
        rows[0][-1] = 0
    else:
        stage_index = rows[index].index(0)
        rows[index][stage_index], rows[index][-1] = rows[index][-1], 0
    return tuple(tuple(ranks) for ranks in (*rows[index:], *rows[:index]))


def server_orders(topology: ClusterTopology) -> dict[str, list[list[int]]]:
    """Ranks by server, in several orders."""

    def ordered(key: Callable[[Device], float]) -> list[list[int]]:
        devices = sorted(topology.devices, key=lambda device: (key(device), device.global_rank))
        servers: dict[str, list[int]] = {}
        for device in devices:
            servers.setdefault(device.server, []).append(device.global_rank)
        return list(servers.values())

    return {
        "by rank": ordered(lambda device: 0.0),
        "fastest first": ordered(lambda device: -device.relative_speed),
        "slowest first": ordered(lambda device: device.relative_speed),
    }


def _deal(servers: Sequence[Sequence[int]], policy: str, num_groups: int, size: int) -> Iterator[list[int]]:
    left = [list(ranks) for ranks in servers]
    turn = 0
    for _ in range(num_groups):
        group: list[int] = []
        while len(group) < size:
            if policy == "scatter":
                while not left[turn % len(left)]:
                    turn += 1
                group.append(left[turn % len(left)].pop(0))
                turn += 1
            else:
                server = _server_of_policy(servers, left, policy, size - len(group))
                taken = left[server][: size - len(group)]
                del left[server][: len(taken)]
                group += taken
        yield group


def _server_of_policy(servers: Sequence[Sequence[int]], left: Sequence[Sequence[int]], policy: str, need: int) -> int:
    """Which server to take from: by policy, then one that has as many as are needed, then the first."""

    def rank(server: int) -> tuple[bool, bool]:
        is_used = len(left[server]) < len(servers[server])
        return is_used if policy == "fresh" else not is_used, len(left[server]) < need

    return min((server for server in range(len(left)) if left[server]), key=rank)


def _grid(groups: Sequence[Sequence[int]], *, by_stage: bool, backwards: bool) -> Grid:
    if not by_stage:
        return tuple(tuple(reversed(group)) if backwards else tuple(group) for group in groups)
    stages = list(reversed(groups)) if backwards else list(groups)
    return tuple(zip(*stages, strict=True))
