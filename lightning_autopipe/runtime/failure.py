"""Ends all processes of a run soon after one of them fails, and shows the first error everywhere."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.runtime.errors import PipelineRuntimeError
from lightning_autopipe.runtime.failure_board import FailureBoard, Mark, RingWatch
from lightning_autopipe.runtime.failure_record import Failure, is_consequence
from lightning_autopipe.runtime.liveness import ProcessIdentity

_run_numbers = itertools.count()  # every rank makes its monitors in one order, so equal numbers belong together


class FailureMonitor:
    """Watches over the processes of a run, from a thread of its own, through the process group's store.

    ::

        monitor = FailureMonitor(layout)
        monitor.start()
        try:
            with monitor.guard():
                ...                       # anything that may raise, or wait for other ranks
        finally:
            monitor.stop()

    A process that fails publishes its error; the first one stays. Every other process shows it on stderr within a
    second, and is ended (exit code 1) if it has not stopped its monitor `grace_s` later, even if it hangs in a
    collective.

    Every process beats and watches the next one in a ring. One that ended without a word (SIGKILL, `os._exit`) is found
    by its entry in the process table on the same machine, else by beats that stay out for `stale_after_s`. The beats
    come from a thread, so that a process that computes for long is not taken for dead.

    Rank 0 leaving in order ends the watch: so call `stop` where all ranks have come through a common barrier.
    """

    def __init__(
        self,
        layout: ParallelLayout | None = None,
        *,
        grace_s: float = 5.0,
        own_grace_s: float = 20.0,
        stale_after_s: float = 20.0,
        interval_s: float = 0.5,
    ) -> None:
        """Prepare to watch; call it equally often on all ranks, after `init_process_group`.

        Args:
            layout: Tells the stage of a rank, for messages.
            grace_s: How long a process may go on after another one failed.
            own_grace_s: How long a process may go on after it failed itself (it may write a checkpoint).
            stale_after_s: After how long without a beat a process on another machine counts as dead.
            interval_s: Between two looks.
        """
        self.global_rank = dist.get_rank()
        self._others = set(range(dist.get_world_size())) - {self.global_rank}
        self.layout = layout
        """Tells the stage of a rank, for messages."""
        self._grace_s, self._own_grace_s, self._interval_s = grace_s, own_grace_s, interval_s
        run_number = next(_run_numbers)
        self._board, self._thread_board = FailureBoard(run_number), FailureBoard(run_number)
        self._ring = RingWatch(
            self._thread_board,
            global_rank=self.global_rank,
            world_size=dist.get_world_size(),
            stale_after_s=stale_after_s,
        )
        self._stop_event = threading.Event()
        self._thread: threading.Thread | None = None
        self._rank_0_has_left = False
        self._show_once = threading.Lock()  # never released
        self._known_failure: Failure | None = None
        """The first failure, once this process knows it: the store may be gone by the time that it is asked for."""

    def start(self) -> None:
        """Start to beat and to watch."""
        if not self._others or self._thread is not None:
            return
        self._board.introduce(self.global_rank, ProcessIdentity.of_this_process())
        self._thread = threading.Thread(target=self._watch, name="autopipe-failure-monitor", daemon=True)
        self._thread.start()
        atexit.register(self._end_thread)  # a thread inside C++ while the interpreter ends would abort the process

    def stop(self) -> None:
        """Leave the run in an orderly way: this process's end is no failure any more. Never raises."""
        if self._thread is None:
            return
        with contextlib.suppress(RuntimeError):
            if not self._rank_0_has_left and self.first_error() is None:
                self._board.mark(Mark.LEFT, self.global_rank)
                if self.global_rank == 0:
                    # The store may live in this process: the others must know that it may go.
                    self._board.wait_for_marks((Mark.LEFT, Mark.SAW_RANK_0_LEAVE), self._others, limit_s=5.0)
        self._end_thread()
        atexit.unregister(self._end_thread)

    def first_error(self, wait_s: float = 0.0) -> Failure | None:
        """The first published failure; None if there is none within `wait_s` or the store is gone."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                failure = self._board.first_failure()
            except RuntimeError:
                return self._known_failure
            if failure is not None or time.monotonic() >= deadline:
                return failure
            time.sleep(min(0.1, self._interval_s))

    def report(self, error: BaseException, *, wait_s: float = 3.0) -> Failure:
        """Publish an error of this process unless another one was first, and give the first one.

        An error that looks like a consequence (a broken connection, a limit that passed) first waits `wait_s` for its
        cause to be published. Call it as often as convenient.
        """
        own = Failure.of(error, global_rank=self.global_rank, stage_index=self._stage_index(self.global_rank))
        if not self._others:
            return own
        first = self.first_error(wait_s=wait_s if is_consequence(error) else 0.0)
        if first is None:
            self._known_failure = own
            try:
                first = self._known_failure = self._board.publish(own)
            except RuntimeError:
                first = own  # no store, no others to tell
            if self.global_rank == 0 and self._thread is not None:
                with contextlib.suppress(RuntimeError):
                    # Again: the store may end with this process.
                    self._board.wait_for_marks((Mark.SAW_FAILURE, Mark.LEFT), self._others, limit_s=3.0)
        if first.global_rank != self.global_rank:
            self._show(first)
        return first

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Report what is raised inside; in place of a mere consequence raise an error that shows its cause.

        Raises:
            PipelineRuntimeError: Another rank failed first, and the error raised here came from that.
        """
        try:
            yield
        except Exception as error:
            first = self.report(error)
            if first.global_rank == self.global_rank or not is_consequence(error):
                raise
            raise PipelineRuntimeError(
                f"global rank {self.global_rank} cannot go on, because another rank failed first. {first}"
            ) from None  # how the connection broke tells nothing more

    # The thread ---------------------------------------------------------------

    def _watch(self) -> None:
        lost_since: float | None = None
        for count in itertools.count():
            failure = None
            try:
                failure = self._look(count)
                lost_since = None
            except RuntimeError as error:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since >= 2 * self._interval_s:
                    failure = self._known_failure or self._store_is_gone(error)
            if failure is not None:
                self._end_process_after(failure)
                return
            if self._rank_0_has_left or self._stop_event.wait(self._interval_s):
                return

    def _look(self, count: int) -> Failure | None:
        self._thread_board.beat(self.global_rank, count)
        failure = self._thread_board.first_failure()
        if failure is None and self._ring.has_left(0):
            # The run ends, and the store with it if it lives in rank 0's process.
            self._rank_0_has_left = True
            self._thread_board.mark(Mark.SAW_RANK_0_LEAVE, self.global_rank)
            return None
        if failure is None and (dead := self._ring.find_dead()) is not None:
            global_rank, message = dead
            failure = self._thread_board.publish(
                Failure(global_rank=global_rank, stage_index=self._stage_index(global_rank), message=message)
            )
        if failure is not None:
            self._known_failure = failure
            self._thread_board.mark(Mark.SAW_FAILURE, self.global_rank)
        return failure

    def _store_is_gone(self, error: RuntimeError) -> Failure:
        return Failure(
            global_rank=0,
            stage_index=self._stage_index(0),
            message=f"the process that holds the process group's store (rank 0 or the launcher) is gone: {error}",
        )

    def _end_process_after(self, failure: Failure) -> None:
        is_own = failure.global_rank == self.global_rank
        if not is_own:
            self._show(failure)
        grace_s = self._own_grace_s if is_own else self._grace_s
        if self._stop_event.wait(grace_s):
            return
        _write_to_stderr(f"[global rank {self.global_rank}] still running {grace_s:g} s after a failure; ending now.\n")
        os._exit(1)

    # Both threads -------------------------------------------------------------

    def _show(self, failure: Failure) -> None:
        if not self._show_once.acquire(blocking=False):
            return
        _write_to_stderr(
            f"\n[global rank {self.global_rank}] The run ends because another rank failed first. {failure}\n"
            + (f"{failure.traceback.rstrip()}\n" if failure.traceback else "")
        )

    def _stage_index(self, global_rank: int) -> int | None:
        return None if self.layout is None else self.layout.stage_index(global_rank)

    def _end_thread(self) -> None:
        self._stop_event.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
            self._thread = None


def _write_to_stderr(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
