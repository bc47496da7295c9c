"""Whether a process on this machine still runs, without asking it."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """Which process, beyond its number: numbers are used again, and differ between machines and containers."""

    machine: str
    """Boot identifier and process-number namespace; empty where the system does not tell."""
    pid: int
    start_ticks: int
    """When it started, in the kernel's clock ticks."""

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """The identity of the process that asks."""
        pid = os.getpid()
        state = _state_and_start(pid)
        return cls(machine=_machine(), pid=pid, start_ticks=0 if state is None else state[1])

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def is_running(self) -> bool | None:
        """True or False where this machine can tell; None for a process elsewhere."""
        machine = _machine()
        if not machine or machine != self.machine:
            return None
        state = _state_and_start(self.pid)
        return state is not None and state[1] == self.start_ticks and state[0] not in ("Z", "X", "x")


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """The process's state letter and start, from /proc; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
    return fields[0], int(fields[19])
