"""Reads and writes a plan as JSON."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from lightning_autopipe.core import _json
from lightning_autopipe.core.cluster import Device
from lightning_autopipe.core.mapping import DeviceMapping
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.prediction import RunnerUp, StagePrediction, StepPrediction
from lightning_autopipe.core.profile_parts import DeviceTimes, LayerMeasurement, LayerProfile, TiedParameter
from lightning_autopipe.core.schedule_spec import ScheduleSpec

if TYPE_CHECKING:
    from lightning_autopipe.core.plan import PipelinePlan

TIMES = ("forward_s", "backward_s", "backward_weight_s", "backward_split_s", "optimizer_s")
"""Fields of `DeviceTimes` with a value for each layer."""


def plan_to_json(plan: PipelinePlan) -> str:
    """JSON text of a plan, indented, ending in a newline."""
    document = _json.as_dict(plan)
    layers = document.pop("layers")  # last: they are long
    return _json.dump({**document, "layers": layers})


def plan_fields_from_json(text: str, kind: type[PipelinePlan], *, schema_version: int) -> dict[str, Any]:
    """Keyword arguments for a plan from its JSON text.

    Raises:
        PlanError: as `PipelinePlan.from_json`.
    """
    document = _json.load_object(text, what="plan")
    _json.check_version(document, schema_version, what="plan")
    _json.check_keys("plan", document, tuple(field.name for field in fields(kind)))
    step = document["step_prediction"]
    return {
        **document,
        "partition": _json.read("partition", Partition, document["partition"], tuples=("cut_points",)),
        "mapping": _read_mapping(document["mapping"]),
        "schedule": _read_schedule("schedule", document["schedule"]),
        "replica_microbatches": tuple(_json.read_list("replica_microbatches", document["replica_microbatches"])),
        "stage_work_shares": tuple(_json.read_list("stage_work_shares", document["stage_work_shares"])),
        "stage_predictions": _json.read_each("stage_predictions", StagePrediction, document["stage_predictions"]),
        "step_prediction": None if step is None else _json.read("step_prediction", StepPrediction, step),
        "runners_up": tuple(
            _read_runner_up(f"runners_up[{index}]", value)
            for index, value in enumerate(_json.read_list("runners_up", document["runners_up"]))
        ),
        "times": _json.read_each("times", DeviceTimes, document["times"], tuples=TIMES),
        "devices": _json.read_each("devices", Device, document["devices"]),
        "layers": read_layers("layers", document["layers"]),
    }


def read_layers(where: str, values: Any) -> tuple[LayerProfile, ...]:
    """Layers from a JSON list.

    Raises:
        PlanError: one is wrong.
    """
    layers = enumerate(_json.read_list(where, values))
    return tuple(_read_layer(f"{where}[{index}]", layer) for index, layer in layers)


def _read_layer(where: str, value: Any) -> LayerProfile:
    if isinstance(value, dict):
        value = dict(value)
        if value.get("measured") is not None:
            value["measured"] = _json.read(f"{where}.measured", LayerMeasurement, value["measured"])
        if isinstance(value.get("tied"), list):
            value["tied"] = list(_json.read_each(f"{where}.tied", TiedParameter, value["tied"]))
    layer: LayerProfile = _json.read(where, LayerProfile, value, tuples=("parameters", "tied"))
    return layer


def _read_mapping(value: Any) -> DeviceMapping:
    if isinstance(value, dict) and isinstance(value.get("stage_ranks"), list):
        stages = enumerate(value["stage_ranks"])
        ranks = [tuple(_json.read_list(f"mapping.stage_ranks[{stage}]", of_stage)) for stage, of_stage in stages]
        value = {**value, "stage_ranks": ranks}
    mapping: DeviceMapping = _json.read("mapping", DeviceMapping, value, tuples=("stage_ranks",))
    return mapping


def _read_schedule(where: str, value: Any) -> ScheduleSpec:
    spec: ScheduleSpec = _json.read(where, ScheduleSpec, value, tuples=("depths",))
    return spec


def _read_runner_up(where: str, value: Any) -> RunnerUp:
    if isinstance(value, dict) and "schedule" in value:
        value = {**value, "schedule": _read_schedule(f"{where}.schedule", value["schedule"])}
    runner_up: RunnerUp = _json.read(where, RunnerUp, value, tuples=("replica_counts",))
    return runner_up
