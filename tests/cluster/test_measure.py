from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch.distributed as dist

from lightning_autopipe.cluster.flows import Flow, MeasuredRound, measurement_rounds
from lightning_autopipe.cluster.measure import measure_links
from tests.harness import run_processes, run_processes_to_end

SIZES = (1 << 10, 1 << 16)


def measure(servers: tuple[str, ...], *, budget_s: float = 60.0, timeout_s: float = 20.0) -> tuple[MeasuredRound, ...]:
    return measure_links(servers, budget_s=budget_s, timeout_s=timeout_s, message_bytes=SIZES)


def rank_1_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(0)
    measure(("a", "b"))


def rank_1_takes_no_part() -> None:
    if dist.get_rank() == 1:
        time.sleep(6)
        os._exit(0)
    measure(("a", "b"), timeout_s=1.0)


def test_every_rank_gets_the_same_times_of_every_round() -> None:
    servers = ("a", "a", "b", "b")
    results = run_processes(4, measure, servers)
    assert all(result == results[0] for result in results)
    assert tuple(each.round for each in results[0]) == measurement_rounds(servers)
    for each in results[0]:
        assert len(each.times) == len(each.round.flows)
        assert all(time.bandwidth_bytes_per_s > 0 and time.latency_s >= 0 for time in each.times), each
        assert (each.together_bytes_per_s or 0) > 0
        if each.round.name == "alone":
            assert each.times[0].latency_s > 0


def test_a_budget_leaves_out_the_same_rounds_on_every_rank() -> None:
    results = run_processes(2, partial(measure, budget_s=0.0), ("a", "b"))
    assert results[0] == results[1]
    assert [each.round.flows for each in results[0]] == [(Flow(sender=0, receiver=1),)]


@pytest.mark.parametrize(("function", "reason"), [(rank_1_dies, "Connection"), (rank_1_takes_no_part, "timed out")])
def test_a_rank_that_does_not_answer_ends_the_measurement(function: Callable[[], None], reason: str) -> None:
    outcome = run_processes_to_end(2, function, timeout_s=40.0)[0]
    assert not outcome.killed_by_harness
    error = (outcome.traceback or "").splitlines()[-1]
    assert "PipelineRuntimeError: rank 0, measuring links, the start of round 'alone' (0->1): another rank" in error
    assert reason in error
