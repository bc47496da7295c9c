"""What a stage, and a step, are predicted to need."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_autopipe.core._checks import check_int, check_number, check_tuple
from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.schedule_spec import ScheduleSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    """Time of one micro-batch on a stage, and the stage's memory at its fullest."""

    forward_s: float
    backward_s: float
    stash_size: float
    """The most that is between forward and backward at a time, in micro-batches: a slice counts as its share of one."""
    plain_stash_size: float
    """The same under 1F1B with its own depths."""
    stash_bytes: int
    """What one micro-batch keeps between forward and backward."""
    parameter_bytes: int
    """Of all parameters on the stage, copies of tied ones included."""
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """What all micro-batches between forward and backward keep, but for the one that runs."""
    working_bytes: int
    """The most that is alive for the micro-batch that runs: activations so far, gradients, results in between."""
    buffer_bytes: int
    """Values that wait to be received or sent."""

    def __post_init__(self) -> None:
        owner = "StagePrediction"
        for name in ("forward_s", "backward_s", "stash_size", "plain_stash_size"):
            check_number(owner, name, getattr(self, name), error=PlanError)
        for name in (
            "stash_bytes",
            "parameter_bytes",
            "gradient_bytes",
            "optimizer_bytes",
            "activation_bytes",
            "working_bytes",
            "buffer_bytes",
        ):
            check_int(owner, name, getattr(self, name), minimum=0, error=PlanError)

    @property
    def microbatch_s(self) -> float:
        """Seconds of forward and backward of one micro-batch."""
        return self.forward_s + self.backward_s

    @property
    def more_stash_bytes(self) -> float:
        """What more is kept than under plain 1F1B; negative where it is less."""
        return (self.stash_size - self.plain_stash_size) * self.stash_bytes

    @property
    def peak_bytes(self) -> int:
        """The most memory in use at a time."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.working_bytes
            + self.buffer_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """What a whole step is predicted to take, and what other choices would."""

    step_s: float
    num_samples: float
    """Of all replicas' batches together."""
    bubble_fraction: float
    """Share of the step for which ranks compute nothing, 0 to 1."""
    plain_step_s: float
    """The same layers, devices and micro-batches under 1F1B with its own depths."""
    rank_0_costs: float = 0.0
    """By what share the step is longer because rank 0 runs the last stage of replica 0."""

    def __post_init__(self) -> None:
        owner = "StepPrediction"
        for name in ("step_s", "num_samples"):
            check_number(owner, name, getattr(self, name), error=PlanError, exclusive=True)
        for name in ("bubble_fraction", "plain_step_s", "rank_0_costs"):
            check_number(owner, name, getattr(self, name), error=PlanError)

    @property
    def samples_per_s(self) -> float:
        """Samples in a second."""
        return self.num_samples / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A choice that was looked at and is predicted to be slower."""

    replica_counts: tuple[int, ...]
    """Replicas of each stage."""
    schedule: ScheduleSpec
    num_microbatches: int
    """Micro-batches a step and replica."""
    step_s: float
    samples_per_s: float

    def __post_init__(self) -> None:
        check_tuple("RunnerUp", "replica_counts", self.replica_counts, int, error=PlanError)
        if not isinstance(self.schedule, ScheduleSpec):
            raise PlanError(f"RunnerUp: schedule must be a ScheduleSpec, got {self.schedule!r}")
        check_int("RunnerUp", "num_microbatches", self.num_microbatches, minimum=1, error=PlanError)
        for name in ("step_s", "samples_per_s"):
            check_number("RunnerUp", name, getattr(self, name), error=PlanError, exclusive=True)
