"""Zero-bubble: backwards in two parts, of which one waits until a stage has nothing better to do."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_autopipe.core.schedule import Action, Schedule
from lightning_autopipe.schedules._build import (
    backward,
    backward_input,
    backward_weight,
    check_sizes,
    check_stash_limits,
    forward,
)

NAME = "zero_bubble"


def zero_bubble(num_stages: int, num_microbatches: int, max_stash: Sequence[float] | None = None) -> Schedule:
    """A schedule whose backwards are split: only the gradient that the stage before waits for is in a hurry.

    A backward's input part (I) gives the gradient of what a stage received; its weight part (W), the gradients of the
    parameters, is needed at the step's end alone. Forwards and input parts go as in 1F1B. The weight part of a
    micro-batch follows the input part of a later one, as many later as the stage may keep more than 1F1B does: those
    that are left fill the ending, in which later stages have nothing else to do. Stage 0 has nobody to hand a gradient
    to: its backwards are whole, and what it may keep lets it run further ahead.

    Three stages, four micro-batches, every action one slot long (a whole backward takes as long as its parts)::

        stage 0 | F0 F1 F2 .  .  B0 F3 B1 .  .  B2 .  B3 .
        stage 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        stage 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Args:
        num_stages: S.
        num_microbatches: M.
        max_stash: the micro-batches that each stage may keep, from the forward to the end of W; None: S on all of them,
            as stage 0 of 1F1B does.

    Raises:
        ConfigurationError: a number is below 1, or a limit holds not even one micro-batch.

    Source:
        Qi et al., *Zero Bubble Pipeline Parallelism*, ICLR 2024: ZB-H1, for any limits.
    """
    check_sizes(num_stages, num_microbatches)
    limits = (num_stages,) * num_stages if max_stash is None else tuple(max_stash)
    check_stash_limits(limits, num_stages)
    actions_by_rank = []
    depth = int(limits[0]) - 1
    for stage_index, limit in enumerate(map(int, limits)):
        if stage_index > 0:
            # A stage that ran further ahead than the one before it would wait for it, and it for this one's gradient.
            depth = min(depth, num_stages - 1 - stage_index, limit - 1)
        actions_by_rank.append(_actions(stage_index, num_microbatches, depth=depth, lag=limit - 1 - depth))
    return Schedule(name=NAME, actions_by_rank=tuple(actions_by_rank), num_microbatches=num_microbatches)


def _actions(stage_index: int, num_microbatches: int, *, depth: int, lag: int) -> tuple[Action, ...]:
    """1F1B of some depth, each weight part behind the input part that comes `lag` micro-batches later."""
    num_warmup = min(depth, num_microbatches)
    actions = [forward(stage_index, index) for index in range(num_warmup)]
    for index in range(num_microbatches):
        if num_warmup + index < num_microbatches:
            actions.append(forward(stage_index, num_warmup + index))
        if stage_index == 0:
            actions.append(backward(stage_index, index))
            continue
        actions.append(backward_input(stage_index, index))
        if index >= lag:
            actions.append(backward_weight(stage_index, index - lag))
    if stage_index > 0:
        left = range(max(0, num_microbatches - lag), num_microbatches)
        actions.extend(backward_weight(stage_index, index) for index in left)
    return tuple(actions)
