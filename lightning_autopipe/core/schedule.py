"""What each stage does, in which order: actions and schedules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from lightning_autopipe.core._checks import check_int, check_text, check_tuple
from lightning_autopipe.core.errors import PlanError


class ActionType(Enum):
    """Kind of an action; the value is the letter that it is printed with.

    The first four are computation: a forward, and its backward, whole or in two parts. The other four appear in the
    lowered form only and move values between a stage and its neighbour: activations from stage s to s+1, gradients from
    stage s+1 to s.
    """

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward."""
    BACKWARD_INPUT = "I"
    """The part of the backward that the stage before waits for: gradients of what was received."""
    BACKWARD_WEIGHT = "W"
    """The rest of the backward: gradients of the parameters."""
    SEND_ACTIVATION = "SA"
    RECEIVE_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECEIVE_GRADIENT = "RG"

    @property
    def is_compute(self) -> bool:
        """True for forwards and backwards, and for the parts of a backward."""
        return not (self.is_send or self.is_receive)

    @property
    def needs_gradient(self) -> bool:
        """True for what begins with the gradient of the stage's result, and gives that of what it received."""
        return self in (ActionType.BACKWARD, ActionType.BACKWARD_INPUT)

    @property
    def ends_backward(self) -> bool:
        """True for what leaves nothing of a micro-batch to do, or to keep, on its stage."""
        return self in (ActionType.BACKWARD, ActionType.BACKWARD_WEIGHT)

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
_PATTERN = re.compile(r"(\d+)(SA|RA|SG|RG|F|B|I|W)(\d+)(?:\.(\d+))?")


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
    def unit(self) -> tuple[int, int | None]:
        """What it is for: a micro-batch, and the slice of it or None for the whole."""
        return self.microbatch_index, self.slice_index

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
    """Lists of actions, each carried out from left to right by one rank of a pipeline.

    A rank runs one stage, or several: then stages go round the ranks, stage s to rank ``s % num_ranks``. The lists may
    be wrong; `lightning_autopipe.schedules.validate` tells.
    """

    name: str
    actions_by_rank: tuple[tuple[Action, ...], ...]
    """``actions_by_rank[r]`` is what the pipeline's rank r does, in order; with one stage a rank that is stage r."""
    num_microbatches: int
    stages_per_rank: int = 1
    merges_slices: bool = True
    """Whether slices of a micro-batch may go as one message, where the receiver is past its warm-up."""

    def __post_init__(self) -> None:
        check_text("Schedule", "name", self.name, error=PlanError)
        check_int("Schedule", "num_microbatches", self.num_microbatches, minimum=1, error=PlanError)
        check_int("Schedule", "stages_per_rank", self.stages_per_rank, minimum=1, error=PlanError)
        check_tuple("Schedule", "actions_by_rank", self.actions_by_rank, tuple, error=PlanError)
        if not self.actions_by_rank:
            raise PlanError("Schedule: actions_by_rank is empty; a schedule has at least one rank")
        for index, actions in enumerate(self.actions_by_rank):
            check_tuple("Schedule", f"actions_by_rank[{index}]", actions, Action, error=PlanError)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the pipeline."""
        return len(self.actions_by_rank)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.num_ranks * self.stages_per_rank

    def pipeline_rank(self, stage_index: int) -> int:
        """The rank, counted within the pipeline, that runs a stage."""
        return stage_index % self.num_ranks

    def stages_of(self, pipeline_rank: int) -> range:
        """The stages that a rank of the pipeline runs."""
        return range(pipeline_rank, self.num_stages, self.num_ranks)

    @property
    def is_lowered(self) -> bool:
        """True where the lists also hold sends or receives."""
        return any(not action.type.is_compute for actions in self.actions_by_rank for action in actions)
