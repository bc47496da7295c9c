"""What the schedules are built from."""

from __future__ import annotations

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.schedule import Action, ActionType


def forward(stage_index: int, microbatch_index: int, slice_index: int | None = None) -> Action:
    """The forward of one micro-batch, or of one slice of it."""
    return _action(ActionType.FORWARD, stage_index, microbatch_index, slice_index)


def backward(stage_index: int, microbatch_index: int, slice_index: int | None = None) -> Action:
    """The backward of one micro-batch, or of one slice of it."""
    return _action(ActionType.BACKWARD, stage_index, microbatch_index, slice_index)


def backward_input(stage_index: int, microbatch_index: int) -> Action:
    """The part of a backward that gives the gradient of what the stage received."""
    return _action(ActionType.BACKWARD_INPUT, stage_index, microbatch_index, None)


def backward_weight(stage_index: int, microbatch_index: int) -> Action:
    """The part of a backward that gives the gradients of the parameters."""
    return _action(ActionType.BACKWARD_WEIGHT, stage_index, microbatch_index, None)


def _action(action_type: ActionType, stage_index: int, microbatch_index: int, slice_index: int | None) -> Action:
    return Action(type=action_type, stage_index=stage_index, microbatch_index=microbatch_index, slice_index=slice_index)


def check_sizes(num_stages: int, num_microbatches: int) -> None:
    """Raises ConfigurationError unless both are integers of at least 1."""
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches)


def check_counts(**counts: int) -> None:
    """Raises ConfigurationError unless all are integers of at least 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"a schedule needs {name} >= 1, got {value!r}; set {name} on the strategy")


def check_stash_limits(limits: tuple[float, ...], num_stages: int) -> None:
    """Raises ConfigurationError unless each stage has a limit that holds at least one micro-batch."""
    if len(limits) != num_stages:
        raise ConfigurationError(f"max_stash has {len(limits)} values for {num_stages} stages; give one a stage")
    for stage_index, limit in enumerate(limits):
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit >= 1:
            raise ConfigurationError(
                f"max_stash of stage {stage_index} must be at least 1 micro-batch, got {limit!r}: a stage keeps "
                "what it runs"
            )
