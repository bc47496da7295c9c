"""A few of the randomised runs; `AUTOPIPE_RANDOM_RUNS=200` runs as many, benchmarks/random_schedules.py as well."""

from __future__ import annotations

import os

import pytest

from tests.harness import run_processes
from tests.runtime.random_runs import random_case, run_cases, wrong_cases

NUM_RUNS = int(os.environ.get("AUTOPIPE_RANDOM_RUNS", "16"))
MAX_PAUSE_S = 0.01
SECONDS_A_RUN = 10.0


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_random_schedules_end_and_are_right(num_ranks: int) -> None:
    cases = [random_case(seed, num_ranks, max_pause_s=MAX_PAUSE_S) for seed in range(NUM_RUNS // 2)]
    limit_s = 60 + SECONDS_A_RUN * len(cases)
    by_rank = run_processes(num_ranks, run_cases, cases, 60.0, timeout_s=limit_s)
    assert not list(wrong_cases(cases, by_rank))
