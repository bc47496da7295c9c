"""Makes the plan."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_autopipe.core.errors import ConfigurationError, PlanError
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.mapping import DeviceMapping
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.profile import ModelProfile
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.planner.cost import CostModel, Work
from lightning_autopipe.planner.min_max import min_max_partition
from lightning_autopipe.planner.objective import PipelineSetting
from lightning_autopipe.planner.partitioner import choose_partition
from lightning_autopipe.planner.prediction import predict_stages
from lightning_autopipe.schedules.catalog import TRAINING_SCHEDULES
from lightning_autopipe.schedules.gpipe import NAME as GPIPE
from lightning_autopipe.schedules.one_f_one_b import default_depths

DEFAULT_SCHEDULE = "1f1b"
"""What ``schedule="auto"`` means: as fast as GPipe, with at most num_stages micro-batches alive on a stage."""

PARTITION_RULES = ("auto", "uniform", "parameters")
"""What ``partition`` can name: the shortest simulated step, equally many layers, or parameters as even as possible."""


def make_plan(
    profile: ModelProfile,
    *,
    num_stages: int,
    num_replicas: int,
    num_microbatches: int,
    schedule: str | ScheduleSpec = "auto",
    module_fingerprint: str,
    partition: str | Partition | Sequence[int] = "auto",
    optimizer_state_ratio: float = 2.0,
) -> PipelinePlan:
    """A plan that shares the layers between the stages.

    Args:
        profile: the layers of the module.
        num_stages: stages of each pipeline.
        num_replicas: pipelines side by side.
        num_microbatches: micro-batches a step and replica.
        schedule: ``"1f1b"``, ``"gpipe"``, or ``"auto"`` for the first; or a spec.
        module_fingerprint: identifies the module that the profile is of.
        partition: ``"auto"`` for the one with the shortest step; ``"uniform"`` for equally many layers on each stage;
            ``"parameters"`` for bytes of parameters as even as possible; or the partition itself; or its cut points,
            the layer index at which each stage after the first begins.
        optimizer_state_ratio: bytes of optimizer state for each byte of trainable parameters, for the prediction of
            memory; AdamW has two.

    Raises:
        ConfigurationError: a number is below 1, there are more stages than layers, the schedule is unknown, or the
            given partition does not fit the layers or the number of stages.
    """
    if isinstance(schedule, str):
        schedule = ScheduleSpec(name=DEFAULT_SCHEDULE if schedule == "auto" else schedule)
    if schedule.name not in TRAINING_SCHEDULES:
        allowed = ", ".join(repr(name) for name in ("auto", *TRAINING_SCHEDULES))
        raise ConfigurationError(f"schedule={schedule.name!r} is not known; set it to one of {allowed}")
    layout = ParallelLayout(num_stages=num_stages, num_replicas=num_replicas)
    cost = CostModel(profile)
    if isinstance(partition, str):
        chosen = _partition_by_rule(
            partition, cost, num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule
        )
    else:
        chosen = _given_partition(partition, num_layers=profile.num_layers, num_stages=num_stages)
    return PipelinePlan(
        module_fingerprint=module_fingerprint,
        layers=profile.layers,
        partition=chosen,
        mapping=DeviceMapping.of_layout(layout),
        schedule=schedule,
        num_microbatches=num_microbatches,
        stage_work_shares=_work_shares(cost, chosen),
        stage_predictions=predict_stages(
            profile.layers,
            chosen,
            schedule=schedule,
            num_microbatches=num_microbatches,
            optimizer_state_ratio=optimizer_state_ratio,
        ),
    )


def _partition_by_rule(
    rule: str, cost: CostModel, *, num_stages: int, num_microbatches: int, schedule: ScheduleSpec
) -> Partition:
    if rule == "uniform":
        return min_max_partition([1] * cost.num_layers, num_stages)
    if rule == "parameters":
        return min_max_partition([layer.param_bytes for layer in cost.profile.layers], num_stages)
    if rule != "auto":
        allowed = ", ".join(f'"{name}"' for name in PARTITION_RULES)
        raise ConfigurationError(f"partition must be {allowed} or a list of cut points, got {rule!r}")
    setting = PipelineSetting(cost=cost, num_stages=num_stages, num_microbatches=(num_microbatches,))
    # GPipe's lists are those of 1F1B with all forwards as warm-up.
    depths = schedule.depths or default_depths(num_stages)
    if schedule.name == GPIPE:
        depths = (num_microbatches - 1,) * num_stages
    return choose_partition(setting, depths=depths).partition


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


def _work_shares(cost: CostModel, partition: Partition) -> tuple[float, ...]:
    stages = [partition.stage_layers(stage_index) for stage_index in range(partition.num_stages)]
    work = [cost.work_s(Work.FORWARD, layers) + cost.work_s(Work.BACKWARD, layers) for layers in stages]
    total = sum(work) or 1.0
    return tuple(seconds / total for seconds in work)
