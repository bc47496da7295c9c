"""Graphs of profiled operations, as planners publish them, and the layers that they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.profile import CrossingValue, DeviceTimes, LayerMeasurement, LayerProfile, ModelProfile

_MAX_NAME = 60
"""Characters; names of whole modules, printed with all that is in them, are cut there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A value that a node makes."""

    num_bytes: int
    """For one micro-batch."""
    readers: tuple[str, ...]
    """Keys of the nodes that use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One profiled operation; times and bytes of one micro-batch."""

    key: str
    """What the file calls it; no two nodes have the same."""
    name: str
    place: str
    """Where in the file it is, for errors."""
    forward_s: float
    backward_s: float
    param_bytes: int
    kept_bytes: int
    """What stays in memory between its forward and its backward."""
    outputs: tuple[Output, ...]

    @property
    def readers(self) -> tuple[str, ...]:
        """Keys of all nodes that use any of its outputs."""
        return tuple(dict.fromkeys(reader for output in self.outputs for reader in output.readers))


def profile_of_graph(nodes: Sequence[Node], *, source: str, device_model: str, microbatch_size: float) -> ModelProfile:
    """One layer a node, in topological order, with the values that cross each cut.

    A value crosses every cut between its node and the last one that uses it; its gradient is as large. All parameters
    are taken to be trainable. A layer keeps what its node does and, while it runs, the gradients of its outputs beside.

    Args:
        nodes: in the order of the file, with readers that are all among them.
        source: the file, for errors.
        device_model: what the times were measured on.
        microbatch_size: samples in the micro-batch that times and bytes are of.

    Raises:
        PlanError: there are no nodes, they form a cycle, or none of them takes any time.
    """
    if not nodes:
        raise PlanError(f"{source}: no nodes; a profile has at least one")
    if not any(node.forward_s + node.backward_s for node in nodes):
        raise PlanError(f"{source}: none of the {len(nodes)} nodes takes any time; a profile needs one that does")
    ordered = topological_order(nodes)
    position = {node.key: index for index, node in enumerate(ordered)}
    values = tuple(
        CrossingValue(
            producer=index,
            last_reader=max(position[reader] for reader in output.readers),
            forward_bytes=output.num_bytes,
            gradient_bytes=output.num_bytes,
        )
        for index, node in enumerate(ordered)
        for output in node.outputs
        if output.num_bytes and output.readers
    )
    crossing = [
        sum(value.forward_bytes for value in values if value.producer <= index < value.last_reader)
        for index in range(len(ordered))
    ]
    times = DeviceTimes(
        device_model=device_model,
        microbatch_size=microbatch_size,
        forward_s=tuple(node.forward_s for node in ordered),
        backward_s=tuple(node.backward_s for node in ordered),
    )
    return ModelProfile(
        layers=tuple(_layer(node, sent_bytes) for node, sent_bytes in zip(ordered, crossing, strict=True)),
        values=values,
        times=(times,),
        microbatch_size=microbatch_size,
    )


def topological_order(nodes: Sequence[Node]) -> list[Node]:
    """Every node after those that it reads from; of several that could be next, the first one of the file.

    Raises:
        PlanError: some of them form a cycle.
    """
    position = {node.key: index for index, node in enumerate(nodes)}
    num_waited_for = [0] * len(nodes)
    for node in nodes:
        for reader in node.readers:
            num_waited_for[position[reader]] += 1
    ready = [index for index, number in enumerate(num_waited_for) if not number]
    heapify(ready)
    ordered: list[Node] = []
    while ready:
        node = nodes[heappop(ready)]
        ordered.append(node)
        for reader in node.readers:
            num_waited_for[position[reader]] -= 1
            if not num_waited_for[position[reader]]:
                heappush(ready, position[reader])
    if len(ordered) < len(nodes):
        raise PlanError(_cycle_text(nodes, {node.key for node in ordered}))
    return ordered


def _layer(node: Node, sent_bytes: int) -> LayerProfile:
    name = " ".join(f"{node.key} {node.name}".split())
    return LayerProfile(
        name=name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…",
        forward_flops=0.0,
        param_bytes=node.param_bytes,
        trainable_bytes=node.param_bytes,
        boundary_bytes=sent_bytes,
        measured=LayerMeasurement(
            forward_s=node.forward_s,
            backward_s=node.backward_s,
            activation_bytes=node.kept_bytes,
            # What is sent was received, or a layer of the stage keeps it: nothing of it is held beside.
            sent_kept_bytes=sent_bytes,
            peak_bytes=node.kept_bytes + sum(output.num_bytes for output in node.outputs),
            sent_bytes=sent_bytes,
            gradient_bytes=sent_bytes,
        ),
    )


def _cycle_text(nodes: Sequence[Node], ordered: set[str]) -> str:
    """Follows those that were left backwards until one comes again."""
    left = {node.key: node for node in nodes if node.key not in ordered}
    writer_of = {reader: key for key, node in left.items() for reader in node.readers}
    key = next(iter(writer_of))
    path: list[str] = []
    while key not in path:
        path.append(key)
        key = writer_of[key]
    cycle = [key, *reversed(path[path.index(key) :])]
    shown = cycle if len(cycle) <= 10 else [*cycle[:8], "…", cycle[-1]]
    return f"{left[key].place}: the edges {' -- '.join(shown)} form a cycle; a step runs each node after its inputs"
