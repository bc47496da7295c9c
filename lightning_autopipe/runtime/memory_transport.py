"""All stages of a pipeline in one process and one thread: for proofs, tests and debugging."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_autopipe.runtime.errors import CommunicationError
from lightning_autopipe.runtime.tensor_spec import SpecBook, TensorSpec
from lightning_autopipe.runtime.transport import Direction, StepPlan


class MemoryNetwork:
    """The mailboxes between the stages of one pipeline."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.mailboxes: dict[tuple[Direction, int, int], tuple[Tensor, ...]] = {}
        """By direction, receiving stage and micro-batch."""

    def transport(self, stage_index: int) -> MemoryTransport:
        """The connections of one stage."""
        return MemoryTransport(self, stage_index)


class MemoryTransport:
    """A `Transport` by copies in one process; a receiver sees what it would see of a message between processes."""

    def __init__(self, network: MemoryNetwork, stage_index: int) -> None:
        self._network = network
        self._stage_index = stage_index
        self._book = SpecBook()
        self._expected_gradients: dict[int, int] = {}
        self._plan = StepPlan(activation_order=(), gradient_order=(), signatures={})

    def begin_step(self, plan: StepPlan) -> None:
        self._plan = plan
        self._expected_gradients.clear()

    def send(self, direction: Direction, microbatch_index: int, tensors: Sequence[Tensor]) -> None:
        specs = tuple(TensorSpec.of(tensor) for tensor in tensors)
        if direction is Direction.FORWARD:
            signature = self._plan.signatures[microbatch_index]
            if self._book.get(signature) is None:
                self._book.add(signature, specs)
            self._book.check(signature, specs)
        elif not tensors:
            return
        peer = self._stage_index + (1 if direction is Direction.FORWARD else -1)
        self._network.mailboxes[direction, peer, microbatch_index] = tuple(
            _copy(tensor).requires_grad_(spec.requires_grad and direction is Direction.FORWARD)
            for tensor, spec in zip(tensors, specs, strict=True)
        )

    def release(self, direction: Direction, microbatch_index: int) -> None:
        pass  # the receiver has a copy

    def expect_gradients(self, microbatch_index: int, specs: Sequence[TensorSpec]) -> None:
        self._expected_gradients[microbatch_index] = len(specs)

    def has_arrived(self, direction: Direction, microbatch_index: int) -> bool:
        if direction is Direction.BACKWARD and not self._expected_gradients[microbatch_index]:
            return True
        return (direction, self._stage_index, microbatch_index) in self._network.mailboxes

    def receive(self, direction: Direction, microbatch_index: int) -> tuple[Tensor, ...]:
        if direction is Direction.BACKWARD and not self._expected_gradients[microbatch_index]:
            return ()
        key = (direction, self._stage_index, microbatch_index)
        if key not in self._network.mailboxes:
            raise CommunicationError(
                f"stage {self._stage_index}: no {direction.value} message of micro-batch {microbatch_index} is there",
                stage_index=self._stage_index,
                microbatch_index=microbatch_index,
                direction=direction.value,
            )
        return self._network.mailboxes.pop(key)

    def end_step(self) -> None:
        pass


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.preserve_format)
