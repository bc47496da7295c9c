"""Checks of field values that several dataclasses share."""

from __future__ import annotations

import math
from typing import Any

from lightning_autopipe.core.errors import AutoPipeError


def check_int(
    owner: str, name: str, value: Any, *, minimum: int, error: type[AutoPipeError], hint: str | None = None
) -> None:
    """Raises ``error`` unless ``value`` is an integer (a bool is not) of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        tail = f"; {hint}" if hint else ""
        raise error(f"{owner}: {name} must be an integer >= {minimum}, got {value!r}{tail}")


def check_number(
    owner: str, name: str, value: Any, *, error: type[AutoPipeError], minimum: float = 0.0, exclusive: bool = False
) -> None:
    """Raises ``error`` unless ``value`` is a finite number of at least (or, exclusive, above) ``minimum``."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < minimum or (exclusive and value <= minimum):
        raise error(f"{owner}: {name} must be a finite number {'>' if exclusive else '>='} {minimum:g}, got {value!r}")


def check_text(owner: str, name: str, value: Any, *, error: type[AutoPipeError]) -> None:
    """Raises ``error`` unless ``value`` is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise error(f"{owner}: {name} must be a non-empty string, got {value!r}")


def check_tuple(owner: str, name: str, value: Any, of: type, *, error: type[AutoPipeError]) -> None:
    """Raises ``error`` unless ``value`` is a tuple whose members are all of type ``of``."""
    if not isinstance(value, tuple):
        raise error(f"{owner}: {name} must be a tuple of {of.__name__}, got {type(value).__name__}")
    for index, member in enumerate(value):
        if not isinstance(member, of) or (of is int and isinstance(member, bool)):
            raise error(f"{owner}: {name}[{index}] must be {of.__name__}, got {member!r}")


def check_index(owner: str, name: str, value: int, count: int) -> None:
    """Raises IndexError unless ``0 <= value < count`` (negative positions are never meant)."""
    if not 0 <= value < count:
        raise IndexError(f"{owner}: {name} {value} is out of range; there are {count}: 0 to {count - 1}")
