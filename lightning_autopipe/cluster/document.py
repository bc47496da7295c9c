"""Reads a YAML or JSON file strictly, and says of each wrong value where in the file it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.quantities import QuantityKind

T = TypeVar("T")
Place = tuple[str | int, ...]
_MAX_BYTES = 64 << 20


class Entry:
    """One value of a document, with its place in it.

    Every method that reads raises `ConfigurationError` with file, line, place, value, and what is allowed.
    """

    def __init__(self, value: Any, *, source: str, path: Place = (), line_of: Callable[[Place], int | None]) -> None:
        self.value = value
        self._source = source
        self._path = path
        self._line_of = line_of

    def error(self, problem: str) -> ConfigurationError:
        """The error to raise for this value."""
        line = self._line_of(self._path)
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self._path).lstrip(".")
        where = self._source if line is None else f"{self._source}:{line}"
        return ConfigurationError(f"{where}: {place}: {problem}" if place else f"{where}: {problem}")

    def mapping(self, *, required: tuple[str, ...] = (), optional: tuple[str, ...] = ()) -> dict[str, Entry]:
        """Members by name: all of ``required``, any of ``optional``, no other."""
        if not isinstance(self.value, dict):
            raise self.error(f"expected a mapping with {_names(required + optional)}, got {_shown(self.value)}")
        allowed = required + optional
        for key in self.value:
            if key not in allowed:
                raise self._member(key).error(f"unknown; allowed are {_names(allowed)}")
        missing = [key for key in required if key not in self.value]
        if missing:
            raise self.error(f"{_names(tuple(missing))} missing; needed are {_names(required)}")
        return {key: self._member(key) for key in self.value}

    def items(self, *, of: str) -> list[Entry]:
        """Members of a list that is not empty."""
        if not isinstance(self.value, list) or not self.value:
            raise self.error(f"expected a list of {of} with at least one, got {_shown(self.value)}")
        return [self._member(index) for index in range(len(self.value))]

    def text(self, *, allow_empty: bool = False) -> str:
        """A string, without the space around it; empty only where that is allowed."""
        if not isinstance(self.value, str) or not (allow_empty or self.value.strip()):
            hint = "" if isinstance(self.value, (dict, list)) else "; put it in quotes if that is the name"
            raise self.error(f"expected a text, got {_shown(self.value)}{hint}")
        return self.value.strip()

    def integer(self, *, minimum: int, maximum: int | None = None) -> int:
        """An integer of at least ``minimum`` and at most ``maximum``."""
        is_integer = isinstance(self.value, int) and not isinstance(self.value, bool)
        if not is_integer or self.value < minimum or (maximum is not None and self.value > maximum):
            bounds = f">= {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise self.error(f"expected an integer {bounds}, got {_shown(self.value)}")
        return int(self.value)

    def number(self) -> int | float:
        """A number; whether it is in its range is left to the type that takes it."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise self.error(f"expected a number, got {_shown(self.value)}")
        return self.value

    def quantity(self, kind: QuantityKind) -> float:
        """A number with a unit, in bytes, bytes per second, or seconds."""
        try:
            return kind.parse(self.value)
        except ValueError as error:
            raise self.error(str(error)) from None

    def choice(self, allowed: tuple[str, ...]) -> str:
        """One of the words of ``allowed``."""
        if not isinstance(self.value, str) or self.value not in allowed:
            raise self.error(f"expected one of {_names(allowed)}, got {_shown(self.value)}")
        return self.value

    def build(self, make: Callable[..., T], **arguments: Any) -> T:
        """What ``make`` gives; its errors name this place."""
        try:
            return make(**arguments)
        except ConfigurationError as error:
            raise self.error(str(error)) from error

    def _member(self, key: str | int) -> Entry:
        value = self.value[key]
        return Entry(value, source=self._source, path=(*self._path, key), line_of=self._line_of)


def read_file(path: Path) -> Entry:
    """The document in a file: JSON where its name ends in ``.json``, else YAML (which JSON is, too).

    Raises:
        ConfigurationError: there is no such file, it cannot be read, or it is neither.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ConfigurationError(f"{path}: {size} bytes are too many for a cluster file; at most {_MAX_BYTES}")
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: not a text file: byte {error.start} is no UTF-8") from error
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror or error}") from error
    return read_text(text, source=str(path), is_json=path.suffix.lower() == ".json")


def read_text(text: str, *, source: str, is_json: bool = False) -> Entry:
    """The document in a text, as `read_file`; ``source`` is what errors call it."""
    try:
        if is_json:
            return Entry(json.loads(text, object_pairs_hook=_unique), source=source, line_of=lambda path: None)
        loader = _StrictLoader(text)
        try:
            node = loader.get_single_node()
            value = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = source if mark is None else f"{source}:{mark.line + 1}"
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigurationError(f"{where}: not YAML: {problem}") from error
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigurationError(f"{source}: not {'JSON' if is_json else 'YAML'}: {problem}") from error
    return Entry(value, source=source, line_of=lambda path: _line(node, path))


# The one in C, where PyYAML has it, reads a large cluster in a tenth of the time.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _StrictLoader(_SafeLoader):  # type: ignore[misc]
    """Safe loading that refuses a key given twice, and reads 1e9 as the number that it is."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key_node.value!r} is no text", problem_mark=key_node.start_mark
                )
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key_node.value!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key_node.value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return mapping


_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _StrictDumper(_SafeDumper):  # type: ignore[misc]
    """Writes texts so that the loader reads them as texts: 1e9 in quotes."""


for _of in (_StrictLoader, _StrictDumper):
    _of.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
        list("-+0123456789"),
    )


def write_yaml(value: Any) -> str:
    """YAML that `read_text` reads as the same value."""
    text: str = yaml.dump(value, Dumper=_StrictDumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"a key is given twice: {sorted({name for name in names if names.count(name) > 1})}")
    return result


def _line(node: yaml.Node | None, path: Place) -> int | None:
    """Line of the value at a path, or of the innermost one around it that is written out."""
    if node is None:
        return None
    line = node.start_mark.line + 1
    for part in path:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line + 1
        elif isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == part]
            if not found:
                return line
            line = found[-1][0].start_mark.line + 1
            node = found[-1][1]
    return int(line)


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
