"""One direction of the traffic between two neighbouring ranks, over a process group."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from lightning_autopipe.runtime.errors import CommunicationError
from lightning_autopipe.runtime.tensor_spec import TensorSpec
from lightning_autopipe.runtime.transport import Crossing, Direction, Message
from lightning_autopipe.runtime.wire import Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """This rank's end of the connection to one neighbour, for one direction of traffic.

    Calls the group itself: what `dist.isend` adds (checks, looking ranks up) costs as much as the message.
    """

    group: dist.ProcessGroup
    direction: Direction
    peer_global_rank: int
    peer_group_rank: int
    timeout_s: float
    host_waits: bool
    """Whether waiting stops the host, as with gloo; with NCCL only the current stream waits."""
    limit: timedelta = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "limit", timedelta(seconds=self.timeout_s))

    def isend(self, buffer: Tensor, crossing: Crossing, tag: int = 0) -> dist.Work:
        """Start to send a buffer, which must stay as it is until the work is done."""
        try:
            return self.group.send([buffer], self.peer_group_rank, tag)
        except RuntimeError as error:
            raise self._failure(error, crossing, "send") from error

    def irecv(self, buffer: Tensor, crossing: Crossing, tag: int = 0) -> dist.Work:
        """Start to receive into a buffer."""
        try:
            return self.group.recv([buffer], self.peer_group_rank, tag)
        except RuntimeError as error:
            raise self._failure(error, crossing, "receive") from error

    def wait(self, work: dist.Work, crossing: Crossing, what: str) -> None:
        """Wait for a send or receive ("send", "receive"), within the limit."""
        try:
            if self.host_waits:
                work.wait(self.limit)
            else:
                work.wait()  # with a limit the host would wait too; the group's own limit watches over it
        except RuntimeError as error:
            raise self._failure(error, crossing, what) from error

    def _failure(self, error: RuntimeError, crossing: Crossing, what: str) -> CommunicationError:
        is_send = what == "send"
        noun = "activations" if self.direction is Direction.FORWARD else "gradients"
        verb, preposition = ("sending", "to") if is_send else ("receiving", "from")
        stages = crossing.cut_index, crossing.cut_index + 1
        own, peer = stages if is_send == (self.direction is Direction.FORWARD) else stages[::-1]
        return CommunicationError(
            f"stage {own} (global rank {dist.get_rank()}): {verb} the {noun} of {crossing} {preposition} stage {peer} "
            f"(global rank {self.peer_global_rank}) failed (limit: timeout = {self.timeout_s:g} s): {error}",
            stage_index=own,
            peer_stage_index=peer,
            microbatch_index=crossing.microbatch_index,
            slice_index=crossing.slice_index,
            direction=self.direction.value,
        )


_SMALL_BYTES = 2**20
"""Memory that nobody notices. While no more than that is under way, sends are waited for at the end of the step, for
all in one go; and receives are posted beyond the window for as many messages as are no more than that together: what is
small waits for the peer's answer longer than for its bytes."""
_MAX_SMALL = 64
"""Receives beyond the window are posted in bursts of up to so many, for which the peer wakes up once."""


class SendChannel:
    """Sends messages without waiting for the receiver and keeps their tensors until they are released."""

    def __init__(self, link: Link, wire: Wire) -> None:
        self._link = link
        self._wire = wire
        self._pending: dict[Crossing, list[tuple[dist.Work, Tensor]]] = {}
        self._pending_bytes = 0
        self.sent_bytes = 0
        """So far."""

    def send(self, message: Message, tensors: Sequence[Tensor]) -> bool:
        """Start to send the tensors of a message; empty ones need no transfer. Give whether much is under way now."""
        outgoing, isend = self._wire.outgoing, self._link.isend
        works, num_bytes = [], 0
        for tensor in tensors:
            if tensor.numel():
                buffer = outgoing(tensor)
                num_bytes += buffer.nbytes
                works.append((isend(buffer, message[0]), buffer))
        self._pending_bytes += num_bytes
        self.sent_bytes += num_bytes
        for crossing in message:
            self._pending[crossing] = works
        return self._pending_bytes > _SMALL_BYTES

    def release(self, crossing: Crossing) -> None:
        """Wait until the message with a crossing is out, and let go of its tensors."""
        works = self._pending.pop(crossing, [])
        for work, buffer in works:
            self._link.wait(work, crossing, "send")
            self._pending_bytes -= buffer.nbytes
        works.clear()  # the other crossings of the message share the list

    def release_all(self) -> None:
        """Wait for everything."""
        for crossing, works in self._pending.items():
            for work, _buffer in works:
                self._link.wait(work, crossing, "send")
            works.clear()  # the other crossings of the message share the list
        self._pending.clear()
        self._pending_bytes = 0


