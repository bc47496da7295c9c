"""torchrun starts the processes again after one of them was killed: the script goes on from its last checkpoint."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_autopipe.strategy import AutoPipeStrategy
from tests.strategy import restart_script
from tests.strategy.test_launch import results, start

pytestmark = pytest.mark.filterwarnings("ignore")

SCRIPT = Path(restart_script.__file__)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    restart_script.fit(AutoPipeStrategy(num_microbatches=2), folder, [], devices=1)
    trained: dict[str, torch.Tensor] = torch.load(folder / "trained")
    assert trained["steps"] == 8
    return trained


def agent(folder: Path, what_happens: str, *options: str) -> subprocess.Popen[str]:
    """One of a run's two machines."""
    return start(
        *(sys.executable, "-m", "torch.distributed.run", "--max-restarts=3", "--nproc-per-node=1"),
        *("--rdzv-backend=c10d", *options, str(SCRIPT), str(folder), what_happens),
    )


@pytest.fixture
def endpoint() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"--rdzv-endpoint=127.0.0.1:{listener.getsockname()[1]}"


def test_a_killed_process_and_then_a_lost_machine(
    tmp_path: Path, endpoint: str, uninterrupted: dict[str, torch.Tensor]
) -> None:
    """Both start again after the first; after the second the other one plans anew, for itself."""
    options = ("--nnodes=1:2", endpoint)
    stays = agent(tmp_path, "stays", *options, "--rdzv-conf=is_host=1,last_call_timeout=10")
    lost = agent(tmp_path, "fails", *options, "--rdzv-conf=is_host=0,last_call_timeout=10")
    assert results(stays) == ["RESULT 1 processes"]
    lost.communicate()
    assert sorted(path.name for path in tmp_path.glob("killed *")) == ["killed in 3", "killed in 5"]
    trained = torch.load(tmp_path / "trained")
    assert trained.keys() == uninterrupted.keys()
    for name, value in uninterrupted.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-10, atol=1e-12)
