"""One direction of the traffic between two neighbouring stages, over a process group."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autopipe.runtime.errors import CommunicationError
from lightning_autopipe.runtime.tensor_spec import TensorSpec
from lightning_autopipe.runtime.transport import Direction
from lightning_autopipe.runtime.wire import Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """This stage's end of the connection to one neighbour, for one direction of traffic."""

    group: dist.ProcessGroup
    direction: Direction
    stage_index: int
    peer_stage_index: int
    peer_global_rank: int
    timeout_s: float
    host_waits: bool
    """Whether waiting stops the host, as with gloo; with NCCL only the current stream waits."""

    def isend(self, buffer: Tensor, microbatch_index: int, tag: int = 0) -> dist.Work:
        """Start to send a buffer, which must stay as it is until the work is done."""
        with self._named_errors(microbatch_index, "send"):
            return _checked(dist.isend(buffer, self.peer_global_rank, group=self.group, tag=tag))

    def irecv(self, buffer: Tensor, microbatch_index: int, tag: int = 0) -> dist.Work:
        """Start to receive into a buffer."""
        with self._named_errors(microbatch_index, "receive"):
            return _checked(dist.irecv(buffer, self.peer_global_rank, group=self.group, tag=tag))

    def wait(self, work: dist.Work, microbatch_index: int, what: str) -> None:
        """Wait for a send or receive ("send", "receive"), within the limit."""
        with self._named_errors(microbatch_index, what):
            if self.host_waits:
                work.wait(timedelta(seconds=self.timeout_s))
            else:
                work.wait()  # with a limit the host would wait too; the group's own limit watches over it

    @contextlib.contextmanager
    def _named_errors(self, microbatch_index: int, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            noun = "activations" if self.direction is Direction.FORWARD else "gradients"
            verb, preposition = ("sending", "to") if what == "send" else ("receiving", "from")
            raise CommunicationError(
                f"stage {self.stage_index} (global rank {dist.get_rank()}): {verb} the {noun} of micro-batch "
                f"{microbatch_index} {preposition} stage {self.peer_stage_index} (global rank {self.peer_global_rank}) "
                f"failed (limit: timeout = {self.timeout_s:g} s): {error}",
                stage_index=self.stage_index,
                peer_stage_index=self.peer_stage_index,
                microbatch_index=microbatch_index,
                direction=self.direction.value,
            ) from error


def _checked(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the traffic group"
    return work


class SendChannel:
    """Sends messages without waiting for the receiver and keeps their tensors until they are released."""

    def __init__(self, link: Link, wire: Wire) -> None:
        self._link = link
        self._wire = wire
        self._pending: dict[int, list[tuple[dist.Work, Tensor]]] = {}

    def send(self, microbatch_index: int, tensors: Sequence[Tensor]) -> None:
        """Start to send the tensors of a micro-batch; empty ones need no message."""
        buffers = [self._wire.outgoing(tensor) for tensor in tensors if tensor.numel()]
        self._pending[microbatch_index] = [(self._link.isend(buffer, microbatch_index), buffer) for buffer in buffers]

    def release(self, microbatch_index: int) -> None:
        """Wait until the tensors of a micro-batch are out, and let go of them."""
        for work, _buffer in self._pending.pop(microbatch_index, ()):
            self._link.wait(work, microbatch_index, "send")

    def release_all(self) -> None:
        """Wait for everything."""
        for microbatch_index in list(self._pending):
            self.release(microbatch_index)


@dataclass(slots=True)
class _Posted:
    tensors: tuple[Tensor, ...]
    buffers: list[tuple[dist.Work, Tensor, Tensor]]  # work, buffer, target


class ReceiveChannel:
    """Receives messages in the order in which the peer sends them, posting receives up to `window` messages ahead.

    gloo moves a message only once its receive is posted, so posting early is what hides the transfer behind
    computation; the window bounds the memory that waits for data.
    """

    def __init__(self, link: Link, wire: Wire, *, device: torch.device, window: int) -> None:
        self._link = link
        self._wire = wire
        self._device = device
        self._window = window
        self._order: deque[int] = deque()
        self._posted: dict[int, _Posted] = {}
        self._specs_of: Callable[[int, bool], Sequence[TensorSpec] | None] = lambda microbatch_index, wait: None

    def begin(self, order: Sequence[int], specs_of: Callable[[int, bool], Sequence[TensorSpec] | None]) -> None:
        """Begin a step.

        Args:
            order: Micro-batches in the order in which the peer sends them.
            specs_of: Gives what will come for a micro-batch, asked in that order; None while it is not known and the
                second argument does not say to wait for it.
        """
        self._order = deque(order)
        self._specs_of = specs_of
        self.post_ahead()

    def post_ahead(self) -> None:
        """Post the receives that the window allows and whose specs are known."""
        while self._order and len(self._posted) < self._window:
            specs = self._specs_of(self._order[0], False)
            if specs is None:
                return
            self._post(self._order.popleft(), specs)

    def receive(self, microbatch_index: int) -> tuple[Tensor, ...]:
        """Wait for the message of a micro-batch; the tensors' requires_grad is as in its specs."""
        while microbatch_index not in self._posted:
            # Beyond the window only where the two stages' orders differ: what comes before is sent before.
            assert microbatch_index in self._order, (microbatch_index, self._order)
            following = self._order.popleft()
            specs = self._specs_of(following, True)
            assert specs is not None
            self._post(following, specs)
        posted = self._posted.pop(microbatch_index)
        self.post_ahead()
        for work, buffer, target in posted.buffers:
            self._link.wait(work, microbatch_index, "receive")
            self._wire.arrived(buffer, target)
        return posted.tensors

    def _post(self, microbatch_index: int, specs: Sequence[TensorSpec]) -> None:
        targets = [spec.empty(self._device) for spec in specs]
        buffers = []
        for target in targets:
            if target.numel():
                buffer = self._wire.incoming(target)
                buffers.append((self._link.irecv(buffer, microbatch_index), buffer, target))
        self._posted[microbatch_index] = _Posted(
            tuple(target.requires_grad_(spec.requires_grad) for target, spec in zip(targets, specs, strict=True)),
            buffers,
        )
