"""torch.distributed.pipelining, by its public interface, on given stage modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

ONE_F_ONE_B, GPIPE = "Schedule1F1B", "ScheduleGPipe"
INTERLEAVED = "ScheduleInterleaved1F1B"
ZERO_BUBBLE, ZERO_BUBBLE_V = "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"

Loss = Callable[[Tensor, Tensor], Tensor]


def stages_of(schedule: str, group_rank: int, num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The stages that a rank runs: round and round, or there and back where the schedule says so."""
    if schedule == ZERO_BUBBLE_V:
        return group_rank, 2 * num_ranks - 1 - group_rank
    return tuple(group_rank + turn * num_ranks for turn in range(stages_per_rank))


class TorchPipeline:
    """One rank's part of a step: stage s runs on rank s of the default group.

    Args:
        schedule: name of a class of torch.distributed.pipelining.
        modules: this rank's stages by their indices.
        num_stages: of the pipeline.
        num_microbatches: of a step.
        batch: ``[samples, ...]`` of the step: what the first stage takes. Others only count its samples.
        loss: of a micro-batch's result and its targets.
    """

    def __init__(
        self,
        schedule: str,
        modules: dict[int, nn.Module],
        *,
        num_stages: int,
        num_microbatches: int,
        batch: Tensor,
        loss: Loss,
    ) -> None:
        # A group of its own, as our runtime has: no other traffic is to be in its way.
        group = dist.new_group(list(range(dist.get_world_size())), group_desc="torch pipelining")
        stages = [
            pipelining.PipelineStage(module, index, num_stages, torch.device("cpu"), group=group)
            for index, module in modules.items()
        ]
        made: Any = getattr(pipelining, schedule)
        is_single = schedule in (ONE_F_ONE_B, GPIPE)
        self._schedule = made(stages[0] if is_single else stages, num_microbatches, loss_fn=loss, scale_grads=True)
        self.modules = modules
        self._inputs: Sequence[Tensor] = (batch,) if 0 in modules else ()
        is_last = num_stages - 1 in modules
        self._more = {"target": torch.zeros(len(batch), 1)} if is_last else {}

    def run(self) -> None:
        """One step."""
        self._schedule.step(*self._inputs, **self._more, return_outputs=False)
