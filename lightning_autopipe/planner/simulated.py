"""The stages of a step while it is simulated, and what becomes a timeline of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.schedule import Action, ActionType, Schedule
from lightning_autopipe.core.timeline import StepEnd, Timeline, TimelineEvent
from lightning_autopipe.planner.reduction import Reduction
from lightning_autopipe.planner.workload import StageWork, StepWork
from lightning_autopipe.schedules.dependencies import on_stage
from lightning_autopipe.schedules.stash import slice_counts

_NOT_THERE = -1.0


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """One rank: a stage of a replica, or of one its own share of the micro-batches.

    A computation's *code* says what it is for: twice the number of its micro-batch's slice, one more for a backward.
    """

    index: int
    global_rank: int
    work: StageWork
    actions: list[Action] = field(default_factory=list)
    """Its computations, in order."""
    codes: list[int] = field(default_factory=list)
    """Of each computation."""
    seconds: list[float] = field(default_factory=list)
    """Of each computation."""
    num_actions: int = 0
    shares: list[float]
    """By code, the share of a micro-batch that it is for."""
    sends: dict[int, Action] = field(default_factory=dict)
    """By code, the send of the result, as far as the schedule names it."""
    arrived: list[float]
    """By code, when the input is there; negative before."""
    outputs: tuple[Output | None, Output | None] = (None, None)
    """Of forwards and of backwards; None at the ends of the pipeline."""
    position: int = 0
    """Of the computation that runs or waits."""
    starts: list[float] = field(default_factory=list)
    """When each computation began, as far as they did."""
    waits_since: float = -1.0
    """Since when it waits for an input; negative where it does not."""
    reductions: list[RunningReduction] = field(default_factory=list)
    num_reduced: int = 0
    end_s: float = 0.0
    """When it has computed and reduced everything."""


@dataclass(slots=True, kw_only=True, eq=False)
class Output:
    """Where a rank sends the results of its forwards, or of its backwards."""

    ways: Sequence[Way]
    """By code, to the rank that has the micro-batch on the next stage."""
    bytes_by_code: Sequence[float]
    sent: list[tuple[int, float, float]] = field(default_factory=list)
    """Code, when it was handed over, and when it arrived."""


@dataclass(slots=True, eq=False)
class Way:
    """From one rank to another."""

    receiver: Node
    route: int = -1
    """Index of the route; -1: none that takes time for a byte."""
    latency_s: float = 0.0


@dataclass(slots=True, eq=False)
class RunningReduction:
    """A sum of gradients over ranks."""

    reduction: Reduction
    members: list[Node]
    routes: list[tuple[int, float]]
    """Of each hop of the ring, the index of its route (-1: none) and its latency."""
    num_here: int = 0
    """Members that have come; once it runs, hops that have ended."""
    start_s: float = 0.0
    end_s: float = 0.0


def make_nodes(step: StepWork) -> list[Node]:
    """All stages of all replicas, before anything has run.

    Raises:
        PlanError: a schedule has more slices to a micro-batch than were priced.
    """
    nodes: list[Node] = []
    lists_by_stage = step.lists_by_stage
    stage_indices = step.stage_indices or range(step.num_stages)
    last = step.num_stages - 1
    for works, schedule, ranks in zip(step.stages, step.schedules, step.list_ranks, strict=True):
        num_slices = slice_counts(schedule)
        most_slices = max(num_slices)
        slices_by_code = [number for number in num_slices for _ in range(2 * most_slices)]
        shares = [1 / number for number in slices_by_code]
        _check_priced(schedule, works, most_slices)
        pipeline = [
            Node(
                index=len(nodes) + index,
                global_rank=ranks[index],
                work=work,
                shares=shares,
                # The first stage has the batch, the last one the loss.
                arrived=[0.0 if stage_index == 0 else _NOT_THERE, 0.0 if stage_index == last else _NOT_THERE]
                * (len(slices_by_code) // 2),
            )
            for index, (work, stage_index) in enumerate(zip(works, stage_indices, strict=True))
        ]
        for node, actions in zip(pipeline, schedule.actions_by_rank, strict=True):
            _read(node, actions, slices_by_code, most_slices)
        owners = [_owners([pipeline[index] for index in lists], len(slices_by_code)) for lists in lists_by_stage]
        for node, stage_index in zip(pipeline, stage_indices, strict=True):
            units = [node.work.units[number - 1] for number in slices_by_code]
            forward = backward = None
            if stage_index < last:
                forward = _output(owners[stage_index + 1], [unit.sent_bytes for unit in units])
            if stage_index > 0:
                backward = _output(owners[stage_index - 1], [unit.gradient_bytes for unit in units])
            node.outputs = (forward, backward)
        nodes.extend(pipeline)
    return nodes


def _owners(stage: Sequence[Node], num_codes: int) -> list[Node]:
    """By code, the rank of a stage that has the micro-batch.

    Raises:
        PlanError: several have it.
    """
    if len(stage) == 1:
        return [stage[0]] * num_codes
    owners: dict[int, Node] = {}
    for node in stage:
        for code, action in zip(node.codes, node.actions, strict=True):
            other = owners.setdefault(code >> 1, node)
            if other is not node:
                raise PlanError(f"{action}: rank {other.global_rank} has this micro-batch; give it to one rank a stage")
    return [owners.get(code >> 1, stage[0]) for code in range(num_codes)]


def _output(owners: Sequence[Node], bytes_by_code: Sequence[float]) -> Output:
    ways = {owner.index: Way(owner) for owner in owners}
    return Output(ways=[ways[owner.index] for owner in owners], bytes_by_code=bytes_by_code)


def _check_priced(schedule: Schedule, stages: Sequence[StageWork], most_slices: int) -> None:
    for stage_index, work in enumerate(stages):
        if most_slices > len(work.units):
            raise PlanError(
                f"schedule {schedule.name!r} runs micro-batches in {most_slices} slices, but stage {stage_index} is "
                f"priced for at most {len(work.units)}"
            )


def _read(node: Node, actions: Sequence[Action], slices_by_code: Sequence[int], most_slices: int) -> None:
    """Takes computations from a stage's list, and the names of sends; receives are posted early and take no time."""
    seconds = [(unit.forward_s, unit.backward_s) for unit in node.work.units]
    forward, backward = ActionType.FORWARD, ActionType.BACKWARD
    for action in actions:
        kind = action.type
        code = 2 * (most_slices * action.microbatch_index + (action.slice_index or 0))
        if kind is forward or kind is backward:
            code += kind is backward
            node.actions.append(action)
            node.codes.append(code)
            node.seconds.append(seconds[slices_by_code[code] - 1][code & 1])
        elif kind is ActionType.SEND_ACTIVATION:
            node.sends[code] = action
        elif kind is ActionType.SEND_GRADIENT:
            node.sends[code + 1] = action
    node.num_actions = len(node.actions)


