"""Reads and writes frozen dataclasses as JSON, strictly: every field once, none unknown, each of its type."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from lightning_autopipe.core.errors import AutoPipeError, PlanError

T = TypeVar("T")


def dump(document: Mapping[str, Any]) -> str:
    """JSON text, indented, ending in a newline."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def load_object(text: str, *, what: str) -> dict[str, Any]:
    """The object that a JSON text holds.

    Raises:
        PlanError: it is no JSON, no object, has a field twice or a number that JSON does not know.
    """
    try:
        document = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise PlanError(f"expected a JSON object with the {what}'s fields, got {type(document).__name__}")
    return document


def read_file(path: str | os.PathLike[str], from_json: Callable[[str], T], *, what: str) -> T:
    """What a file of one of our types holds.

    Raises:
        PlanError: it cannot be read, or holds nothing valid; the message names it.
    """
    where = f"the {what} file {os.fspath(path)!r}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{where} cannot be read: {error}") from error
    try:
        return from_json(text)
    except PlanError as error:
        raise PlanError(f"{where} is not valid: {error}") from error


def check_version(document: Mapping[str, Any], expected: int, *, what: str) -> None:
    """Checks ``schema_version``, before the fields: one of another version is named as such.

    Raises:
        PlanError: it is another one.
    """
    found = document.get("schema_version")
    if isinstance(found, bool) or found != expected:
        raise PlanError(
            f"schema_version is {found!r}, this version of lightning_autopipe reads {expected}; make the {what} again, "
            f"or name another file if this is no {what}"
        )


def as_dict(value: Any) -> dict[str, Any]:
    """A dataclass as JSON objects, lists and values."""
    return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}


def as_json(member: Any) -> Any:
    """A field's value, alike."""
    if isinstance(member, tuple):
        return [as_json(item) for item in member]
    return as_dict(member) if is_dataclass(member) else member


def read(where: str, kind: type, value: Any, *, tuples: tuple[str, ...] = ()) -> Any:
    """A dataclass from a JSON object; ``tuples`` names the fields that are lists there.

    Raises:
        PlanError: a field is missing, unknown or wrong; the message begins with ``where``.
    """
    if not isinstance(value, dict):
        raise PlanError(f"{where}: expected an object, got {type(value).__name__}")
    check_keys(where, value, tuple(field.name for field in fields(kind)))
    arguments = dict(value)
    for name in tuples:
        arguments[name] = tuple(read_list(f"{where}.{name}", arguments[name]))
    try:
        return kind(**arguments)
    except AutoPipeError as error:
        raise PlanError(f"{where}: {error}") from error


def read_list(where: str, value: Any) -> list[Any]:
    """A JSON list.

    Raises:
        PlanError: it is none.
    """
    if not isinstance(value, list):
        raise PlanError(f"{where}: expected a list, got {type(value).__name__}")
    return value


def read_each(where: str, kind: type, values: Any, *, tuples: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """Dataclasses from a JSON list of objects; see `read`."""
    return tuple(
        read(f"{where}[{index}]", kind, value, tuples=tuples) for index, value in enumerate(read_list(where, values))
    )


def check_keys(where: str, value: Mapping[str, Any], expected: tuple[str, ...]) -> None:
    """Checks the names of an object's fields.

    Raises:
        PlanError: some are missing or unknown.
    """
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
