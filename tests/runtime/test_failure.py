"""One rank fails: all end soon, and the first error is on every rank's terminal."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Hashable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.runtime import failure_board
from lightning_autopipe.runtime.errors import CommunicationError, PipelineRuntimeError, StageError
from lightning_autopipe.runtime.executor import StageExecutor
from lightning_autopipe.runtime.failure import FailureMonitor
from lightning_autopipe.runtime.failure_record import Failure, is_consequence
from lightning_autopipe.runtime.liveness import ProcessIdentity
from lightning_autopipe.runtime.process_groups import create_process_groups
from lightning_autopipe.runtime.stage import StageOutput
from lightning_autopipe.schedules import one_f_one_b
from tests.harness import ProcessOutcome, describe, run_processes, run_processes_to_end

NUM_STAGES = 3


class FailingStage:
    def __init__(self, stage_index: int, end: str | None) -> None:
        self.is_last = stage_index == NUM_STAGES - 1
        self.end = end
        self.parameter = nn.Parameter(torch.ones(4))

    def signature(self, microbatch_index: int) -> Hashable:
        return None

    def forward(self, microbatch_index: int, received: tuple[Tensor, ...]) -> StageOutput:
        h = (received[0] if received else torch.ones(4)) * self.parameter
        if microbatch_index == 1 and self.end is not None:
            if self.end == "raise in backward":
                h.register_hook(self.fail)
            else:
                self.fail(h)
        return StageOutput(loss=h.sum()) if self.is_last else StageOutput(sent=(h,))

    def fail(self, _: Tensor) -> None:
        if self.end == "exit":
            os._exit(1)
        if self.end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.end == "hang":
            time.sleep(1000)
        raise KeyError("no such token")


def run_failing_pipeline(failing_stage: int, end: str, timeout_s: float = 20) -> None:
    layout = ParallelLayout(num_stages=NUM_STAGES)
    groups = create_process_groups(layout, timeout_s=timeout_s)
    monitor = FailureMonitor(layout, grace_s=2, own_grace_s=4, interval_s=0.2)
    monitor.start()
    transport = groups.transport(torch.device("cpu"))
    transport.warm_up()
    executor = StageExecutor(stage_index=groups.stage_index, num_stages=NUM_STAGES, transport=transport)
    stage = FailingStage(groups.stage_index, end if groups.stage_index == failing_stage else None)
    try:
        with monitor.guard():
            executor.run(stage, one_f_one_b(NUM_STAGES, 4))
            dist.barrier(groups.control)  # as at the end of every step
    finally:
        monitor.stop()


def assert_all_failed(outcomes: list[ProcessOutcome]) -> None:
    assert all(outcome.exit_code not in (0, None) for outcome in outcomes), describe(outcomes)
    assert not any(outcome.killed_by_harness for outcome in outcomes), describe(outcomes)


@pytest.mark.parametrize("end", ["raise in forward", "raise in backward"])
@pytest.mark.parametrize("failing_stage", [0, 1, 2])
def test_an_exception_ends_all_and_is_shown_everywhere(failing_stage: int, end: str) -> None:
    outcomes = run_processes_to_end(NUM_STAGES, run_failing_pipeline, failing_stage, end, timeout_s=30)
    assert_all_failed(outcomes)
    failing_rank = NUM_STAGES - 1 - failing_stage
    first = f"global rank {failing_rank}, stage {failing_stage}, micro-batch 1, {end.rpartition(' ')[2]}"
    for outcome in outcomes:
        assert outcome.traceback is not None
        if outcome.global_rank == failing_rank:
            assert "StageError" in outcome.traceback
            assert "no such token" in outcome.traceback
        else:
            # In the error that ends the rank, and on its terminal with the other rank's traceback.
            assert first in outcome.traceback, describe(outcomes)
            assert outcome.output.count(f"another rank failed first. {first}") == 1, describe(outcomes)
            assert "in fail" in outcome.output


@pytest.mark.parametrize("end", ["exit", "kill"])
@pytest.mark.parametrize("failing_stage", [0, 1, 2])
def test_a_process_that_vanishes_ends_all(failing_stage: int, end: str) -> None:
    outcomes = run_processes_to_end(NUM_STAGES, run_failing_pipeline, failing_stage, end, timeout_s=30)
    assert_all_failed(outcomes)
    failing_rank = NUM_STAGES - 1 - failing_stage
    for outcome in outcomes:
        if outcome.global_rank != failing_rank:
            text = outcome.output + (outcome.traceback or "")
            assert f"global rank {failing_rank}, stage {failing_stage}: its process ended without an error" in text


def test_a_stage_that_hangs_runs_into_the_limit() -> None:
    outcomes = run_processes_to_end(NUM_STAGES, run_failing_pipeline, 1, "hang", 2.0, timeout_s=30)
    assert_all_failed(outcomes)
    for outcome in outcomes:
        text = outcome.output + (outcome.traceback or "")
        assert "limit: timeout = 2 s" in text, describe(outcomes)
        assert "stage 1" in text


def sleep_while_another_fails() -> None:
    monitor = FailureMonitor(grace_s=1, own_grace_s=2, interval_s=0.1)
    monitor.start()
    if dist.get_rank() == 1:
        with monitor.guard():
            raise ValueError("a reason")
    time.sleep(1000)


def test_a_process_that_does_not_end_by_itself_is_ended() -> None:
    outcomes = run_processes_to_end(3, sleep_while_another_fails, timeout_s=30)
    assert [outcome.exit_code for outcome in outcomes] == [1, 1, 1]
    for outcome in (outcomes[0], outcomes[2]):
        assert "global rank 1: ValueError: a reason" in outcome.output
        assert "still running 1 s after a failure" in outcome.output


def hide_process_table() -> None:
    ProcessIdentity.is_running = lambda self: None  # type: ignore[method-assign]


def stop_beating(stopped_rank: int) -> str:
    hide_process_table()  # as if the ranks were on different machines
    monitor = FailureMonitor(ParallelLayout(num_stages=3), grace_s=0.5, stale_after_s=3, interval_s=0.1)
    monitor.start()
    dist.barrier()
    time.sleep(0.5)
    if dist.get_rank() == stopped_rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    deadline = time.monotonic() + 7
    while time.monotonic() < deadline:  # computing, without a word to anybody
        sum(range(10_000))
    monitor.stop()
    return "done"


def test_a_rank_without_a_sign_of_life_is_dead() -> None:
    outcomes = run_processes_to_end(3, stop_beating, 1, timeout_s=20, grace_after_failure_s=2)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.exit_code == 1, describe(outcomes)
        assert "global rank 1, stage 1: no sign of life for 3 s" in outcome.output


def test_a_rank_that_computes_for_long_is_alive() -> None:
    assert run_processes(3, stop_beating, None) == ["done"] * 3


def leave_one_after_another(first: int) -> str:
    dist.init_process_group("gloo")
    monitor = FailureMonitor(grace_s=0.3, interval_s=0.1)
    monitor.start()
    dist.barrier()
    if dist.get_rank() == first:
        monitor.stop()
        os._exit(0)  # takes the store with it if it is here
    time.sleep(2.0)
    monitor.stop()
    return "done"


@pytest.mark.parametrize(("first", "rank_0_hosts_store"), [(0, False), (0, True), (1, False)])
def test_leaving_in_order_is_no_failure(first: int, rank_0_hosts_store: bool) -> None:
    outcomes = run_processes_to_end(
        3,
        leave_one_after_another,
        first,
        initialize_process_group=False,
        rank_0_hosts_store=rank_0_hosts_store,
        timeout_s=30,
    )
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 0], describe(outcomes)
    for outcome in outcomes:
        if outcome.global_rank != first:
            assert outcome.value == "done"
            assert outcome.output == ""


def lose_rank_0(how: str) -> None:
    dist.init_process_group("gloo")
    monitor = FailureMonitor(ParallelLayout(num_stages=3), grace_s=1, own_grace_s=2, interval_s=0.2)
    monitor.start()
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(0.3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        with monitor.guard():
            raise ValueError("a reason")
    time.sleep(1000)


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_the_rank_that_holds_the_store_fails(how: str) -> None:
    outcomes = run_processes_to_end(
        3, lose_rank_0, how, initialize_process_group=False, rank_0_hosts_store=True, timeout_s=30
    )
    assert_all_failed(outcomes)
    expected = "global rank 0, stage 2: " + ("ValueError: a reason" if how == "raise" else "the process that holds")
    for outcome in outcomes[1:]:
        assert outcome.exit_code == 1
        assert expected in outcome.output, describe(outcomes)


def wait_for_rank_0() -> None:
    dist.init_process_group("gloo")
    monitor = FailureMonitor(ParallelLayout(num_stages=3), interval_s=0.2)
    monitor.start()
    dist.barrier()
    try:
        with monitor.guard():
            if dist.get_rank() == 0:
                raise ValueError("a reason")
            dist.recv(torch.empty(1), src=0)
    except ValueError:
        os._exit(1)  # the connections and the store break at once


def test_the_first_error_is_raised_although_the_store_went_with_it() -> None:
    outcomes = run_processes_to_end(
        3, wait_for_rank_0, initialize_process_group=False, rank_0_hosts_store=True, timeout_s=30
    )
    for outcome in outcomes[1:]:
        assert "another rank failed first. global rank 0, stage 2: ValueError: a reason" in (outcome.traceback or "")


def run_monitors_in_turn() -> list[str | None]:
    """Two runs in one process group: a failure of the first is no failure of the second."""
    texts: list[str | None] = []
    for run in range(2):
        monitor = FailureMonitor(interval_s=0.1)
        monitor.start()
        if run == 0 and dist.get_rank() == 1:
            monitor.report(ValueError("a reason"))
        dist.barrier()
        first = monitor.first_error(wait_s=1 if run == 0 else 0)
        texts.append(None if first is None else first.message)
        monitor.stop()
        monitor.stop()
    return texts


def test_runs_have_failures_of_their_own() -> None:
    assert run_processes(2, run_monitors_in_turn) == [["ValueError: a reason", None]] * 2


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text(
        "import time, torch.distributed as dist\n"
        "from lightning_autopipe.runtime.failure import FailureMonitor\n"
        "dist.init_process_group('gloo')\n"
        "monitor = FailureMonitor(grace_s=1, own_grace_s=60, interval_s=0.2)\n"
        "monitor.start()\n"
        "if dist.get_rank() == 1:\n"
        "    monitor.report(ValueError('a reason'))\n"
        "    time.sleep(60)\n"  # torchrun would end rank 0 if this one ended
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.getcwd()}
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert result.returncode != 0
    assert "[global rank 0] The run ends because another rank failed first. global rank 1: ValueError" in result.stderr


def test_a_failure_finds_its_place_in_the_causes() -> None:
    error = PipelineRuntimeError("outer")
    error.__cause__ = StageError("inner", stage_index=2, microbatch_index=5, direction="backward")
    failure = Failure.of(error, global_rank=7, stage_index=1)
    assert str(failure) == "global rank 7, stage 2, micro-batch 5, backward: PipelineRuntimeError: outer"
    assert Failure.from_json(failure.to_json()) == failure
    assert str(Failure.of(ValueError("x"), global_rank=0, stage_index=None)) == "global rank 0: ValueError: x"


@pytest.mark.parametrize("error", [StageError("a", stage_index=1), CommunicationError("b", peer_stage_index=2)])
def test_errors_travel_by_pickle(error: PipelineRuntimeError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.args, copy.__dict__) == (type(error), error.args, error.__dict__)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CommunicationError("x"), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"), True),
        (dist.DistBackendError("NCCL communicator was aborted"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (StageError("x"), False),
        (ConnectionError("the data server refused: connection reset"), False),
    ],
)
def test_consequences_are_told_from_causes(error: Exception, expected: bool) -> None:
    assert is_consequence(error) is expected
    wrapped = StageError("wrapped")
    wrapped.__cause__ = error
    assert is_consequence(wrapped) is expected


def test_identity_of_processes() -> None:
    own = ProcessIdentity.of_this_process()
    assert own.is_running() is True
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    fields = own.to_dict() | {"pid": child.pid}
    start: Callable[[int], tuple[str, int] | None] = failure_board.ProcessIdentity.is_running.__globals__[
        "_state_and_start"
    ]
    state = start(child.pid)
    assert state is not None
    identity = ProcessIdentity(**fields | {"start_ticks": state[1]})
    assert identity.is_running() is True
    assert ProcessIdentity(**identity.to_dict() | {"start_ticks": 1}).is_running() is False  # the number was used again
    assert ProcessIdentity(**identity.to_dict() | {"machine": "elsewhere"}).is_running() is None
    child.kill()
    while (state := start(child.pid)) is not None and state[0] != "Z":
        time.sleep(0.01)
    assert identity.is_running() is False  # dead, though nobody has waited for it
    child.communicate()
    assert identity.is_running() is False
