"""The text form of PipeDream and DAPPLE: nodes, then edges, one a line."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.profile_files.graph import Node, Output

_NODE = re.compile(
    r"(?P<key>\S+) -- (?P<name>.*) -- forward_compute_time=(?P<forward>[^,]*), "
    r"backward_compute_time=(?P<backward>[^,]*), activation_size=(?P<activation>[^,]*), "
    r"parameter_size=(?P<parameter>[^,]*?)(?: -- stage_id=\S+)?"
)
_EDGE = re.compile(r"(\S+) -- (\S+)")
_EXPECTED = (
    "a node (nodeN -- name -- forward_compute_time=…, backward_compute_time=…, activation_size=…, parameter_size=…) "
    "or, indented, an edge (nodeN -- nodeM)"
)


def is_text_graph(text: str) -> bool:
    """Whether the first line that is not empty is one of this form."""
    lines = (line for line in text.splitlines() if line.strip())
    first = next(lines, "")
    return " -- " in first and "forward_compute_time" in first


def read_text_graph(text: str, *, source: str, seconds_per_unit: float) -> list[Node]:
    """The nodes of such a file, in its order.

    Sizes are bytes of one micro-batch. A list of sizes, ``[a; b]``, is several outputs: where there are as many edges,
    each of them carries one, in their order; else every output is needed until the last reader of any.

    Args:
        text: of the file.
        source: what errors call it.
        seconds_per_unit: of its times.

    Raises:
        PlanError: a line is neither node nor edge, a number is none or below 0, a node comes twice, an edge leads to
            a node that is not there.
    """
    found: dict[str, tuple[int, re.Match[str]]] = {}
    edges: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        if line[0].isspace():
            edge = _EDGE.fullmatch(line.strip())
            if edge is None:
                raise PlanError(f"{source}:{number}: {_shown(line)} is no edge; expected {_EXPECTED}")
            edges.setdefault((edge[1], edge[2]), number)
            continue
        node = _NODE.fullmatch(line.strip())
        if node is None:
            raise PlanError(f"{source}:{number}: {_shown(line)} is no node; expected {_EXPECTED}")
        if node["key"] in found:
            raise PlanError(f"{source}:{number}: {node['key']} comes twice, first in line {found[node['key']][0]}")
        found[node["key"]] = number, node
    readers: dict[str, list[str]] = {key: [] for key in found}
    for ends, number in edges.items():
        for key in ends:
            if key not in found:
                raise PlanError(
                    f"{source}:{number}: the edge {' -- '.join(ends)} names {key}, which is no node of the file (it "
                    f"has {len(found)})"
                )
        readers[ends[0]].append(ends[1])
    return [
        _node(match, readers[key], place=f"{source}:{number}", seconds_per_unit=seconds_per_unit)
        for key, (number, match) in found.items()
    ]


def _node(match: re.Match[str], readers: Sequence[str], *, place: str, seconds_per_unit: float) -> Node:
    sizes = _sizes(match["activation"], place)
    if len(sizes) == len(readers):
        outputs = tuple(Output(num_bytes=size, readers=(key,)) for size, key in zip(sizes, readers, strict=True))
    else:
        outputs = tuple(Output(num_bytes=size, readers=tuple(readers)) for size in sizes)
    return Node(
        key=match["key"],
        name=match["name"],
        place=place,
        forward_s=_number(match["forward"], "forward_compute_time", place) * seconds_per_unit,
        backward_s=_number(match["backward"], "backward_compute_time", place) * seconds_per_unit,
        param_bytes=round(_number(match["parameter"], "parameter_size", place)),
        kept_bytes=sum(sizes),
        outputs=outputs,
    )


def _sizes(text: str, place: str) -> list[int]:
    text = text.strip()
    is_list = text.startswith("[") and text.endswith("]")
    return [round(_number(part, "activation_size", place)) for part in (text[1:-1].split(";") if is_list else [text])]


def _number(text: str, name: str, place: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise PlanError(f"{place}: {name} must be a finite number >= 0, got {text.strip()!r}")
    return value


def _shown(line: str) -> str:
    line = line.strip()
    return repr(line if len(line) <= 60 else f"{line[:57]}...")
