"""What holds for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Nothing is read from or written to the home of whoever runs the tests; processes that tests start inherit it.
os.environ["LIGHTNING_AUTOPIPE_CACHE"] = "off"

# No example fails for being slow on a busy machine.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--layouts", choices=("usual", "all"), default="usual", help="which layouts items are tried on")
    group.addoption("--conformance-report", metavar="FILE", help="where to write the table of items and layouts")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--conformance-report")
    if path is not None and not hasattr(config, "workerinput"):  # with several workers only where reports meet
        from tests.conformance.report import ConformanceReport

        config.pluginmanager.register(ConformanceReport(Path(path)))
