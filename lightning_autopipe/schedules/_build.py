"""What the schedules are built from."""

from __future__ import annotations

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.schedule import Action, ActionType


def forward(stage_index: int, microbatch_index: int, slice_index: int | None = None) -> Action:
    """The forward of one micro-batch, or of one slice of it."""
    return Action(
        type=ActionType.FORWARD, stage_index=stage_index, microbatch_index=microbatch_index, slice_index=slice_index
    )


def backward(stage_index: int, microbatch_index: int, slice_index: int | None = None) -> Action:
    """The backward of one micro-batch, or of one slice of it."""
    return Action(
        type=ActionType.BACKWARD, stage_index=stage_index, microbatch_index=microbatch_index, slice_index=slice_index
    )


def check_sizes(num_stages: int, num_microbatches: int) -> None:
    """Raises ConfigurationError unless both are integers of at least 1."""
    for name, value in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"a schedule needs {name} >= 1, got {value!r}; set {name} on the strategy")
