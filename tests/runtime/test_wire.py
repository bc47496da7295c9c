"""Which memory a process group reads and writes; a CUDA device is only told of, never used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autopipe.runtime.tensor_spec import TensorSpec
from lightning_autopipe.runtime.wire import DirectWire, HostWire, wire_for

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("device", "backend", "expected"),
    [(CPU, "gloo", DirectWire), (CUDA, "gloo", HostWire), (CUDA, "nccl", DirectWire)],
)
def test_only_gloo_with_cuda_tensors_needs_copies(
    device: torch.device, backend: str, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    assert type(wire_for(device, None)) is expected  # type: ignore[arg-type]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens with memory and streams, in order; without a GPU nothing can be pinned."""
    events: list[str] = []
    empty, empty_strided, copy = torch.empty, torch.empty_strided, Tensor.copy_

    def noting_empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        events.append("pinned" if pin_memory else "not pinned")
        return empty(*args, **kwargs)

    def noting_copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        events.append("starts to copy" if non_blocking else "copies")
        return copy(self, source)

    class Stream:
        def synchronize(self) -> None:
            events.append("waits for the stream")

    monkeypatch.setattr(torch, "empty", noting_empty)
    monkeypatch.setattr(torch, "empty_strided", lambda *args, device, **kwargs: empty_strided(*args, **kwargs))
    monkeypatch.setattr(Tensor, "copy_", noting_copy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    return events


def test_cuda_tensors_pass_through_pinned_memory(events: list[str]) -> None:
    wire = HostWire(CUDA)
    sent = torch.arange(6, dtype=torch.float64).view(2, 3)
    message = wire.outgoing(sent)
    assert events == ["pinned", "starts to copy", "waits for the stream"], "gloo knows of no stream"
    sent.zero_()
    buffer, received = wire.incoming(TensorSpec.of(sent))
    buffer.copy_(message)
    wire.arrived(buffer, received)
    assert events[3:] == ["pinned", "copies", "starts to copy"]
    assert received.tolist() == [[0, 1, 2], [3, 4, 5]]
