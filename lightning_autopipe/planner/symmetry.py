"""Devices that can be exchanged without a difference, and orders of devices without their mirror images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_autopipe.core.cluster import ClusterTopology, rank_of_point
from lightning_autopipe.planner.links import LinkNetwork

_Colours = tuple[int, ...]


def twin_classes(network: LinkNetwork) -> tuple[int, ...]:
    """For each global rank a number; equal ones are of devices that are alike and joined alike to the same points.

    Exchanging two of them changes nothing. That servers are alike, or pairs in one, is seen by `Symmetries` only.
    """
    ends = _ends(network.topology)
    known: dict[object, int] = {}
    classes = []
    for device in network.topology.devices:
        point = network.point(device.global_rank)
        stands: object = point if rank_of_point(point) is None else tuple(sorted(ends[point], key=repr))
        key = (device.model, device.relative_speed, device.memory_bytes, stands)
        classes.append(known.setdefault(key, len(known)))
    return tuple(classes)


class Symmetries:
    """The exchanges of devices under which a cluster looks the same: automorphisms of the graph of devices and links.

    For few devices: the graph is refined again for each question. Where several ways between two devices are equally
    quick, routes may differ where the graph does not.

    Args:
        topology: devices and links.
    """

    def __init__(self, topology: ClusterTopology) -> None:
        self._num_devices = topology.world_size
        network = LinkNetwork(topology)
        points = sorted(
            {point for link in topology.links for point in (link.a, link.b)}
            | {network.point(rank) for rank in range(self._num_devices)}
        )
        index_of = {point: self._num_devices + index for index, point in enumerate(points)}
        self._edges: list[dict[int, tuple[object, ...]]] = [{} for _ in range(self._num_devices + len(points))]
        for point, ends in _ends(topology).items():
            edges = self._edges[index_of[point]]
            for other, kind in ends:
                known = edges.get(index_of[other], ())
                edges[index_of[other]] = tuple(sorted((*known, kind), key=repr))
        for rank in range(self._num_devices):
            point_index = index_of[network.point(rank)]
            self._edges[rank][point_index] = self._edges[point_index][rank] = ("stands here",)
        kinds = [(device.model, device.relative_speed, device.memory_bytes) for device in topology.devices]
        numbers = {kind: number for number, kind in enumerate(sorted(set(kinds)), start=1)}
        self._start = (*(numbers[kind] for kind in kinds), *([0] * len(points)))
        self._orbits: dict[tuple[int, ...], tuple[int, ...]] = {}

    def first_of_orbits(self, fixed: tuple[int, ...]) -> tuple[int, ...]:
        """Of the devices that are not fixed, one of each set that is alike while those stay where they are."""
        if fixed not in self._orbits:
            first: list[int] = []
            for rank in range(self._num_devices):
                if rank not in fixed and not any(self._is_alike(fixed, rank, other) for other in first):
                    first.append(rank)
            self._orbits[fixed] = tuple(first)
        return self._orbits[fixed]

    def _is_alike(self, fixed: tuple[int, ...], a: int, b: int) -> bool:
        return self._matches((*fixed, a), (*fixed, b))

    def _matches(self, these: tuple[int, ...], those: tuple[int, ...]) -> bool:
        """Whether an automorphism takes these vertices to those, one by one."""
        if any(self._start[vertex] != self._start[other] for vertex, other in zip(these, those, strict=True)):
            return False
        colours, others = self._refined(these), self._refined(those)
        if sorted(colours) != sorted(others):
            return False
        members: dict[int, list[int]] = {}
        for vertex, colour in enumerate(colours):
            members.setdefault(colour, []).append(vertex)
        for colour, vertices in members.items():
            if len(vertices) > 1:
                choices = [vertex for vertex, other in enumerate(others) if other == colour]
                return any(self._matches((*these, vertices[0]), (*those, choice)) for choice in choices)
        image = {colour: vertex for vertex, colour in enumerate(others)}
        return all(
            self._edges[image[colours[vertex]]] == {image[colours[end]]: kind for end, kind in edges.items()}
            for vertex, edges in enumerate(self._edges)
        )

    def _refined(self, fixed: Sequence[int]) -> _Colours:
        """Colours such that vertices of one colour have alike neighbours; numbered alike for alike graphs."""
        colours = list(self._start)
        for number, vertex in enumerate(fixed, start=1):
            colours[vertex] = -number
        num_colours = len(set(colours))
        while True:
            seen = [
                (colours[vertex], tuple(sorted((repr(kind), colours[end]) for end, kind in edges.items())))
                for vertex, edges in enumerate(self._edges)
            ]
            numbers = {signature: number for number, signature in enumerate(sorted(set(seen)))}
            colours = [numbers[signature] for signature in seen]
            if len(numbers) == num_colours:
                return tuple(colours)
            num_colours = len(numbers)


def distinct_orders(
    topology: ClusterTopology, length: int, *, fold: bool = True, first: int | None = None
) -> Iterator[tuple[int, ...]]:
    """Orders of so many of the devices; of those that only exchanges of alike devices tell apart, one.

    Args:
        topology: devices and links.
        length: devices in an order.
        fold: whether alike ones are folded together.
        first: the device that all orders begin with; None: any.
    """
    symmetries = Symmetries(topology) if fold else None
    ranks = range(topology.world_size)

    def orders(begun: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(begun) == length:
            yield begun
            return
        if not begun and first is not None:
            choices: Sequence[int] = (first,)
        elif symmetries is not None:
            choices = symmetries.first_of_orbits(begun)
        else:
            choices = [rank for rank in ranks if rank not in begun]
        for rank in choices:
            yield from orders((*begun, rank))

    return orders(())


def _ends(topology: ClusterTopology) -> dict[str, list[tuple[str, tuple[object, ...]]]]:
    """By point, the other ends of its links, and what those links are like."""
    ends: dict[str, list[tuple[str, tuple[object, ...]]]] = {}
    for link in topology.links:
        kind = (link.bandwidth_bytes_per_s, link.latency_s, link.duplex, link.sharing)
        ends.setdefault(link.a, []).append((link.b, kind))
        ends.setdefault(link.b, []).append((link.a, kind))
    return ends
