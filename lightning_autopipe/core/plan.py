"""The plan: everything that the runtime needs to know, in one file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_autopipe.core import _json
from lightning_autopipe.core._checks import check_int, check_number, check_text, check_tuple
from lightning_autopipe.core._plan_json import plan_fields_from_json, plan_to_json
from lightning_autopipe.core.cluster import Device, is_same_model
from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.files import write_whole
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.mapping import DeviceMapping
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.prediction import RunnerUp, StagePrediction, StepPrediction
from lightning_autopipe.core.profile import DeviceTimes, LayerProfile, ModelProfile
from lightning_autopipe.core.schedule_spec import ScheduleSpec

SCHEMA_VERSION = 4
_ENOUGH = 0.95
"""Devices of one model differ a little in the memory that they tell."""


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
    mapping: DeviceMapping
    """Which ranks run which stage; where each runs several, of the first of them (see `stage_ranks`)."""
    schedule: ScheduleSpec
    num_microbatches: int
    """Micro-batches a step and replica; where stages have unlike numbers of replicas, a step."""
    replica_microbatches: tuple[int, ...] = ()
    """Of each replica, where unlike ones take unlike numbers; empty: `num_microbatches` each."""
    stage_work_shares: tuple[float, ...] = ()
    """Predicted share of the step's work on each stage, summing to 1; empty where it was not predicted."""
    stage_predictions: tuple[StagePrediction, ...] = ()
    """Predicted time and memory of each stage; empty where layers were not measured."""
    step_prediction: StepPrediction | None = None
    """Predicted step; None where layers were not measured."""
    runners_up: tuple[RunnerUp, ...] = ()
    """What was not chosen, the best one first."""
    microbatch_size: float | None = None
    """Samples in a micro-batch, as planned; None where that was not known."""
    times: tuple[DeviceTimes, ...] = ()
    """Seconds of the layers by device model and size, where those of the layers do not tell all; else empty."""
    devices: tuple[Device, ...] = ()
    """What the plan is for, by rank; empty: any devices."""

    def __post_init__(self) -> None:
        owner = "PipelinePlan"
        if self.schema_version != SCHEMA_VERSION:
            raise PlanError(
                f"{owner}: schema_version {self.schema_version!r} is not the one that this version of "
                f"lightning_autopipe reads ({SCHEMA_VERSION}); make the plan again"
            )
        check_text(owner, "module_fingerprint", self.module_fingerprint, error=PlanError)
        for name, kind in (("partition", Partition), ("mapping", DeviceMapping), ("schedule", ScheduleSpec)):
            if not isinstance(getattr(self, name), kind):
                raise PlanError(f"{owner}: {name} must be a {kind.__name__}, got {getattr(self, name)!r}")
        for name, of in (
            ("layers", LayerProfile),
            ("replica_microbatches", int),
            ("stage_predictions", StagePrediction),
            ("runners_up", RunnerUp),
            ("times", DeviceTimes),
            ("devices", Device),
        ):
            check_tuple(owner, name, getattr(self, name), of, error=PlanError)
        check_int(owner, "num_microbatches", self.num_microbatches, minimum=1, error=PlanError)
        if self.partition.num_layers != len(self.layers):
            raise PlanError(
                f"{owner}: the partition covers {self.partition.num_layers} layers, but the plan lists "
                f"{len(self.layers)}"
            )
        if self.partition.num_stages != self.mapping.num_stages * self.schedule.stages_per_rank:
            raise PlanError(
                f"{owner}: the partition has {self.partition.num_stages} stages, but the mapping has ranks for "
                f"{self.mapping.num_stages}, each with {self.schedule.stages_per_rank}"
            )
        self._check_work_shares(owner)
        for name in ("stage_predictions", "schedule.depths"):
            values = self.schedule.depths if name == "schedule.depths" else self.stage_predictions
            if values and len(values) != self.num_stages:
                raise PlanError(f"{owner}: {name} has {len(values)} values for {self.num_stages} stages")
        if self.step_prediction is not None and not isinstance(self.step_prediction, StepPrediction):
            raise PlanError(f"{owner}: step_prediction must be a StepPrediction, got {self.step_prediction!r}")
        if self.microbatch_size is not None:
            check_number(owner, "microbatch_size", self.microbatch_size, error=PlanError, exclusive=True)
        for table in self.times:
            if len(table.forward_s) != len(self.layers):
                raise PlanError(
                    f"{owner}: times of {table.device_model!r} are of {len(table.forward_s)} layers, not of "
                    f"{len(self.layers)}"
                )
        self._check_ranks(owner)

    def _check_ranks(self, owner: str) -> None:
        if self.replica_microbatches:
            for index, number in enumerate(self.replica_microbatches):
                check_int(owner, f"replica_microbatches[{index}]", number, minimum=1, error=PlanError)
            if len(self.replica_microbatches) != self.mapping.num_replicas:
                raise PlanError(
                    f"{owner}: replica_microbatches has {len(self.replica_microbatches)} values, but there are "
                    f"{self.mapping.num_replicas or 'unlike numbers of'} replicas"
                )
        if self.devices:
            if [device.global_rank for device in self.devices] != list(range(len(self.devices))):
                raise PlanError(f"{owner}: devices must be listed by global rank, each once, from 0 on")
            if self.mapping.ranks[-1] >= len(self.devices):
                raise PlanError(
                    f"{owner}: the mapping names rank {self.mapping.ranks[-1]}, but there are {len(self.devices)} "
                    "devices"
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

    @property
    def layout(self) -> ParallelLayout:
        """Stages and replicas as the runtime has them.

        Raises:
            PlanError: stages have unlike numbers of replicas, or some ranks run nothing.
        """
        return self.mapping.layout()

    def stage_ranks(self, stage_index: int) -> tuple[int, ...]:
        """The ranks that run a stage: where each rank runs several, stages go round the ranks."""
        return self.mapping.stage_ranks[stage_index % self.mapping.num_stages]

    @property
    def profile(self) -> ModelProfile:
        """What the layers cost, as far as it was planned with."""
        return ModelProfile(layers=self.layers, times=self.times, microbatch_size=self.microbatch_size)

    @property
    def has_unlike_replicas(self) -> bool:
        """Whether replicas take unlike numbers of micro-batches."""
        return len(set(self.replica_microbatches)) > 1

    def microbatches_of(self, replica_index: int) -> int:
        """Micro-batches of one replica in a step."""
        return self.replica_microbatches[replica_index] if self.replica_microbatches else self.num_microbatches

    def stage_layers(self, stage_index: int) -> tuple[LayerProfile, ...]:
        """The layers that a stage owns."""
        owned = self.partition.stage_layers(stage_index)
        return self.layers[owned.start : owned.stop]

    def require_module(self, module_fingerprint: str) -> None:
        """Checks that the plan is for this module.

        Raises:
            PlanError: it is for another one.
        """
        if module_fingerprint != self.module_fingerprint:
            raise PlanError(
                f"the plan was made for another module: its fingerprint is {self.module_fingerprint!r}, the module's "
                f"is {module_fingerprint!r}; leave plan= unset to make a new one"
            )

    def require_world(self, world_size: int) -> None:
        """Checks that the plan can run on this number of processes.

        Raises:
            PlanError: it is for another number, or its stages have unlike numbers of replicas.
        """
        layout = self.layout
        if world_size != layout.world_size:
            raise PlanError(
                f"the plan is for {layout.world_size} processes ({layout.num_stages} stages x "
                f"{layout.num_replicas} replicas), but {world_size} were started; set the Trainer's devices and "
                "num_nodes to match, or leave plan= unset to make a new one"
            )

    def require_devices(self, devices: Sequence[Device]) -> None:
        """Checks that the plan is for devices like these: models, memory, and which ranks share a server.

        Plans for cluster files name models as people do, drivers in full; see `is_same_model`.

        Args:
            devices: of this run, by rank; what is not known of one is left to itself by an empty plan.

        Raises:
            PlanError: one is another model or has less memory, or ranks share a server that should not.
        """
        for planned, found in zip(self.devices, devices, strict=False):
            has_memory = found.memory_bytes >= _ENOUGH * planned.memory_bytes
            if not has_memory or not is_same_model(planned.model, found.model):
                raise PlanError(
                    f"the plan is for another cluster: global rank {planned.global_rank} is planned for "
                    f"{planned.model!r} with {planned.memory_bytes / 2**30:.1f} GiB, but here it is {found.model!r} "
                    f"with {found.memory_bytes / 2**30:.1f} GiB; start the processes on the planned servers in the "
                    "planned order, or leave plan= unset to make a new one"
                )
        if _servers(self.devices) != _servers(devices) and self.devices:
            raise PlanError(
                f"the plan is for another cluster: its servers have ranks {_servers(self.devices)}, but here they have "
                f"{_servers(devices)}; start the processes on the planned servers in the planned order, or leave plan= "
                "unset to make a new one"
            )

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` gives an equal plan."""
        return plan_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> PipelinePlan:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: the text is no JSON, a field is missing, unknown or of the wrong type, or the plan is invalid.
        """
        return cls(**plan_fields_from_json(text, cls, schema_version=SCHEMA_VERSION))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file: whole or not at all, also where the process is killed meanwhile."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PipelinePlan:
        """Reads a plan from a file.

        Raises:
            PlanError: the file cannot be read or holds no valid plan; the message names it.
        """
        return _json.read_file(path, cls.from_json, what="plan")


def _servers(devices: Sequence[Device]) -> list[list[int]]:
    """The ranks of each server; names do not count."""
    ranks: dict[str, list[int]] = {}
    for device in devices:
        ranks.setdefault(device.server, []).append(device.global_rank)
    return list(ranks.values())
