"""Commands as a user types them, ended with all their processes at a limit."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from recipes.launch import CONFIG_DIR

# Several processes start one after another, and each imports torch: much time on a busy machine.
LIMIT_S = 400.0
# A fit in this process leaves them behind; with LOCAL_RANK set, Lightning waits for processes that others start.
_OF_A_LAUNCHER = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "PL_GLOBAL_SEED", "RANK", "WORLD_SIZE")


def start_command(command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """Start a command in a folder, in a session of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
    environment |= {
        "PYTHONPATH": str(Path(CONFIG_DIR).parent),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end_command(process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a command; at the limit kill it and whatever it started, which gives a status below 0."""
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run_command(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder to its end."""
    return end_command(start_command(command, folder))
