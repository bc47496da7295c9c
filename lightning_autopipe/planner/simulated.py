"""What becomes of simulated ranks: the end of the step, and its timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_autopipe.core.schedule import Action, ActionType
from lightning_autopipe.core.timeline import StepEnd, Timeline, TimelineEvent
from lightning_autopipe.planner.simulated_ranks import Node, RunningReduction
from lightning_autopipe.planner.workload import StepWork
from lightning_autopipe.schedules.dependencies import on_stage


def step_end_s(step: StepWork, nodes: Sequence[Node]) -> float:
    """When the last rank has stepped, once all have computed and reduced."""
    if step.exchange_s:
        begin = max(node.end_s for node in nodes) + step.exchange_s
        return max(begin + node.optimizer_s for node in nodes)
    return max(node.end_s + node.optimizer_s for node in nodes)


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
        if node.optimizer_s:
            events.append(_event(StepEnd.OPTIMIZER, node, begin, begin + node.optimizer_s))
    step_s = max((event.end_s for event in events), default=0.0)
    busy_s = sum(sum(node.seconds) + node.optimizer_s for node in nodes)
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
    if len(node.sends) < len(node.sent):
        node.sends = _unnamed_sends(node) | node.sends
    rank, names = node.global_rank, node.sends
    for direction in (0, 1):
        for code, start_s, end_s in node.sent:
            if code & 1 == direction:
                yield TimelineEvent(action=names[code], global_rank=rank, start_s=start_s, end_s=end_s)


def _unnamed_sends(node: Node) -> dict[int, Action]:
    """The sends that lowering would add."""
    kinds = (ActionType.SEND_ACTIVATION, ActionType.SEND_GRADIENT)
    return {
        code: on_stage(action, kinds[code & 1], action.stage_index)
        for code, action in zip(node.codes, node.actions, strict=True)
    }


def _peak_bytes(node: Node) -> int:
    """The fullest moment of the list: what is in flight is kept, but for the one that runs, which is worked on."""
    forward, backward_input = ActionType.FORWARD, ActionType.BACKWARD_INPUT
    has_backward = any(action.type.ends_backward for action in node.actions)
    kept = most = 0.0
    kept_then, working_then = 0.0, float(max(work.working_bytes for work in node.works))
    bytes_of = {
        stage_index: [
            (node.works[turn].stash_bytes / k, node.works[turn].working_bytes / k)
            for k in range(1, max(node.num_slices) + 1)
        ]
        for stage_index, turn in node.turn_of.items()
    }
    for action in node.actions if has_backward else ():
        kind = action.type
        num_slices = node.num_slices[action.microbatch_index]
        kept_bytes, working_bytes = bytes_of[action.stage_index][num_slices - 1]
        if kind is not forward:
            kept -= kept_bytes
        if kept + working_bytes > most:
            most, kept_then, working_then = kept + working_bytes, kept, working_bytes
        if kind is forward or kind is backward_input:
            kept += kept_bytes
    return sum(work.fixed_bytes for work in node.works) + round(kept_then + working_then)
