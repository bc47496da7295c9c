"""Frozen types that everything else is built on: standard library alone, nothing of ours imported."""

from __future__ import annotations

from lightning_autopipe.core.cluster import ClusterTopology, Device, Link
from lightning_autopipe.core.errors import (
    AutoPipeError,
    BatchError,
    CaptureError,
    CheckpointError,
    ConfigurationError,
    PipelineRuntimeError,
    PlanError,
)
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.mapping import DeviceMapping
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.plan import SCHEMA_VERSION, PipelinePlan
from lightning_autopipe.core.prediction import RunnerUp, StagePrediction, StepPrediction
from lightning_autopipe.core.profile import (
    CrossingValue,
    DeviceTimes,
    LayerBytes,
    LayerMeasurement,
    LayerProfile,
    ModelProfile,
    SizedBytes,
    TiedParameter,
)
from lightning_autopipe.core.schedule import Action, ActionType, Schedule
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.core.timeline import StepEnd, Timeline, TimelineEvent

__all__ = [
    "SCHEMA_VERSION",
    "Action",
    "ActionType",
    "AutoPipeError",
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "ClusterTopology",
    "ConfigurationError",
    "CrossingValue",
    "Device",
    "DeviceMapping",
    "DeviceTimes",
    "LayerBytes",
    "LayerMeasurement",
    "LayerProfile",
    "Link",
    "ModelProfile",
    "ParallelLayout",
    "Partition",
    "PipelinePlan",
    "PipelineRuntimeError",
    "PlanError",
    "RunnerUp",
    "Schedule",
    "ScheduleSpec",
    "SizedBytes",
    "StagePrediction",
    "StepEnd",
    "StepPrediction",
    "TiedParameter",
    "Timeline",
    "TimelineEvent",
]
