"""How values move between neighbouring stages: the interface that both transports implement."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor

from lightning_autopipe.runtime.tensor_spec import TensorSpec


class Direction(Enum):
    """Which way a message goes: activations forward to the next stage, gradients backward to the previous one."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What a transport knows of a step before it begins."""

    activation_order: tuple[int, ...]
    """Micro-batches in the order in which the previous stage sends their activations; empty on the first stage."""
    gradient_order: tuple[int, ...]
    """Micro-batches in the order in which the next stage sends their gradients; empty on the last stage."""
    signatures: Mapping[int, Hashable]
    """By micro-batch index; equal signatures mean equal specs of what crosses each cut."""


class Transport(Protocol):
    """One stage's connections to its two neighbours. A message is all the tensors of one micro-batch in one direction.

    Within a step each message is sent once and received once. Sends never wait for the receiver.
    """

    def begin_step(self, plan: StepPlan) -> None:
        """Prepare for a step; receives may be posted from here on.

        Raises:
            PipelineRuntimeError: An earlier step failed and left messages under way.
        """
        ...

    def send(self, direction: Direction, microbatch_index: int, tensors: Sequence[Tensor]) -> None:
        """Start to send tensors; they must stay unchanged until `release`.

        Raises:
            PipelineRuntimeError: The activations differ from those of an earlier message with the same signature.
        """
        ...

    def release(self, direction: Direction, microbatch_index: int) -> None:
        """Wait until what was sent is out, and let go of it.

        Raises:
            CommunicationError: The peer did not take it within the limit.
        """
        ...

    def expect_gradients(self, microbatch_index: int, specs: Sequence[TensorSpec]) -> None:
        """Tell what gradients the next stage will send for a micro-batch; none where `specs` is empty."""
        ...

    def has_arrived(self, direction: Direction, microbatch_index: int) -> bool:
        """Whether `receive` can be called; a transport whose `receive` waits says True."""
        ...

    def receive(self, direction: Direction, microbatch_index: int) -> tuple[Tensor, ...]:
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