def step_end_s(step: StepWork, nodes: Sequence[Node]) -> float:
    """When the last rank has stepped, once all have computed and reduced."""
    if step.exchange_s:
        begin = max(node.end_s for node in nodes) + step.exchange_s
        return max(begin + node.work.optimizer_s for node in nodes)
    return max(node.end_s + node.work.optimizer_s for node in nodes)


def to_timeline(step: StepWork, nodes: Sequence[Node], reductions: Sequence[RunningReduction]) -> Timeline:
    """What has run, rank by rank: computations, sends, and the step's end."""
    events: list[TimelineEvent] = []
    for node in nodes:
        events.extend(_computations(node))
        events.extend(_sends(node))
    for running in reductions:
        kind = StepEnd.TIED_GRADIENTS if running.reduction.is_tie else StepEnd.GRADIENTS
        events.extend(_event(kind, member, running.start_s, running.end_s) for member in running.members)
    exchange_begin = max(node.end_s for node in nodes)
    exchange_end = exchange_begin + step.exchange_s
    step_s = exchange_begin
    for node in nodes:
        begin = node.end_s
        if step.exchange_s:
            events.append(_event(StepEnd.EXCHANGE, node, exchange_begin, exchange_end))
            begin = step_s = exchange_end
        if node.work.optimizer_s:
            events.append(_event(StepEnd.OPTIMIZER, node, begin, begin + node.work.optimizer_s))
    step_s = max((event.end_s for event in events), default=0.0)
    busy_s = sum(sum(node.seconds) + node.work.optimizer_s for node in nodes)
    busy_s += sum(len(running.members) * (running.end_s - running.start_s) for running in reductions)
    idle = 1 - busy_s / (step_s * len(nodes)) if step_s else 0.0
    peak_bytes = [0] * (1 + max(node.global_rank for node in nodes))
    for node in nodes:
        peak_bytes[node.global_rank] = _peak_bytes(node)
    return Timeline(
        events=tuple(events), step_s=step_s, bubble_fraction=min(1.0, max(0.0, idle)), peak_bytes=tuple(peak_bytes)
    )


def _event(action: Action | StepEnd, node: Node, start_s: float, end_s: float) -> TimelineEvent:
    return TimelineEvent(action=action, global_rank=node.global_rank, start_s=start_s, end_s=end_s)


def _computations(node: Node) -> Iterator[TimelineEvent]:
    rank = node.global_rank
    for action, start_s, seconds in zip(node.actions, node.starts, node.seconds, strict=True):
        yield TimelineEvent(action=action, global_rank=rank, start_s=start_s, end_s=start_s + seconds)


def _sends(node: Node) -> Iterator[TimelineEvent]:
    rank = node.global_rank
    if any(node.outputs) and not node.sends:
        node.sends = _unnamed_sends(node)
    for output in node.outputs:
        for code, start_s, end_s in output.sent if output else ():
            yield TimelineEvent(action=node.sends[code], global_rank=rank, start_s=start_s, end_s=end_s)


def _unnamed_sends(node: Node) -> dict[int, Action]:
    """The sends that lowering would add."""
    kinds = (ActionType.SEND_ACTIVATION, ActionType.SEND_GRADIENT)
    return {
        code: on_stage(action, kinds[code & 1], action.stage_index)
        for code, action in zip(node.codes, node.actions, strict=True)
    }


def _peak_bytes(node: Node) -> int:
    """The fullest moment of the list: what is in flight is kept, but for the one that runs, which is worked on."""
    alive = most = 0.0
    if any(code & 1 for code in node.codes):
        shares = node.shares
        for code in node.codes:
            if code & 1:
                alive -= shares[code]
            if alive > most:
                most = alive
            if not code & 1:
                alive += shares[code]
    return node.work.fixed_bytes + round(most * node.work.stash_bytes) + node.work.working_bytes
