"""Shows a cluster: its servers, devices and links as tables, and what hangs on what as a tree."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich import box
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from lightning_autopipe.core.cluster import ClusterTopology, Device, Link, rank_of_point, rank_point
from lightning_autopipe.core.quantities import bandwidth_text, duration_text, memory_text

_MAX_ROWS = 40


def server_table(topology: ClusterTopology, *, max_rows: int = _MAX_ROWS) -> Table:
    """One row a server: its ranks, devices, memory, speed, and what leads out of it."""
    num_servers = len(topology.servers)
    table = _table(f"{_count(topology.world_size, 'device')} in {_count(num_servers, 'server')}")
    for name, justify in (("server", "left"), ("ranks", "left"), ("devices", "left"), ("memory", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("speed", justify="right")
    table.add_column("to others")
    for server in topology.servers[:max_rows]:
        devices = [topology.devices[rank] for rank in topology.server_ranks(server)]
        models = Counter(device.model for device in devices)
        ways_out = [link for link in topology.links if _leads_out(link, server, devices)]
        table.add_row(
            Text(server),
            _ranks(device.global_rank for device in devices),
            Text(", ".join(f"{number} × {model}" for model, number in models.items())),
            memory_text(sum(device.memory_bytes for device in devices)),
            f"{sum(device.relative_speed for device in devices):.3g}",
            Text("\n".join(_figures(link) for link in ways_out)),
        )
    return _cut(table, num_servers, max_rows)


def device_table(topology: ClusterTopology, *, max_rows: int = _MAX_ROWS) -> Table:
    """One row for each run of ranks that are alike."""
    table = _table("devices")
    table.add_column("ranks")
    table.add_column("server")
    table.add_column("model")
    table.add_column("memory", justify="right")
    table.add_column("speed", justify="right")
    runs: list[list[Device]] = []
    for device in topology.devices:
        if runs and _alike(runs[-1][-1], device):
            runs[-1].append(device)
        else:
            runs.append([device])
    for run in runs[:max_rows]:
        first = run[0]
        table.add_row(
            _ranks(device.global_rank for device in run),
            Text(first.server),
            Text(first.model),
            memory_text(first.memory_bytes),
            f"{first.relative_speed:.3g}",
        )
    return _cut(table, len(runs), max_rows)


def link_table(topology: ClusterTopology, *, max_rows: int = _MAX_ROWS) -> Table:
    """One row for each link, or for several ranks' links to one point that are alike."""
    table = _table("links")
    for name, justify in (("from", "left"), ("to", "left"), ("kind", "left"), ("bandwidth", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("latency", justify="right")
    table.add_column("duplex")
    table.add_column("sharing")
    rows: dict[tuple[str, Link], list[str]] = defaultdict(list)
    for link in topology.links:
        rows[link.b, _without_ends(link)].append(link.a)
    for (end, link), begins in list(rows.items())[:max_rows]:
        table.add_row(
            Text(_points(begins)),
            Text(end),
            Text(link.kind),
            bandwidth_text(link.bandwidth_bytes_per_s),
            duration_text(link.latency_s),
            link.duplex,
            link.sharing,
        )
    return _cut(table, len(rows), max_rows)


def topology_tree(topology: ClusterTopology) -> Tree:
    """What hangs on what, from the network down to the devices, each with its link; the rest is listed at the end."""
    neighbours: dict[str, list[tuple[str, Link]]] = defaultdict(list)
    for link in topology.links:
        neighbours[link.a].append((link.b, link))
        neighbours[link.b].append((link.a, link))
    at_point: dict[str, list[int]] = defaultdict(list)
    for device in topology.devices:
        own = rank_point(device.global_rank)
        at_point[own if own in neighbours else device.server].append(device.global_rank)
    tree = Tree(Text("cluster"))
    seen: set[str] = set()
    used: set[Link] = set()
    for start in _starts(topology, neighbours, at_point):
        if start not in seen:
            seen.add(start)
            border = [(start, _add(tree, topology, [start], None, at_point))]
            while border:
                point, branch = border.pop(0)
                border.extend(_grow(branch, topology, neighbours[point], at_point, seen, used))
    beside = [link for link in topology.links if link not in used]
    if beside:
        branch = tree.add(Text("and beside these"))
        for link in beside[:_MAX_ROWS]:
            branch.add(Text(f"{link.a} ↔ {link.b} · {_figures(link)}"))
        if len(beside) > _MAX_ROWS:
            branch.add(Text(f"… {len(beside) - _MAX_ROWS} more"))
    return tree


def _starts(
    topology: ClusterTopology, neighbours: dict[str, list[tuple[str, Link]]], at_point: dict[str, list[int]]
) -> list[str]:
    """Points to begin a tree at: those of no server first (the network), then all others, devices last."""
    points = list(dict.fromkeys([*neighbours, *at_point]))
    return sorted(points, key=lambda point: (rank_of_point(point) is not None, _server_of(topology, point) is not None))


def _grow(
    branch: Tree,
    topology: ClusterTopology,
    neighbours: Sequence[tuple[str, Link]],
    at_point: dict[str, list[int]],
    seen: set[str],
    used: set[Link],
) -> list[tuple[str, Tree]]:
    """Add what is next to a point and not yet in the tree; give what to go on from. Nothing passes through a device."""
    devices: dict[Link, list[str]] = defaultdict(list)
    border = []
    for point, link in neighbours:
        if point in seen:
            continue
        seen.add(point)
        used.add(link)
        if rank_of_point(point) is None:
            border.append((point, _add(branch, topology, [point], link, at_point)))
        else:
            devices[_without_ends(link)].append(point)
    for link, points in devices.items():
        _add(branch, topology, points, link, at_point)
    return border


def _add(
    branch: Tree, topology: ClusterTopology, points: list[str], link: Link | None, at_point: dict[str, list[int]]
) -> Tree:
    ranks = [rank for point in points for rank in at_point[point]]
    models = ", ".join(dict.fromkeys(topology.devices[rank].model for rank in ranks))
    label = _points(points)
    if ranks:
        label += f": {models}" if rank_of_point(points[0]) is not None else f": {models}, rank {_ranks(ranks)}"
    return branch.add(Text(label if link is None else f"{label} · {_figures(link)}"))


def _server_of(topology: ClusterTopology, point: str) -> str | None:
    server = point.split("/")[0]
    return server if server in topology.servers else None


def _leads_out(link: Link, server: str, devices: Sequence[Device]) -> bool:
    own = {rank_point(device.global_rank) for device in devices} | {server}
    inside = [point in own or point.startswith(f"{server}/") for point in (link.a, link.b)]
    return inside[0] != inside[1]


def _figures(link: Link) -> str:
    parts = [link.kind, bandwidth_text(link.bandwidth_bytes_per_s), duration_text(link.latency_s)]
    parts += ["half duplex"] if link.duplex == "half" else []
    parts += [link.sharing] if link.sharing != "fair" else []
    return " ".join(part for part in parts if part and part != "0")


def _without_ends(link: Link) -> Link:
    return replace(link, a="a", b="b")


def _alike(a: Device, b: Device) -> bool:
    return replace(a, global_rank=b.global_rank) == b


def _points(points: Sequence[str]) -> str:
    ranks = [rank_of_point(point) for point in points]
    if len(points) == 1 or None in ranks:
        return ", ".join(points)
    return f"rank {_ranks(rank for rank in ranks if rank is not None)}"


def _ranks(ranks: Iterable[int]) -> str:
    """``0–3, 5`` of 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _table(title: str) -> Table:
    return Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _cut(table: Table, num_rows: int, max_rows: int) -> Table:
    if num_rows > max_rows:
        table.caption = Text(f"{num_rows - max_rows} more rows")
    return table
