"""Into how many micro-batches a batch can be split."""

from __future__ import annotations

from lightning_autopipe.planner.cost import CostModel

MAX_PER_STAGE = 16
"""More micro-batches for each stage than this are not looked at: the bubble is a seventeenth of the step then."""
_MAX_COUNTS = 6


def microbatch_counts(
    cost: CostModel, *, batch_size: float, num_stages: int, min_samples: float = 1.0, num_wanted: int | None = None
) -> tuple[int, ...]:
    """Numbers of micro-batches to look at, ascending: those of sizes that times are known for.

    Those that divide the batch, or all where none of those does; of many, a few that are evenly spread, as sizes count
    by their ratio.

    Args:
        cost: knows the sizes.
        batch_size: samples in one replica's batch.
        num_stages: of a pipeline.
        min_samples: of a micro-batch.
        num_wanted: the number that is given, and then the only one; None: all.
    """
    smallest, largest = cost.known_sizes
    smallest = max(smallest, min_samples)

    def fits(number: int) -> bool:
        return smallest * (1 - _ROUNDING) <= batch_size / number <= largest * (1 + _ROUNDING)

    if num_wanted is not None:
        return (num_wanted,) if fits(num_wanted) else ()
    most = min(MAX_PER_STAGE * num_stages, int(batch_size / smallest + _ROUNDING))
    counts = [number for number in range(1, most + 1) if fits(number)]
    counts = [number for number in counts if not batch_size % number] or counts
    if len(counts) <= _MAX_COUNTS:
        return tuple(counts)
    ratio = (counts[-1] / counts[0]) ** (1 / (_MAX_COUNTS - 1))
    wanted = [counts[0] * ratio**index for index in range(_MAX_COUNTS)]
    return tuple(sorted({min(counts, key=lambda number: abs(number - target)) for target in wanted}))


_ROUNDING = 1e-9
