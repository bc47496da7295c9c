"""What an action must wait for, and how far lists of actions get when each waits for what it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_autopipe.core.schedule import Action, ActionType, Schedule
from lightning_autopipe.schedules.merging import merged_microbatches


def on_stage(action: Action, action_type: ActionType, stage_index: int) -> Action:
    """The action of another type or stage for the same micro-batch and slice."""
    return Action(
        type=action_type,
        stage_index=stage_index,
        microbatch_index=action.microbatch_index,
        slice_index=action.slice_index,
    )


def needed_receive(action: Action, num_stages: int) -> Action | None:
    """The receive without which a computation cannot start, if it is of its unit alone; None where it needs none."""
    if action.type is ActionType.FORWARD and action.stage_index > 0:
        return on_stage(action, ActionType.RECEIVE_ACTIVATION, action.stage_index)
    if action.type.needs_gradient and action.stage_index < num_stages - 1:
        return on_stage(action, ActionType.RECEIVE_GRADIENT, action.stage_index)
    return None


def caused_send(action: Action, num_stages: int) -> Action | None:
    """The send that hands a computation's result on, if it is of its unit alone; None where it gives nothing on."""
    if action.type is ActionType.FORWARD and action.stage_index < num_stages - 1:
        return on_stage(action, ActionType.SEND_ACTIVATION, action.stage_index)
    if action.type.needs_gradient and action.stage_index > 0:
        return on_stage(action, ActionType.SEND_GRADIENT, action.stage_index)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """The sends and receives of the lowered form, by the computations that need them.

    Slices that go as one message (see `merged_microbatches`) have one send behind the last one's forward, and one
    receive before the first one's; both are of the whole micro-batch.
    """

    sends: Mapping[Action, Action]
    """By computation, what stands right behind it."""
    receives: Mapping[Action, Action]
    """By computation, what stands before it; for all slices of a merged micro-batch the same."""


def messages_of(schedule: Schedule) -> Messages:
    """What a schedule, lowered or not, has to send and to receive."""
    num_stages = schedule.num_stages
    merged = [merged_microbatches(schedule, stage_index) for stage_index in range(num_stages)]
    sends: dict[Action, Action] = {}
    receives: dict[Action, Action] = {}
    last_of_merged: dict[Action, Action] = {}
    for actions in schedule.actions_by_rank:
        for action in actions:
            if not action.type.is_compute:
                continue
            receive, send = needed_receive(action, num_stages), caused_send(action, num_stages)
            if receive is not None:
                is_merged = _is_merged(receive, merged, action.stage_index - 1)
                receives[action] = replace(receive, slice_index=None) if is_merged else receive
            if send is not None:
                if _is_merged(send, merged, action.stage_index):
                    send = replace(send, slice_index=None)
                    sends.pop(last_of_merged.get(send, action), None)
                    last_of_merged[send] = action
                sends[action] = send
    return Messages(sends=sends, receives=receives)


def _is_merged(transfer: Action, merged: Sequence[frozenset[int]], sender: int) -> bool:
    activations = (ActionType.SEND_ACTIVATION, ActionType.RECEIVE_ACTIVATION)
    return transfer.type in activations and transfer.microbatch_index in merged[sender]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far each rank came, and in which time slot each of its actions ran (slots are one action long)."""

    slots_by_rank: Sequence[Sequence[int]]
    """One slot for each action that ran; shorter than the list where the rank is stuck."""

    def position(self, pipeline_rank: int) -> int:
        """Index of the first action that did not run."""
        return len(self.slots_by_rank[pipeline_rank])


def run_by_dependencies(schedule: Schedule) -> Progress:
    """Runs the lists with sends that never block: an action starts as soon as what it needs is there.

    Lists of computations hand each result on when it is computed; slices are merged in the lowered form only.
    """
    num_stages = schedule.num_stages
    receives = messages_of(schedule).receives if schedule.is_lowered else None
    done: dict[Action | None, int] = {None: 0}
    slots: list[list[int]] = [[] for _ in schedule.actions_by_rank]
    free_at = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions_by_rank):
            while len(slots[rank]) < len(actions):
                action = actions[len(slots[rank])]
                if receives is None:
                    receive = needed_receive(action, num_stages)
                    needed, gives = receive and receive.counterpart, caused_send(action, num_stages)
                elif action.type.is_compute:
                    needed, gives = receives.get(action), action
                else:
                    needed, gives = action.counterpart if action.type.is_receive else None, action
                if needed not in done:
                    break
                start = max(free_at[rank], done[needed])
                slots[rank].append(start)
                free_at[rank] = start + 1
                if gives is not None:
                    done[gives] = start + 1
                moved = True
    return Progress(slots_by_rank=slots)


def run_with_blocking_sends(schedule: Schedule) -> Progress:
    """Runs the lowered lists with rendezvous: a send and its receive both wait for each other, and end together."""
    slots: list[list[int]] = [[] for _ in schedule.actions_by_rank]
    free_at = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions_by_rank):
            while len(slots[rank]) < len(actions):
                action = actions[len(slots[rank])]
                together = [rank]
                if not action.type.is_compute:
                    peer = schedule.pipeline_rank(action.peer_stage_index)
                    peer_actions = schedule.actions_by_rank[peer]
                    position = len(slots[peer])
                    if position == len(peer_actions) or peer_actions[position] != action.counterpart:
                        break
                    together.append(peer)
                start = max(free_at[index] for index in together)
                for index in together:
                    slots[index].append(start)
                    free_at[index] = start + 1
                moved = True
    return Progress(slots_by_rank=slots)
