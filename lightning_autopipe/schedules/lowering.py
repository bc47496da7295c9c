"""Adds to a schedule the sends and receives that its computations need."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.schedule import Action, Schedule
from lightning_autopipe.schedules.dependencies import Messages, messages_of
from lightning_autopipe.schedules.validation import validate


def lower(schedule: Schedule) -> Schedule:
    """The schedule with a send after each computation whose result a neighbour needs, and a receive before its use.

    Sends stand right behind the computation that gives the value, receives right before the one that takes it; between
    the two neighbouring computations of a rank (a *gap*) the order of sends and receives is chosen so that the lists
    cannot deadlock **even if every send blocks until its receive is reached**::

        stage 0 |  F0  SA0  F1  SA1  RG0  B0  RG1  B1          SA/RA: activation to / from a neighbour
        stage 1 |  RA0  F0  B0  RA1  SG0  F1  B1  SG1          SG/RG: its gradient

    With "send first" on both stages this 1F1B would hang: stage 0 in SA1, stage 1 in SG0.

    How: the lists are run with gaps whose members may happen in any order, each transfer at both of its ends at once,
    and every stage's transfers are written down in the order in which they happened. The lists are then parts of one
    common order in which a send and its receive are one event, and such lists cannot wait in a circle. Where even free
    gaps would wait in a circle, one receive moves to an earlier gap; for 1F1B, GPipe and forwards alone none does.

    Slices that go as one message (see `merged_microbatches`) have one send and one receive of the whole micro-batch.

    Who executes the lists may do better than block: start a send and go on, post receives ahead of time, and wait for a
    value only at the computation that takes it. Between two ranks and in one direction the order of sends equals the
    order of receives, so messages need no tags.

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
        stages_per_rank=schedule.stages_per_rank,
        merges_slices=schedule.merges_slices,
    )


def _run_gaps(schedule: Schedule) -> list[list[Action]]:
    messages = messages_of(schedule)
    ranks = [_Rank(actions, messages) for actions in schedule.actions_by_rank]
    while not all(rank.is_finished for rank in ranks):
        moved = False
        for rank in ranks:
            moved |= rank.compute()
            for action in list(rank.gap):
                peer = ranks[schedule.pipeline_rank(action.peer_stage_index)]
                if action.type.is_send and action.counterpart in peer.gap:
                    rank.transfer(action)
                    peer.transfer(action.counterpart)
                    moved = True
        if not moved:
            # A valid schedule always has a send here: were all waiting to receive, the computations would be circular.
            blocked = next(action for rank in ranks for action in rank.gap if action.type.is_send)
            ranks[schedule.pipeline_rank(blocked.peer_stage_index)].receive_early(blocked.counterpart)
    return [rank.done for rank in ranks]


class _Rank:
    """One rank while its list is being written: computations in order, transfers in the gaps between them."""

    def __init__(self, actions: tuple[Action, ...], messages: Messages) -> None:
        self._coming: Iterator[Action] = iter(actions)
        self._messages = messages
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
        send = None if after is None else self._messages.sends.get(after)
        receive = None if self._next is None else self._messages.receives.get(self._next)
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
