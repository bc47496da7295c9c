"""A backward in two parts: first the gradients that the stage before waits for, later those of the parameters.

Autograd's graph of a stage has nodes from which received values can be reached (the *path*) and nodes that lead to
parameters only (*sides*, hanging on the path). The first part runs the path alone; each node with a side keeps the
gradient that came in. The second part runs each of those nodes again, now for its side only: the path's own part of it
is not computed twice. Both give the same numbers as one backward: the same kernels on the same gradients.

Some parameters cannot wait; the first part computes them as well:

- those that several nodes of the path lead to (a shared module): from the first of these nodes autograd would run the
  path to the others again, and sums would be formed in another order;
- those at nodes that compute all their gradients at once (custom functions, in-place views), or whose saved tensors are
  recomputed or fetched for each use (checkpointed regions, offloading).

Around a reentrant checkpoint, which allows no partial backward, and a compiled graph, which may reuse the memory of
what it has saved, the first part is the whole one. Where nothing received requires a gradient, as on the first stage,
the second part is.

Until the second part has run all of the graph is alive. Hooks on the outputs of nodes that run twice are called twice,
with the same gradient.

Source:
    The idea: Qi et al., *Zero Bubble Pipeline Parallelism*, ICLR 2024.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_RUN_ONCE = frozenset({"CheckpointFunctionBackward", "CompiledFunctionBackward"})
_COPY_SLICES = "CopySlices"


@dataclass(slots=True)
class DeferredBackward:
    """What is left of a backward."""

    calls: list[tuple[list[GradientEdge] | list[Tensor], list[Tensor | None], list[Tensor] | None]] = field(
        default_factory=list
    )
    """Arguments of `torch.autograd.backward`: where to begin, the gradients there, and for which leaves (None: all)."""

    def run(self) -> None:
        """Accumulate what is left, and let go of the graph piece by piece."""
        self.calls.reverse()
        while self.calls:
            roots, gradients, leaves = self.calls.pop()
            torch.autograd.backward(roots, gradients, inputs=leaves)


def backward_of_leaves(
    roots: Sequence[Tensor], gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> tuple[list[Tensor | None], DeferredBackward]:
    """Give the gradients of some leaves, and what is left to do for all others.

    Args:
        roots: Where the backward begins.
        gradients: Their gradients; None for a scalar's 1.
        leaves: Whose gradients are needed now; nothing is accumulated in them.
    """
    if not roots:
        return [None] * len(leaves), DeferredBackward()
    graph = _Graph(roots, leaves) if leaves else None
    if graph is None or not graph.path:
        return [None] * len(leaves), DeferredBackward([(list(roots), list(gradients), None)])
    if graph.runs_once:
        torch.autograd.backward(roots, gradients)
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found, DeferredBackward()
    at_once, owned, of_side_roots = graph.sides()
    kept = [(node, GradientEdge(node, slot)) for node in owned for slot in sorted(graph.slots[node])]
    edges = [*map(get_gradient_edge, leaves), *(GradientEdge(node, 0) for node in at_once), *(edge for _, edge in kept)]
    results = torch.autograd.grad(roots, edges, gradients, retain_graph=bool(kept or of_side_roots), allow_unused=True)
    with torch.no_grad():
        for node, gradient in zip(at_once, results[len(leaves) :], strict=False):
            if gradient is not None:
                # It accumulates and calls the hooks behind that; those before were called when it was captured.
                node(gradient)  # type: ignore[operator]
    rest = DeferredBackward()
    if of_side_roots:
        side_roots = [index for index, root in enumerate(roots) if get_gradient_edge(root).node not in graph.path]
        rest.calls.append(([roots[i] for i in side_roots], [gradients[i] for i in side_roots], of_side_roots))
    came_in: dict[Node, tuple[list[GradientEdge], list[Tensor | None]]] = {}
    for (node, edge), gradient in zip(kept, results[len(leaves) + len(at_once) :], strict=True):
        if gradient is not None:
            node_edges, node_gradients = came_in.setdefault(node, ([], []))
            node_edges.append(edge)
            node_gradients.append(gradient)
    rest.calls.extend((*came_in[node], owned[node]) for node in came_in)
    return list(results[: len(leaves)]), rest


class _Graph:
    """The nodes below some roots, and which of them lead to some leaves."""

    def __init__(self, roots: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        self._root_edges = [get_gradient_edge(root) for root in roots]
        self._leaf_nodes = {get_gradient_edge(leaf).node for leaf in leaves}
        self.path: set[Node] = set()
        self.slots: dict[Node, set[int]] = {}
        """By node, which of its results gradients may come in for."""
        self.runs_once = False
        for edge in self._root_edges:
            self.slots.setdefault(edge.node, set()).add(edge.output_nr)
        self._order = self._walk()

    def _walk(self) -> list[Node]:
        """All nodes, each behind those that it leads to."""
        order: list[Node] = []
        seen: set[Node] = set()
        waiting = [(edge.node, False) for edge in self._root_edges]
        while waiting:
            node, is_done = waiting.pop()
            if is_done:
                order.append(node)
                if node in self._leaf_nodes or any(following in self.path for following, _ in node.next_functions):
                    self.path.add(node)
                continue
            if node in seen:
                continue
            seen.add(node)
            self.runs_once |= node.name() in _RUN_ONCE
            waiting.append((node, True))
            for following, slot in node.next_functions:
                if following is not None:
                    self.slots.setdefault(following, set()).add(slot)
                    waiting.append((following, False))
        return order

    def sides(self) -> tuple[list[Node], dict[Node, list[Tensor]], list[Tensor]]:
        """Sort the parameters.

        Returns:
            Accumulators of those that cannot wait; the others by the one node of the path that leads to them, in the
            order of a backward; those that only roots lead to which are not on the path.
        """
        owners: dict[Node, Node | None] = {}  # of what lies on sides; None: several, or one that cannot run twice
        side_roots = [edge.node for edge in self._root_edges if edge.node not in self.path]
        beginning = side_roots[0] if side_roots else None
        self._claim(beginning, side_roots, owners)
        for node in reversed(self._order):
            if node in self.path:
                self._claim(None if _computes_at_once(node) else node, self._off_path(node), owners)
        at_once: list[Node] = []
        owned: dict[Node, list[Tensor]] = {}
        for node, owner in owners.items():
            if not hasattr(node, "variable"):
                continue
            if owner is None:
                at_once.append(node)
            else:
                owned.setdefault(owner, []).append(node.variable)
        of_side_roots = owned.pop(beginning, []) if beginning is not None else []
        return at_once, owned, of_side_roots

    def _off_path(self, node: Node) -> list[Node]:
        return [
            following for following, _ in node.next_functions if following is not None and following not in self.path
        ]

    def _claim(self, owner: Node | None, starts: Iterable[Node], owners: dict[Node, Node | None]) -> None:
        waiting = [(start, owner) for start in starts]
        while waiting:
            node, claimed_by = waiting.pop()
            if node in owners and owners[node] is not claimed_by:
                claimed_by = None
            if node in owners and owners[node] is claimed_by:
                continue
            owners[node] = claimed_by
            below = None if _computes_at_once(node) else claimed_by
            waiting.extend((following, below) for following, _ in node.next_functions if following is not None)


def _computes_at_once(node: Node) -> bool:
    if issubclass(type(node), torch.autograd.function.BackwardCFunction) or node.name() == _COPY_SLICES:
        return True
    return any(_is_fetched(getattr(node, name)) for name in _saved_names(type(node)))


_names_by_type: dict[type, tuple[str, ...]] = {}


def _saved_names(node_type: type) -> tuple[str, ...]:
    """Attributes of a kind of node that hold its saved tensors, still packed."""
    if node_type not in _names_by_type:
        _names_by_type[node_type] = tuple(name for name in dir(node_type) if name.startswith("_raw_saved_"))
    return _names_by_type[node_type]


def _is_fetched(saved: object) -> bool:
    """Whether a saved tensor, or one of several, is made anew for each use."""
    if isinstance(saved, (tuple, list)):
        return any(map(_is_fetched, saved))
    return getattr(saved, "unpack_hook", None) is not None
