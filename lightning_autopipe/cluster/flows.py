"""Which transfers to measure, alone and at once, and what their times say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations
from statistics import median

from lightning_autopipe.core.errors import ConfigurationError

MESSAGE_BYTES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
_ALL_PAIRS_UP_TO = 8
"""Ranks of a server of which all pairs are measured alone; in larger ones the neighbours, and rank 0 with each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Messages from one global rank to another."""

    sender: int
    receiver: int

    def __str__(self) -> str:
        return f"{self.sender}->{self.receiver}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Flows that run at the same time."""

    name: str
    """``alone``, ``both directions``, ``neighbours at once``, ``halves at once``, ``servers at once`` or ``ring of
    servers``."""
    flows: tuple[Flow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowTime:
    """How fast a flow was: a message of n bytes takes ``latency_s + n / bandwidth_bytes_per_s``."""

    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRound:
    """A round and how fast its flows were, in their order."""

    round: Round
    times: tuple[FlowTime, ...]
    together_bytes_per_s: float | None = None
    """What all flows got until the last of them was through, with the largest messages; None where it is not known."""


def measurement_rounds(servers: Sequence[str]) -> tuple[Round, ...]:
    """What to measure, the most telling first, since a budget may end it early.

    Each pair that is measured is measured in both directions, alone and at once. Several flows at once, of which no two
    share a rank, show what is shared: inside a server, and between every two servers.

    Args:
        servers: Of each global rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for global_rank, server in enumerate(servers):
        ranks_of.setdefault(server, []).append(global_rank)
    pairs = [pair for ranks in ranks_of.values() for pair in _pairs_inside(ranks)]
    groups = list(ranks_of.values())
    across = [(a[0], b[0]) for a, b in combinations(groups, 2)]
    rounds: list[Round] = []
    for a, b in across + pairs:
        rounds.extend(_round("alone", (way,)) for way in ((a, b), (b, a)))
        rounds.append(_round("both directions", ((a, b), (b, a))))
    for ranks in groups:
        if len(ranks) >= 4:
            half = len(ranks) // 2
            rounds.append(_round("neighbours at once", list(zip(ranks[::2], ranks[1::2], strict=False))))
            rounds.append(_round("halves at once", list(zip(ranks[:half], ranks[half:], strict=False))))
    for here, there in permutations(groups, 2):
        if min(len(here), len(there)) >= 2:
            rounds.append(_round("servers at once", list(zip(here, there, strict=False))))
    if len(groups) > 2:
        ring = list(zip(groups, groups[1:] + groups[:1], strict=True))
        rounds.append(_round("ring of servers", [(a[0], b[-1]) for a, b in ring]))
    return tuple(rounds)


def fit_flow(seconds_by_bytes: Mapping[int, Sequence[float]], *, round_trip_s: float | None = None) -> FlowTime:
    """The line through the medians of times, by least relative squares.

    Args:
        seconds_by_bytes: Times of messages of each size.
        round_trip_s: Of a small message there and back; its half is then the latency. None: the line's own.

    Raises:
        ConfigurationError: no times, or one that is not above zero.
    """
    points = [(float(size), median(times)) for size, times in sorted(seconds_by_bytes.items()) if times]
    if not points or any(seconds <= 0 for _, seconds in points):
        raise ConfigurationError(f"cannot fit a line to times {points}; needed is at least one size, with times > 0")
    # Weighted by 1/t², as errors are relative; otherwise the largest message alone would decide.
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_size = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
    mean_s = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    spread = sum(w * (size - mean_size) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    slope = 0.0
    if spread > 0:
        slope = sum(
            w * (size - mean_size) * (seconds - mean_s) for w, (size, seconds) in zip(weights, points, strict=True)
        )
        slope /= spread
    size, seconds = points[-1]
    offset = mean_s - slope * mean_size
    if slope <= 0 or offset < 0:
        # Noise: the largest message is then the best witness.
        slope, offset = seconds / size, 0.0
    latency_s = offset if round_trip_s is None else round_trip_s / 2
    return FlowTime(latency_s=latency_s, bandwidth_bytes_per_s=1 / slope)


def _pairs_inside(ranks: list[int]) -> list[tuple[int, int]]:
    if len(ranks) <= _ALL_PAIRS_UP_TO:
        return list(combinations(ranks, 2))
    neighbours = list(pairwise(ranks))
    return [*neighbours, *((ranks[0], other) for other in ranks[2:])]


def _round(name: str, ways: Sequence[tuple[int, int]]) -> Round:
    return Round(name=name, flows=tuple(Flow(sender=sender, receiver=receiver) for sender, receiver in ways))
