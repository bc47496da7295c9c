"""Channels against a link that only takes notes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_autopipe.runtime import p2p_channel
from lightning_autopipe.runtime.p2p_channel import ReceiveChannel, SendChannel
from lightning_autopipe.runtime.tensor_spec import TensorSpec
from lightning_autopipe.runtime.transport import Crossing, Message
from lightning_autopipe.runtime.wire import DirectWire, HostWire

CPU = torch.device("cpu")
SPEC = TensorSpec.of(torch.zeros(4))
NOTHING = TensorSpec.of(torch.zeros(0))


def crossing(index: int) -> Crossing:
    return Crossing(0, index)


def one_each(indices: Iterable[int]) -> list[Message]:
    return [(crossing(index),) for index in indices]


class NotingLink:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def isend(self, buffer: Tensor, crossing: Crossing, tag: int = 0) -> Any:
        self.notes.append(f"isend {crossing.microbatch_index}")

    def irecv(self, buffer: Tensor, crossing: Crossing, tag: int = 0) -> Any:
        buffer.fill_(crossing.microbatch_index)
        self.notes.append(f"irecv {crossing.microbatch_index}")

    def wait(self, work: Any, crossing: Crossing, what: str) -> None:
        self.notes.append(f"wait {what} {crossing.microbatch_index}")

    def take(self) -> list[str]:
        notes, self.notes = self.notes, []
        return notes


def receive_channel(link: NotingLink) -> ReceiveChannel:
    return ReceiveChannel(link, DirectWire(CPU))  # type: ignore[arg-type]


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p_channel, "_SMALL_BYTES", 0)


@pytest.mark.usefixtures("nothing_is_small")
def test_receives_are_posted_ahead_within_the_window() -> None:
    link = NotingLink()
    channel = receive_channel(link)
    channel.begin(one_each(range(5)), lambda crossing, wait: ((SPEC,), 16), window=2)
    assert link.take() == ["irecv 0", "irecv 1"]
    (tensor,) = channel.receive(crossing(0))
    assert link.take() == ["irecv 2", "wait receive 0"]
    assert tensor.view(torch.uint8).tolist() == [0] * 16
    for index in range(1, 5):
        channel.receive(crossing(index))
    assert link.take() == ["irecv 3", "wait receive 1", "irecv 4", *(f"wait receive {index}" for index in (2, 3, 4))]


def test_posts_what_is_known_and_waits_for_the_rest() -> None:
    link, known = NotingLink(), {0}
    channel = receive_channel(link)

    def specs_of(crossing: Crossing, wait: bool) -> tuple[tuple[TensorSpec, ...], int] | None:
        if wait:
            known.update({1, 2})
        return ((SPEC,), 16) if crossing.microbatch_index in known else None

    channel.begin(one_each(range(4)), specs_of, window=3)
    channel.receive(crossing(0))
    assert link.take() == ["irecv 0", "wait receive 0"]
    channel.receive(crossing(1))
    assert link.take() == ["irecv 1", "irecv 2", "wait receive 1"]


@pytest.mark.usefixtures("nothing_is_small")
def test_receives_keep_the_order_of_the_peer() -> None:
    link = NotingLink()
    channel = receive_channel(link)
    channel.begin(one_each([2, 0, 1]), lambda crossing, wait: ((SPEC, SPEC), 32), window=1)
    (tensor, _) = channel.receive(crossing(1))
    assert tensor.tolist() == [1.0] * 4
    channel.receive(crossing(2))
    channel.receive(crossing(0))
    assert [note for note in link.take() if note.startswith("irecv")] == ["irecv 2"] * 2 + ["irecv 0"] * 2 + [
        "irecv 1"
    ] * 2


def test_empty_tensors_need_no_message() -> None:
    link = NotingLink()
    channel = receive_channel(link)
    channel.begin(
        one_each([0, 1]), lambda crossing, wait: ((NOTHING,) if crossing.microbatch_index else (), 0), window=2
    )
    assert channel.receive(crossing(0)) == ()
    assert channel.receive(crossing(1))[0].shape == (0,)
    sender = SendChannel(link, DirectWire(CPU))  # type: ignore[arg-type]
    sender.send((crossing(0),), [torch.zeros(0), torch.zeros(3, 0)])
    sender.release(crossing(0))
    assert link.take() == []


@pytest.mark.usefixtures("nothing_is_small")
def test_sends_are_kept_until_released() -> None:
    link = NotingLink()
    sender = SendChannel(link, HostWire(CPU))  # type: ignore[arg-type]
    sender.send((crossing(0),), [torch.zeros(2), torch.zeros(3)])
    sender.send((crossing(1),), [torch.zeros(2)])
    assert link.take() == ["isend 0", "isend 0", "isend 1"]
    sender.release(crossing(0))
    sender.release(crossing(0))
    assert link.take() == ["wait send 0"] * 2
    assert sender.sent_bytes == 28
    sender.release_all()
    sender.release_all()
    assert link.take() == ["wait send 1"]


def test_it_is_told_when_more_than_what_is_small_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    link = NotingLink()
    sender = SendChannel(link, DirectWire(CPU))  # type: ignore[arg-type]
    monkeypatch.setattr(p2p_channel, "_SMALL_BYTES", 3 * SPEC.num_bytes)
    assert [sender.send((crossing(index),), [torch.zeros(4)]) for index in range(5)] == [False] * 3 + [True] * 2
    sender.release(crossing(3))
    sender.release(crossing(1))
    assert not sender.send((crossing(5),), [torch.zeros(0)])
    sender.release_all()
    assert not sender.send((crossing(6),), [torch.zeros(4)])


def test_small_messages_are_posted_beyond_the_window_in_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    link = NotingLink()
    channel = receive_channel(link)
    monkeypatch.setattr(p2p_channel, "_SMALL_BYTES", 3 * SPEC.num_bytes)
    channel.begin(one_each(range(9)), lambda crossing, wait: ((SPEC,), 16), window=2)
    assert link.take() == ["irecv 0", "irecv 1", "irecv 2"]
    channel.receive(crossing(0))
    assert link.take() == ["wait receive 0"]
    channel.receive(crossing(1))
    assert link.take() == ["irecv 3", "irecv 4", "wait receive 1"]


@pytest.mark.usefixtures("nothing_is_small")
def test_halves_of_one_message_come_together() -> None:
    link = NotingLink()
    halves = Crossing(0, 1, 0), Crossing(0, 1, 1)
    channel = receive_channel(link)
    channel.begin([*one_each([0]), halves, *one_each([2])], lambda crossing, wait: ((SPEC,), 16), window=2)
    assert link.take() == ["irecv 0", "irecv 1", "irecv 1"]
    channel.receive(crossing(0))
    link.take()
    first = channel.receive(halves[0])
    assert link.take() == ["wait receive 1", "wait receive 1"]
    second = channel.receive(halves[1])
    assert link.take() == []
    assert first[0] is not second[0]
    sender = SendChannel(link, DirectWire(CPU))  # type: ignore[arg-type]
    sender.send(halves, [torch.zeros(2), torch.zeros(3)])
    sender.release(halves[1])
    sender.release(halves[0])
    assert link.take() == ["isend 1", "isend 1", "wait send 1", "wait send 1"]
