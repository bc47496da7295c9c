"""Run one function in several real processes, with a hard limit on everything.

Use it for tests that need `torch.distributed` or a Lightning `Trainer` on several ranks::

    from tests.harness import run_processes

    def sum_over_ranks(value: float) -> float:            # at module level, so that it can be pickled by name
        total = torch.tensor(value + dist.get_rank())
        dist.all_reduce(total)
        return float(total)

    def test_sum() -> None:
        assert run_processes(2, sum_over_ranks, 1.0) == [3.0, 3.0]     # one value per global rank

A function that builds a `Trainer` starts its process group itself, from the environment (``env://``)::

    run_processes(2, fit_tiny_module, initialize_process_group=False)

RANK, LOCAL_RANK, WORLD_SIZE and MASTER_ADDR are set in both cases, MASTER_PORT in the second. With LOCAL_RANK set,
Lightning starts no processes of its own: give ``Trainer(accelerator="cpu", devices=num_processes, ...)``. The port is
free of races: the kernel chooses it for a store that already listens before any process starts, and the processes join
it as torchrun's workers join their agent's store.

Tests *about* failures use `run_processes_to_end`, which never raises and tells for each rank how it ended and what it
printed.

Processes are forked from one server that has torch and Lightning loaded (about 6 s the first time, then 0.1 to 1 s a
run). Each has one thread, the loopback interface, a session of its own and a hard limit; on a hang the tracebacks of
all threads are dumped, then SIGKILL. Arguments and return values travel by `pickle`; CPU tensors are fine. Use
`functools.partial` for keyword arguments.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

PROCESS_GROUP_TIMEOUT_S = 20.0
_PRELOADED = ["tests.preloaded"]
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOutcome:
    """How one process ended."""

    global_rank: int
    exit_code: int | None
    """As in `multiprocessing`: negative for a signal, None if it could not even be killed."""
    returned: bool
    value: Any
    traceback: str | None
    """Of the exception that left the function, if one did."""
    output: str
    """Everything that the process wrote to stdout and stderr."""
    killed_by_harness: bool
    """True if it was still running at the limit."""
    ended_after_s: float


class ProcessesFailedError(AssertionError):
    """A process raised, died or was still running at the limit; the message has every rank's traceback and output."""


def run_processes(
    num_processes: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    initialize_process_group: bool = True,
    environment: Mapping[str, str] | None = None,
    rank_0_hosts_store: bool = False,
    process_group_timeout_s: float = PROCESS_GROUP_TIMEOUT_S,
) -> list[Any]:
    """Return `function(*args)` of every process, by global rank.

    Args:
        num_processes: World size.
        function: A module-level function; called in every process with `args`.
        timeout_s: Hard limit; after it the tracebacks of all threads are dumped and the processes killed.
        initialize_process_group: Start the default group (gloo, FileStore) before the call. False for functions that
            do it themselves.
        environment: More variables for every process.
        rank_0_hosts_store: With ``env://``, let rank 0's process hold the store, as it does under Lightning's own
            launcher: the store then dies with that process. By default the test's own process holds it, as
            torchrun's agent does.
        process_group_timeout_s: Limit of the default group's operations.

    Raises:
        ProcessesFailedError: A process raised, ended with another code than 0, or ran past the limit.
    """
    outcomes = run_processes_to_end(
        num_processes,
        function,
        *args,
        timeout_s=timeout_s,
        initialize_process_group=initialize_process_group,
        environment=environment,
        rank_0_hosts_store=rank_0_hosts_store,
        process_group_timeout_s=process_group_timeout_s,
        grace_after_failure_s=5.0,
    )
    if not all(outcome.returned and outcome.exit_code == 0 for outcome in outcomes):
        raise ProcessesFailedError(describe(outcomes))
    return [outcome.value for outcome in outcomes]


