"""Finds out in which form a profile is, and reads it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from lightning_autopipe.core._checks import check_number, check_text
from lightning_autopipe.core.errors import ConfigurationError, PlanError
from lightning_autopipe.core.profile import ModelProfile
from lightning_autopipe.profile_files.graph import profile_of_graph
from lightning_autopipe.profile_files.piper import is_piper, read_piper
from lightning_autopipe.profile_files.text_graph import is_text_graph, read_text_graph

TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""In seconds."""
UNNAMED_DEVICE = "the profiled device"
_MAX_BYTES = 64 << 20
_SIZE_IN_NAME = re.compile(r"-pbs-(\d+)$")


def load_profile(
    path: str | os.PathLike[str],
    *,
    time_unit: str | None = None,
    microbatch_size: float | None = None,
    device_model: str | None = None,
) -> ModelProfile:
    """The profile in a file: our own JSON, Piper's JSON, or the text graphs of PipeDream and DAPPLE.

    Files of other planners say neither the unit of their times nor what they were measured on, and only some in their
    name how many samples a micro-batch has.

    Args:
        path: of the file; what is in it tells the form.
        time_unit: ``"s"``, ``"ms"`` or ``"us"``; None: milliseconds in text graphs, seconds in Piper's files. Piper's
            own ``resnet.json`` needs ``"ms"``: it was made from PipeDream's, and a sample of it is a whole minibatch.
        microbatch_size: samples in a micro-batch; None: from a file name that ends in ``-pbs-K``, else 1. Times and
            bytes of text graphs are of one micro-batch, whatever its size; those of Piper's files are of one sample.
        device_model: what was profiled, as clusters name it; None: a name that no cluster has, so that devices count
            by their relative speed.

    Raises:
        PlanError: the file cannot be read, is of none of these forms, or something in it is wrong: file, line or
            place, value, and what is allowed.
        ConfigurationError: an option is wrong, or given for a profile that says it itself.
    """
    _check_options(time_unit, microbatch_size, device_model)
    source, text = str(path), _read(Path(path))
    size = _size_in_name(Path(path)) if microbatch_size is None else microbatch_size
    if text.lstrip().startswith("{"):
        document = _json(text, source)
        if not is_piper(document):
            given = {"time_unit": time_unit, "microbatch_size": microbatch_size, "device_model": device_model}
            return _own(document, text, source, [name for name, value in given.items() if value is not None])
        seconds_per_unit = TIME_UNITS[time_unit or "s"]
        nodes = read_piper(document, source=source, seconds_per_unit=seconds_per_unit, microbatch_size=size)
    elif is_text_graph(text):
        nodes = read_text_graph(text, source=source, seconds_per_unit=TIME_UNITS[time_unit or "ms"])
    else:
        raise PlanError(
            f"{source}: no profile: it is neither JSON nor does it begin with a node (nodeN -- name -- "
            "forward_compute_time=…); allowed are profiles that were saved here, PipeDream's and DAPPLE's text graphs, "
            "and Piper's JSON"
        )
    return profile_of_graph(nodes, source=source, device_model=device_model or UNNAMED_DEVICE, microbatch_size=size)


def _own(document: dict[str, Any], text: str, source: str, given: list[str]) -> ModelProfile:
    if "layers" not in document:
        raise PlanError(
            f"{source}: no profile: JSON with {', '.join(sorted(document)) or 'nothing'}; a profile that was saved "
            "here has layers, one of Piper's has nodes and edges"
        )
    if given:
        raise ConfigurationError(
            f"{source}: {', '.join(given)} given, but a profile that was saved here says it itself"
        )
    try:
        return ModelProfile.from_json(text)
    except PlanError as error:
        raise PlanError(f"{source}: {error}") from error


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise PlanError(f"{path}: {size} bytes are too many for a profile; at most {_MAX_BYTES}")
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: not a text file: byte {error.start} is no UTF-8") from error
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not text.strip():
        raise PlanError(f"{path}: empty; expected a profile")
    return text


def _json(text: str, source: str) -> dict[str, Any]:
    try:
        document = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise PlanError(f"{source}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise PlanError(f"{source}: not JSON: {problem}") from error
    assert isinstance(document, dict), "a text that begins with { and is JSON is an object"
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"a key is given twice: {sorted({name for name in names if names.count(name) > 1})}")
    return result


def _size_in_name(path: Path) -> float:
    match = _SIZE_IN_NAME.search(path.stem)
    return float(match[1]) if match and int(match[1]) else 1.0


def _check_options(time_unit: str | None, microbatch_size: float | None, device_model: str | None) -> None:
    if time_unit is not None and time_unit not in TIME_UNITS:
        raise ConfigurationError(f"time_unit must be one of {', '.join(TIME_UNITS)}, got {time_unit!r}")
    if microbatch_size is not None:
        check_number("load_profile", "microbatch_size", microbatch_size, error=ConfigurationError, exclusive=True)
    if device_model is not None:
        check_text("load_profile", "device_model", device_model, error=ConfigurationError)
