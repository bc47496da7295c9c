"""How the processes of a run meet, before any of them joins a collective that others might never reach."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from lightning_autopipe.core.errors import ConfigurationError, PipelineRuntimeError
from lightning_autopipe.runtime.members import Member, check_members, check_world_size

T = TypeVar("T")

_ROUND = "lightning_autopipe/round"
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
    hall = _Hall(store, own, is_host=is_host)
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
    return hall.store_of_round


class _Hall:
    """The part of the store in which processes introduce themselves.

    A launcher that starts processes again (torchrun, after a failure or with other machines) keeps its store, with what
    those before have left in it. So processes meet in rounds: global rank 0 opens one, and closes it with the list of
    all who are in it; who is elsewhere goes on to the newest one. How often a launcher has started them is no name for
    a round: the agents of several machines count for themselves.
    """

    def __init__(self, store: Store, own: Member, *, is_host: bool) -> None:
        self._whole_store = store
        self._own = own
        self._is_host = is_host
        self._round = 0

    @property
    def store_of_round(self) -> Store:
        """The store as nobody before has used it."""
        return PrefixStore(f"lightning_autopipe/round {self._round}", self._whole_store)

    @property
    def _store(self) -> Store:
        return PrefixStore("meeting", self.store_of_round)

    def enter(self) -> None:
        """Take one's place: global rank 0 in a round of its own, others in the newest."""
        self._round = self._whole_store.add(_ROUND, int(self._own.global_rank == 0))
        self._store.add("came", 1)
        self._store.compare_set(self._key(self._own.global_rank), "", self._own.to_json())

    def wait_for_all(self, deadline: float) -> list[Member] | None:
        """All members by global rank; None at the deadline.

        Raises:
            ConfigurationError: Global rank 0 counts other processes.
            PipelineRuntimeError: Somebody found a problem, or has this process's global rank.
        """
        keys = [self._key(global_rank) for global_rank in range(self._own.world_size)]
        while True:
            if self._own.global_rank == 0 and self._store.check(keys):
                self._store.set("closed", json.dumps([member.to_json() for member in self.present()]))
            if self._store.check(["closed"]):
                members = [Member.from_json(text) for text in json.loads(self._store.get("closed"))]
                if self._own in members:
                    return members
            if self._store.check(["problem"]):
                self.refuse("")
            is_late = time.monotonic() >= deadline
            first = self.present(1)
            # Where global rank 0 is not there yet, or of an earlier start, a round of its own is still to come, and
            # what ended this one would never reach it.
            if first and (is_late or first[0].identity.is_running()):
                check_world_size([first[0], self._own])
                self._check_place()
            if self._whole_store.add(_ROUND, 0) != self._round:
                self.enter()
            elif is_late:
                return None
            time.sleep(_LOOK_INTERVAL_S)

    def _check_place(self) -> None:
        """End the meeting if another process has this one's global rank.

        Raises:
            PipelineRuntimeError: That is so.
        """
        known = Member.from_json(self._store.get(self._key(self._own.global_rank)).decode())
        if known != self._own and known.identity.is_running():
            self.refuse(
                f"two processes have global rank {self._own.global_rank}: {known} and "
                f"{self._own}. Each needs a rank of its own (RANK, or NODE_RANK and LOCAL_RANK, or SLURM_PROCID), and "
                "each run a port of its own (MASTER_PORT)"
            )

    def present(self, world_size: int | None = None) -> list[Member]:
        """Who has come, by global rank; of the first so many."""
        keys = [self._key(global_rank) for global_rank in range(world_size or self._own.world_size)]
        return [Member.from_json(self._store.get(key)) for key in keys if self._store.check([key])]

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
