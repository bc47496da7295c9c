"""Makes the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning_autopipe.core.cluster import ClusterTopology, Device, is_same_model
from lightning_autopipe.core.errors import ConfigurationError, PlanError
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.mapping import DeviceMapping
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.prediction import StepPrediction
from lightning_autopipe.core.profile import DeviceTimes, LayerMeasurement, LayerProfile, ModelProfile
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.planner.candidate import Candidate
from lightning_autopipe.planner.cost import CostModel, Work
from lightning_autopipe.planner.min_max import check_enough_layers
from lightning_autopipe.planner.objective import PipelineSetting
from lightning_autopipe.planner.partition_rules import partition_by_rule
from lightning_autopipe.planner.partitioner import choose_partition
from lightning_autopipe.planner.prediction import predict_stages
from lightning_autopipe.planner.search import SearchResult
from lightning_autopipe.planner.search_space import SearchSpace
from lightning_autopipe.planner.simulator import simulate
from lightning_autopipe.planner.workload import StepWork
from lightning_autopipe.schedules.catalog import TRAINING_SCHEDULES
from lightning_autopipe.schedules.gpipe import NAME as GPIPE
from lightning_autopipe.schedules.interleaved import NAME as INTERLEAVED
from lightning_autopipe.schedules.one_f_one_b import default_depths
from lightning_autopipe.schedules.sliced import NAME as SLICED
from lightning_autopipe.schedules.stash import peak_stash_size

DEFAULT_SCHEDULE = "1f1b"
"""What ``schedule="auto"`` means: as fast as GPipe, with at most num_stages micro-batches alive on a stage."""

_MAX_RUNNERS_UP = 8
_KEPT = ("activation_bytes", "received_kept_bytes", "sent_kept_bytes", "peak_bytes")


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
    shards_optimizer: bool = False,
) -> PipelinePlan:
    """A plan that shares the layers between the stages.

    Args:
        profile: the layers of the module.
        num_stages: ranks of each pipeline, and stages, but where a rank runs several.
        num_replicas: pipelines side by side.
        num_microbatches: micro-batches a step and replica.
        schedule: a name of `TRAINING_SCHEDULES`, ``"auto"`` for ``"1f1b"``; or a spec.
        module_fingerprint: identifies the module that the profile is of.
        partition: ``"auto"`` for the one with the shortest step; ``"uniform"`` for equally many layers on each stage;
            ``"parameters"`` for bytes of parameters as even as possible; or the partition itself; or its cut points,
            the layer index at which each stage after the first begins.
        optimizer_state_ratio: bytes of optimizer state for each byte of trainable parameters, for the prediction of
            memory; AdamW has two.
        shards_optimizer: whether the replicas of a stage share that state.

    Raises:
        ConfigurationError: a number is below 1, there are more stages than layers, the schedule is unknown, or the
            given partition does not fit the layers or the number of stages.
    """
    if isinstance(schedule, str):
        schedule = _usual_spec(schedule, num_stages=num_stages, num_microbatches=num_microbatches)
        if schedule.stages_per_rank > 1 and not isinstance(partition, str):
            num_cuts = len(partition.cut_points if isinstance(partition, Partition) else partition)
            schedule = replace(schedule, stages_per_rank=max(2, (num_cuts + 1) // num_stages))
    layout = ParallelLayout(num_stages=num_stages, num_replicas=num_replicas)
    cost = CostModel(profile)
    if isinstance(partition, str):
        chosen = _partition_by_rule(
            partition, cost, num_ranks=num_stages, num_microbatches=num_microbatches, schedule=schedule
        )
    else:
        chosen = _given_partition(
            partition,
            num_layers=profile.num_layers,
            num_ranks=num_stages,
            stages_per_rank=schedule.stages_per_rank,
        )
    return PipelinePlan(
        module_fingerprint=module_fingerprint,
        layers=profile.layers,
        partition=chosen,
        mapping=DeviceMapping.of_layout(layout),
        schedule=schedule,
        num_microbatches=num_microbatches,
        microbatch_size=profile.microbatch_size,
        stage_work_shares=_work_shares(cost, chosen),
        stage_predictions=predict_stages(
            cost,
            chosen,
            schedule=schedule,
            num_microbatches=num_microbatches,
            optimizer_state_ratio=optimizer_state_ratio,
            optimizer_shares=num_replicas if shards_optimizer else 1,
        ),
    )


def plan_of(
    result: SearchResult, space: SearchSpace, *, module_fingerprint: str, devices: Sequence[Device] = ()
) -> PipelinePlan:
    """The plan of the best candidate that a search has found.

    Args:
        result: of the search.
        space: what was searched.
        module_fingerprint: identifies the module that the profile is of.
        devices: what the plan is for, by rank; empty: any devices.
    """
    best, cost = result.best, space.cost
    size, partition = best.microbatch_size, best.partition
    of_replica_0 = [space.topology.devices[ranks[0]] for ranks in best.mapping.stage_ranks]
    of_replica_0 *= best.schedule.stages_per_rank
    timeline = simulate(best.work)
    return PipelinePlan(
        module_fingerprint=module_fingerprint,
        layers=_layers_at(cost, size),
        times=_times_at(cost, best, space.topology),
        partition=partition,
        mapping=best.mapping,
        schedule=best.schedule,
        num_microbatches=best.num_microbatches,
        replica_microbatches=best.replica_microbatches,
        microbatch_size=size,
        stage_work_shares=_work_shares(cost, partition, microbatch_size=size),
        stage_predictions=predict_stages(
            cost,
            partition,
            schedule=best.schedule,
            num_microbatches=best.num_microbatches,
            optimizer_state_ratio=space.optimizer_state_ratio,
            optimizer_shares=space.optimizer_shares(best.mapping.num_replicas or 1),
            microbatch_size=size,
            devices=of_replica_0,
            stash_sizes=() if best.mapping.num_replicas else _stash_sizes(best.work),
        ),
        step_prediction=StepPrediction(
            step_s=timeline.step_s,
            num_samples=best.num_samples,
            bubble_fraction=timeline.bubble_fraction,
            plain_step_s=best.plain_step_s,
            rank_0_costs=max(0.0, best.rank_0_costs),
        ),
        runners_up=tuple(candidate.as_runner_up() for candidate in result.runners_up[:_MAX_RUNNERS_UP]),
        devices=tuple(devices),
    )


def _stash_sizes(work: StepWork) -> list[float]:
    """The most that a rank of each stage keeps, where stages have unlike numbers of ranks."""
    (schedule,) = work.schedules
    return [max(peak_stash_size(schedule, index) for index in lists) for lists in work.lists_by_stage]


def _layers_at(cost: CostModel, size: float) -> tuple[LayerProfile, ...]:
    """The layers with what they take for a micro-batch of some size."""
    forward_s, backward_s, weight_s, split_s = (
        _seconds_by_layer(cost, work, size) for work in (Work.FORWARD, Work.BACKWARD, Work.WEIGHT_GRADIENT, Work.SPLIT)
    )
    sized = cost.layer_bytes(size)
    layers = []
    for index, layer in enumerate(cost.profile.layers):
        kept = {"activation_bytes": 0, "peak_bytes": 0}
        if sized:
            kept = {name: getattr(sized[index], name) for name in _KEPT}
        measured = LayerMeasurement(
            **kept,
            sent_bytes=cost.sent_bytes(index + 1, microbatch_size=size),
            gradient_bytes=cost.gradient_bytes(index + 1, microbatch_size=size),
            forward_s=forward_s[index],
            backward_s=backward_s[index],
            backward_weight_s=weight_s[index],
            backward_split_s=split_s[index],
        )
        layers.append(replace(layer, measured=measured))
    return tuple(layers)


def _times_at(cost: CostModel, best: Candidate, topology: ClusterTopology) -> tuple[DeviceTimes, ...]:
    """Seconds on the device models in use, the reference first, at the planned size and, where it slices, of halves."""
    known = dict.fromkeys(table.device_model for table in cost.profile.times)
    used = {topology.devices[rank].model for ranks in best.mapping.stage_ranks for rank in ranks}
    sizes = [best.microbatch_size, *([best.microbatch_size / 2] if best.schedule.is_sliced else [])]
    return tuple(
        DeviceTimes(
            device_model=model,
            microbatch_size=size,
            dtype=cost.profile.times[0].dtype,
            forward_s=_seconds_by_layer(cost, Work.FORWARD, size, model),
            backward_s=_seconds_by_layer(cost, Work.BACKWARD, size, model),
            backward_weight_s=_seconds_by_layer(cost, Work.WEIGHT_GRADIENT, size, model),
            backward_split_s=_seconds_by_layer(cost, Work.SPLIT, size, model),
            optimizer_s=_seconds_by_layer(cost, Work.OPTIMIZER, size, model),
            overhead_s=cost.overhead_s(device=_device_of(model), microbatch_size=size),
        )
        for position, model in enumerate(known)
        if position == 0 or any(is_same_model(name, model) or is_same_model(model, name) for name in used)
        for size in sizes
    )


def _seconds_by_layer(cost: CostModel, work: Work, size: float, model: str | None = None) -> tuple[float, ...]:
    return cost.layers_s(work, device=None if model is None else _device_of(model), microbatch_size=size)


def _device_of(model: str) -> Device:
    return Device(global_rank=0, server="any", model=model, memory_bytes=1)


def _usual_spec(name: str, *, num_stages: int, num_microbatches: int) -> ScheduleSpec:
    """A schedule by its name, with numbers that suit even stages."""
    if name == "auto":
        name = DEFAULT_SCHEDULE
    if name not in TRAINING_SCHEDULES:
        allowed = ", ".join(repr(known) for known in ("auto", *TRAINING_SCHEDULES))
        raise ConfigurationError(f"schedule={name!r} is not known; set it to one of {allowed}")
    if name == SLICED:
        # As many as save all of the startup where a backward takes two forwards.
        num_sliced = min(math.ceil((num_stages - 1) / 4), num_microbatches // 2)
        return ScheduleSpec(name=name, num_sliced_first=num_sliced, num_sliced_last=num_sliced)
    # One rank has nobody to take turns with.
    return ScheduleSpec(name=name, stages_per_rank=2 if name == INTERLEAVED and num_stages > 1 else 1)


def _partition_by_rule(
    rule: str, cost: CostModel, *, num_ranks: int, num_microbatches: int, schedule: ScheduleSpec
) -> Partition:
    num_stages = num_ranks * schedule.stages_per_rank
    check_enough_layers(num_stages, cost.num_layers)
    found = partition_by_rule(rule, cost, num_stages)
    if found is not None:
        return found
    # GPipe's lists are those of 1F1B with all forwards as warm-up.
    depths = schedule.depths or default_depths(num_stages)
    if schedule.name == GPIPE:
        depths = (num_microbatches - 1,) * num_stages
    setting = PipelineSetting(cost=cost, num_stages=num_ranks, num_microbatches=(num_microbatches,))
    setting = setting.with_stages_per_rank(schedule.stages_per_rank)
    return choose_partition(setting, depths=depths).partition


def _given_partition(
    partition: Partition | Sequence[int], *, num_layers: int, num_ranks: int, stages_per_rank: int
) -> Partition:
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
    if partition.num_stages != num_ranks * stages_per_rank:
        num_cuts = num_ranks * stages_per_rank - 1
        wanted = f"num_stages is {num_ranks}"
        way_out = f"or set num_stages={partition.num_stages}"
        if stages_per_rank > 1:
            wanted += f", each rank with {stages_per_rank}"
            way_out = f"one fewer than a multiple of {num_ranks}"
        raise ConfigurationError(
            f"partition={partition.cut_points} has {partition.num_stages} stages, but {wanted}; give "
            f"{num_cuts} cut point{'s' if num_cuts != 1 else ''}, {way_out}"
        )
    return partition


def _work_shares(cost: CostModel, partition: Partition, *, microbatch_size: float | None = None) -> tuple[float, ...]:
    work = [
        sum(
            cost.work_s(work, partition.stage_layers(stage_index), microbatch_size=microbatch_size)
            for work in (Work.FORWARD, Work.BACKWARD)
        )
        for stage_index in range(partition.num_stages)
    ]
    total = sum(work) or 1.0
    return tuple(seconds / total for seconds in work)
