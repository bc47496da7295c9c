"""Reads and writes a profile as JSON."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from lightning_autopipe.core import _json
from lightning_autopipe.core._plan_json import TIMES, read_layers
from lightning_autopipe.core.profile_parts import CrossingValue, DeviceTimes, LayerBytes, SizedBytes

if TYPE_CHECKING:
    from lightning_autopipe.core.profile import ModelProfile

SCHEMA_VERSION = 2


def profile_to_json(profile: ModelProfile) -> str:
    """JSON text of a profile, indented, ending in a newline."""
    return _json.dump({"schema_version": SCHEMA_VERSION, **_json.as_dict(profile)})


def profile_fields_from_json(text: str, kind: type[ModelProfile]) -> dict[str, Any]:
    """Keyword arguments for a profile from its JSON text.

    Raises:
        PlanError: as `ModelProfile.from_json`.
    """
    document = _json.load_object(text, what="profile")
    _json.check_version(document, SCHEMA_VERSION, what="profile")
    del document["schema_version"]
    document.setdefault("module_fingerprint", "")  # of profiles from elsewhere
    _json.check_keys("profile", document, tuple(field.name for field in fields(kind)))
    sized = enumerate(_json.read_list("other_sizes", document["other_sizes"]))
    return {
        **document,
        "layers": read_layers("layers", document["layers"]),
        "values": _json.read_each("values", CrossingValue, document["values"]),
        "times": _json.read_each("times", DeviceTimes, document["times"], tuples=TIMES),
        "other_sizes": tuple(_read_sized(f"other_sizes[{index}]", value) for index, value in sized),
    }


def _read_sized(where: str, value: Any) -> SizedBytes:
    if isinstance(value, dict) and "layers" in value:
        value = {**value, "layers": list(_json.read_each(f"{where}.layers", LayerBytes, value["layers"]))}
    sized: SizedBytes = _json.read(where, SizedBytes, value, tuples=("layers",))
    return sized
