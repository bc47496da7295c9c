"""The ways in which a running pipeline fails: in a stage's own code, for lack of memory, or between two stages."""

from __future__ import annotations

from lightning_autopipe.core.errors import PipelineRuntimeError

__all__ = ["CommunicationError", "OutOfMemoryError", "PipelineRuntimeError", "StageError"]


class StageError(PipelineRuntimeError):
    """The code of a stage raised in its forward or backward; the cause is the original exception."""

    def __init__(
        self,
        message: str,
        *,
        stage_index: int | None = None,
        microbatch_index: int | None = None,
        slice_index: int | None = None,
        direction: str | None = None,
    ) -> None:
        super().__init__(message)
        self.stage_index = stage_index
        self.microbatch_index = microbatch_index
        self.slice_index = slice_index
        self.direction = direction


class OutOfMemoryError(StageError):
    """Memory was asked for in vain; the message says what was planned, and what to change."""


class CommunicationError(PipelineRuntimeError):
    """A message between two stages did not get through: a limit passed, or the connection broke.

    Mostly the consequence of a failure elsewhere; `FailureMonitor` looks for that one.
    """

    def __init__(
        self,
        message: str,
        *,
        stage_index: int | None = None,
        peer_stage_index: int | None = None,
        microbatch_index: int | None = None,
        slice_index: int | None = None,
        direction: str | None = None,
    ) -> None:
        super().__init__(message)
        self.stage_index = stage_index
        self.peer_stage_index = peer_stage_index
        self.microbatch_index = microbatch_index
        self.slice_index = slice_index
        self.direction = direction
