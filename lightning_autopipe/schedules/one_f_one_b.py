"""1F1B: one forward, one backward in turn, so that few micro-batches are alive at a time."""

from __future__ import annotations

from lightning_autopipe.core.schedule import Action, Schedule
from lightning_autopipe.schedules._build import backward, check_sizes, forward

NAME = "1f1b"


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """The synchronous 1F1B schedule with a flush after each step.

    Stage s first runs min(S - 1 - s, M) forwards (*warm-up*), then one forward and one backward in turn (*steady*), and
    at last the backwards that are left (*cool-down*). At most min(S - s, M) micro-batches are alive on it, whatever M.

    Four stages, four micro-batches, every action one slot long::

        stage 0 | F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
        stage 1 | .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .
        stage 2 | .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .
        stage 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .

    Raises:
        ConfigurationError: a number is below 1.

    Source:
        Narayanan et al., *PipeDream*, SOSP 2019 (the order); Fan et al., *DAPPLE*, PPoPP 2021 (with a flush).
    """
    check_sizes(num_stages, num_microbatches)
    actions_by_stage = []
    for stage_index in range(num_stages):
        num_warmup = min(num_stages - 1 - stage_index, num_microbatches)
        actions: list[Action] = [forward(stage_index, index) for index in range(num_warmup)]
        for index in range(num_microbatches):
            if num_warmup + index < num_microbatches:
                actions.append(forward(stage_index, num_warmup + index))
            actions.append(backward(stage_index, index))
        actions_by_stage.append(tuple(actions))
    return Schedule(name=NAME, actions_by_stage=tuple(actions_by_stage), num_microbatches=num_microbatches)
