"""Predicts time and memory of each stage from what was measured of its layers."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_autopipe.core.cluster import Device
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.prediction import StagePrediction
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.planner.cost import CostModel, Work
from lightning_autopipe.planner.memory import stage_memory
from lightning_autopipe.schedules.catalog import get_schedule
from lightning_autopipe.schedules.one_f_one_b import NAME as ONE_F_ONE_B
from lightning_autopipe.schedules.stash import peak_stash_size


def predict_stages(
    cost: CostModel,
    partition: Partition,
    *,
    schedule: ScheduleSpec,
    num_microbatches: int,
    optimizer_state_ratio: float,
    microbatch_size: float | None = None,
    devices: Sequence[Device] = (),
    stash_sizes: Sequence[float] = (),
    optimizer_shares: int = 1,
) -> tuple[StagePrediction, ...]:
    """Time of one micro-batch and peak memory on each stage; empty where nothing was measured.

    Args:
        cost: of the layers.
        partition: of the layers.
        schedule: whose stash counts: as many micro-batches as it has between forward and backward.
        num_microbatches: of a step.
        optimizer_state_ratio: bytes of optimizer state for each byte of trainable parameters.
        microbatch_size: samples; None: as profiled.
        devices: of each stage; empty: the profiled one.
        stash_sizes: micro-batches between forward and backward on each stage; empty: by the schedule.
        optimizer_shares: replicas that share a stage's optimizer state.
    """
    if not cost.is_measured:
        return ()
    plain_sizes = _stash_sizes(ScheduleSpec(name=ONE_F_ONE_B), partition.num_stages, num_microbatches)
    if not stash_sizes:
        stash_sizes = _stash_sizes(schedule, partition.num_stages, num_microbatches)
    predictions = []
    for stage_index in range(partition.num_stages):
        owned = partition.stage_layers(stage_index)
        device = devices[stage_index] if devices else None
        memory = stage_memory(
            cost,
            owned,
            num_microbatches=num_microbatches,
            microbatch_size=microbatch_size,
            optimizer_state_ratio=optimizer_state_ratio,
            optimizer_shares=optimizer_shares,
        )
        predictions.append(
            StagePrediction(
                forward_s=cost.work_s(Work.FORWARD, owned, device=device, microbatch_size=microbatch_size),
                backward_s=cost.work_s(Work.BACKWARD, owned, device=device, microbatch_size=microbatch_size),
                stash_size=stash_sizes[stage_index],
                plain_stash_size=plain_sizes[stage_index],
                stash_bytes=memory.stash_bytes,
                parameter_bytes=memory.parameter_bytes,
                gradient_bytes=memory.gradient_bytes,
                optimizer_bytes=memory.optimizer_bytes,
                activation_bytes=round((stash_sizes[stage_index] - 1) * memory.stash_bytes),
                working_bytes=memory.working_bytes,
                buffer_bytes=memory.buffer_bytes,
            )
        )
    return tuple(predictions)


def _stash_sizes(schedule: ScheduleSpec, num_stages: int, num_microbatches: int) -> list[float]:
    actions = get_schedule(schedule, num_stages, num_microbatches)
    return [peak_stash_size(actions, stage_index) for stage_index in range(num_stages)]
