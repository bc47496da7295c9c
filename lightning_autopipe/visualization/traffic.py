"""What a step asks of the links that it goes over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_autopipe.core.timeline import Timeline
from lightning_autopipe.visualization.lanes import Message, Ranks, make_messages


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """One step's use of a link, or of the way from one rank to another."""

    name: str
    num_messages: int | None
    """None where not counted."""
    num_bytes: float | None
    """None where unknown."""
    busy_s: float
    """Seconds in which at least one message is on its way; of a link, those that its bytes take."""
    busy_share: float
    """Of the step, 0 to 1."""
    summed_bytes: float = 0.0
    """Of `num_bytes`, those of sums of gradients."""
    contended_share: float | None = None
    """Share of the step in which more than one flow has something under way here; None where not known."""
    contending: tuple[str, ...] = ()
    """The flows that do, as ``3→2``."""


def link_uses(
    timeline: Timeline, *, ranks: Ranks = (), boundary_bytes: Sequence[tuple[float, float]] = ()
) -> tuple[LinkUse, ...]:
    """The use of the way between each two ranks that send messages, in the order of senders and receivers.

    Arguments and errors as of `make_messages`.
    """
    by_pair: dict[tuple[int, int], list[Message]] = {}
    for message in make_messages(timeline, ranks, boundary_bytes):
        by_pair.setdefault((message.sender, message.receiver), []).append(message)
    uses = []
    for (sender, receiver), messages in sorted(by_pair.items()):
        busy_s = _covered_s((message.event.start_s, message.event.end_s) for message in messages)
        uses.append(
            LinkUse(
                name=f"rank {sender} → rank {receiver}",
                num_messages=len(messages),
                num_bytes=sum(message.num_bytes or 0.0 for message in messages) if boundary_bytes else None,
                busy_s=busy_s,
                busy_share=busy_s / timeline.step_s if timeline.step_s else 0.0,
            )
        )
    return tuple(uses)


def _covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds in at least one of the intervals."""
    covered = end_so_far = 0.0
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, end_so_far))
        end_so_far = max(end_so_far, end)
    return covered
