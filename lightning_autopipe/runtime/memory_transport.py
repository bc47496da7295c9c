"""All stages of a pipeline in one process and one thread: for proofs, tests and debugging."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_autopipe.runtime.errors import CommunicationError
from lightning_autopipe.runtime.tensor_spec import SpecBook, TensorSpec
from lightning_autopipe.runtime.transport import Crossing, Direction, Message, StepPlan


class MemoryNetwork:
    """The mailboxes between the stages of one pipeline."""

    def __init__(self) -> None:
        self.mailboxes: dict[tuple[Direction, Crossing], tuple[Tensor, ...]] = {}
        """What was sent and not received yet."""

    def transport(self, pipeline_rank: int) -> MemoryTransport:
        """The connections of one rank of the pipeline."""
        return MemoryTransport(self, pipeline_rank)


class MemoryTransport:
    """A `Transport` by copies in one process; a receiver sees what it would see of a message between processes."""

    is_loaded = False  # the receiver has a copy
    receive_waits = False

    def __init__(self, network: MemoryNetwork, pipeline_rank: int) -> None:
        self._network = network
        self._pipeline_rank = pipeline_rank
        self._book = SpecBook()
        self._num_gradients: dict[Crossing, int] = {}
        self._sent_bytes = dict.fromkeys(Direction, 0)
        self._plan = StepPlan(activation_order=(), gradient_order=(), signatures={})

    @property
    def sent_bytes(self) -> tuple[int, int]:
        return self._sent_bytes[Direction.FORWARD], self._sent_bytes[Direction.BACKWARD]

    def close_circle(self) -> None:
        pass  # anybody may send to anybody

    def begin_step(self, plan: StepPlan) -> None:
        self._plan = plan
        self._num_gradients.clear()

    def send(self, direction: Direction, message: Message, values: Sequence[Sequence[Tensor]]) -> None:
        is_forward = direction is Direction.FORWARD
        for crossing, tensors in zip(message, values, strict=True):
            self._sent_bytes[direction] += sum(tensor.nbytes for tensor in tensors)
            if is_forward:
                signature = crossing.cut_index, self._plan.signatures[crossing.unit]
                specs = self._book.check(signature, tensors)
                if specs is None:
                    specs = self._book.add(signature, tuple(TensorSpec.of(tensor) for tensor in tensors))
                self._num_gradients[crossing] = len(specs.gradients)
            if is_forward or tensors:
                self._network.mailboxes[direction, crossing] = tuple(
                    _copy(tensor).requires_grad_(tensor.requires_grad and is_forward) for tensor in tensors
                )

    def release(self, direction: Direction, crossing: Crossing) -> None:
        pass  # the receiver has a copy

    def has_arrived(self, direction: Direction, crossing: Crossing) -> bool:
        return self._comes_without(direction, crossing) or (direction, crossing) in self._network.mailboxes

    def receive(self, direction: Direction, crossing: Crossing) -> tuple[Tensor, ...]:
        if self._comes_without(direction, crossing):
            return ()
        if (direction, crossing) not in self._network.mailboxes:
            raise CommunicationError(
                f"rank {self._pipeline_rank} of the pipeline: no {direction.value} message of {crossing} is there",
                stage_index=crossing.cut_index + (direction is Direction.FORWARD),
                microbatch_index=crossing.microbatch_index,
                slice_index=crossing.slice_index,
                direction=direction.value,
            )
        return self._network.mailboxes.pop((direction, crossing))

    def end_step(self) -> None:
        pass

    def _comes_without(self, direction: Direction, crossing: Crossing) -> bool:
        return direction is Direction.BACKWARD and not self._num_gradients[crossing]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.preserve_format)
