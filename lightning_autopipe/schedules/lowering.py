"""Adds to a schedule the sends and receives that its computations need."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.schedule import Action, Schedule
from lightning_autopipe.schedules.dependencies import caused_send, needed_receive
from lightning_autopipe.schedules.validation import validate


def lower(schedule: Schedule) -> Schedule:
    """The schedule with a send after each computation whose result a neighbour needs, and a receive before its use.

    Sends stand right behind the computation that gives the value, receives right before the one that takes it; between
    the two neighbouring computations of a stage (a *gap*) the order of sends and receives is chosen so that the lists
    cannot deadlock **even if every send blocks until its receive is reached**::

        stage 0 |  F0  SA0  F1  SA1  RG0  B0  RG1  B1          SA/RA: activation to / from a neighbour
        stage 1 |  RA0  F0  B0  RA1  SG0  F1  B1  SG1          SG/RG: its gradient

    With "send first" on both stages this 1F1B would hang: stage 0 in SA1, stage 1 in SG0.

    How: the lists are run with gaps whose members may happen in any order, each transfer at both of its ends at once,
    and every stage's transfers are written down in the order in which they happened. The lists are then parts of one
    common order in which a send and its receive are one event, and such lists cannot wait in a circle. Where even free
    gaps would wait in a circle, one receive moves to an earlier gap; for 1F1B, GPipe and forwards alone none does.

    Who executes the lists may do better than block: start a send and go on, post receives ahead of time, and wait for a
    value only at the computation that takes it. Between two neighbours and in one direction the order of sends equals
    the order of receives, so messages need no tags.

    Raises:
        PlanError: the schedule is invalid (see `validate`) or lowered already.
    """
    validate(schedule)
    if schedule.is_lowered:
        raise PlanError(f"schedule {schedule.name!r} holds sends and receives already; lower it once")
    lists = _run_gaps(schedule)
    return Schedule(
        name=schedule.name,
        actions_by_rank=tuple(tuple(actions) for actions in lists),
        num_microbatches=schedule.num_microbatches,
    )


def _run_gaps(schedule: Schedule) -> list[list[Action]]:
    stages = [_Stage(actions, schedule.num_stages) for actions in schedule.actions_by_rank]
    while not all(stage.is_finished for stage in stages):
        moved = False
        for stage in stages:
            moved |= stage.compute()
            for action in list(stage.gap):
                if action.type.is_send and action.counterpart in stages[action.peer_stage_index].gap:
                    stage.transfer(action)
                    stages[action.peer_stage_index].transfer(action.counterpart)
                    moved = True
        if not moved:
            # A valid schedule always has a send here: were all waiting to receive, the computations would be circular.
            blocked = next(action for stage in stages for action in stage.gap if action.type.is_send)
            stages[blocked.peer_stage_index].receive_early(blocked.counterpart)
    return [stage.done for stage in stages]


class _Stage:
    """One stage while its list is being written: computations in order, transfers in the gaps between them."""

    def __init__(self, actions: tuple[Action, ...], num_stages: int) -> None:
        self._coming: Iterator[Action] = iter(actions)
        self._num_stages = num_stages
        self._received: set[Action] = set()
        self._next: Action | None = None
        self.gap: list[Action] = []
        self.done: list[Action] = []
        self._open_gap(after=None)

    @property
    def is_finished(self) -> bool:
        return self._next is None and not self.gap

    def _open_gap(self, after: Action | None) -> None:
        self._next = next(self._coming, None)
        send = None if after is None else caused_send(after, self._num_stages)
        receive = None if self._next is None else needed_receive(self._next, self._num_stages)
        self.gap = [action for action in (send, receive) if action is not None and action not in self._received]

    def compute(self) -> bool:
        """Runs the next computations up to one with an open transfer; False where none ran."""
        moved = False
        while self._next is not None and not self.gap:
            computed = self._next
            self.done.append(computed)
            self._open_gap(after=computed)
            moved = True
        return moved

    def transfer(self, action: Action) -> None:
        self.gap.remove(action)
        self.done.append(action)
        if action.type.is_receive:
            self._received.add(action)

    def receive_early(self, receive: Action) -> None:
        self.gap.append(receive)
