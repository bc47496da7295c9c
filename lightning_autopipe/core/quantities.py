"""Quantities as people write them, ``100 Gb/s`` or ``24 GiB``, and back."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

_ONE = Decimal(1)
_DECIMAL = {"": _ONE, "k": _ONE * 10**3, "K": _ONE * 10**3, "M": _ONE * 10**6, "G": _ONE * 10**9, "T": _ONE * 10**12}
_BINARY = {"Ki": _ONE * 2**10, "Mi": _ONE * 2**20, "Gi": _ONE * 2**30, "Ti": _ONE * 2**40}
_PREFIXES = {**_DECIMAL, **_BINARY}
_NUMBER_AND_UNIT = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantityKind:
    """What a quantity is of, and the units that say so."""

    noun: str
    units: Mapping[str, Decimal]
    """Each unit in bytes, bytes per second, or seconds."""
    examples: str
    exclusive: bool
    """Whether zero is refused."""

    def parse(self, text: object) -> float:
        """The value of ``text`` in bytes, bytes per second, or seconds.

        Raises:
            ValueError: no number, no unit or another one, negative, or too large.
        """
        if not isinstance(text, str):
            given = f"{text!r} has no unit" if isinstance(text, (int, float)) and not isinstance(text, bool) else ""
            raise ValueError(f"{given or f'{text!r} is no {self.noun}'}; write a number and a unit: {self.examples}")
        match = _NUMBER_AND_UNIT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is no {self.noun}; write a number and a unit: {self.examples}")
        unit = match[2]
        if unit not in self.units:
            problem = f"unit {unit!r} is none of a {self.noun}" if unit else "has no unit"
            raise ValueError(f"{text!r}: {problem}; write, for example, {self.examples}")
        try:
            # Decimal: 8.21 GB/s are 8.21e9 bytes per second exactly.
            value = float(Decimal(match[1]) * self.units[unit])
        except ArithmeticError:
            value = math.inf
        if not math.isfinite(value) or value < 0 or (self.exclusive and value == 0):
            raise ValueError(f"{text!r}: a {self.noun} is finite and {'> 0' if self.exclusive else '>= 0'}")
        return value


MEMORY = QuantityKind(
    noun="memory size",
    units={f"{prefix}B": factor for prefix, factor in _PREFIXES.items()},
    examples="'24 GiB' or '24 GB'",
    exclusive=True,
)
BANDWIDTH = QuantityKind(
    noun="bandwidth",
    units={
        **{f"{prefix}B/s": factor for prefix, factor in _PREFIXES.items()},
        **{f"{prefix}{bit}": factor / 8 for prefix, factor in _DECIMAL.items() for bit in ("b/s", "bit/s", "bps")},
    },
    examples="'100 Gb/s' (bits) or '12.5 GB/s' (bytes)",
    exclusive=True,
)
_SECONDS = {"s": "1", "ms": "1e-3", "us": "1e-6", "µs": "1e-6", "μs": "1e-6", "ns": "1e-9"}
DURATION = QuantityKind(
    noun="time",
    units={unit: Decimal(factor) for unit, factor in _SECONDS.items()},
    examples="'2 us' or '0.1 ms'",
    exclusive=False,
)


def memory_text(num_bytes: float) -> str:
    """``24 GiB``, or ``24 GB`` where that is the rounder number."""
    whole_decimal = num_bytes >= 1e9 and num_bytes % 1e9 == 0
    return _scaled(num_bytes, _DECIMAL if whole_decimal else {"": _ONE, **_BINARY}, "B")


def bandwidth_text(bytes_per_s: float) -> str:
    """In bytes per second, three digits: ``12.5 GB/s``."""
    return _scaled(bytes_per_s, _DECIMAL, "B/s")


def duration_text(seconds: float) -> str:
    """Three digits: ``2 µs``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0"


def _scaled(value: float, prefixes: Mapping[str, Decimal], unit: str) -> str:
    fitting = [(float(factor), prefix) for prefix, factor in prefixes.items() if value >= factor and prefix != "k"]
    factor, prefix = max(fitting, default=(1.0, ""))
    number = value / factor
    return f"{number:.0f} {prefix}{unit}" if number >= 100 else f"{number:.3g} {prefix}{unit}"
