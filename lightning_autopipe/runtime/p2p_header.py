"""Tells the next stage, once for each signature, what will cross the cut."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autopipe.runtime.p2p_channel import Link
from lightning_autopipe.runtime.tensor_spec import TensorSpec, decode_specs, encode_specs

_TAG = 1  # payloads have 0
_LENGTH_BYTES = 8
_FIRST_PART_BYTES = 1024
"""Enough for about twenty values; what is longer follows as a second message."""


class HeaderSender:
    """Sends specs; a small CPU message of one fixed size, then the rest if there is any."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._pending: list[tuple[dist.Work, Tensor, int]] = []

    def send(self, microbatch_index: int, specs: tuple[TensorSpec, ...]) -> None:
        """Start to send."""
        encoded = encode_specs(specs)
        message = len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded
        parts = [message[:_FIRST_PART_BYTES].ljust(_FIRST_PART_BYTES), message[_FIRST_PART_BYTES:]]
        for part in parts:
            if part:
                buffer = torch.frombuffer(bytearray(part), dtype=torch.uint8)
                self._pending.append((self._link.isend(buffer, microbatch_index, _TAG), buffer, microbatch_index))

    def release_all(self) -> None:
        """Wait until everything is out."""
        for work, _buffer, microbatch_index in self._pending:
            self._link.wait(work, microbatch_index, "send")
        self._pending.clear()


class HeaderReceiver:
    """Receives what a `HeaderSender` sends, in its order."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._posted: tuple[dist.Work, Tensor] | None = None

    def post(self, microbatch_index: int) -> None:
        """Post the receive of the next header, unless it is posted."""
        if self._posted is None:
            self._posted = self._post(microbatch_index, _FIRST_PART_BYTES)

    def receive(self, microbatch_index: int) -> tuple[TensorSpec, ...]:
        """Wait for the next header."""
        self.post(microbatch_index)
        assert self._posted is not None
        data = self._wait(microbatch_index, *self._posted)
        self._posted = None
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        rest = _LENGTH_BYTES + length - _FIRST_PART_BYTES
        if rest > 0:
            data += self._wait(microbatch_index, *self._post(microbatch_index, rest))
        return decode_specs(data[_LENGTH_BYTES : _LENGTH_BYTES + length])

    def _post(self, microbatch_index: int, num_bytes: int) -> tuple[dist.Work, Tensor]:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return self._link.irecv(buffer, microbatch_index, _TAG), buffer

    def _wait(self, microbatch_index: int, work: dist.Work, buffer: Tensor) -> bytes:
        self._link.wait(work, microbatch_index, "receive")
        return bytes(buffer.tolist())
