"""The JSON form of Piper's inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.profile_files.graph import Node, Output

_DEGREE = "1"
_KIND = "vanilla"
FORWARD_SHARE = 1 / 3
"""Of the time of a sample, which the files do not divide: a backward is taken to last twice as long as its forward."""


def is_piper(document: Mapping[str, Any]) -> bool:
    """Whether a JSON document has what only this form has."""
    return "nodes" in document and "edges" in document


def read_piper(
    document: Mapping[str, Any], *, source: str, seconds_per_unit: float, microbatch_size: float
) -> list[Node]:
    """The nodes of such a file, in its order, without tensor parallelism and without recomputation.

    Times and bytes are of one sample there, and grow with the micro-batch. What a node keeps is ``memoryUsageA``. Edges
    of one node that carry equally many bytes carry the same value.

    Args:
        document: the file's JSON.
        source: what errors call it.
        seconds_per_unit: of its times.
        microbatch_size: samples that nodes are priced for.

    Raises:
        PlanError: something is missing, no number or below 0, a node comes twice, an edge leads to a node that is not
            there, or nodes have no entry for one device without recomputation.
    """
    nodes = _list(document, "nodes", source)
    edges = _list(document, "edges", source)
    entries: dict[str, tuple[str, str, Mapping[str, Any]]] = {}
    for index, node in enumerate(nodes):
        place = f"{source}: nodes[{index}]"
        key = _key(node, "id", place)
        if key in entries:
            raise PlanError(f"{place}: id {key} comes twice, first in {entries[key][0].removeprefix(f'{source}: ')}")
        name = node.get("name", "")
        if not isinstance(name, str):
            raise PlanError(f"{place}: name must be a text, got {_shown(name)}")
        entries[key] = place, name, _entry(node, place)
    readers: dict[str, dict[float, list[str]]] = {key: {} for key in entries}
    for index, edge in enumerate(edges):
        place = f"{source}: edges[{index}]"
        ends = [_key(edge, end, place) for end in ("sourceId", "destId")]
        for key in ends:
            if key not in entries:
                raise PlanError(f"{place}: names {key}, which is no id of the file's {len(entries)} nodes")
        num_bytes = _number(edge, "communicationCost", place)
        readers[ends[0]].setdefault(num_bytes, []).append(ends[1])
    result = []
    for key, (place, name, entry) in entries.items():
        seconds = _number(entry, "timePerSample", place) * seconds_per_unit * microbatch_size
        result.append(
            Node(
                key=key,
                name=name,
                place=place,
                forward_s=seconds * FORWARD_SHARE,
                backward_s=seconds * (1 - FORWARD_SHARE),
                param_bytes=round(_number(entry, "parameterSize", place)),
                kept_bytes=round(_number(entry, "memoryUsageA", place) * microbatch_size),
                outputs=tuple(
                    Output(num_bytes=round(num_bytes * microbatch_size), readers=tuple(keys))
                    for num_bytes, keys in readers[key].items()
                ),
            )
        )
    return result


def _entry(node: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    degrees = node.get("TMPCs")
    if not isinstance(degrees, dict) or not isinstance(degrees.get(_DEGREE), list):
        known = sorted(degrees) if isinstance(degrees, dict) else _shown(degrees)
        raise PlanError(f'{place}: TMPCs must have a list for degree "{_DEGREE}" (one device), got {known}')
    for entry in degrees[_DEGREE]:
        if isinstance(entry, dict) and entry.get("id") == _KIND:
            return entry
    kinds = [entry.get("id") if isinstance(entry, dict) else entry for entry in degrees[_DEGREE]]
    raise PlanError(f'{place}: TMPCs["{_DEGREE}"] has no entry {_KIND!r} (without recomputation); it has {kinds}')


def _list(document: Mapping[str, Any], name: str, source: str) -> list[Mapping[str, Any]]:
    values = document[name]
    if not isinstance(values, list):
        raise PlanError(f"{source}: {name} must be a list, got {_shown(values)}")
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise PlanError(f"{source}: {name}[{index}] must be an object, got {_shown(value)}")
    return values


def _key(value: Mapping[str, Any], name: str, place: str) -> str:
    key = value.get(name)
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise PlanError(f"{place}: {name} must be an integer or a text, got {_shown(key)}")
    return f"node{key}" if isinstance(key, int) else key


def _number(value: Mapping[str, Any], name: str, place: str) -> float:
    number = value.get(name)
    if isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number) and number >= 0:
        return float(number)
    raise PlanError(f"{place}: {name} must be a finite number >= 0, got {_shown(number)}")


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
