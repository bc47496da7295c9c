"""Stages in processes of their own, joined by `torch.distributed`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.runtime.errors import PipelineRuntimeError
from lightning_autopipe.runtime.p2p_channel import Link, ReceiveChannel, SendChannel
from lightning_autopipe.runtime.p2p_header import HeaderReceiver, HeaderSender
from lightning_autopipe.runtime.tensor_spec import SpecBook, TensorSpec
from lightning_autopipe.runtime.transport import Crossing, Direction, Message, StepPlan
from lightning_autopipe.runtime.wire import wire_for

_FORWARDS = Direction.FORWARD
_WARM_UP_INDEX = -1
"""Stands for the micro-batch in errors of `warm_up`."""


class P2PTransport:
    """A `Transport` whose neighbours are other processes: gloo for CPU tensors, NCCL or staged gloo for CUDA tensors.

    Activations and gradients have process groups of their own, and sends never wait for their receiver, so neither
    direction holds up the other. Receives are posted ahead, as many as the schedule lets the sender run ahead. What
    will cross a cut is told in a header, once for each signature.
    """

    receive_waits = True

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
        stages_per_rank: int = 1,
    ) -> None:
        """Connect a rank to its neighbours.

        Args:
            stage_index: This process's (first) stage, which is its place in the pipeline.
            pipeline_ranks: Global ranks of the pipeline, by their first stages 0, 1, ...
            forward_group: For activations; has all the pipeline's ranks and no other traffic.
            backward_group: For gradients; likewise.
            header_group: A gloo group for headers; may be `forward_group` if that is gloo.
            device: Where received tensors live.
            timeout_s: Limit of every wait. With NCCL the groups' own timeout is what limits.
            stages_per_rank: With several the pipeline is a circle: the last rank sends to the first.
        """
        assert dist.get_backend(header_group) == "gloo", "headers are CPU tensors"
        self._device = device
        self._stage_index = stage_index
        self._is_in_step = self.is_loaded = False
        self._plan = StepPlan(activation_order=(), gradient_order=(), signatures={})
        self._sent_book, self._received_book = SpecBook(), SpecBook()
        self._senders: dict[Direction, SendChannel] = {}
        self._receivers: dict[Direction, ReceiveChannel] = {}
        self._header_sender: HeaderSender | None = None
        self._header_receiver: HeaderReceiver | None = None
        self._pipeline_ranks = tuple(pipeline_ranks)
        self._groups = {Direction.FORWARD: forward_group, Direction.BACKWARD: backward_group}
        self._header_group = header_group
        self._timeout_s = timeout_s
        if stage_index > 0:
            self._connect_previous()
        if stage_index < len(pipeline_ranks) - 1:
            self._connect_following()
        if stages_per_rank > 1:
            self.close_circle()

    def close_circle(self) -> None:
        num_ranks = len(self._pipeline_ranks)
        if num_ranks == 2 and dist.get_backend(self._groups[Direction.FORWARD]) != "gloo":
            raise PlanError(
                "two ranks with several stages each send each other activations and gradients; NCCL would have a "
                "receive that is posted early hold up the sends behind it. Use more ranks, another schedule=, or "
                "process_group_backend='gloo'"
            )
        # As in `warm_up`, the two ends meet here, and not in the middle of a step.
        if num_ranks > 1 and Direction.FORWARD not in self._receivers:
            self._connect_previous()
            self._receive_byte(Direction.FORWARD)
            self._send_byte(Direction.BACKWARD)
        if num_ranks > 1 and Direction.FORWARD not in self._senders:
            self._connect_following()
            self._send_byte(Direction.FORWARD)
            self._receive_byte(Direction.BACKWARD)

    def _connect_previous(self) -> None:
        peer = self._stage_index - 1
        self._receivers[Direction.FORWARD] = self._receiver(Direction.FORWARD, peer)
        self._header_receiver = HeaderReceiver(self._link(Direction.FORWARD, self._header_group, peer))
        self._senders[Direction.BACKWARD] = self._sender(Direction.BACKWARD, peer)

    def _connect_following(self) -> None:
        peer = (self._stage_index + 1) % len(self._pipeline_ranks)
        self._senders[Direction.FORWARD] = self._sender(Direction.FORWARD, peer)
        self._header_sender = HeaderSender(self._link(Direction.FORWARD, self._header_group, peer))
        self._receivers[Direction.BACKWARD] = self._receiver(Direction.BACKWARD, peer)

    def _link(self, direction: Direction, group: dist.ProcessGroup, peer: int) -> Link:
        global_rank = self._pipeline_ranks[peer]
        return Link(
            group=group,
            direction=direction,
            peer_global_rank=global_rank,
            peer_group_rank=dist.get_group_rank(group, global_rank),
            timeout_s=self._timeout_s,
            host_waits=dist.get_backend(group) == "gloo",
        )

    def _sender(self, direction: Direction, peer: int) -> SendChannel:
        group = self._groups[direction]
        return SendChannel(self._link(direction, group, peer), wire_for(self._device, group))

    def _receiver(self, direction: Direction, peer: int) -> ReceiveChannel:
        group = self._groups[direction]
        return ReceiveChannel(self._link(direction, group, peer), wire_for(self._device, group))

    def warm_up(self) -> None:
        """Send a byte through every connection; all stages call it at once.

        NCCL connects two ranks in their first message, and the host waits there for the other one: between two
        micro-batches that could be a circle.

        Raises:
            CommunicationError: A neighbour cannot be reached.
        """
        begins = self._stage_index == 0  # in a circle somebody has to
        for direction in Direction:  # one after the other: each is a chain, or a circle
            if begins and direction in self._senders:
                self._send_byte(direction)
            if direction in self._receivers:
                self._receive_byte(direction)
            if not begins and direction in self._senders:
                self._send_byte(direction)

    def _receive_byte(self, direction: Direction) -> None:
        crossing = Crossing(self._stage_index - (direction is Direction.FORWARD), _WARM_UP_INDEX)
        specs = (TensorSpec.of(torch.zeros(1, dtype=torch.uint8)),)
        self._receivers[direction].begin([(crossing,)], lambda _, wait: (specs, 1), window=1)
        self._receivers[direction].receive(crossing)

    def _send_byte(self, direction: Direction) -> None:
        crossing = Crossing(self._stage_index - (direction is Direction.BACKWARD), _WARM_UP_INDEX)
        self._senders[direction].send((crossing,), [torch.zeros(1, dtype=torch.uint8, device=self._device)])
        self._senders[direction].release(crossing)

    @property
    def sent_bytes(self) -> tuple[int, int]:
        forward, backward = (self._senders.get(direction) for direction in Direction)
        return 0 if forward is None else forward.sent_bytes, 0 if backward is None else backward.sent_bytes

    def begin_step(self, plan: StepPlan) -> None:
        if self._is_in_step:
            raise PipelineRuntimeError(
                "an earlier step failed in the middle and left messages under way between the stages; start a new run"
            )
        self._is_in_step = True
        self.is_loaded = False
        self._plan = plan
        if Direction.FORWARD in self._receivers:
            channel = self._receivers[Direction.FORWARD]
            channel.begin(plan.activation_order, self._activation_specs, window=plan.activation_window)
        if Direction.BACKWARD in self._receivers:
            channel = self._receivers[Direction.BACKWARD]
            channel.begin(plan.gradient_order, self._gradient_specs, window=plan.gradient_window)

    def send(self, direction: Direction, message: Message, values: Sequence[Sequence[Tensor]]) -> None:
        if direction is _FORWARDS:
            is_new = False
            for crossing, tensors in zip(message, values, strict=True):
                is_new |= self._announce(crossing, tensors)
            if is_new:
                self._receivers[Direction.BACKWARD].post_ahead()
        tensors = values[0] if len(values) == 1 else [tensor for tensors in values for tensor in tensors]
        if self._senders[direction].send(message, tensors):
            self.is_loaded = True

    def release(self, direction: Direction, crossing: Crossing) -> None:
        self._senders[direction].release(crossing)

    def has_arrived(self, direction: Direction, crossing: Crossing) -> bool:
        raise AssertionError("receive waits")

    def receive(self, direction: Direction, crossing: Crossing) -> tuple[Tensor, ...]:
        return self._receivers[direction].receive(crossing)

    def end_step(self) -> None:
        if self._header_sender is not None:
            self._header_sender.release_all()
        for sender in self._senders.values():
            sender.release_all()
        self._is_in_step = False

    def _signature(self, crossing: Crossing) -> Hashable:
        return crossing[0], self._plan.signatures[crossing[1:]]  # its cut and unit, without a call for each

    def _announce(self, crossing: Crossing, tensors: Sequence[Tensor]) -> bool:
        """Tell the receiver what comes where it cannot know; give whether that was so."""
        signature = self._signature(crossing)
        known = self._sent_book.get(signature)
        if known is not None and known.fit(tensors):
            return False
        is_new = self._sent_book.check(signature, tensors) is None
        if is_new:
            assert self._header_sender is not None
            specs = tuple(TensorSpec.of(tensor) for tensor in tensors)
            self._header_sender.send(crossing, specs)
            self._sent_book.add(signature, specs)
        return is_new

    def _activation_specs(self, crossing: Crossing, wait: bool) -> tuple[Sequence[TensorSpec], int] | None:
        signature = self._signature(crossing)
        specs = self._received_book.get(signature)
        if specs is None:
            assert self._header_receiver is not None
            self._header_receiver.post(crossing)
            if not wait:
                return None
            specs = self._received_book.add(signature, self._header_receiver.receive(crossing))
        return specs.values, specs.value_bytes

    def _gradient_specs(self, crossing: Crossing, wait: bool) -> tuple[Sequence[TensorSpec], int] | None:
        # Those of what was sent, or will be sent: where that turns out to differ, sending it is an error.
        specs = self._sent_book.get(self._signature(crossing))
        if specs is None:
            assert not wait, f"the gradient of {crossing} is due before its forward"
            return None
        return specs.gradients, specs.gradient_bytes
