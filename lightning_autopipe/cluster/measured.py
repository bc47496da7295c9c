"""Turns what was measured of links into a topology."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from lightning_autopipe.cluster.flows import Flow, FlowTime, MeasuredRound
from lightning_autopipe.cluster.reachability import check_reachable, device_points
from lightning_autopipe.cluster.servers import NETWORK_POINT
from lightning_autopipe.core.cluster import ClusterTopology, Link, rank_of_point, rank_point

_HELD_UP = 0.75
"""A flow that gets less than this share of what it gets alone shares something with those beside it."""
_UNLIKE = 1.2
"""Pairs of one server whose bandwidths differ by more are joined by links of two kinds."""
_KIND = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFlow:
    """A flow that others hold up."""

    round_name: str
    flow: Flow
    share: float
    """Its bandwidth against that alone, 0 to `1`."""


def shared_flows(measured: Sequence[MeasuredRound]) -> tuple[SharedFlow, ...]:
    """Flows that lose more than a quarter of their bandwidth to others at the same time; those measured alone, too."""
    alone = _alone(measured)
    return tuple(
        SharedFlow(round_name=each.round.name, flow=flow, share=time.bandwidth_bytes_per_s / alone[flow])
        for each in measured
        if each.round.name != "alone"
        for flow, time in zip(each.round.flows, each.times, strict=True)
        if flow in alone and time.bandwidth_bytes_per_s < _HELD_UP * alone[flow]
    )


def measured_topology(topology: ClusterTopology, measured: Sequence[MeasuredRound]) -> ClusterTopology:
    """The same devices with links as they were measured.

    Inside a server, ranks hang on common points: one, or one for each group of ranks that reach each other faster than
    the rest (NVLink pairs, a PCIe switch), joined by what their flows got together. Servers hang on one network, each
    by what all its flows got together. A part of which nothing was measured keeps its described links and bandwidths.

    Args:
        topology: Devices, and described links where there are any.
        measured: Of `lightning_autopipe.cluster.measure.measure_links`.

    Raises:
        ConfigurationError: what was neither measured nor described leaves devices apart.
    """
    times: dict[Flow, FlowTime] = {}
    for each in measured:
        if each.round.name == "alone":
            times.update(zip(each.round.flows, each.times, strict=True))
    insides = {server: _inside(topology.server_ranks(server), server, times, measured) for server in topology.servers}
    # What a flow between servers spends before it has left one and after it has entered the other.
    inner_latency_s = {link.a: link.latency_s for inside in insides.values() for link in inside}
    links: list[Link] = []
    for server, inside in insides.items():
        described, ways_out, at = _described(topology, server)
        if inside:
            at = server
        links.extend(inside or described)
        network = _network(topology, server, times, measured, inner_latency_s)
        if network is not None:
            links.append(replace(network, a=at))
        elif ways_out:
            links.append(replace(max(ways_out, key=lambda link: link.bandwidth_bytes_per_s), a=at, b=NETWORK_POINT))
    result = ClusterTopology(devices=topology.devices, links=tuple(links))
    check_reachable(result)
    return result


def _alone(measured: Iterable[MeasuredRound]) -> dict[Flow, float]:
    return {each.round.flows[0]: each.times[0].bandwidth_bytes_per_s for each in measured if each.round.name == "alone"}


def _inside(
    ranks: Sequence[int], server: str, times: Mapping[Flow, FlowTime], measured: Sequence[MeasuredRound]
) -> list[Link]:
    own = {flow: time for flow, time in times.items() if flow.sender in ranks and flow.receiver in ranks}
    if {rank for flow in own for rank in (flow.sender, flow.receiver)} != set(ranks):
        return []
    kept = _kept_share(measured, own, ("neighbours at once",))
    duplex = _duplex(measured, own)
    groups = _groups(ranks, own)
    links = []
    for number, members in enumerate(groups):
        hub = server if len(groups) == 1 else f"{server}/group {number}"
        for rank in members:
            near = [
                time for flow, time in own.items() if rank in (flow.sender, flow.receiver) and _within(flow, members)
            ]
            near = near or [time for flow, time in own.items() if rank in (flow.sender, flow.receiver)]
            bandwidth = kept * max(time.bandwidth_bytes_per_s for time in near)
            latency_s = median(time.latency_s for time in near) / 2
            links.append(_link(rank_point(rank), hub, bandwidth, latency_s, duplex))
        if len(groups) > 1:
            others = set(ranks) - set(members)
            together = _together(measured, members, others) + _together(measured, others, members)
            links.append(_link(hub, server, max(together), 0.0, duplex))
    return links


def _network(
    topology: ClusterTopology,
    server: str,
    times: Mapping[Flow, FlowTime],
    measured: Sequence[MeasuredRound],
    inner_latency_s: Mapping[str, float],
) -> Link | None:
    ranks = topology.server_ranks(server)
    across = {flow: time for flow, time in times.items() if (flow.sender in ranks) != (flow.receiver in ranks)}
    if not across:
        return None
    others = set(range(topology.world_size)) - set(ranks)
    together = _together(measured, ranks, others) + _together(measured, others, ranks)
    latency_s = min(
        time.latency_s - sum(inner_latency_s.get(rank_point(rank), 0.0) for rank in (flow.sender, flow.receiver))
        for flow, time in across.items()
    )
    return _link(server, NETWORK_POINT, max(together), max(0.0, latency_s / 2), _duplex(measured, across))


def _together(measured: Iterable[MeasuredRound], senders: Container[int], receivers: Container[int]) -> list[float]:
    """What all flows from some ranks to others got together in each round that has any, in bytes per second.

    Where flows take turns, and other ones are first each time, none has its time from the same turn as the others: only
    that of the last one says how much passed. Of a part of a round's flows there is no such time. They begin at once
    with equal sizes: when the i-th of them is through, i messages have passed.
    """
    found = []
    for each in measured:
        bandwidths = sorted(
            time.bandwidth_bytes_per_s
            for flow, time in zip(each.round.flows, each.times, strict=True)
            if flow.sender in senders and flow.receiver in receivers
        )
        if bandwidths and len(bandwidths) == len(each.times) and each.together_bytes_per_s is not None:
            found.append(each.together_bytes_per_s)
        elif bandwidths:
            found.append(max(place * bandwidth for place, bandwidth in enumerate(reversed(bandwidths), start=1)))
    return found


def _kept_share(measured: Iterable[MeasuredRound], own: Mapping[Flow, FlowTime], names: tuple[str, ...]) -> float:
    """What flows keep of their bandwidth beside others, 1 where they do not hold each other up."""
    shares = [
        time.bandwidth_bytes_per_s / own[flow].bandwidth_bytes_per_s
        for each in measured
        if each.round.name in names
        for flow, time in zip(each.round.flows, each.times, strict=True)
        if flow in own
    ]
    return min(1.0, median(shares)) if shares and median(shares) < _HELD_UP else 1.0


def _duplex(measured: Iterable[MeasuredRound], own: Mapping[Flow, FlowTime]) -> str:
    return "half" if _kept_share(measured, own, ("both directions",)) < 1 else "full"


def _groups(ranks: Sequence[int], own: Mapping[Flow, FlowTime]) -> list[list[int]]:
    bandwidths = [time.bandwidth_bytes_per_s for time in own.values()]
    if max(bandwidths) < _UNLIKE * min(bandwidths):
        return [list(ranks)]
    enough = math.sqrt(max(bandwidths) * min(bandwidths))
    group_of = {rank: rank for rank in ranks}
    for flow, time in own.items():
        if time.bandwidth_bytes_per_s >= enough and group_of[flow.sender] != group_of[flow.receiver]:
            old, new = sorted((group_of[flow.sender], group_of[flow.receiver]), reverse=True)
            group_of = {rank: new if group == old else group for rank, group in group_of.items()}
    groups: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        groups[group_of[rank]].append(rank)
    return list(groups.values())


def _described(topology: ClusterTopology, server: str) -> tuple[list[Link], list[Link], str]:
    """Links inside a server, links that lead out of it, and the point from which the widest of them does."""
    points = device_points(topology)
    own = {points[rank] for rank in topology.server_ranks(server)} | {server}

    def is_own(point: str) -> bool:
        return point in own or (rank_of_point(point) is None and point.startswith(f"{server}/"))

    inside = [link for link in topology.links if is_own(link.a) and is_own(link.b)]
    ways_out = [link for link in topology.links if is_own(link.a) != is_own(link.b)]
    if not ways_out:
        return inside, [], server
    widest = max(ways_out, key=lambda link: link.bandwidth_bytes_per_s)
    return inside, ways_out, widest.a if is_own(widest.a) else widest.b


def _within(flow: Flow, ranks: Sequence[int]) -> bool:
    return flow.sender in ranks and flow.receiver in ranks


def _link(a: str, b: str, bandwidth: float, latency_s: float, duplex: str) -> Link:
    return Link(a=a, b=b, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s, duplex=duplex, kind=_KIND)
