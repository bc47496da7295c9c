"""Predicts time and memory of each stage from what was measured of its layers."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.prediction import StagePrediction
from lightning_autopipe.core.profile import LayerProfile, ModelProfile
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.planner.cost import CostModel, Work
from lightning_autopipe.planner.memory import stage_memory
from lightning_autopipe.schedules.catalog import get_schedule
from lightning_autopipe.schedules.stash import peak_stash


def predict_stages(
    layers: Sequence[LayerProfile],
    partition: Partition,
    *,
    schedule: ScheduleSpec,
    num_microbatches: int,
    optimizer_state_ratio: float,
) -> tuple[StagePrediction, ...]:
    """Time of one micro-batch and peak memory on each stage; empty where layers were not measured.

    Args:
        layers: of the module.
        partition: of the layers.
        schedule: whose stash counts: as many micro-batches as it has between forward and backward.
        num_microbatches: of a step.
        optimizer_state_ratio: bytes of optimizer state for each byte of trainable parameters.
    """
    cost = CostModel(ModelProfile(layers=tuple(layers)))
    if not cost.measured:
        return ()
    actions = get_schedule(schedule, partition.num_stages, num_microbatches)
    predictions = []
    for stage_index in range(partition.num_stages):
        owned = partition.stage_layers(stage_index)
        memory = stage_memory(
            cost, owned, num_microbatches=num_microbatches, optimizer_state_ratio=optimizer_state_ratio
        )
        predictions.append(
            StagePrediction(
                forward_s=cost.work_s(Work.FORWARD, owned),
                backward_s=cost.work_s(Work.BACKWARD, owned),
                parameter_bytes=memory.parameter_bytes,
                gradient_bytes=memory.gradient_bytes,
                optimizer_bytes=memory.optimizer_bytes,
                activation_bytes=(peak_stash(actions, stage_index) - 1) * memory.stash_bytes,
                working_bytes=memory.working_bytes,
                buffer_bytes=memory.buffer_bytes,
            )
        )
    return tuple(predictions)
