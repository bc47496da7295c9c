"""One complete choice: what runs where, in which order, and the step that is predicted for it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_autopipe.core.mapping import DeviceMapping
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.prediction import RunnerUp
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.planner.workload import StepWork


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
