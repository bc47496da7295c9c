"""What a stage is predicted to need."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_autopipe.core._checks import check_int, check_number
from lightning_autopipe.core.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    """Time of one micro-batch on a stage, and the stage's memory at its fullest."""

    forward_s: float
    backward_s: float
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
        for name in ("forward_s", "backward_s"):
            check_number(owner, name, getattr(self, name), error=PlanError)
        for name in (
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
