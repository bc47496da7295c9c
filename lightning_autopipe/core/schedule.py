"""What each stage does, in which order: actions and schedules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from lightning_autopipe.core._checks import check_int, check_text, check_tuple
from lightning_autopipe.core.errors import PlanError


class ActionType(Enum):
    """Kind of an action; the value is the letter that it is printed with.

    FORWARD and BACKWARD are computation. The other four appear in the lowered form only and move values between a stage
    and its neighbour: activations from stage s to s+1, gradients from stage s+1 to s.
    """

    FORWARD = "F"
    BACKWARD = "B"
    SEND_ACTIVATION = "SA"
    RECEIVE_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECEIVE_GRADIENT = "RG"

    @property
    def is_compute(self) -> bool:
        """True for FORWARD and BACKWARD."""
        return self in (ActionType.FORWARD, ActionType.BACKWARD)

    @property
    def is_send(self) -> bool:
        """True for the two kinds that hand a value to a neighbour."""
        return self in (ActionType.SEND_ACTIVATION, ActionType.SEND_GRADIENT)

    @property
    def is_receive(self) -> bool:
        """True for the two kinds that take a value from a neighbour."""
        return self in (ActionType.RECEIVE_ACTIVATION, ActionType.RECEIVE_GRADIENT)


_PEER_OFFSET = {
    ActionType.SEND_ACTIVATION: 1,
    ActionType.RECEIVE_ACTIVATION: -1,
    ActionType.SEND_GRADIENT: -1,
    ActionType.RECEIVE_GRADIENT: 1,
}
_COUNTERPART = {
    ActionType.SEND_ACTIVATION: ActionType.RECEIVE_ACTIVATION,
    ActionType.RECEIVE_ACTIVATION: ActionType.SEND_ACTIVATION,
    ActionType.SEND_GRADIENT: ActionType.RECEIVE_GRADIENT,
    ActionType.RECEIVE_GRADIENT: ActionType.SEND_GRADIENT,
}
_PATTERN = re.compile(r"(\d+)(SA|RA|SG|RG|F|B)(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing that one stage does for one micro-batch; printed ``2F0``, or ``2F0.1`` with a slice."""

    type: ActionType
    stage_index: int
    """The stage that acts, 0 for the one that reads the batch."""
    microbatch_index: int
    slice_index: int | None = None
    """Which slice of the micro-batch; None for all of it."""

    def __post_init__(self) -> None:
        if not isinstance(self.type, ActionType):
            raise PlanError(f"Action: type must be an ActionType, got {self.type!r}")
        check_int("Action", "stage_index", self.stage_index, minimum=0, error=PlanError)
        check_int("Action", "microbatch_index", self.microbatch_index, minimum=0, error=PlanError)
        if self.slice_index is not None:
            check_int("Action", "slice_index", self.slice_index, minimum=0, error=PlanError)

    def __str__(self) -> str:
        slice_text = "" if self.slice_index is None else f".{self.slice_index}"
        return f"{self.stage_index}{self.type.value}{self.microbatch_index}{slice_text}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that ``str`` prints as ``text``.

        Raises:
            PlanError: the text is no action.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise PlanError(f"no action: {text!r}; expected stage, kind, micro-batch, as in '2F0', '2SA0' or '2F0.1'")
        stage, kind, microbatch, slice_text = match.groups()
        return cls(
            type=ActionType(kind),
            stage_index=int(stage),
            microbatch_index=int(microbatch),
            slice_index=None if slice_text is None else int(slice_text),
        )

    @property
    def peer_stage_index(self) -> int:
        """The stage at the other end of a send or receive (-1 or the number of stages where there is none)."""
        return self.stage_index + _PEER_OFFSET[self.type]

    @property
    def counterpart(self) -> Action:
        """The receive that belongs to this send, or the send that belongs to this receive."""
        return Action(
            type=_COUNTERPART[self.type],
            stage_index=self.peer_stage_index,
            microbatch_index=self.microbatch_index,
            slice_index=self.slice_index,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Lists of actions, one a stage, each carried out from left to right by the rank that runs the stage.

    The lists may be wrong; `lightning_autopipe.schedules.validate` tells.
    """

    name: str
    actions_by_stage: tuple[tuple[Action, ...], ...]
    """``actions_by_stage[s]`` is what stage s does, in order."""
    num_microbatches: int

    def __post_init__(self) -> None:
        check_text("Schedule", "name", self.name, error=PlanError)
        check_int("Schedule", "num_microbatches", self.num_microbatches, minimum=1, error=PlanError)
        check_tuple("Schedule", "actions_by_stage", self.actions_by_stage, tuple, error=PlanError)
        if not self.actions_by_stage:
            raise PlanError("Schedule: actions_by_stage is empty; a schedule has at least one stage")
        for stage_index, actions in enumerate(self.actions_by_stage):
            check_tuple("Schedule", f"actions_by_stage[{stage_index}]", actions, Action, error=PlanError)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.actions_by_stage)

    @property
    def is_lowered(self) -> bool:
        """True where the lists also hold sends or receives."""
        return any(not action.type.is_compute for actions in self.actions_by_stage for action in actions)