SpecsOf = Callable[[Crossing, bool], "tuple[Sequence[TensorSpec], int] | None"]


class _Posted:
    """A message whose receives are posted, and what is to be waited for; all its crossings share it."""

    __slots__ = ("num_bytes", "works")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.works: list[tuple[dist.Work, Tensor, Tensor]] | None = []  # work, buffer, target; None: waited for


class ReceiveChannel:
    """Receives messages in the order in which the peer sends them, posting receives up to a window ahead.

    gloo moves a message only once its receive is posted, so posting early is what hides the transfer behind
    computation; the window bounds the memory that waits for data.

    Every message gets new memory. What a stage received is the user's: a view of it may be kept in a list, in a metric
    or by autograd beyond the unit's backward, and nothing tells when the last one is gone. torch's allocators hand the
    block of the last message out again as it is; a pool here would save nothing that could be measured.
    """

    def __init__(self, link: Link, wire: Wire) -> None:
        self._link = link
        self._wire = wire
        self._window = 0
        self._order: deque[Message] = deque()
        self._posted: dict[Crossing, tuple[_Posted, tuple[Tensor, ...]]] = {}
        self._num_ahead = self._bytes_ahead = 0
        self._specs_of: SpecsOf = lambda crossing, wait: None

    def begin(self, order: Sequence[Message], specs_of: SpecsOf, *, window: int) -> None:
        """Begin a step.

        Args:
            order: Messages in the order in which the peer sends them.
            specs_of: Gives what will come for a crossing, and its bytes, asked in that order; None while it is not
                known and the second argument does not say to wait for it.
            window: Messages whose receives are posted ahead.
        """
        self._order = deque(order)
        self._specs_of = specs_of
        self._window = window
        self.post_ahead()

    def post_ahead(self) -> None:
        """Where fewer receives are posted than the window allows: post those, small ones beyond, if they are known."""
        if self._num_ahead >= self._window:
            return
        while self._order and (self._num_ahead < self._window or self._num_ahead < _MAX_SMALL):
            if not self._post_next(False):
                return

    def receive(self, crossing: Crossing) -> tuple[Tensor, ...]:
        """Wait for the message with a crossing; the tensors' requires_grad is as in their specs."""
        while (found := self._posted.pop(crossing, None)) is None:
            # Beyond the window only where the orders of the two differ: what comes before is sent before.
            assert self._order, crossing
            self._post_next(True)
        posted, values = found
        works = posted.works
        if works is not None:
            posted.works = None
            self._num_ahead -= 1
            self._bytes_ahead -= posted.num_bytes
            if self._order:
                self.post_ahead()
            for work, buffer, target in works:
                self._link.wait(work, crossing, "receive")
                if buffer is not target:
                    self._wire.arrived(buffer, target)
        return values

    def _post_next(self, wait: bool) -> bool:
        message = self._order[0]
        specs = []
        num_bytes = 0
        for crossing in message:
            known = self._specs_of(crossing, wait)
            if known is None:
                return False
            specs.append(known[0])
            num_bytes += known[1]
        if not wait and self._num_ahead >= self._window and self._bytes_ahead + num_bytes > _SMALL_BYTES:
            return False
        self._order.popleft()
        posted = _Posted(num_bytes)
        works = posted.works
        assert works is not None
        for crossing, own in zip(message, specs, strict=True):
            values = []
            for spec in own:
                buffer, target = self._wire.incoming(spec)
                if spec.num_bytes:
                    works.append((self._link.irecv(buffer, crossing), buffer, target))
                values.append(target.requires_grad_() if spec.requires_grad else target)
            self._posted[crossing] = posted, tuple(values)
        self._num_ahead += 1
        self._bytes_ahead += num_bytes
        return True
