"""Tells the next stage, once for each signature, what will cross the cut."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autopipe.runtime.p2p_channel import Link
from lightning_autopipe.runtime.tensor_spec import TensorSpec, decode_specs, encode_specs
from lightning_autopipe.runtime.transport import Crossing

_TAG = 1  # payloads have 0
_LENGTH_BYTES = 8
_FIRST_PART_BYTES = 1024
"""Enough for about twenty values; what is longer follows as a second message."""


class HeaderSender:
    """Sends specs; a small CPU message of one fixed size, then the rest if there is any."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._pending: list[tuple[dist.Work, Tensor, Crossing]] = []

    def send(self, crossing: Crossing, specs: tuple[TensorSpec, ...]) -> None:
        """Start to send."""
        encoded = encode_specs(specs)
        message = len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded
        parts = [message[:_FIRST_PART_BYTES].ljust(_FIRST_PART_BYTES), message[_FIRST_PART_BYTES:]]
        for part in parts:
            if part:
                buffer = torch.frombuffer(bytearray(part), dtype=torch.uint8)
                self._pending.append((self._link.isend(buffer, crossing, _TAG), buffer, crossing))

    def release_all(self) -> None:
        """Wait until everything is out."""
        for work, _buffer, crossing in self._pending:
            self._link.wait(work, crossing, "send")
        self._pending.clear()


class HeaderReceiver:
    """Receives what a `HeaderSender` sends, in its order."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._posted: tuple[dist.Work, Tensor] | None = None

    def post(self, crossing: Crossing) -> None:
        """Post the receive of the next header, unless it is posted."""
        if self._posted is None:
            self._posted = self._post(crossing, _FIRST_PART_BYTES)

    def receive(self, crossing: Crossing) -> tuple[TensorSpec, ...]:
        """Wait for the next header."""
        self.post(crossing)
        assert self._posted is not None
        data = self._wait(crossing, *self._posted)
        self._posted = None
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        rest = _LENGTH_BYTES + length - _FIRST_PART_BYTES
        if rest > 0:
            data += self._wait(crossing, *self._post(crossing, rest))
        return decode_specs(data[_LENGTH_BYTES : _LENGTH_BYTES + length])

    def _post(self, crossing: Crossing, num_bytes: int) -> tuple[dist.Work, Tensor]:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return self._link.irecv(buffer, crossing, _TAG), buffer

    def _wait(self, crossing: Crossing, work: dist.Work, buffer: Tensor) -> bytes:
        self._link.wait(work, crossing, "receive")
        return bytes(buffer.tolist())