def run_processes_to_end(
    num_processes: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    initialize_process_group: bool = True,
    environment: Mapping[str, str] | None = None,
    rank_0_hosts_store: bool = False,
    process_group_timeout_s: float = PROCESS_GROUP_TIMEOUT_S,
    grace_after_failure_s: float | None = None,
) -> list[ProcessOutcome]:
    """Like `run_processes`, but tell how every process ended instead of raising.

    `grace_after_failure_s` is how long the others may go on after one has failed; None means up to `timeout_s`.
    """
    job = _Job(
        call=pickle.dumps((function, args)),
        num_processes=num_processes,
        timeout_s=timeout_s,
        initialize_process_group=initialize_process_group,
        environment=dict(environment or {}),
        rank_0_hosts_store=rank_0_hosts_store,
        process_group_timeout_s=process_group_timeout_s,
    )
    context = _forkserver_context()
    with tempfile.TemporaryDirectory(prefix="autopipe-test-", ignore_cleanup_errors=True) as name, _store(job) as port:
        directory = Path(name)
        processes = [
            context.Process(target=_run_in_process, args=(job, global_rank, str(directory), port))
            for global_rank in range(num_processes)
        ]
        try:
            started = time.monotonic()
            with _without_main_module():
                for process in processes:
                    process.start()
            ended_after_s, killed = _wait(processes, started, timeout_s, grace_after_failure_s)
        finally:
            _kill(processes)
        return [
            _outcome(directory, global_rank, process, ended_after_s[global_rank], global_rank in killed)
            for global_rank, process in enumerate(processes)
        ]


