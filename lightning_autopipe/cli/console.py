"""Where commands print their tables."""

from __future__ import annotations

import os
from collections.abc import Iterable

from rich.console import Console

_WIDTH_OF_FILES = 120


def make_console() -> Console:
    """The terminal as wide as it is; a file or a pipe wide enough for every table, unless COLUMNS says how wide."""
    console = Console()
    if console.is_terminal or os.environ.get("COLUMNS", "").isdigit():
        return console
    return Console(width=_WIDTH_OF_FILES)


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """Print what was taken for granted, a line each."""
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False)
