"""What all benchmarks do alike: options, spreads, the file of figures, and how they end."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SKIPPED_STATUS = 3
"""Of ``--check`` where nothing could be measured: neither passed nor fallen short."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has; a script may add its own."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--check", action="store_true", help="fail where a figure falls short, or none was measured")
    made.add_argument("--json", type=Path, help="write the figures to this file")
    return made


def environment() -> dict[str, Any]:
    """What the figures were measured with; a script adds its own to it."""
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}


def spread(seconds: Sequence[float]) -> str:
    """Median and extremes, in milliseconds."""
    median, least, most = (1e3 * value for value in (statistics.median(seconds), min(seconds), max(seconds)))
    return f"{median:.1f} [{least:.1f} {most:.1f}] ms"


def at_least(name: str, value: float, wanted: float) -> list[str]:
    """A line where a figure is too small."""
    return [] if value >= wanted else [f"{name}: {value:.4g}, wanted is at least {wanted:.4g}"]


def at_most(name: str, value: float, wanted: float) -> list[str]:
    """A line where a figure is too large."""
    return [] if value <= wanted else [f"{name}: {value:.4g}, wanted is at most {wanted:.4g}"]


def finish(
    options: argparse.Namespace, results: dict[str, Any], shortfalls: Sequence[str], *, skipped: str | None = None
) -> int:
    """Writes the file, prints what falls short, and gives the script's exit status.

    Args:
        options: of `parser`.
        results: the figures.
        shortfalls: a line for each figure that falls short.
        skipped: why nothing was measured; None: it was.
    """
    if options.json:
        ended = {"skipped": skipped} if skipped else {"falls_short": list(shortfalls)}
        options.json.write_text(json.dumps({**results, **ended}, indent=2) + "\n")
    if skipped:
        print(f"SKIPPED, nothing was measured: {skipped}", file=sys.stderr)
        return SKIPPED_STATUS if options.check else 0
    print("\n".join(f"Falls short: {line}" for line in shortfalls) or "Nothing falls short.")
    return 1 if options.check and shortfalls else 0
