"""Commands as a user types them, ended with all their processes at a limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from recipes.launch import CONFIG_DIR

# Several processes start one after another, and each imports torch: much time on a busy machine.
LIMIT_S = 400.0


def start_command(command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """Start a command in a folder, in a session of its own."""
    environment = os.environ | {
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
    """Wait for the end of a command; at the limit kill it and whatever it started."""
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run_command(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder to its end."""
    return end_command(start_command(command, folder))
