"""The layouts of the conformance tests."""

from __future__ import annotations

import pytest

from tests.conformance.items import ALL_LAYOUTS, USUAL_LAYOUTS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "layout" in metafunc.fixturenames:
        layouts = ALL_LAYOUTS if metafunc.config.getoption("--layouts") == "all" else USUAL_LAYOUTS
        ids = [f"{num_stages}x{num_replicas}" for num_stages, num_replicas in layouts]
        metafunc.parametrize("layout", layouts, ids=ids)
