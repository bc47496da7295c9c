"""Makes the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning_autopipe.core.errors import ConfigurationError, PlanError
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.profile import ModelProfile
from lightning_autopipe.planner.cost import CostModel, Work
from lightning_autopipe.planner.min_max import min_max_partition
from lightning_autopipe.planner.prediction import predict_stages
from lightning_autopipe.schedules.catalog import TRAINING_SCHEDULES

DEFAULT_SCHEDULE = "1f1b"
"""What ``schedule="auto"`` means: as fast as GPipe, with at most num_stages micro-batches alive on a stage."""


def make_plan(
    profile: ModelProfile,
    *,
    num_stages: int,
    num_replicas: int,
    num_microbatches: int,
    schedule_name: str = "auto",
    module_fingerprint: str,
    partition: Literal["auto"] | Partition | Sequence[int] = "auto",
    optimizer_state_ratio: float = 2.0,
) -> PipelinePlan:
    """A plan that balances the layers over the stages.

    Args:
        profile: the layers of the module.
        num_stages: stages of each pipeline.
        num_replicas: pipelines side by side.
        num_microbatches: micro-batches a step and replica.
        schedule_name: ``"1f1b"``, ``"gpipe"``, or ``"auto"`` for the first.
        module_fingerprint: identifies the module that the profile is of.
        partition: ``"auto"`` for the most even one; or the partition itself; or its cut points, the layer index at
            which each stage after the first begins.
        optimizer_state_ratio: bytes of optimizer state for each byte of trainable parameters, for the prediction of
            memory; AdamW has two.

    Raises:
        ConfigurationError: a number is below 1, there are more stages than layers, the schedule is unknown, or the
            given partition does not fit the layers or the number of stages.
    """
    if schedule_name == "auto":
        schedule_name = DEFAULT_SCHEDULE
    if schedule_name not in TRAINING_SCHEDULES:
        allowed = ", ".join(repr(name) for name in ("auto", *TRAINING_SCHEDULES))
        raise ConfigurationError(f"schedule={schedule_name!r} is not known; set it to one of {allowed}")
    layout = ParallelLayout(num_stages=num_stages, num_replicas=num_replicas)
    cost = CostModel(profile)
    costs = [cost.work_s(Work.FORWARD, layers) + cost.work_s(Work.BACKWARD, layers) for layers in _each(profile)]
    if isinstance(partition, str):
        if partition != "auto":
            raise ConfigurationError(f'partition must be "auto" or a list of cut points, got {partition!r}')
        chosen = min_max_partition(costs, num_stages)
    else:
        chosen = _given_partition(partition, num_layers=profile.num_layers, num_stages=num_stages)
    return PipelinePlan(
        module_fingerprint=module_fingerprint,
        layers=profile.layers,
        partition=chosen,
        layout=layout,
        schedule_name=schedule_name,
        num_microbatches=num_microbatches,
        stage_work_shares=_work_shares(costs, chosen),
        stage_predictions=predict_stages(
            profile.layers,
            chosen,
            schedule_name=schedule_name,
            num_microbatches=num_microbatches,
            optimizer_state_ratio=optimizer_state_ratio,
        ),
    )


def _given_partition(partition: Partition | Sequence[int], *, num_layers: int, num_stages: int) -> Partition:
    if not isinstance(partition, Partition):
        cut_points = tuple(partition)
        try:
            partition = Partition(cut_points=cut_points, num_layers=num_layers)
        except PlanError as error:
            raise ConfigurationError(f"partition={cut_points} does not fit the module: {error}") from error
    if partition.num_layers != num_layers:
        raise ConfigurationError(
            f"the partition is for {partition.num_layers} layers, but the module has {num_layers}; set "
            'partition="auto" or one made for this module'
        )
    if partition.num_stages != num_stages:
        raise ConfigurationError(
            f"partition={partition.cut_points} has {partition.num_stages} stages, but num_stages is {num_stages}; give "
            f"{num_stages - 1} cut points, or set num_stages={partition.num_stages}"
        )
    return partition


def _work_shares(costs: Sequence[float], partition: Partition) -> tuple[float, ...]:
    total = sum(costs)
    stages = range(partition.num_stages)
    return tuple(sum(costs[index] for index in partition.stage_layers(stage_index)) / total for stage_index in stages)


def _each(profile: ModelProfile) -> list[range]:
    return [range(index, index + 1) for index in range(profile.num_layers)]
