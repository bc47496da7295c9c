"""What each link carries in a step, how busy it is, and which flows meet on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

from lightning_autopipe.core.cluster import Link
from lightning_autopipe.core.schedule import Action, ActionType, Schedule
from lightning_autopipe.core.timeline import StepEnd, Timeline, TimelineEvent
from lightning_autopipe.planner.workload import StageWork, StepWork
from lightning_autopipe.schedules.stash import slice_counts

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Bytes that one rank sends to another in a step."""

    sender: int
    receiver: int
    num_bytes: float
    is_reduction: bool
    """Whether they are of a sum of gradients, not from stage to stage."""
    intervals: tuple[Interval, ...]
    """When it has something under way, in seconds since the step began; they rise and do not meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLoad:
    """One direction of a link in a step, or a half-duplex link."""

    link: Link
    sender: str
    """The end that it leads from; of a half-duplex link, one of its ends."""
    receiver: str
    stage_bytes: float
    """From stage to stage."""
    reduction_bytes: float
    """Of sums of gradients."""
    busy_share: float
    """Share of the step that these bytes take at the link's bandwidth, 0 to 1."""
    contended_share: float
    """Share of the step in which more than one flow has something under way here, 0 to 1."""
    flows: tuple[Flow, ...]

    @property
    def num_bytes(self) -> float:
        """All bytes of a step."""
        return self.stage_bytes + self.reduction_bytes

    @property
    def contending_flows(self) -> tuple[Flow, ...]:
        """Flows that have something under way while another one of the link has."""
        return tuple(
            flow
            for flow in self.flows
            if any(other is not flow and _overlap(flow.intervals, other.intervals) for other in self.flows)
        )


def step_flows(step: StepWork, timeline: Timeline) -> tuple[Flow, ...]:
    """All flows of a step that was simulated: over stage boundaries in both directions, and around rings."""
    return (*_stage_flows(step, timeline), *_ring_flows(step, timeline))


def link_loads(step: StepWork, timeline: Timeline) -> tuple[LinkLoad, ...]:
    """The load of each link that carries anything, in each direction, the busiest one first.

    Args:
        step: what was simulated.
        timeline: the simulation of it.
    """
    network = step.network
    if network is None:
        return ()
    carried: dict[int, list[Flow]] = {}
    for flow in step_flows(step, timeline):
        for index in step.route(flow.sender, flow.receiver).channels:
            carried.setdefault(index, []).append(flow)
    loads = []
    for index, flows in carried.items():
        channel = network.channels[index]
        link = network.topology.links[channel.link_index]
        is_back = index > 0 and network.channels[index - 1].link_index == channel.link_index
        reduction_bytes = sum(flow.num_bytes for flow in flows if flow.is_reduction)
        stage_bytes = sum(flow.num_bytes for flow in flows if not flow.is_reduction)
        busy_s = (stage_bytes + reduction_bytes) / channel.bandwidth_bytes_per_s
        loads.append(
            LinkLoad(
                link=link,
                sender=link.b if is_back else link.a,
                receiver=link.a if is_back else link.b,
                stage_bytes=stage_bytes,
                reduction_bytes=reduction_bytes,
                busy_share=min(1.0, busy_s / timeline.step_s),
                contended_share=_contended_s([flow.intervals for flow in flows]) / timeline.step_s,
                flows=tuple(flows),
            )
        )
    return tuple(sorted(loads, key=lambda load: (-load.busy_share, load.link.a, load.link.b, load.sender)))


def _stage_flows(step: StepWork, timeline: Timeline) -> Iterator[Flow]:
    sends: dict[tuple[int, int, ActionType], list[tuple[Action, TimelineEvent]]] = {}
    for event in timeline.events:
        action = event.action
        if isinstance(action, Action):
            sends.setdefault((event.global_rank, action.stage_index, action.type), []).append((action, event))
    for works, schedule, ranks in zip(step.stages, step.schedules, step.list_ranks, strict=True):
        num_slices = slice_counts(schedule)
        owners = [_owners(schedule, stage_index, lists, ranks) for stage_index, lists in enumerate(step.lists_by_stage)]
        for stage_index, lists in enumerate(step.lists_by_stage):
            for index, kind in product(lists, (ActionType.SEND_ACTIVATION, ActionType.SEND_GRADIENT)):
                neighbour = stage_index + (1 if kind is ActionType.SEND_ACTIVATION else -1)
                by_receiver: dict[int, list[tuple[Action, TimelineEvent]]] = {}
                for send in sends.get((ranks[index], stage_index, kind), ()):
                    by_receiver.setdefault(owners[neighbour][send[0].microbatch_index], []).append(send)
                for receiver, of_receiver in by_receiver.items():
                    flow = _flow(step, works[index], num_slices, receiver, of_receiver)
                    if flow.num_bytes:
                        yield flow


def _owners(schedule: Schedule, stage_index: int, lists: Sequence[int], ranks: Sequence[int]) -> dict[int, int]:
    """By micro-batch, the rank of a stage that has it."""
    return {
        action.microbatch_index: ranks[index]
        for index in lists
        for action in schedule.actions_by_rank[index % schedule.num_ranks]
        if action.stage_index == stage_index
    }


def _flow(
    step: StepWork,
    work: StageWork,
    num_slices: Sequence[int],
    receiver: int,
    sends: Sequence[tuple[Action, TimelineEvent]],
) -> Flow:
    """The flow of some sends of one kind from one rank to another."""
    sender = sends[0][1].global_rank
    latency_s = step.route(sender, receiver).latency_s
    num_bytes = 0.0
    for action, _ in sends:
        of_microbatch = num_slices[action.microbatch_index]
        unit = work.units[of_microbatch - 1]
        num_units = of_microbatch if action.slice_index is None else 1  # all slices in one message
        num_bytes += num_units * (unit.sent_bytes if action.type is ActionType.SEND_ACTIVATION else unit.gradient_bytes)
    return Flow(
        sender=sender,
        receiver=receiver,
        num_bytes=num_bytes,
        is_reduction=False,
        intervals=_joined([(event.start_s, event.end_s - latency_s) for _, event in sends]),
    )


def _ring_flows(step: StepWork, timeline: Timeline) -> Iterator[Flow]:
    ends: Iterator[TimelineEvent] = (
        event for event in timeline.events if event.action in (StepEnd.TIED_GRADIENTS, StepEnd.GRADIENTS)
    )
    for reduction in step.reductions():
        event, *_ = islice(ends, len(reduction.members))
        for sender, receiver in reduction.hops:
            yield Flow(
                sender=sender,
                receiver=receiver,
                num_bytes=reduction.hop_bytes,
                is_reduction=True,
                intervals=((event.start_s, event.end_s),),
            )


def _joined(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)


def _overlap(these: Sequence[Interval], those: Sequence[Interval]) -> bool:
    return _contended_s([these, those]) > 0


def _contended_s(flows: Sequence[Sequence[Interval]]) -> float:
    """How long more than one of some flows has something under way."""
    changes = sorted(
        (when, change) for flow in flows for start, end in flow for when, change in ((start, 1), (end, -1))
    )
    seconds, before, number = 0.0, 0.0, 0
    for when, change in changes:
        if number > 1:
            seconds += when - before
        before, number = when, number + change
    return seconds
