"""Which sizes of micro-batch are measured besides the one in use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MAX_OTHER_SIZES = 4


def other_splits(
    batch_size: int, num_microbatches: int, *, min_samples: int = 1, sizes: Sequence[int] | None = None
) -> dict[int, int]:
    """Give numbers of micro-batches by the samples that the largest one of them has, the most useful first.

    Without `sizes`: half and twice the size in use, the smallest size, the whole batch, four times the size in use.
    The first ones are what a plan is likely to change to; between the outermost ones all sizes can be priced.

    Args:
        batch_size: samples in one replica's batch.
        num_microbatches: in use.
        min_samples: the fewest that a micro-batch may have.
        sizes: those that are wanted; a batch that cannot be split so has micro-batches a little smaller.
    """
    most = max(1, batch_size // min_samples)
    in_use = min(num_microbatches, most)
    if sizes is None:
        numbers = [2 * in_use, in_use // 2, most, 1, in_use // 4]
    else:
        numbers = [-(-batch_size // max(1, size)) for size in sizes]
    found: dict[int, int] = {}
    for number in numbers:
        if 1 <= number <= most:
            found.setdefault(-(-batch_size // number), number)
    found.pop(-(-batch_size // in_use), None)
    return found


def half_size(batch_size: int, num_microbatches: int) -> list[int]:
    """Give the samples of half a micro-batch, for schedules that slice; none where one sample is all."""
    half = -(-batch_size // num_microbatches) // 2
    return [half] if half else []


def affordable_splits(
    splits: Mapping[int, int], *, least_s: float, size_in_use: int, budget_s: float
) -> tuple[dict[int, int], list[int]]:
    """Give the splits that can be measured within a budget, as many as `MAX_OTHER_SIZES`, and the sizes left out.

    Args:
        splits: as `other_splits` gives them.
        least_s: what measuring the size in use takes at the least; larger sizes take more, in proportion.
        size_in_use: samples.
        budget_s: for all of them.
    """
    chosen: dict[int, int] = {}
    left_out = []
    for size, number in splits.items():
        if len(chosen) == MAX_OTHER_SIZES:
            break
        taken_s = least_s * max(1.0, size / size_in_use)
        if taken_s > budget_s:
            left_out.append(size)
            continue
        budget_s -= taken_s
        chosen[size] = number
    return chosen, left_out
