"""How the processes of a run meet, before any of them joins a collective that others might never reach."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from lightning_autopipe.core.errors import ConfigurationError, PipelineRuntimeError
from lightning_autopipe.runtime.members import Member, check_members

T = TypeVar("T")

_LOOK_INTERVAL_S = 0.1
_FAREWELL_S = 3.0
"""How long the process that holds the store waits for the others to read why it ends."""
_ATTEMPT_S = 5.0
"""How long one attempt to connect may take: a host has several addresses, and may come up between two attempts."""
_ANSWER_S = 20.0
"""How long a store that listens may take to answer."""


def meet(own: Member, *, address: str, port: int, timeout_s: float, launched_by: str) -> Store:
    """Wait until all processes of a run are there and have checked each other; give the store in which they met.

    Global rank 0 holds the store, or the launcher's agent where that says so (torchrun).

    Args:
        own: This process.
        address: Where the store is, a host's name or address.
        port: The store's.
        timeout_s: Limit of the whole.
        launched_by: Who told this process its rank, for errors.

    Raises:
        ConfigurationError: The processes do not fit together.
        PipelineRuntimeError: Somebody did not come, or the store cannot be opened or reached.
    """
    deadline = time.monotonic() + timeout_s
    is_host = own.global_rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    store = _open_store(own, address, port, is_host=is_host, timeout_s=timeout_s)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    hall = _Hall(PrefixStore(f"lightning_autopipe/meeting/{attempt}", store), own, is_host=is_host)
    try:
        hall.enter()
        members = hall.wait_for_all(deadline)
        if members is None:
            hall.refuse(
                f"{own} waited {timeout_s:g} s (timeout) at {address}:{port} for global ranks "
                f"{hall.missing()} of {own.world_size}, which did not come; there are "
                f"{', '.join(map(str, hall.present()))}. Its rank comes from {launched_by}: start as many processes "
                "as it says, each with a rank of its own, and see whether the others ended with an error; for "
                "processes that Lightning shall start, unset LOCAL_RANK"
            )
        else:
            check_members(members)
    except ConfigurationError as error:
        hall.tell(str(error))
        raise
    except dist.DistError as error:
        raise PipelineRuntimeError(
            f"{own}: the store at {address}:{port}, held by global rank 0 or the launcher, went away before all "
            f"processes had met; that process ended: {_first_line(error)}"
        ) from error
    return store


class _Hall:
    """The part of the store in which processes introduce themselves."""

    def __init__(self, store: Store, own: Member, *, is_host: bool) -> None:
        self._store = store
        self._own = own
        self._is_host = is_host

    def enter(self) -> None:
        """Take one's place."""
        self._store.add("came", 1)
        introduction = json.dumps(asdict(self._own))
        known = self._store.compare_set(self._key(self._own.global_rank), "", introduction).decode()
        if known != introduction:
            self.refuse(
                f"two processes have global rank {self._own.global_rank}: {Member(**json.loads(known))} and "
                f"{self._own}. Each needs a rank of its own (RANK, or NODE_RANK and LOCAL_RANK, or SLURM_PROCID), and "
                "each run a port of its own (MASTER_PORT)"
            )

    def wait_for_all(self, deadline: float) -> list[Member] | None:
        """All members by global rank; None at the deadline."""
        ranks = range(self._own.world_size)
        while not self._store.check([self._key(global_rank) for global_rank in ranks]):
            if self._store.check(["problem"]):
                self.refuse("")
            if time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK_INTERVAL_S)
        return self.present()

    def present(self) -> list[Member]:
        """Who has come, by global rank."""
        keys = [self._key(global_rank) for global_rank in range(self._own.world_size)]
        return [Member(**json.loads(self._store.get(key))) for key in keys if self._store.check([key])]

    def missing(self) -> list[int]:
        """Who has not."""
        there = {member.global_rank for member in self.present()}
        return [global_rank for global_rank in range(self._own.world_size) if global_rank not in there]

    def refuse(self, problem: str) -> None:
        """End the meeting with the first problem that anybody found.

        Raises:
            PipelineRuntimeError: always.
        """
        raise PipelineRuntimeError(self.tell(problem))

    def tell(self, problem: str) -> str:
        """Make a problem known to those who wait; give the first one. The host stays until they have read it."""
        first = self._store.compare_set("problem", "", problem).decode()
        self._store.add("readers", 1)
        if self._is_host:
            deadline = time.monotonic() + _FAREWELL_S
            with contextlib.suppress(dist.DistError):
                while self._store.add("readers", 0) < self._store.add("came", 0) and time.monotonic() < deadline:
                    time.sleep(_LOOK_INTERVAL_S)
        return first

    @staticmethod
    def _key(global_rank: int) -> str:
        return f"member {global_rank}"


def _open_store(own: Member, address: str, port: int, *, is_host: bool, timeout_s: float) -> Store:
    def open_store() -> Store:
        return dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            is_master=is_host,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )

    began = time.monotonic()
    if not is_host:
        _wait_for_listener(own, address, port, timeout_s)
    left_s = max(timeout_s - (time.monotonic() - began), 1.0)
    try:
        return _within(min(left_s, _ANSWER_S), open_store)
    except TimeoutError:
        raise PipelineRuntimeError(
            f"{own}: whoever listens at {address}:{port} (MASTER_ADDR, MASTER_PORT) does not answer as the run's store "
            "would: global rank 0 has ended, or another program has this port. In that case set MASTER_PORT to a free "
            "one, the same for all processes"
        ) from None
    except dist.DistError as error:
        what = "cannot open the run's store" if is_host else "cannot join the run's store"
        raise PipelineRuntimeError(
            f"{own} {what} at {address}:{port} (MASTER_ADDR, MASTER_PORT): {_first_line(error)}. Is another run or "
            "another process with global rank 0 there? Set MASTER_PORT to a free port, the same for all processes"
        ) from error


def _wait_for_listener(own: Member, address: str, port: int, timeout_s: float) -> None:
    """Wait until something listens: torch's own attempt takes longer than its limit, and is noisy."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            left_s = max(deadline - time.monotonic(), _LOOK_INTERVAL_S)
            with socket.create_connection((address, port), timeout=min(left_s, _ATTEMPT_S)):
                return
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(_LOOK_INTERVAL_S)
                continue
            raise PipelineRuntimeError(
                f"{own} waited {timeout_s:g} s (timeout) for global rank 0 (or the launcher) to listen at "
                f"{address}:{port} (MASTER_ADDR, MASTER_PORT), in vain: {error}. Is global rank 0 running, and is this "
                "the address of its machine, reachable from here? For processes that Lightning shall start, unset "
                "LOCAL_RANK"
            ) from error


def _within(limit_s: float, function: Callable[[], T]) -> T:
    """What the function gives; TimeoutError if it takes longer (torch waits without a limit for a silent listener)."""
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="autopipe-meeting", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
