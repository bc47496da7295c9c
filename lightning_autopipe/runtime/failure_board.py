"""What the processes of a run tell each other about life and death, in the process group's store."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from datetime import timedelta
from enum import Enum

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from lightning_autopipe.runtime.failure_record import Failure
from lightning_autopipe.runtime.liveness import ProcessIdentity

_FIRST_FAILURE = "first failure"


class Mark(Enum):
    """What a rank can say once."""

    LEFT = "left"
    """It has left the run in an orderly way."""
    SAW_FAILURE = "saw failure"
    """It knows the first failure."""
    SAW_RANK_0_LEAVE = "saw rank 0 leave"
    """It knows that rank 0, in whose process the store may live, has left in an orderly way."""


class FailureBoard:
    """One thread's connection to the common board; every method raises RuntimeError once the store is gone.

    A store's connection is not safe between a thread that waits in it and another one: each thread takes its own board.
    """

    def __init__(self, run_number: int) -> None:
        store: Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._store = PrefixStore(f"lightning_autopipe/failure/{run_number}", store)
        self._store.set_timeout(timedelta(seconds=10))

    def first_failure(self) -> Failure | None:
        """The first failure that was published."""
        if not self._store.check([_FIRST_FAILURE]):
            return None
        return Failure.from_json(self._store.get(_FIRST_FAILURE))

    def publish(self, failure: Failure) -> Failure:
        """Publish a failure unless there is one; give the one that is there."""
        return Failure.from_json(self._store.compare_set(_FIRST_FAILURE, "", failure.to_json()))

    def mark(self, mark: Mark, global_rank: int) -> None:
        """Say something for a rank."""
        self._store.set(f"{mark.value} {global_rank}", "1")

    def is_marked(self, mark: Mark, global_rank: int) -> bool:
        """Whether a rank has said it."""
        return self._store.check([f"{mark.value} {global_rank}"])

    def wait_for_marks(self, marks: Collection[Mark], global_ranks: Collection[int], *, limit_s: float) -> None:
        """Wait until each rank has said one of the things, at most `limit_s`."""
        deadline = time.monotonic() + limit_s
        waiting = set(global_ranks)
        while True:
            waiting = {rank for rank in waiting if not any(self.is_marked(mark, rank) for mark in marks)}
            if not waiting or time.monotonic() >= deadline:
                return
            time.sleep(0.05)

    def introduce(self, global_rank: int, identity: ProcessIdentity) -> None:
        """Tell which process runs a rank."""
        self._store.set(f"who {global_rank}", json.dumps(identity.to_dict()))

    def beat(self, global_rank: int, count: int) -> None:
        """Give a sign of life."""
        self._store.set(f"beat {global_rank}", str(count))

    def last_sign(self, global_rank: int) -> tuple[ProcessIdentity, bytes] | None:
        """Which process runs a rank and its latest sign of life; None before the first one."""
        if not self._store.check([f"who {global_rank}", f"beat {global_rank}"]):
            return None
        identity = ProcessIdentity(**json.loads(self._store.get(f"who {global_rank}")))
        return identity, self._store.get(f"beat {global_rank}")


class RingWatch:
    """Finds the death of the next rank in the ring that has not left."""

    def __init__(self, board: FailureBoard, *, global_rank: int, world_size: int, stale_after_s: float) -> None:
        self._board = board
        self._following = [(global_rank + distance) % world_size for distance in range(1, world_size)]
        self._stale_after_s = stale_after_s
        self._left: set[int] = set()
        self._last_change: dict[int, tuple[bytes, float]] = {}
        self._suspects: set[int] = set()

    def has_left(self, global_rank: int) -> bool:
        """Whether a rank has left the run in an orderly way."""
        if global_rank not in self._left and self._board.is_marked(Mark.LEFT, global_rank):
            self._left.add(global_rank)
        return global_rank in self._left

    def find_dead(self) -> tuple[int, str] | None:
        """The rank that died, and how that shows; None while all is well."""
        watched = next((rank for rank in self._following if not self.has_left(rank)), None)
        sign = None if watched is None else self._board.last_sign(watched)
        if watched is None or sign is None:
            return None
        identity, beat = sign
        is_running = identity.is_running()
        if is_running is False:
            # Its last word ("left") may still be under way to the store: look once more.
            if watched in self._suspects:
                return watched, "its process ended without an error (killed, out of memory, os._exit, or a crash)"
            self._suspects.add(watched)
            return None
        now = time.monotonic()
        last_change = self._last_change.get(watched)
        if last_change is None or last_change[0] != beat:
            self._last_change[watched] = (beat, now)
        elif is_running is None and now - last_change[1] > self._stale_after_s:
            return watched, f"no sign of life for {self._stale_after_s:g} s (its machine or the network is down)"
        return None
