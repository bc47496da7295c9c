"""Runs all stages of a pipeline in turns in one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_autopipe.core.schedule import Action, Schedule
from lightning_autopipe.runtime.errors import PipelineRuntimeError
from lightning_autopipe.runtime.executor import StageExecutor, require_stages
from lightning_autopipe.runtime.memory_transport import MemoryNetwork
from lightning_autopipe.runtime.stage import StageForward


class InProcessPipeline:
    """A pipeline whose stages share one process: the same executor as between processes, over an in-memory transport.

    Replicas run one after another: call `run` once for each replica's stages.
    """

    def __init__(self, num_stages: int) -> None:
        network = MemoryNetwork()
        self.executors = tuple(
            StageExecutor(stage_index=index, num_stages=num_stages, transport=network.transport(index))
            for index in range(num_stages)
        )
        self._network = network

    def run(
        self,
        stages: Sequence[StageForward],
        schedule: Schedule,
        *,
        before_last_backward: Callable[[], None] | None = None,
    ) -> None:
        """Run one step on all stages.

        `before_last_backward` is called once, when the last of them turns to its last backward.

        Raises:
            PipelineRuntimeError: The stages wait for one another in a circle; or as `StageExecutor.run`.
        """
        assert len(stages) == len(self.executors), (len(stages), len(self.executors))
        require_stages(schedule, len(stages))
        self._network.mailboxes.clear()
        turned: list[int] = []

        def one_more() -> None:
            turned.append(len(turned))
            if before_last_backward is not None and len(turned) == schedule.num_ranks:
                before_last_backward()

        # With several stages a rank the first ones stand for all.
        running = {
            rank: self.executors[rank].advance(
                {stage_index: stages[stage_index] for stage_index in schedule.stages_of(rank)}, schedule, one_more
            )
            for rank in range(schedule.num_ranks)
        }
        waiting: dict[int, Action] = {}
        while running:
            before = dict(waiting)
            for rank in list(running):
                action = next(running[rank], None)
                if action is None:
                    del running[rank]
                    waiting.pop(rank, None)
                else:
                    waiting[rank] = action
            if running and waiting == before:
                raise PipelineRuntimeError(
                    f"schedule {schedule.name!r} cannot go on; these actions wait for inputs that no stage will send: "
                    + ", ".join(str(action) for action in waiting.values())
                )
        assert not self._network.mailboxes, f"messages that nobody took: {list(self._network.mailboxes)}"
