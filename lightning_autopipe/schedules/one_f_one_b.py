"""1F1B: one forward, one backward in turn, so that few micro-batches are alive at a time."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.schedule import Action, Schedule
from lightning_autopipe.schedules._build import backward, check_sizes, forward

NAME = "1f1b"


def one_f_one_b(num_stages: int, num_microbatches: int, depths: Sequence[int] | None = None) -> Schedule:
    """The synchronous 1F1B schedule with a flush after each step.

    Stage s first runs min(w, M) forwards (*warm-up* of depth w), then one forward and one backward in turn (*steady*),
    and at last the backwards that are left (*cool-down*). At most min(w + 1, M) micro-batches are alive on it, whatever
    M. The depth is S - 1 - s unless given: just enough where nothing takes time but computing on even stages.

    Four stages, four micro-batches, every action one slot long::

        stage 0 | F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
        stage 1 | .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .
        stage 2 | .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .
        stage 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .

    Args:
        num_stages: S.
        num_microbatches: M.
        depths: forwards that each stage runs before its first forward-backward pair. Deeper warm-ups hide slow links
            and uneven stages, and keep more micro-batches alive.

    Raises:
        ConfigurationError: a number is below 1, there is not one depth >= 0 for each stage, or a stage is to run
            further ahead than the stage before it, from which it gets its micro-batches.

    Source:
        Narayanan et al., *PipeDream*, SOSP 2019 (the order); Fan et al., *DAPPLE*, PPoPP 2021 (with a flush).
    """
    check_sizes(num_stages, num_microbatches)
    depths = default_depths(num_stages) if depths is None else tuple(depths)
    _check_depths(depths, num_stages)
    actions_by_rank = []
    for stage_index, depth in enumerate(depths):
        num_warmup = min(depth, num_microbatches)
        actions: list[Action] = [forward(stage_index, index) for index in range(num_warmup)]
        for index in range(num_microbatches):
            if num_warmup + index < num_microbatches:
                actions.append(forward(stage_index, num_warmup + index))
            actions.append(backward(stage_index, index))
        actions_by_rank.append(tuple(actions))
    return Schedule(name=NAME, actions_by_rank=tuple(actions_by_rank), num_microbatches=num_microbatches)


def default_depths(num_stages: int) -> tuple[int, ...]:
    """The warm-up of plain 1F1B: as many forwards as stages follow."""
    return tuple(range(num_stages - 1, -1, -1))


def _check_depths(depths: Sequence[int], num_stages: int) -> None:
    if len(depths) != num_stages:
        raise ConfigurationError(f"{len(depths)} warm-up depths are given for {num_stages} stages; give one a stage")
    for stage_index, depth in enumerate(depths):
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise ConfigurationError(f"the warm-up depth of stage {stage_index} must be an integer >= 0, got {depth!r}")
        if stage_index > 0 and depth > depths[stage_index - 1]:
            raise ConfigurationError(
                f"the warm-up depth of stage {stage_index} is {depth}, allowed is at most the "
                f"{depths[stage_index - 1]} of stage {stage_index - 1}: both would wait for each other"
            )
