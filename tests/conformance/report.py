"""Writes what was found of each item on each layout as a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.items import ALL_LAYOUTS

_HEADER = """# What works as on one device

Each line is something that Lightning's users do; it was run on every layout (stages x replicas, a process each) beside
the plain module in one process, with the same losses, gradients, parameters and metrics afterwards (or, where one
device draws or counts otherwise, with what the test says), or is refused with an error. `make conformance` runs them
all and writes this table; `make test` runs two layouts.

"""
_MARKS = {"passed": "yes", "failed": "**no**"}


class ConformanceReport:
    """A plugin of pytest: collects outcomes, and writes the table at the end.

    Lines of items that were not run stay as they are.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[tuple[str, str], dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        if "item" in properties and (report.when == "call" or report.failed):
            key = str(properties["item"]), report.nodeid.split("::")[0]
            layouts = self._found.setdefault(key, {})
            layouts[str(properties["layout"])] = properties["refused"] if report.passed else "failed"

    def pytest_sessionfinish(self) -> None:
        names = [f"{num_stages}x{num_replicas}" for num_stages, num_replicas in ALL_LAYOUTS]
        lines = self._lines()
        for (item, test), layouts in self._found.items():
            marks = [layouts.get(name, "") for name in names]
            lines[item, f"[{test}](../{test})"] = " | ".join(_MARKS.get(mark, mark) for mark in marks)
        heads = [f"| item | {' | '.join(names)} | test |", f"| --- |{' --- |' * (len(names) + 1)}"]
        table = [f"| {item} | {marks} | {test} |" for (item, test), marks in sorted(lines.items())]
        self._path.write_text(_HEADER + "\n".join([*heads, *table]) + "\n")

    def _lines(self) -> dict[tuple[str, str], str]:
        """Of the table as it is, the marks by item and test."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        cells = [line.strip("| ").split(" | ") for line in lines if line.endswith(".py) |")]
        return {(item, test): " | ".join(marks) for item, *marks, test in cells}
