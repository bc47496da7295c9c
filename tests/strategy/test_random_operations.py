"""Some random operations with a fixed seed; benchmarks/random_operations.py runs them for half an hour."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness import run_processes
from tests.strategy.random_operations import left_behind, operate

pytestmark = pytest.mark.filterwarnings("ignore")

SECONDS = float(os.environ.get("AUTOPIPE_RANDOM_SECONDS", "10"))


def test_random_operations(tmp_path: Path) -> None:
    found = run_processes(4, operate, 1, SECONDS, tmp_path, initialize_process_group=False, timeout_s=SECONDS + 150)
    assert not found[0].wrong, "\n".join(found[0].wrong)
    assert not left_behind(found, most_memory_bytes=64 * 2**20)
