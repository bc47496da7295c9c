"""The plan: everything that the runtime needs to know, in one file."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lightning_autopipe.core._checks import check_int, check_number, check_text, check_tuple
from lightning_autopipe.core._plan_json import plan_fields_from_json, plan_fields_to_json
from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.prediction import StagePrediction
from lightning_autopipe.core.profile import LayerProfile

SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """How one module is trained as a pipeline: the only thing that passes from planning to running.

    Raises:
        PlanError: a field is invalid or two fields contradict each other.
    """

    schema_version: int = SCHEMA_VERSION
    module_fingerprint: str
    """Identifies the traced module: a plan for another one is refused."""
    layers: tuple[LayerProfile, ...]
    partition: Partition
    layout: ParallelLayout
    schedule_name: str
    num_microbatches: int
    """Micro-batches a step and replica."""
    stage_work_shares: tuple[float, ...] = ()
    """Predicted share of the step's work on each stage, summing to 1; empty where it was not predicted."""
    stage_predictions: tuple[StagePrediction, ...] = ()
    """Predicted time and memory of each stage; empty where layers were not measured."""

    def __post_init__(self) -> None:
        owner = "PipelinePlan"
        if self.schema_version != SCHEMA_VERSION:
            raise PlanError(
                f"{owner}: schema_version {self.schema_version!r} is not the one that this version of "
                f"lightning_autopipe reads ({SCHEMA_VERSION}); make the plan again"
            )
        check_text(owner, "module_fingerprint", self.module_fingerprint, error=PlanError)
        check_tuple(owner, "layers", self.layers, LayerProfile, error=PlanError)
        for name, kind in (("partition", Partition), ("layout", ParallelLayout)):
            if not isinstance(getattr(self, name), kind):
                raise PlanError(f"{owner}: {name} must be a {kind.__name__}, got {getattr(self, name)!r}")
        check_text(owner, "schedule_name", self.schedule_name, error=PlanError)
        check_int(owner, "num_microbatches", self.num_microbatches, minimum=1, error=PlanError)
        if self.partition.num_layers != len(self.layers):
            raise PlanError(
                f"{owner}: the partition covers {self.partition.num_layers} layers, but the plan lists "
                f"{len(self.layers)}"
            )
        if self.partition.num_stages != self.layout.num_stages:
            raise PlanError(
                f"{owner}: the partition has {self.partition.num_stages} stages, but the layout has "
                f"{self.layout.num_stages}"
            )
        self._check_work_shares(owner)
        check_tuple(owner, "stage_predictions", self.stage_predictions, StagePrediction, error=PlanError)
        if self.stage_predictions and len(self.stage_predictions) != self.num_stages:
            raise PlanError(
                f"{owner}: stage_predictions has {len(self.stage_predictions)} values for {self.num_stages} stages"
            )

    def _check_work_shares(self, owner: str) -> None:
        if not isinstance(self.stage_work_shares, tuple):
            raise PlanError(f"{owner}: stage_work_shares must be a tuple, got {self.stage_work_shares!r}")
        if self.stage_work_shares and len(self.stage_work_shares) != self.num_stages:
            raise PlanError(
                f"{owner}: stage_work_shares has {len(self.stage_work_shares)} values for {self.num_stages} stages"
            )
        for stage_index, share in enumerate(self.stage_work_shares):
            check_number(owner, f"stage_work_shares[{stage_index}]", share, error=PlanError)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.partition.num_stages

    def stage_layers(self, stage_index: int) -> tuple[LayerProfile, ...]:
        """The layers that a stage owns."""
        owned = self.partition.stage_layers(stage_index)
        return self.layers[owned.start : owned.stop]

    def require(self, *, module_fingerprint: str, world_size: int) -> None:
        """Checks that the plan is for this module and this number of processes.

        Raises:
            PlanError: it is not.
        """
        if module_fingerprint != self.module_fingerprint:
            raise PlanError(
                f"the plan was made for another module: its fingerprint is {self.module_fingerprint!r}, the module's "
                f"is {module_fingerprint!r}; leave plan= unset to make a new one"
            )
        if world_size != self.layout.world_size:
            raise PlanError(
                f"the plan is for {self.layout.world_size} processes ({self.layout.num_stages} stages x "
                f"{self.layout.num_replicas} replicas), but {world_size} were started; set the Trainer's devices and "
                "num_nodes to match, or leave plan= unset to make a new one"
            )

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` gives an equal plan."""
        return plan_fields_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> PipelinePlan:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: the text is no JSON, a field is missing, unknown or of the wrong type, or the plan is invalid.
        """
        return cls(**plan_fields_from_json(text, schema_version=SCHEMA_VERSION))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file: whole or not at all, also where the process is killed meanwhile."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(self.to_json())
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PipelinePlan:
        """Reads a plan from a file.

        Raises:
            PlanError: the file cannot be read or holds no valid plan; the message names it.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"the plan file {os.fspath(path)!r} cannot be read: {error}") from error
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"the plan file {os.fspath(path)!r} is not valid: {error}") from error
