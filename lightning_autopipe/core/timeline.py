"""When each action of a step ran, predicted or measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from lightning_autopipe.core._checks import check_int, check_number, check_tuple
from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.schedule import Action


class StepEnd(Enum):
    """What a rank does after the last action of its list, in this order; the value is what it is printed with."""

    TIED_GRADIENTS = "tied gradients"
    """Sums the gradients of parameters that several stages hold."""
    GRADIENTS = "gradients"
    """Sums the gradients of its stage over the replicas."""
    EXCHANGE = "exchange"
    """Agrees with all ranks on what is one number for all: the loss's weight, the gradients' norm and finiteness."""
    OPTIMIZER = "optimizer"
    """Changes its parameters."""

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """One action with its begin and end, in seconds since the step began.

    A send begins when it is handed to the link, and ends when the value is at its receiver.
    """

    action: Action | StepEnd
    global_rank: int
    """The rank that acts; of a send, the sender."""
    start_s: float
    end_s: float
    waited_s: float = 0.0
    """For how long the rank had nothing else to do than to wait for the action's input; 0 where not known."""

    def __post_init__(self) -> None:
        if 0 <= self.start_s <= self.end_s < math.inf and self.global_rank >= 0:
            return
        owner = f"TimelineEvent {self.action}"
        check_int(owner, "global_rank", self.global_rank, minimum=0, error=PlanError)
        check_number(owner, "start_s", self.start_s, error=PlanError)
        check_number(owner, "end_s", self.end_s, error=PlanError)
        raise PlanError(f"{owner}: end_s={self.end_s} lies before start_s={self.start_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of the whole pipeline."""

    events: tuple[TimelineEvent, ...]
    step_s: float
    """From the begin of the first action to the end of the last one."""
    bubble_fraction: float
    """Share of rank-seconds in which a rank neither computes nor reduces, 0 to 1."""
    peak_bytes: tuple[int, ...] = ()
    """Largest memory in use on each global rank; empty where unknown."""

    def __post_init__(self) -> None:
        check_tuple("Timeline", "events", self.events, TimelineEvent, error=PlanError)
        check_number("Timeline", "step_s", self.step_s, error=PlanError)
        check_number("Timeline", "bubble_fraction", self.bubble_fraction, error=PlanError)
        if self.bubble_fraction > 1:
            raise PlanError(f"Timeline: bubble_fraction must be from 0 to 1, got {self.bubble_fraction!r}")
        check_tuple("Timeline", "peak_bytes", self.peak_bytes, int, error=PlanError)
