"""How values move between neighbouring stages: the interface that both transports implement."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from torch import Tensor

from lightning_autopipe.runtime.units import Unit, unit_name


class Direction(Enum):
    """Which way a message goes: activations forward to the next stage, gradients backward to the previous one."""

    FORWARD = "forward"
    BACKWARD = "backward"

    __hash__ = object.__hash__  # in C; Enum's own runs as Python code for each look-up


class Crossing(NamedTuple):
    """What one unit hands across one cut: activations forward, their gradients backward."""

    cut_index: int
    """Cut c joins stages c and c + 1."""
    microbatch_index: int
    slice_index: int | None = None

    @property
    def unit(self) -> Unit:
        """The micro-batch, or the slice of one."""
        return self.microbatch_index, self.slice_index

    def __str__(self) -> str:
        return unit_name(self.unit)


Message = tuple[Crossing, ...]
"""What is sent as one: one crossing, or those of all slices of a micro-batch."""


class Signature:
    """Stands for a key: there is one for each key, so that it is looked up by what it is, whatever the key's length."""

    __slots__ = ("key",)

    def __init__(self, key: Hashable) -> None:
        self.key = key

    def __repr__(self) -> str:
        return repr(self.key)


class SignatureTable:
    """The signatures of the keys so far.

    Neighbouring ranks meet corresponding keys in one order and forget them at the same length, so that a signature is
    new to both or to neither.
    """

    MAX_SIGNATURES = 4096

    def __init__(self) -> None:
        self._signatures: dict[Hashable, Signature] = {}

    def __len__(self) -> int:
        return len(self._signatures)

    def signature(self, key: Hashable) -> Signature:
        """The one of a key."""
        found = self._signatures.get(key)
        if found is None:
            if len(self._signatures) >= self.MAX_SIGNATURES:
                self._signatures.clear()
            found = self._signatures[key] = Signature(key)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What a transport knows of a step before it begins."""

    activation_order: tuple[Message, ...]
    """Messages in the order in which the previous rank sends activations; empty where none come."""
    gradient_order: tuple[Message, ...]
    """Messages in the order in which the next rank sends gradients; empty where none come."""
    activation_window: int = 2
    """How many messages of activations the previous rank may be ahead, so that receives are posted for them."""
    gradient_window: int = 2
    """The same for gradients of the next rank."""
    signatures: Mapping[Unit, Signature]
    """The same signature means equal specs of what crosses a cut, in all steps."""


class Transport(Protocol):
    """One rank's connections to its two neighbours. Within a step each message is sent once and received once.

    Sends never wait for the receiver.
    """

    is_loaded: bool
    """Whether so much is under way that messages are to be released one by one; else `end_step` lets go of all."""
    receive_waits: bool
    """Whether `receive` waits for what has not arrived; else it must only be called once `has_arrived`."""

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """Bytes sent so far, to the next rank (activations) and to the previous one (gradients)."""
        ...

    def close_circle(self) -> None:
        """Connect the last rank to the first one as well: each runs several stages.

        Raises:
            PlanError: These connections cannot do that.
        """
        ...

    def begin_step(self, plan: StepPlan) -> None:
        """Prepare for a step; receives may be posted from here on.

        Raises:
            PipelineRuntimeError: An earlier step failed and left messages under way.
        """
        ...

    def send(self, direction: Direction, message: Message, values: Sequence[Sequence[Tensor]]) -> None:
        """Start to send the tensors of each crossing of a message; they must stay unchanged until `release`.

        Raises:
            PipelineRuntimeError: Activations differ from those of an earlier message with the same signature.
        """
        ...

    def release(self, direction: Direction, crossing: Crossing) -> None:
        """Wait until the message with this crossing is out, and let go of it.

        Raises:
            CommunicationError: The peer did not take it within the limit.
        """
        ...

    def has_arrived(self, direction: Direction, crossing: Crossing) -> bool:
        """Whether `receive` can be called; asked where that does not wait."""
        ...

    def receive(self, direction: Direction, crossing: Crossing) -> tuple[Tensor, ...]:
        """The tensors that the peer sent: new leaves, requiring gradients as the peer's activations did.

        Raises:
            CommunicationError: Nothing came within the limit, or the connection broke.
        """
        ...

    def end_step(self) -> None:
        """Wait until everything that was sent is out.

        Raises:
            CommunicationError: A peer did not take a message within the limit.
        """
        ...
