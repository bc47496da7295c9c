"""Servers that are network namespaces of this machine, joined by a link of limited bandwidth."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from lightning_autopipe.core.errors import AutoPipeError

INTERFACE = "link0"
"""Name of each server's end of the link."""
_PREFIX = "autopipe"
_RUN = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_LIMIT_S = 20.0
_BURST_BYTES = 4_000
"""What may pass at full speed after a pause: little more than one frame."""
_TCP_SETTINGS = ("net.ipv4.tcp_congestion_control=reno", "net.ipv4.tcp_slow_start_after_idle=0")
"""With these, messages of some 100 kB from several connections share a link about evenly and keep it full.

With `bbr`, the default of some systems, a connection keeps for seconds to the rate that it once found, so that the last
of three uses a third of the link. With short buffers what is under way waits for acknowledgements, which stand in the
other direction's queue.
"""
_NETWORK = "10.123.45"
_QUEUE_BYTES = 16_000_000
"""Enough for all that is under way at a time: nothing is dropped."""


class NamespacesUnavailableError(AutoPipeError):
    """This machine, or this user, cannot make network namespaces with limited links."""


@contextlib.contextmanager
def two_servers(bits_per_s: float) -> Iterator[tuple[str, str]]:
    """Makes two network namespaces with a link between them; they are gone afterwards, whatever happens.

    The link carries so many bits per second (frames with their headers) in each direction. Each direction is one queue
    (`tbf`, a token bucket) of frames of all connections.

    Raises:
        NamespacesUnavailableError: that is not possible here.
    """
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise NamespacesUnavailableError(f"there is no command {command!r} (iproute2)")
    _remove_left_over()
    names = tuple(f"{_PREFIX}-{os.getpid()}-{letter}" for letter in "ab")
    try:
        for name in names:
            _call("ip", "netns", "add", name)
            _call("ip", "-n", name, "link", "set", "lo", "up")
            for setting in _TCP_SETTINGS:
                _call("ip", "netns", "exec", name, "sysctl", "-q", "-w", setting)
        first, second = names
        _call("ip", "-n", first, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        for number, name in enumerate(names, start=1):
            _call("ip", "-n", name, "address", "add", f"{_NETWORK}.{number}/24", "dev", INTERFACE)
            _call("ip", "-n", name, "link", "set", INTERFACE, "up")
            rate, burst, queue = f"{bits_per_s:.0f}bit", f"{_BURST_BYTES}b", f"{_QUEUE_BYTES}b"
            limited = ("root", "tbf", "rate", rate, "burst", burst, "limit", queue)
            _call("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, *limited)
        yield first, second
    finally:
        for name in names:
            _remove(name)


def enter_namespace(name: str) -> None:
    """Moves this thread, and those that it starts, into a network namespace.

    Raises:
        OSError: it cannot.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with (_RUN / name).open("rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, f"cannot enter network namespace {name}: {os.strerror(error)}")


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip() or f"status {done.returncode}"
        raise NamespacesUnavailableError(f"`{' '.join(command)}` failed: {reason}")


def _remove(name: str) -> None:
    # The link goes with the last process in the namespace at the latest.
    subprocess.run(("ip", "netns", "delete", name), capture_output=True, timeout=_LIMIT_S, check=False)


def _remove_left_over() -> None:
    """Removes namespaces of processes that were killed."""
    for path in _RUN.glob(f"{_PREFIX}-*-[ab]"):
        process = path.name.split("-")[1]
        if process.isdigit() and not Path("/proc", process).exists():
            _remove(path.name)
