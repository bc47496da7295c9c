"""Channels against a link that only takes notes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_autopipe.runtime.p2p_channel import ReceiveChannel, SendChannel
from lightning_autopipe.runtime.tensor_spec import TensorSpec
from lightning_autopipe.runtime.wire import DirectWire, HostWire

CPU = torch.device("cpu")
SPEC = TensorSpec.of(torch.zeros(4))
NOTHING = TensorSpec.of(torch.zeros(0))


class NotingLink:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def isend(self, buffer: Tensor, microbatch_index: int, tag: int = 0) -> Any:
        self.notes.append(f"isend {microbatch_index}")

    def irecv(self, buffer: Tensor, microbatch_index: int, tag: int = 0) -> Any:
        buffer.fill_(microbatch_index)
        self.notes.append(f"irecv {microbatch_index}")

    def wait(self, work: Any, microbatch_index: int, what: str) -> None:
        self.notes.append(f"wait {what} {microbatch_index}")

    def take(self) -> list[str]:
        notes, self.notes = self.notes, []
        return notes


def receive_channel(link: NotingLink, window: int) -> ReceiveChannel:
    return ReceiveChannel(link, DirectWire(), device=CPU, window=window)  # type: ignore[arg-type]


def test_receives_are_posted_ahead_within_the_window() -> None:
    link = NotingLink()
    channel = receive_channel(link, window=2)
    channel.begin(range(5), lambda index, wait: (SPEC,))
    assert link.take() == ["irecv 0", "irecv 1"]
    (tensor,) = channel.receive(0)
    assert link.take() == ["irecv 2", "wait receive 0"]
    assert tensor.view(torch.uint8).tolist() == [0] * 16
    for index in range(1, 5):
        channel.receive(index)
    assert link.take() == ["irecv 3", "wait receive 1", "irecv 4", *(f"wait receive {index}" for index in (2, 3, 4))]


def test_posts_what_is_known_and_waits_for_the_rest() -> None:
    link, known = NotingLink(), {0}
    channel = receive_channel(link, window=3)

    def specs_of(index: int, wait: bool) -> tuple[TensorSpec, ...] | None:
        if wait:
            known.update({1, 2})
        return (SPEC,) if index in known else None

    channel.begin(range(4), specs_of)
    channel.receive(0)
    assert link.take() == ["irecv 0", "wait receive 0"]
    channel.receive(1)
    assert link.take() == ["irecv 1", "irecv 2", "wait receive 1"]


def test_receives_keep_the_order_of_the_peer() -> None:
    link = NotingLink()
    channel = receive_channel(link, window=1)
    channel.begin([2, 0, 1], lambda index, wait: (SPEC, SPEC))
    (tensor, _) = channel.receive(1)
    assert tensor.view(torch.uint8)[0] == 1
    channel.receive(2)
    channel.receive(0)
    assert [note for note in link.take() if note.startswith("irecv")] == ["irecv 2"] * 2 + ["irecv 0"] * 2 + [
        "irecv 1"
    ] * 2


def test_empty_tensors_need_no_message() -> None:
    link = NotingLink()
    channel = receive_channel(link, window=2)
    channel.begin([0, 1], lambda index, wait: (NOTHING,) if index else ())
    assert channel.receive(0) == ()
    assert channel.receive(1)[0].shape == (0,)
    sender = SendChannel(link, DirectWire())  # type: ignore[arg-type]
    sender.send(0, [torch.zeros(0), torch.zeros(3, 0)])
    sender.release(0)
    assert link.take() == []


def test_sends_are_kept_until_released() -> None:
    link = NotingLink()
    sender = SendChannel(link, HostWire(CPU))  # type: ignore[arg-type]
    sender.send(0, [torch.zeros(2), torch.zeros(3)])
    sender.send(1, [torch.zeros(2)])
    assert link.take() == ["isend 0", "isend 0", "isend 1"]
    sender.release(0)
    sender.release(0)
    assert link.take() == ["wait send 0"] * 2
    sender.release_all()
    sender.release_all()
    assert link.take() == ["wait send 1"]
