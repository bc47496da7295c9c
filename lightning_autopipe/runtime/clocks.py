"""How the ranks' clocks differ: those of several servers have nothing in common."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

_NUM_ROUND_TRIPS = 12
_TAG = 7  # other messages of the group have other ones


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """One rank's clock (`time.perf_counter`) and rank 0's, read at about the same time."""

    own_s: float
    rank_0_s: float
    error_s: float = 0.0
    """By how much the two may miss each other: half of the round trip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedClock:
    """Tells rank 0's time for that of another rank, by two readings: clocks may also drift apart in between."""

    begin: ClockReading
    end: ClockReading

    def on_rank_0_s(self, own_s: float) -> float:
        """Rank 0's time; on the line through both readings."""
        begin, end = self.begin, self.end
        if end.own_s <= begin.own_s:
            return own_s - begin.own_s + begin.rank_0_s
        rate = (end.rank_0_s - begin.rank_0_s) / (end.own_s - begin.own_s)
        return begin.rank_0_s + rate * (own_s - begin.own_s)

    @property
    def drift_s(self) -> float:
        """How far the clocks went apart between the two readings."""
        return (self.end.own_s - self.end.rank_0_s) - (self.begin.own_s - self.begin.rank_0_s)

    @property
    def error_s(self) -> float:
        """What events of this rank may be shifted by."""
        return max(self.begin.error_s, self.end.error_s)


def read_clocks(group: dist.ProcessGroup | None) -> tuple[ClockReading, ...]:
    """The clocks of all ranks against rank 0's, by rank, on rank 0; nothing on the others. Collective over the group.

    Rank 0 asks one rank after the other, several times: of the shortest round trip the middle is when the other one
    read its clock, for a message takes about as long there as back.

    Args:
        group: all ranks, in host memory; None where there is one.
    """
    now_s = time.perf_counter()
    own = ClockReading(own_s=now_s, rank_0_s=now_s)
    if group is None:
        return (own,)
    if dist.get_rank() == 0:
        others = (_ask(rank, group) for rank in range(1, dist.get_world_size(group)))
        return (own, *others)
    _answer(group)
    return ()


def _ask(rank: int, group: dist.ProcessGroup) -> ClockReading:
    best: ClockReading | None = None
    answer = torch.zeros(1, dtype=torch.float64)
    for _ in range(_NUM_ROUND_TRIPS):
        begin_s = time.perf_counter()
        dist.send(torch.zeros(1, dtype=torch.float64), dst=rank, group=group, tag=_TAG)
        dist.recv(answer, src=rank, group=group, tag=_TAG)
        end_s = time.perf_counter()
        error_s = (end_s - begin_s) / 2
        if best is None or error_s < best.error_s:
            best = ClockReading(own_s=answer.item(), rank_0_s=begin_s + error_s, error_s=error_s)
    assert best is not None
    return best


def _answer(group: dist.ProcessGroup) -> None:
    question = torch.zeros(1, dtype=torch.float64)
    for _ in range(_NUM_ROUND_TRIPS):
        dist.recv(question, src=0, group=group, tag=_TAG)
        dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64), dst=0, group=group, tag=_TAG)
