"""A user's script under Lightning's own launcher and under torchrun. Slow, so there are only these."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fit_script.py")
ROOT = Path(__file__).parents[2]


def run(*command: str) -> str:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        environment.pop(name, None)
    # Lightning's handler swallows SIGTERM, so only SIGKILL is sure to end a hang.
    done = subprocess.run(
        ["timeout", "-k", "1", "90", *command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert len(results) == 1, done.stdout + done.stderr
    return results[0]


@pytest.fixture(scope="module")
def expected() -> str:
    return run(sys.executable, str(SCRIPT), "1", "auto")


def test_lightnings_launcher(expected: str) -> None:
    assert run(sys.executable, str(SCRIPT), "2", "autopipe_h") == expected


def test_torchrun(expected: str) -> None:
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT))
    assert run(*command, "2", "autopipe_h") == expected