def describe(outcomes: list[ProcessOutcome]) -> str:
    """Every rank's end, traceback and output as one text."""
    parts = []
    for outcome in outcomes:
        end = "killed: still running at the limit" if outcome.killed_by_harness else f"exit code {outcome.exit_code}"
        parts.append(f"--- global rank {outcome.global_rank}: {end} after {outcome.ended_after_s:.1f} s ---")
        if outcome.traceback:
            parts.append(outcome.traceback.rstrip())
        if outcome.output:
            parts.append(f"[output]\n{outcome.output[-12_000:].rstrip()}")
    return "\n".join(["", *parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    call: bytes
    num_processes: int
    timeout_s: float
    initialize_process_group: bool
    environment: dict[str, str]
    rank_0_hosts_store: bool
    process_group_timeout_s: float


# In the test's own process -------------------------------------------------------------------------


def _forkserver_context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with _variables({**_ONE_THREAD, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}):
        multiprocessing.forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    # multiprocessing would import pytest's own main file again in every process; the functions come from other modules.
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    is_pytest = main.__dict__.get("__package__") == "pytest" or (file and Path(file).stem in ("pytest", "py.test"))
    if not is_pytest:
        yield
        return
    main.__spec__ = None
    main.__dict__.pop("__file__", None)
    try:
        yield
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file


@contextlib.contextmanager
def _store(job: _Job) -> Iterator[int | None]:
    """Give the port of a listening store, or None where no process will ask for it here."""
    if job.initialize_process_group or job.rank_0_hosts_store:
        yield None
        return
    store = _listening_store()
    yield store.port
    del store


def _listening_store() -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def _wait(
    processes: list[ForkServerProcess], started: float, timeout_s: float, grace_after_failure_s: float | None
) -> tuple[list[float], set[int]]:
    deadline = started + timeout_s
    ended_after_s = [0.0] * len(processes)
    running = set(range(len(processes)))
    failed = False
    while running and time.monotonic() < deadline:
        multiprocessing.connection.wait([processes[i].sentinel for i in running], timeout=deadline - time.monotonic())
        for i in sorted(running):
            if processes[i].is_alive():
                continue
            running.discard(i)
            ended_after_s[i] = time.monotonic() - started
            if processes[i].exitcode != 0 and not failed and grace_after_failure_s is not None:
                failed = True
                deadline = min(deadline, time.monotonic() + grace_after_failure_s)
    for i in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[i].pid or 0, signal.SIGUSR1)  # faulthandler: the tracebacks of all threads
        ended_after_s[i] = time.monotonic() - started
    if running:
        time.sleep(0.5)
    return ended_after_s, running


def _kill(processes: list[ForkServerProcess]) -> None:
    for process in processes:
        if process.pid is None:
            continue
        # The whole session, so that data loader workers go too; it may also be gone already.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join(timeout=5)


def _outcome(
    directory: Path, global_rank: int, process: ForkServerProcess, ended_after_s: float, killed: bool
) -> ProcessOutcome:
    value, error, returned = None, None, False
    result = directory / f"result-{global_rank}"
    if result.exists():
        returned, value, error = pickle.loads(result.read_bytes())
    output = directory / f"output-{global_rank}"
    return ProcessOutcome(
        global_rank=global_rank,
        exit_code=process.exitcode,
        returned=returned,
        value=value,
        traceback=error,
        output=output.read_text(errors="replace") if output.exists() else "",
        killed_by_harness=killed,
        ended_after_s=ended_after_s,
    )


# In each started process ---------------------------------------------------------------------------


def _run_in_process(job: _Job, global_rank: int, directory_name: str, port: int | None) -> None:
    directory = Path(directory_name)
    with contextlib.suppress(PermissionError):
        os.setsid()
    _redirect_output(directory / f"output-{global_rank}")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Should the test's own process be gone at the limit, nobody else ends this one.
    faulthandler.dump_traceback_later(job.timeout_s + 10, exit=True)
    result: tuple[bool, Any, str | None] = (False, None, None)
    exit_code = 0
    try:
        result = (True, _call(job, global_rank, directory, port), None)
    except SystemExit as error:
        exit_code = error.code if isinstance(error.code, int) else int(error.code is not None)
        result = (exit_code == 0, None, traceback.format_exc())
    except BaseException:
        exit_code = 1
        result = (False, None, traceback.format_exc())
    partial = directory / f"partial-{global_rank}"
    partial.write_bytes(pickle.dumps(result))
    partial.rename(directory / f"result-{global_rank}")
    if exit_code:
        sys.exit(exit_code)


def _redirect_output(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # The forkserver's own objects may be pytest's capture; make new ones on the descriptors.
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115


def _call(job: _Job, global_rank: int, directory: Path, port: int | None) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.pop("PL_GLOBAL_SEED", None)  # of an earlier test in the process that started this one
    os.environ.update(
        {
            **_ONE_THREAD,
            "RANK": str(global_rank),
            "LOCAL_RANK": str(global_rank),
            "NODE_RANK": "0",
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(job.num_processes),
            "LOCAL_WORLD_SIZE": str(job.num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            # Every process joins a store that exists already instead of opening MASTER_PORT itself.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            **job.environment,
        }
    )
    store_of_rank_0 = None
    if job.rank_0_hosts_store:
        store_of_rank_0, port = _store_of_rank_0(global_rank, directory)
    if port is not None:
        os.environ["MASTER_PORT"] = str(port)
    if job.initialize_process_group:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(directory / "store"), job.num_processes),
            rank=global_rank,
            world_size=job.num_processes,
            timeout=timedelta(seconds=job.process_group_timeout_s),
        )
    function, args = pickle.loads(job.call)
    try:
        return function(*args)
    finally:
        if sys.exc_info()[0] is None and dist.is_initialized():
            dist.destroy_process_group()
        if store_of_rank_0 is not None and sys.exc_info()[0] is None:
            _wait_for_others(directory, job)


def _store_of_rank_0(global_rank: int, directory: Path) -> tuple[Any, int]:
    path = directory / "port"
    if global_rank == 0:
        store = _listening_store()
        partial = directory / "partial-port"
        partial.write_text(str(store.port))
        partial.rename(path)
        return store, store.port
    deadline = time.monotonic() + 20
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("global rank 0 did not open its store within 20 s")
        time.sleep(0.01)
    return None, int(path.read_text())


def _wait_for_others(directory: Path, job: _Job) -> None:
    """Keep rank 0's store until the others have ended, as a launcher's rank 0 would by its last barrier."""
    deadline = time.monotonic() + 10
    others = [directory / f"result-{other}" for other in range(1, job.num_processes)]
    while time.monotonic() < deadline and not all(path.exists() for path in others):
        time.sleep(0.01)
