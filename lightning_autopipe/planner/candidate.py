"""One complete choice: what runs where, in which order, and the step that is predicted for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_autopipe.core.mapping import DeviceMapping
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.prediction import RunnerUp
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.planner.cost import CostModel, Work
from lightning_autopipe.planner.objective import Objective, PipelineSetting
from lightning_autopipe.planner.replica import Cuts
from lightning_autopipe.planner.workload import StageWork, StepWork, UnitWork
from lightning_autopipe.schedules.catalog import get_schedule
from lightning_autopipe.schedules.one_f_one_b import NAME as ONE_F_ONE_B
from lightning_autopipe.schedules.one_f_one_b import default_depths


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A choice of everything that a search chooses."""

    mapping: DeviceMapping
    partition: Partition
    schedule: ScheduleSpec
    num_microbatches: int
    """Micro-batches a step and replica; where stages have unlike numbers of replicas, a step."""
    replica_microbatches: tuple[int, ...] = ()
    """Of each replica, where they take unlike numbers."""
    microbatch_size: float
    """Samples."""
    num_samples: float
    """Of a step, all replicas together."""
    work: StepWork
    """The step, for the simulator."""
    step_s: float
    plain_step_s: float
    """With the same partition under 1F1B with its own depths."""
    rank_0_costs: float = 0.0
    """By what share the step is longer because rank 0 runs the last stage of replica 0."""

    @property
    def samples_per_s(self) -> float:
        """What a search makes as large as possible."""
        return self.num_samples / self.step_s

    @property
    def replica_counts(self) -> tuple[int, ...]:
        """Replicas of each stage."""
        return tuple(len(ranks) for ranks in self.mapping.stage_ranks)

    def as_runner_up(self) -> RunnerUp:
        """What a plan tells of a candidate that was not chosen."""
        return RunnerUp(
            replica_counts=self.replica_counts,
            schedule=self.schedule,
            num_microbatches=self.num_microbatches,
            step_s=self.step_s,
            samples_per_s=self.samples_per_s,
        )


def scheduled_work(setting: PipelineSetting, cuts: Cuts, schedule: ScheduleSpec) -> StepWork:
    """The step under any schedule, for the simulator.

    Raises:
        PlanError: it slices micro-batches, and no times are known for halves.
    """
    depths = schedule.depths or default_depths(setting.num_stages)
    step = Objective(setting).step_work(cuts, depths)
    if schedule.name == ONE_F_ONE_B:
        return step
    schedules = tuple(get_schedule(schedule, setting.num_stages, number) for number in setting.num_microbatches)
    if not schedule.is_sliced:
        return replace(step, schedules=schedules)
    edges = (0, *cuts, setting.cost.num_layers)
    stages = tuple(
        tuple(
            _with_halves(work, setting, range(edges[index], edges[index + 1]), replica_index, index)
            for index, work in enumerate(of_replica)
        )
        for replica_index, of_replica in enumerate(step.stages)
    )
    return replace(step, schedules=schedules, stages=stages)


def can_halve(cost: CostModel, microbatch_size: float | None) -> bool:
    """Whether times are known for half a micro-batch."""
    size = cost.microbatch_size if microbatch_size is None else microbatch_size
    smallest, _ = known_sizes(cost)
    return size / 2 >= smallest


def known_sizes(cost: CostModel) -> tuple[float, float]:
    """Samples of the smallest and of the largest micro-batch that every profiled device model has times for."""
    by_model: dict[str, list[float]] = {}
    for table in cost.profile.times:
        by_model.setdefault(table.device_model, []).append(table.microbatch_size)
    if not by_model:
        return cost.microbatch_size, cost.microbatch_size
    return max(map(min, by_model.values())), min(map(max, by_model.values()))


def _with_halves(
    work: StageWork, setting: PipelineSetting, layers: range, replica_index: int, stage_index: int
) -> StageWork:
    cost = setting.cost
    device = setting.devices[replica_index][stage_index] if setting.devices else None
    half = (cost.microbatch_size if setting.microbatch_size is None else setting.microbatch_size) / 2
    unit = UnitWork(
        forward_s=cost.action_s(Work.FORWARD, layers, device=device, microbatch_size=half),
        backward_s=cost.action_s(Work.BACKWARD, layers, device=device, microbatch_size=half),
        sent_bytes=cost.sent_bytes(layers.stop, microbatch_size=half),
        gradient_bytes=cost.gradient_bytes(layers.start, microbatch_size=half),
    )
    return replace(work, units=(work.units[0], unit))
