"""Zero-bubble: backwards in two parts, of which one waits until a stage has nothing better to do."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_autopipe.core.schedule import Action, ActionType, Schedule
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
    parameters, is needed at the step's end alone and fills the gaps. The lists are those of stages that always take,
    of what they could begin, an I before a forward before a W, where each of the three lasts as long as the others;
    forwards only as long as the stage keeps no more than its limit, from the forward to the end of W. Stage 0 has
    nobody to hand a gradient to: where its W would follow on I, they are one whole backward.

    Three stages, four micro-batches, every action one slot long (a whole backward takes as long as its parts)::

        stage 0 | F0 F1 F2 .  .  B0 .  I1 F3 I2 W1 W2 .  B3
        stage 1 | .  F0 F1 F2 I0 W0 I1 W1 I2 F3 W2 .  I3 W3
        stage 2 | .  .  F0 I0 F1 I1 F2 I2 W0 W1 F3 I3 W2 W3

    Args:
        num_stages: S.
        num_microbatches: M.
        max_stash: the micro-batches that each stage may keep; None: S on all of them, as stage 0 of 1F1B does.

    Raises:
        ConfigurationError: a number is below 1, or a limit holds not even one micro-batch.

    Source:
        Qi et al., *Zero Bubble Pipeline Parallelism*, ICLR 2024.
    """
    check_sizes(num_stages, num_microbatches)
    limits = (num_stages,) * num_stages if max_stash is None else tuple(max_stash)
    check_stash_limits(limits, num_stages)
    stages = [_Stage(limit, num_microbatches) for limit in limits]
    now = 0
    while any(stage.num_weights < num_microbatches for stage in stages):
        for stage_index, stage in enumerate(stages):
            before = stages[stage_index - 1].forward_ends if stage_index > 0 else None
            after = stages[stage_index + 1].input_ends if stage_index + 1 < num_stages else None
            stage.run_one(now, before, after)
        now += 1
    return Schedule(
        name=NAME,
        actions_by_rank=tuple(_actions(stage_index, stage.order) for stage_index, stage in enumerate(stages)),
        num_microbatches=num_microbatches,
    )


class _Stage:
    """What a stage has run so far, in slots of one action; each kind goes through the micro-batches in order."""

    def __init__(self, limit: float, num_microbatches: int) -> None:
        self._limit, self._num_microbatches = limit, num_microbatches
        self.forward_ends: list[int] = []
        self.input_ends: list[int] = []
        self.num_weights = 0
        self.order: list[tuple[ActionType, int]] = []

    def run_one(self, now: int, forwards_before: list[int] | None, inputs_after: list[int] | None) -> None:
        """Runs what is most urgent of what can begin now, or nothing.

        Args:
            now: the slot.
            forwards_before: when the forwards of the stage before ended; None for the first stage.
            inputs_after: when the input parts of the next stage ended; None for the last stage.
        """
        num_forwards, num_inputs = len(self.forward_ends), len(self.input_ends)
        can_forward = num_forwards < self._num_microbatches and num_forwards - self.num_weights + 1 <= self._limit
        if num_inputs < num_forwards and _is_there(inputs_after, num_inputs, now):
            self.input_ends.append(now + 1)
            self.order.append((ActionType.BACKWARD_INPUT, num_inputs))
        elif can_forward and _is_there(forwards_before, num_forwards, now):
            self.forward_ends.append(now + 1)
            self.order.append((ActionType.FORWARD, num_forwards))
        elif self.num_weights < num_inputs:
            self.order.append((ActionType.BACKWARD_WEIGHT, self.num_weights))
            self.num_weights += 1


def _is_there(ends: list[int] | None, index: int, now: int) -> bool:
    return ends is None or (index < len(ends) and ends[index] <= now)


def _actions(stage_index: int, order: Sequence[tuple[ActionType, int]]) -> tuple[Action, ...]:
    make = {
        ActionType.FORWARD: forward,
        ActionType.BACKWARD_INPUT: backward_input,
        ActionType.BACKWARD_WEIGHT: backward_weight,
    }
    actions: list[Action] = []
    for action_type, microbatch_index in order:
        follows_input = bool(actions) and actions[-1] == backward_input(stage_index, microbatch_index)
        if stage_index == 0 and action_type is ActionType.BACKWARD_WEIGHT and follows_input:
            actions[-1] = backward(stage_index, microbatch_index)
        else:
            actions.append(make[action_type](stage_index, microbatch_index))
    return tuple(actions)
