"""Stages in processes of their own, joined by `torch.distributed`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autopipe.runtime.errors import PipelineRuntimeError
from lightning_autopipe.runtime.p2p_channel import Link, ReceiveChannel, SendChannel
from lightning_autopipe.runtime.p2p_header import HeaderReceiver, HeaderSender
from lightning_autopipe.runtime.tensor_spec import SpecBook, TensorSpec
from lightning_autopipe.runtime.transport import Direction, StepPlan
from lightning_autopipe.runtime.wire import wire_for

_WARM_UP = -1
"""Stands for the micro-batch in errors of `warm_up`."""


class P2PTransport:
    """A `Transport` whose neighbours are other processes: gloo for CPU tensors, NCCL or staged gloo for CUDA tensors.

    Activations and gradients have process groups of their own, and sends never wait for their receiver, so neither
    direction holds up the other. Receives are posted ahead, up to `receive_window` messages in each direction. What
    will cross a cut is told in a header, once for each signature.
    """

    def __init__(
        self,
        *,
        stage_index: int,
        pipeline_ranks: Sequence[int],
        forward_group: dist.ProcessGroup,
        backward_group: dist.ProcessGroup,
        header_group: dist.ProcessGroup,
        device: torch.device,
        timeout_s: float,
        receive_window: int = 2,
    ) -> None:
        """Connect a stage to its neighbours.

        Args:
            stage_index: This process's stage.
            pipeline_ranks: Global ranks of the pipeline's stages 0, 1, ...
            forward_group: For activations; has all the pipeline's ranks and no other traffic.
            backward_group: For gradients; likewise.
            header_group: A gloo group for headers; may be `forward_group` if that is gloo.
            device: Where received tensors live.
            timeout_s: Limit of every wait. With NCCL the groups' own timeout is what limits.
            receive_window: Messages whose receives are posted ahead.
        """
        assert dist.get_backend(header_group) == "gloo", "headers are CPU tensors"
        self._device = device
        self._is_in_step = False
        self._plan = StepPlan(activation_order=(), gradient_order=(), signatures={})
        self._sent_book, self._received_book = SpecBook(), SpecBook()
        self._gradient_specs: dict[int, tuple[TensorSpec, ...]] = {}
        self._senders: dict[Direction, SendChannel] = {}
        self._receivers: dict[Direction, ReceiveChannel] = {}
        self._header_sender: HeaderSender | None = None
        self._header_receiver: HeaderReceiver | None = None

        def link(direction: Direction, group: dist.ProcessGroup, peer_stage_index: int) -> Link:
            return Link(
                group=group,
                direction=direction,
                stage_index=stage_index,
                peer_stage_index=peer_stage_index,
                peer_global_rank=pipeline_ranks[peer_stage_index],
                timeout_s=timeout_s,
                host_waits=dist.get_backend(group) == "gloo",
            )

        def sender(direction: Direction, group: dist.ProcessGroup, peer_stage_index: int) -> SendChannel:
            return SendChannel(link(direction, group, peer_stage_index), wire_for(device, group))

        def receiver(direction: Direction, group: dist.ProcessGroup, peer_stage_index: int) -> ReceiveChannel:
            return ReceiveChannel(
                link(direction, group, peer_stage_index), wire_for(device, group), device=device, window=receive_window
            )

        if stage_index > 0:
            previous = stage_index - 1
            self._receivers[Direction.FORWARD] = receiver(Direction.FORWARD, forward_group, previous)
            self._header_receiver = HeaderReceiver(link(Direction.FORWARD, header_group, previous))
            self._senders[Direction.BACKWARD] = sender(Direction.BACKWARD, backward_group, previous)
        if stage_index < len(pipeline_ranks) - 1:
            following = stage_index + 1
            self._senders[Direction.FORWARD] = sender(Direction.FORWARD, forward_group, following)
            self._header_sender = HeaderSender(link(Direction.FORWARD, header_group, following))
            self._receivers[Direction.BACKWARD] = receiver(Direction.BACKWARD, backward_group, following)

    def warm_up(self) -> None:
        """Send a byte through every connection; all stages call it at once.

        NCCL connects two ranks in their first message, and the host waits there for the other one: between two
        micro-batches that could be a circle.

        Raises:
            CommunicationError: A neighbour cannot be reached.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        spec = (TensorSpec.of(byte),)
        for direction in Direction:  # one after the other: each is a chain
            if direction in self._receivers:
                self._receivers[direction].begin([_WARM_UP], lambda microbatch_index, wait: spec)
                self._receivers[direction].receive(_WARM_UP)
            if direction in self._senders:
                self._senders[direction].send(_WARM_UP, [byte])
                self._senders[direction].release(_WARM_UP)

    def begin_step(self, plan: StepPlan) -> None:
        if self._is_in_step:
            raise PipelineRuntimeError(
                "an earlier step failed in the middle and left messages under way between the stages; start a new run"
            )
        self._is_in_step = True
        self._plan = plan
        self._gradient_specs.clear()
        if Direction.FORWARD in self._receivers:
            self._receivers[Direction.FORWARD].begin(plan.activation_order, self._activation_specs)
        if Direction.BACKWARD in self._receivers:
            self._receivers[Direction.BACKWARD].begin(plan.gradient_order, self._expected_gradient_specs)

    def send(self, direction: Direction, microbatch_index: int, tensors: Sequence[Tensor]) -> None:
        if direction is Direction.FORWARD:
            self._announce(microbatch_index, tuple(TensorSpec.of(tensor) for tensor in tensors))
        self._senders[direction].send(microbatch_index, tensors)

    def release(self, direction: Direction, microbatch_index: int) -> None:
        self._senders[direction].release(microbatch_index)

    def expect_gradients(self, microbatch_index: int, specs: Sequence[TensorSpec]) -> None:
        self._gradient_specs[microbatch_index] = tuple(replace(spec, requires_grad=False) for spec in specs)
        self._receivers[Direction.BACKWARD].post_ahead()

    def has_arrived(self, direction: Direction, microbatch_index: int) -> bool:
        return True  # `receive` waits

    def receive(self, direction: Direction, microbatch_index: int) -> tuple[Tensor, ...]:
        return self._receivers[direction].receive(microbatch_index)

    def end_step(self) -> None:
        if self._header_sender is not None:
            self._header_sender.release_all()
        for sender in self._senders.values():
            sender.release_all()
        self._is_in_step = False

    def _announce(self, microbatch_index: int, specs: tuple[TensorSpec, ...]) -> None:
        signature = self._plan.signatures[microbatch_index]
        if self._sent_book.get(signature) is None:
            assert self._header_sender is not None
            self._header_sender.send(microbatch_index, specs)
            self._sent_book.add(signature, specs)
        self._sent_book.check(signature, specs)

    def _activation_specs(self, microbatch_index: int, wait: bool) -> tuple[TensorSpec, ...] | None:
        signature = self._plan.signatures[microbatch_index]
        specs = self._received_book.get(signature)
        if specs is None:
            assert self._header_receiver is not None
            self._header_receiver.post(microbatch_index)
            if wait:
                specs = self._header_receiver.receive(microbatch_index)
                self._received_book.add(signature, specs)
        return specs

    def _expected_gradient_specs(self, microbatch_index: int, wait: bool) -> tuple[TensorSpec, ...] | None:
        specs = self._gradient_specs.get(microbatch_index)
        assert specs is not None or not wait, (
            f"the gradient of micro-batch {microbatch_index} is due before its forward"
        )
        return specs
