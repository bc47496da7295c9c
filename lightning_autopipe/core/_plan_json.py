"""Reads and writes a plan as JSON, strictly: every field once, none unknown, each of its type."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from lightning_autopipe.core.errors import AutoPipeError, PlanError
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.prediction import StagePrediction
from lightning_autopipe.core.profile import LayerMeasurement, LayerProfile, TiedParameter

if TYPE_CHECKING:
    from lightning_autopipe.core.plan import PipelinePlan

_PLAN_KEYS = (
    "schema_version",
    "module_fingerprint",
    "schedule_name",
    "num_microbatches",
    "layout",
    "partition",
    "stage_work_shares",
    "stage_predictions",
    "layers",
)


def plan_fields_to_json(plan: PipelinePlan) -> str:
    """JSON text of a plan, indented, ending in a newline."""
    document = {
        "schema_version": plan.schema_version,
        "module_fingerprint": plan.module_fingerprint,
        "schedule_name": plan.schedule_name,
        "num_microbatches": plan.num_microbatches,
        "layout": _as_dict(plan.layout),
        "partition": _as_dict(plan.partition),
        "stage_work_shares": list(plan.stage_work_shares),
        "stage_predictions": [_as_dict(stage) for stage in plan.stage_predictions],
        "layers": [_as_dict(layer) for layer in plan.layers],
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def plan_fields_from_json(text: str, *, schema_version: int) -> dict[str, Any]:
    """Keyword arguments for a plan from its JSON text.

    Raises:
        PlanError: as `PipelinePlan.from_json`.
    """
    try:
        document = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise PlanError(f"expected a JSON object with the plan's fields, got {type(document).__name__}")
    # First, so that a plan of another version is named as such and not by the first field that differs.
    found_version = document.get("schema_version")
    if isinstance(found_version, bool) or found_version != schema_version:
        raise PlanError(
            f"schema_version is {found_version!r}, this version of lightning_autopipe reads {schema_version}; "
            "make the plan again"
        )
    _check_keys("plan", document, _PLAN_KEYS)
    layers = _list("layers", document["layers"])
    return {
        "schema_version": found_version,
        "module_fingerprint": document["module_fingerprint"],
        "schedule_name": document["schedule_name"],
        "num_microbatches": document["num_microbatches"],
        "layout": _read("layout", ParallelLayout, document["layout"]),
        "partition": _read("partition", Partition, document["partition"], tuples=("cut_points",)),
        "stage_work_shares": tuple(_list("stage_work_shares", document["stage_work_shares"])),
        "stage_predictions": tuple(
            _read(f"stage_predictions[{index}]", StagePrediction, stage)
            for index, stage in enumerate(_list("stage_predictions", document["stage_predictions"]))
        ),
        "layers": tuple(_read_layer(f"layers[{index}]", layer) for index, layer in enumerate(layers)),
    }


def _read_layer(where: str, value: Any) -> LayerProfile:
    if isinstance(value, dict):
        value = dict(value)
        if value.get("measured") is not None:
            value["measured"] = _read(f"{where}.measured", LayerMeasurement, value["measured"])
        if isinstance(value.get("tied"), list):
            value["tied"] = [
                _read(f"{where}.tied[{index}]", TiedParameter, tied) for index, tied in enumerate(value["tied"])
            ]
    layer: LayerProfile = _read(where, LayerProfile, value, tuples=("parameters", "tied"))
    return layer


def _as_dict(value: Any) -> dict[str, Any]:
    return {field.name: _as_json(getattr(value, field.name)) for field in fields(value)}


def _as_json(member: Any) -> Any:
    if isinstance(member, tuple):
        return [_as_json(item) for item in member]
    return _as_dict(member) if is_dataclass(member) else member


def _read(where: str, kind: type, value: Any, *, tuples: tuple[str, ...] = ()) -> Any:
    if not isinstance(value, dict):
        raise PlanError(f"{where}: expected an object, got {type(value).__name__}")
    _check_keys(where, value, tuple(field.name for field in fields(kind)))
    arguments = dict(value)
    for name in tuples:
        arguments[name] = tuple(_list(f"{where}.{name}", arguments[name]))
    try:
        return kind(**arguments)
    except AutoPipeError as error:
        raise PlanError(f"{where}: {error}") from error


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise PlanError(f"{where}: expected a list, got {type(value).__name__}")
    return value


def _check_keys(where: str, value: Mapping[str, Any], expected: tuple[str, ...]) -> None:
    missing = [key for key in expected if key not in value]
    unknown = [key for key in value if key not in expected]
    if missing or unknown:
        raise PlanError(f"{where}: fields missing: {missing or 'none'}; fields unknown: {unknown or 'none'}")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"a field is given twice: {sorted({name for name in names if names.count(name) > 1})}")
    return result


def _refuse_constant(text: str) -> float:
    assert not math.isfinite(float(text))
    raise ValueError(f"{text} is not a number of JSON")
