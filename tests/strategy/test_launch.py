"""A user's script under Lightning's own launcher and under torchrun. Slow, so there are only these."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import describe, run_processes_to_end

SCRIPT = Path(__file__).with_name("fit_script.py")
ROOT = Path(__file__).parents[2]


def start(*command: str) -> subprocess.Popen[str]:
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
    command = ("timeout", "-k", "1", "380", *command)
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results(*processes: subprocess.Popen[str]) -> list[str]:
    """The lines with a result, after all processes have ended well."""
    outputs = [process.communicate() for process in processes]
    shown = "\n".join(stdout + stderr for stdout, stderr in outputs)
    assert all(process.returncode == 0 for process in processes), shown
    return [line for stdout, _ in outputs for line in stdout.splitlines() if line.startswith("RESULT")]


def run_script(*arguments: str) -> None:
    """Run the script as it is in this process, which has imported all that it needs."""
    # What a launcher's process is told, which this is not.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        os.environ.pop(name, None)
    sys.argv = [str(SCRIPT), *arguments]
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.fixture(scope="module")
def expected() -> str:
    """Of one process under Lightning's own strategy."""
    (outcome,) = run_processes_to_end(1, run_script, "1", "auto", initialize_process_group=False, timeout_s=380)
    assert outcome.exit_code == 0, describe([outcome])
    (result,) = [line for line in outcome.output.splitlines() if line.startswith("RESULT")]
    return result


def test_lightnings_launcher(expected: str) -> None:
    """And after the fit the same command again, in the environment that the fit has left."""
    command = (sys.executable, str(SCRIPT), "2", "pipeline")
    assert results(start(*command, "1", *command)) == [expected, expected]


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_processes_of_the_script_s_own(start_method: str, expected: str) -> None:
    """The process that started them has the trained weights and the metrics."""
    assert results(start(sys.executable, str(SCRIPT), "2", start_method)) == [expected]


def test_torchrun_on_two_nodes_of_unlike_numbers_of_processes(expected: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    agents = [
        start(
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node_rank}"),
            *("--master-addr=127.0.0.1", f"--master-port={port}", f"--nproc-per-node={num_processes}"),
            *(str(SCRIPT), str(num_processes), "pipeline", "2"),
        )
        for node_rank, num_processes in enumerate((1, 2))
    ]
    assert results(*agents) == [expected]
