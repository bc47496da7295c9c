"""Runs one step in simulated time."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.timeline import Timeline
from lightning_autopipe.planner.links import Route
from lightning_autopipe.planner.simulated import step_end_s, to_timeline
from lightning_autopipe.planner.simulated_ranks import Node, RunningReduction, make_nodes
from lightning_autopipe.planner.transfers import Event, Transfers
from lightning_autopipe.planner.workload import StepWork

_OF_A_RING = -1
"""In place of a code: the message belongs to a reduction, and its sender is that."""


def simulate(step: StepWork) -> Timeline:
    """When each action of a step runs, and how much memory each rank needs at most.

    As the executor does it: a rank goes through the computations of its list, and each begins when the one before has
    ended and its input has arrived. Receives are posted early and sends block nobody; a value is handed to its links
    when it is computed, slices that go as one message when the last of them is. After its list a rank sums gradients
    with those that share parameters with it, then, stage by stage, with the other replicas; when all ranks have done so
    they exchange what is one number for all, and step.

    Deterministic: equal input gives equal output, to the bit.

    Raises:
        PlanError: a schedule cannot run to its end, or slices a micro-batch in a way that was not priced.
        ConfigurationError: two ranks that talk have no links between them.
    """
    with _collecting_no_garbage():
        nodes = make_nodes(step)
        reductions = _Simulation(step, nodes).run()
        return to_timeline(step, nodes, reductions)


def simulated_s(step: StepWork) -> float:
    """The same step's seconds alone, as `simulate` gives them, in less time: for searches."""
    with _collecting_no_garbage():
        nodes = make_nodes(step)
        _Simulation(step, nodes).run()
        return step_end_s(step, nodes)


@contextlib.contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """Many small objects are made here and all are kept: looking for garbage would take a quarter of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Simulation:
    """The events of one step: ends of computations, of messages on a route, and of reductions."""

    def __init__(self, step: StepWork, nodes: Sequence[Node]) -> None:
        self._step, self._nodes = step, nodes
        self._events: list[Event] = []
        self._number = itertools.count().__next__
        self._routes: list[Route] = []
        self._index_of: dict[tuple[int, int], int] = {}
        for node in nodes:
            for output in dict.fromkeys(node.outputs):
                if output is not None:
                    output.route, output.latency_s = self._route(node.global_rank, output.receiver.global_rank)
        node_of = {node.global_rank: node for node in nodes}
        self._reductions: list[RunningReduction] = []
        for reduction in step.reductions():
            members = [node_of[rank] for rank in reduction.members]
            running = RunningReduction(reduction, members, [self._route(*hop) for hop in reduction.hops])
            self._reductions.append(running)
            for member in members:
                member.reductions.append(running)
        self._first_reduction = len(nodes) + len(self._routes)
        channels = step.network.channels if step.network else ()
        self._transfers = Transfers(self._events, self._number, self._routes, channels, len(nodes))

    def _route(self, sender: int, receiver: int) -> tuple[int, float]:
        """Index of the route, -1 for one that takes no time for a byte, and its latency."""
        route = self._step.route(sender, receiver)
        if not route.channels:
            return -1, route.latency_s
        if (sender, receiver) not in self._index_of:
            self._index_of[sender, receiver] = len(self._routes)
            self._routes.append(route)
        return self._index_of[sender, receiver], route.latency_s

    def run(self) -> Sequence[RunningReduction]:
        """Runs all nodes to their ends; they hold when their computations began. Gives the reductions, alike."""
        events, nodes, transfers = self._events, self._nodes, self._transfers
        begin_next, arrive, send, end_message = self._begin_next, self._arrive, transfers.send, transfers.end
        num_nodes, first_reduction, due = len(nodes), self._first_reduction, transfers.due
        for node in nodes:
            begin_next(node, 0.0)
        while events:
            now, number, who = heappop(events)
            if who < num_nodes:
                node = nodes[who]
                code = node.codes[node.position]
                node.position += 1
                output = node.outputs[code]
                if output is not None:
                    num_bytes = output.num_bytes
                    if num_bytes > 0 and output.route >= 0:
                        send(output.route, (num_bytes, output.latency_s, who, code, now))
                    else:
                        arrive(who, code, now, now + output.latency_s if num_bytes > 0 else now)
                begin_next(node, now)
            elif who < first_reduction:
                if due[who - num_nodes] == number:
                    _, latency_s, sender, code, sent_s = end_message(now, who - num_nodes)
                    arrive(sender, code, sent_s, now + latency_s)
            else:
                self._end_reduction(self._reductions[who - first_reduction], now)
        for node in nodes:
            if node.position < len(node.codes):
                raise PlanError(
                    f"the schedule cannot run to its end: {node.actions[node.position]} waits for what is never sent"
                )
        return self._reductions

    def _begin_next(self, node: Node, now: float) -> None:
        """Begins the next computation of a node that is free, or lets it wait for its input."""
        position = node.position
        if position == node.num_actions:
            node.end_s = now
            self._join_next(node, now)
            return
        start = node.arrived[node.codes[position]]
        if start < now:
            if start < 0.0:
                node.waits_since = now
                return
            start = now
        node.starts.append(start)
        heappush(self._events, (start + node.seconds[position], self._number(), node.index))

    def _arrive(self, sender: int, code: int, sent_s: float, when: float) -> None:
        if code == _OF_A_RING:
            self._arrive_in_ring(self._reductions[sender], when)
            return
        node = self._nodes[sender]
        node.sent.append((code, sent_s, when))
        output = node.outputs[code]
        assert output is not None
        receiver = output.receiver
        code += output.code_offset
        receiver.arrived[code] = when
        since = receiver.waits_since
        if since >= 0.0 and receiver.codes[receiver.position] == code:
            receiver.waits_since = -1.0
            self._begin_next(receiver, since)

    # The step's end --------------------------------------------------------

    def _join_next(self, node: Node, now: float) -> None:
        """A node has nothing to do before its next reduction, which begins when all members have come."""
        if node.num_reduced == len(node.reductions):
            return
        running = node.reductions[node.num_reduced]
        running.num_here += 1
        if running.num_here < len(running.members):
            return
        running.start_s = now
        running.num_here = 0
        index = self._reductions.index(running)
        for route, latency_s in running.routes:
            latency_s *= running.reduction.num_rounds
            if route >= 0:
                self._transfers.send(route, (running.reduction.hop_bytes, latency_s, index, _OF_A_RING, now))
            else:
                self._arrive_in_ring(running, now + latency_s)

    def _arrive_in_ring(self, running: RunningReduction, when: float) -> None:
        running.num_here += 1
        running.end_s = max(running.end_s, when)
        if running.num_here == len(running.members):
            index = self._reductions.index(running)
            heappush(self._events, (running.end_s, self._number(), self._first_reduction + index))

    def _end_reduction(self, running: RunningReduction, now: float) -> None:
        for node in running.members:
            node.num_reduced += 1
            node.end_s = now
        for node in running.members:
            self._join_next(node, now)
