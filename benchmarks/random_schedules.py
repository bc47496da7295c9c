"""Randomised steps of the executor between real processes: each must end, with the right gradients.

Stages, micro-batches, slices, warm-ups, schedules, pauses of each rank and sizes of messages to 8 MB are drawn anew for
every run; processes serve many runs.

Run: python benchmarks/random_schedules.py [--runs 200] [--check] [--json FILE]   (10 minutes)

--check fails where a run gave other gradients; one that hangs ends at its limit, as an error.
"""

# ruff: noqa: E402
from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # Python puts this file's folder there

from benchmarks.reporting import environment, finish, parser
from tests.harness import run_processes
from tests.runtime.random_runs import random_case, run_cases, wrong_cases

NUM_RANKS = (2, 3, 4, 6)
MAX_PAUSE_S = 0.05
MESSAGE_LIMIT_S = 120.0
BATCH_LIMIT_S = 1200.0
CASES_AT_A_TIME = 25


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--runs", type=int, default=200, help="how many (default: %(default)s)")
    made.add_argument("--seed", type=int, default=1000, help="of the first run (default: %(default)s)")
    options = made.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    done = 0
    while done < options.runs:
        num_ranks = NUM_RANKS[len(rows) % len(NUM_RANKS)]
        seeds = range(options.seed + done, options.seed + min(options.runs, done + CASES_AT_A_TIME))
        cases = [random_case(seed, num_ranks, max_pause_s=MAX_PAUSE_S) for seed in seeds]
        began = time.perf_counter()
        by_rank = run_processes(num_ranks, run_cases, cases, MESSAGE_LIMIT_S, timeout_s=BATCH_LIMIT_S)
        seconds = time.perf_counter() - began
        wrong = list(wrong_cases(cases, by_rank))
        missed += wrong
        done += len(cases)
        names = dict(Counter(case.spec.name for case in cases))
        rows.append({"num_ranks": num_ranks, "runs": len(cases), "wrong": len(wrong), "seconds": seconds, **names})
        print(f"{num_ranks} ranks: {len(cases)} runs, {len(wrong)} wrong, {seconds:.0f} s; {names}", flush=True)
    print(f"{done} runs, {len(missed)} wrong, none hung")
    return finish(options, {"environment": environment(), "rows": rows}, missed)


if __name__ == "__main__":
    sys.exit(main())
