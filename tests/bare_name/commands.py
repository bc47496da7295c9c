"""Runs what a user would run, in the user's environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_OURS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR", "NODE_RANK", "PYTHONPATH")
_SETTINGS = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}


def run(python: Path, *arguments: object, cwd: Path, fails: bool = False, **variables: str) -> str:
    """What a command writes; its exit code must be 0, or another one where it `fails`.

    Its variables have nothing of this checkout, nor of a distributed run around it.
    """
    # Lightning's handler swallows SIGTERM, so only SIGKILL is sure to end a hang.
    command = ["timeout", "-k", "1", "200", str(python), *(str(argument) for argument in arguments)]
    kept = {name: value for name, value in os.environ.items() if name not in _OURS}
    environment = {**kept, **_SETTINGS, **variables}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, output
    return output
