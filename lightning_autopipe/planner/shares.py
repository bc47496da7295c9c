"""How many micro-batches each replica takes."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

from lightning_autopipe.core.errors import ConfigurationError


def share_microbatches(num_microbatches: int, fill_s: Sequence[float], period_s: Sequence[float]) -> tuple[int, ...]:
    """Micro-batches of each replica, so that the last one to finish does so as early as possible.

    Replicas that are alike get alike numbers, but for what does not divide. Each takes at least one: a replica without
    any would have no gradients to sum.

    Args:
        num_microbatches: of all replicas together.
        fill_s: by replica, what its first micro-batch takes.
        period_s: by replica, what each further one adds.

    Raises:
        ConfigurationError: there are fewer micro-batches than replicas.
    """
    num_replicas = len(fill_s)
    if num_microbatches < num_replicas:
        raise ConfigurationError(
            f"{num_microbatches} micro-batches for {num_replicas} replicas: each takes at least one; set more "
            "micro-batches (num_microbatches) or fewer replicas (num_replicas)"
        )
    shares = [1] * num_replicas
    # Entries: when a replica would end with one more. Giving each to the first of them is best: ends only grow.
    ends = [(fill + period, index) for index, (fill, period) in enumerate(zip(fill_s, period_s, strict=True))]
    heapify(ends)
    for _ in range(num_microbatches - num_replicas):
        end_s, index = ends[0]
        shares[index] += 1
        heapreplace(ends, (end_s + period_s[index], index))
    return tuple(shares)
