"""A step under any schedule, priced for the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from lightning_autopipe.core.cluster import Device
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.planner.cost import CostModel, Work
from lightning_autopipe.planner.objective import Objective, PipelineSetting
from lightning_autopipe.planner.replica import Cuts
from lightning_autopipe.planner.workload import StageWork, StepWork, UnitWork
from lightning_autopipe.schedules.catalog import get_schedule
from lightning_autopipe.schedules.zero_bubble import NAME as ZERO_BUBBLE

_schedule = lru_cache(maxsize=256)(get_schedule)


def scheduled_work(setting: PipelineSetting, cuts: Cuts, schedule: ScheduleSpec) -> StepWork:
    """The step as `simulate` takes it.

    Args:
        setting: what is given; its stages are the ranks of a pipeline.
        cuts: of the layers, for all stages: ``schedule.stages_per_rank`` for each rank.
        schedule: what is run.

    Raises:
        PlanError: it slices micro-batches, and no times are known for halves.
    """
    objective = Objective(setting.with_stages_per_rank(schedule.stages_per_rank))
    stages = objective.stage_works(cuts)
    if schedule.is_sliced or schedule.name == ZERO_BUBBLE:
        add = _with_halves if schedule.is_sliced else _with_weight_gradients
        stages = tuple(
            tuple(add(work, setting.cost, layers, device, setting.microbatch_size) for work, layers, device in places)
            for places in _places(objective.setting, cuts, stages)
        )
    return StepWork(
        stages=stages,
        schedules=tuple(_schedule(schedule, len(cuts) + 1, number) for number in setting.num_microbatches),
        ranks=setting.ranks,
        network=setting.network,
        tied_bytes=tuple(objective.tied_bytes(cuts).items()),
        exchange_s=setting.exchange_s,
    )


def can_halve(cost: CostModel, microbatch_size: float | None) -> bool:
    """Whether times are known for half a micro-batch."""
    size = cost.microbatch_size if microbatch_size is None else microbatch_size
    return size / 2 >= cost.known_sizes[0]


def _places(
    setting: PipelineSetting, cuts: Cuts, stages: tuple[tuple[StageWork, ...], ...]
) -> Iterator[Iterator[tuple[StageWork, range, Device | None]]]:
    """Of each replica, its stages with their layers and devices."""
    layers = [range(start, stop) for start, stop in pairwise((0, *cuts, setting.cost.num_layers))]
    for replica_index, of_replica in enumerate(stages):
        devices = setting.devices[replica_index] if setting.devices else (None,) * len(layers)
        yield zip(of_replica, layers, devices, strict=True)


def _with_halves(
    work: StageWork, cost: CostModel, layers: range, device: Device | None, microbatch_size: float | None
) -> StageWork:
    half = (cost.microbatch_size if microbatch_size is None else microbatch_size) / 2
    unit = UnitWork(
        forward_s=cost.action_s(Work.FORWARD, layers, device=device, microbatch_size=half),
        backward_s=cost.action_s(Work.BACKWARD, layers, device=device, microbatch_size=half),
        sent_bytes=cost.sent_bytes(layers.stop, microbatch_size=half),
        gradient_bytes=cost.gradient_bytes(layers.start, microbatch_size=half),
    )
    return replace(work, units=(work.units[0], unit))


def _with_weight_gradients(
    work: StageWork, cost: CostModel, layers: range, device: Device | None, microbatch_size: float | None
) -> StageWork:
    """A backward in two parts is one action more; those of the first stage are whole."""
    if layers.start == 0:
        return work
    unit = work.units[0]
    split_s = cost.action_s(Work.SPLIT, layers, device=device, microbatch_size=microbatch_size)
    split = replace(
        unit,
        backward_s=unit.backward_s + split_s,
        backward_weight_s=cost.action_s(Work.WEIGHT_GRADIENT, layers, device=device, microbatch_size=microbatch_size),
    )
    return replace(work, units=(split, *work.units[1:]))
