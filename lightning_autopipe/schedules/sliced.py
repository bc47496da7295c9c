"""1F1B with the first and the last micro-batches in two halves: a shorter startup and a shorter ending."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.schedule import Action, Schedule
from lightning_autopipe.schedules._build import backward, check_sizes, check_stash_limits, forward

NAME = "sliced_1f1b"

_HALVES_OF_WHOLE = 2


def sliced_one_f_one_b(
    num_stages: int,
    num_microbatches: int,
    *,
    num_sliced_first: int,
    num_sliced_last: int = 0,
    max_stash: Sequence[float] | None = None,
    merges_slices: bool = True,
) -> Schedule:
    """1F1B in which the first and the last micro-batches go through as two halves each.

    Warm-up is counted in work: a stage runs forwards as long as what it keeps, in sizes of micro-batches, stays within
    its limit, then a backward, and so on. With the limit S - s and nothing sliced this is plain 1F1B.

    Three stages, four micro-batches, the first and the last one sliced, every action one slot long::

        stage 0 | F0.0 F0.1 F1   F2   .    .    B0.0 F3.0 B0.1 F3.1 B1   .    B2   .    B3.0 B3.1
        stage 1 | .    F0.0 F0.1 F1   .    B0.0 B0.1 F2   B1   F3.0 F3.1 B2   .    B3.0 B3.1 .
        stage 2 | .    .    F0.0 F0.1 B0.0 B0.1 F1   B1   F2   B2   F3.0 F3.1 B3.0 B3.1 .    .

    Args:
        num_stages: S.
        num_microbatches: M.
        num_sliced_first: how many micro-batches at the begin are sliced.
        num_sliced_last: how many at the end; with the first ones at most M.
        max_stash: the limit of each stage; None: S - s.
        merges_slices: whether both halves may go as one message where the receiver is past its warm-up.

    Raises:
        ConfigurationError: a number is out of range, a limit holds not even one micro-batch, or a limit is above that
            of the stage before.

    Source:
        Liu et al., *AutoPipe*, IEEE CLUSTER 2022 (slices at the begin).
    """
    check_sizes(num_stages, num_microbatches)
    for name, value in (("num_sliced_first", num_sliced_first), ("num_sliced_last", num_sliced_last)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigurationError(f"{name} must be an integer >= 0, got {value!r}")
    if num_sliced_first + num_sliced_last > num_microbatches:
        raise ConfigurationError(
            f"num_sliced_first={num_sliced_first} and num_sliced_last={num_sliced_last} are more than the "
            f"{num_microbatches} micro-batches"
        )
    limits = tuple(range(num_stages, 0, -1)) if max_stash is None else tuple(max_stash)
    check_stash_limits(limits, num_stages)
    _check_order(limits)
    units: list[tuple[int, int | None]] = []
    for index in range(num_microbatches):
        is_sliced = index < num_sliced_first or index >= num_microbatches - num_sliced_last
        units.extend([(index, 0), (index, 1)] if is_sliced else [(index, None)])
    return Schedule(
        name=NAME,
        actions_by_rank=tuple(_actions(stage_index, units, limit) for stage_index, limit in enumerate(limits)),
        num_microbatches=num_microbatches,
        merges_slices=merges_slices,
    )


def _actions(stage_index: int, units: Sequence[tuple[int, int | None]], limit: float) -> tuple[Action, ...]:
    halves = [_HALVES_OF_WHOLE if slice_index is None else 1 for _, slice_index in units]
    actions: list[Action] = []
    num_forwards = kept = 0
    for position, unit in enumerate(units):
        while num_forwards < len(units) and kept + halves[num_forwards] <= _HALVES_OF_WHOLE * limit:
            actions.append(forward(stage_index, *units[num_forwards]))
            kept += halves[num_forwards]
            num_forwards += 1
        actions.append(backward(stage_index, *unit))
        kept -= halves[position]
    return tuple(actions)


def _check_order(limits: Sequence[float]) -> None:
    for stage_index, (before, limit) in enumerate(pairwise(limits), start=1):
        if limit > before:
            raise ConfigurationError(
                f"max_stash of stage {stage_index} is {limit}, allowed is at most the {before} of stage "
                f"{stage_index - 1}: both would wait for each other"
            )
