"""What an action must wait for, and how far lists of actions get when each waits for what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_autopipe.core.schedule import Action, ActionType, Schedule


def on_stage(action: Action, action_type: ActionType, stage_index: int) -> Action:
    """The action of another type or stage for the same micro-batch and slice."""
    return Action(
        type=action_type,
        stage_index=stage_index,
        microbatch_index=action.microbatch_index,
        slice_index=action.slice_index,
    )


def remote_dependency(action: Action, num_stages: int) -> Action | None:
    """The computation on a neighbour whose result a computation needs: None at the ends of the pipeline."""
    if action.type is ActionType.FORWARD and action.stage_index > 0:
        return on_stage(action, ActionType.FORWARD, action.stage_index - 1)
    if action.type is ActionType.BACKWARD and action.stage_index < num_stages - 1:
        return on_stage(action, ActionType.BACKWARD, action.stage_index + 1)
    return None


def needed_receive(action: Action, num_stages: int) -> Action | None:
    """The receive in the lowered form without which a computation cannot start, or None."""
    if remote_dependency(action, num_stages) is None:
        return None
    is_forward = action.type is ActionType.FORWARD
    receive = ActionType.RECEIVE_ACTIVATION if is_forward else ActionType.RECEIVE_GRADIENT
    return on_stage(action, receive, action.stage_index)


def caused_send(action: Action, num_stages: int) -> Action | None:
    """The send in the lowered form that hands a computation's result on, or None."""
    if action.type is ActionType.FORWARD and action.stage_index < num_stages - 1:
        return on_stage(action, ActionType.SEND_ACTIVATION, action.stage_index)
    if action.type is ActionType.BACKWARD and action.stage_index > 0:
        return on_stage(action, ActionType.SEND_GRADIENT, action.stage_index)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far each stage came, and in which time slot each of its actions ran (slots are one action long)."""

    slots_by_stage: Sequence[Sequence[int]]
    """One slot for each action that ran; shorter than the list where the stage is stuck."""

    def position(self, stage_index: int) -> int:
        """Index of the first action that did not run."""
        return len(self.slots_by_stage[stage_index])


def run_by_dependencies(schedule: Schedule) -> Progress:
    """Runs the lists with sends that never block: an action starts as soon as what it needs is there."""
    num_stages = schedule.num_stages
    lowered = schedule.is_lowered
    done: dict[Action, int] = {}
    slots: list[list[int]] = [[] for _ in range(num_stages)]
    free_at = [0] * num_stages
    moved = True
    while moved:
        moved = False
        for stage_index, actions in enumerate(schedule.actions_by_rank):
            while len(slots[stage_index]) < len(actions):
                action = actions[len(slots[stage_index])]
                needed = _needed(action, num_stages, lowered)
                if needed is not None and needed not in done:
                    break
                start = free_at[stage_index] if needed is None else max(free_at[stage_index], done[needed])
                slots[stage_index].append(start)
                free_at[stage_index] = done[action] = start + 1
                moved = True
    return Progress(slots_by_stage=slots)


def _needed(action: Action, num_stages: int, lowered: bool) -> Action | None:
    if action.type.is_compute:
        return needed_receive(action, num_stages) if lowered else remote_dependency(action, num_stages)
    return action.counterpart if action.type.is_receive else None


def run_with_blocking_sends(schedule: Schedule) -> Progress:
    """Runs the lowered lists with rendezvous: a send and its receive both wait for each other, and end together."""
    slots: list[list[int]] = [[] for _ in range(schedule.num_stages)]
    free_at = [0] * schedule.num_stages
    moved = True
    while moved:
        moved = False
        for stage_index, actions in enumerate(schedule.actions_by_rank):
            while len(slots[stage_index]) < len(actions):
                action = actions[len(slots[stage_index])]
                together = [stage_index]
                if not action.type.is_compute:
                    peer = action.peer_stage_index
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
    return Progress(slots_by_stage=slots)
