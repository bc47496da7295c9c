"""1F1B without shared links, in dependency order: what the simulator gives, in the time that a search can spend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Hop(NamedTuple):
    """What a message from one stage to the next takes on a way that it shares with none of another sender."""

    occupied_s: float
    """How long it keeps the way busy; the next one follows behind it."""
    latency_s: float
    """How much later it is there."""


def one_f_one_b_ends(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    depths: Sequence[int],
    num_microbatches: int,
    forward_hops: Sequence[Hop] = (),
    backward_hops: Sequence[Hop] = (),
) -> list[float]:
    """When each stage has gone through its list of `one_f_one_b`; GPipe is the depth M - 1 on every stage.

    Every action begins when the one before it on its stage has ended and its input has arrived.

    Args:
        forward_s: of one micro-batch on each stage.
        backward_s: alike.
        depths: forwards of each stage before its first forward-backward pair; they never rise.
        num_microbatches: M.
        forward_hops: what a message over each boundary takes, towards the last stage; empty: nothing.
        backward_hops: alike, towards the first stage.
    """
    num_stages = len(forward_s)
    if forward_hops or backward_hops:
        return _ends_with_hops(forward_s, backward_s, depths, num_microbatches, forward_hops, backward_hops)
    inputs = [[0.0] * num_microbatches, *([] for _ in range(num_stages))]  # when each forward's input has arrived
    free = []
    for stage_index, seconds in enumerate(forward_s):
        now = 0.0
        results = inputs[stage_index + 1]
        for arrived in inputs[stage_index][: depths[stage_index] + 1]:
            now = (arrived if arrived > now else now) + seconds
            results.append(now)
        free.append(now)
    from_last = range(num_stages - 1, -1, -1)
    offsets = [min(depth, num_microbatches) + 1 for depth in depths]
    for index in range(num_microbatches):
        arrived = 0.0
        for stage_index in from_last:
            now = free[stage_index]
            if arrived > now:
                now = arrived
            free[stage_index] = arrived = now + backward_s[stage_index]
        for stage_index, offset in enumerate(offsets):
            if index + offset < num_microbatches:
                now = free[stage_index]
                arrived = inputs[stage_index][index + offset]
                if arrived > now:
                    now = arrived
                free[stage_index] = now = now + forward_s[stage_index]
                inputs[stage_index + 1].append(now)
    return free


def _ends_with_hops(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    depths: Sequence[int],
    num_microbatches: int,
    forward_hops: Sequence[Hop],
    backward_hops: Sequence[Hop],
) -> list[float]:
    num_stages = len(forward_s)
    nothing = Hop(0.0, 0.0)
    out_hops = [*forward_hops, nothing]  # behind each stage, the last one included
    back_hops = [nothing, *backward_hops]  # before each stage
    out_free, back_free = [0.0] * num_stages, [0.0] * num_stages
    inputs = [[0.0] * num_microbatches, *([] for _ in range(num_stages))]
    free = []
    for stage_index, seconds in enumerate(forward_s):
        now = sent = 0.0
        occupied_s, latency_s = out_hops[stage_index]
        results = inputs[stage_index + 1]
        for arrived in inputs[stage_index][: depths[stage_index] + 1]:
            now = (arrived if arrived > now else now) + seconds
            sent = (now if now > sent else sent) + occupied_s
            results.append(sent + latency_s)
        out_free[stage_index] = sent
        free.append(now)
    from_last = range(num_stages - 1, -1, -1)
    offsets = [min(depth, num_microbatches) + 1 for depth in depths]
    for index in range(num_microbatches):
        arrived = 0.0
        for stage_index in from_last:
            now = free[stage_index]
            if arrived > now:
                now = arrived
            free[stage_index] = now = now + backward_s[stage_index]
            occupied_s, latency_s = back_hops[stage_index]
            sent = back_free[stage_index]
            back_free[stage_index] = sent = (now if now > sent else sent) + occupied_s
            arrived = sent + latency_s
        for stage_index, offset in enumerate(offsets):
            if index + offset < num_microbatches:
                now = free[stage_index]
                arrived = inputs[stage_index][index + offset]
                if arrived > now:
                    now = arrived
                free[stage_index] = now = now + forward_s[stage_index]
                occupied_s, latency_s = out_hops[stage_index]
                sent = out_free[stage_index]
                out_free[stage_index] = sent = (now if now > sent else sent) + occupied_s
                inputs[stage_index + 1].append(sent + latency_s)
    return free
