"""Runs the stages of one process, whether the others are in the same process or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning_autopipe.core.schedule import Schedule
from lightning_autopipe.runtime.executor import ExecutionObserver, StageExecutor
from lightning_autopipe.runtime.in_process import InProcessPipeline
from lightning_autopipe.runtime.stage import StageForward
from lightning_autopipe.runtime.transport import Transport


class StageRunner:
    """Runs one rank's stages over its transport; without one, all stages in turns.

    Args:
        num_ranks: Of the pipeline.
        stage_index: This rank's first stage.
        transport: Its connections, or None.
    """

    def __init__(self, *, num_ranks: int, stage_index: int, transport: Transport | None) -> None:
        self._num_ranks = num_ranks
        self._num_stages = num_ranks
        self._stage_index = stage_index
        self._transport = transport
        self._local: InProcessPipeline | None = None
        if transport is None:
            self._local = InProcessPipeline(num_ranks)
            self.executors = self._local.executors
        else:
            self.executors = (StageExecutor(stage_index=stage_index, num_stages=num_ranks, transport=transport),)

    def set_num_stages(self, num_stages: int) -> None:
        """Run a pipeline of so many stages from now on: as many as ranks, or a multiple."""
        self._num_stages = num_stages
        if self._transport is None:
            self._local = InProcessPipeline(num_stages)
            self.executors = self._local.executors
            return
        (executor,) = self.executors
        executor.num_stages = num_stages
        if num_stages > self._num_ranks:
            self._transport.close_circle()

    def stage_indices(self, schedule: Schedule) -> range:
        """Give the stages that run in this process."""
        return range(self._num_stages) if self._local is not None else schedule.stages_of(self._stage_index)

    def run(
        self,
        stages: Mapping[int, StageForward],
        schedule: Schedule,
        *,
        observer: ExecutionObserver | None,
        before_last_backward: Callable[[], None] | None,
    ) -> None:
        """Run the schedule to its end.

        Args:
            stages: Those of `stage_indices`.
            schedule: For all stages.
            observer: Told of every action of this process.
            before_last_backward: As of `StageExecutor.run`.
        """
        for executor in self.executors:
            executor.observer = observer
        if self._local is not None:
            self._local.run(list(stages.values()), schedule, before_last_backward=before_last_backward)
        else:
            self.executors[0].run(stages, schedule, before_last_backward=before_last_backward)

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """Bytes that this process has sent to the next rank of its pipeline so far, and to the previous one."""
        return (0, 0) if self._transport is None else self._transport.sent_bytes
