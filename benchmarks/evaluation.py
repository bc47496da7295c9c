"""How full pipelines are that only run forwards: validation, test, prediction.

Layers that sleep, as 2 and 4 stages in processes of this machine over gloo, with the runtime's own executor and
transport. S stages run M micro-batches in (M + S - 1) forwards at best, as in training; each batch begins with an empty
pipeline, for Lightning takes what a step returns before it gives the next batch. What a batch takes is compared with
that bound, and the share of forwards in it is told, which grows with the micro-batches.

Run: python benchmarks/evaluation.py [--check] [--json FILE]   (20 seconds)

--check fails where a batch takes longer than bound / 0.93.
"""

# ruff: noqa: E402
from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from benchmarks import reporting
from benchmarks.emulation import SleepingRun, StepMeasurement, run_sleeping
from lightning_autopipe.planner.workload import StageWork, StepWork, UnitWork
from lightning_autopipe.schedules import forward_only

MIN_EFFICIENCY = 0.93
FORWARD_S = 0.02
CROSSING_BYTES = 256 << 10
CASES = ((2, 4), (2, 16), (4, 4), (4, 8), (4, 16))
"""Stages and micro-batches."""
LIMIT_S = 120.0


def forward_step(num_stages: int, num_microbatches: int) -> StepWork:
    """Forwards of one batch."""
    stages = tuple(
        StageWork(
            units=(
                UnitWork(
                    forward_s=FORWARD_S,
                    backward_s=0.0,
                    sent_bytes=CROSSING_BYTES if stage_index < num_stages - 1 else 0,
                ),
            )
        )
        for stage_index in range(num_stages)
    )
    return StepWork(stages=(stages,), schedules=(forward_only(num_stages, num_microbatches),))


def row(num_stages: int, num_microbatches: int, measured: StepMeasurement) -> dict[str, Any]:
    """One case: batches one after the other, with an exchange after each, as a Trainer runs them."""
    forward_s = max(stage.units[0].forward_s for stage in measured.priced.stages[0])
    bound_s = (num_microbatches + num_stages - 1) * forward_s + measured.priced.exchange_s
    return {
        "stages": num_stages,
        "microbatches": num_microbatches,
        "forward_s": forward_s,
        "bound_s": bound_s,
        "seconds": measured.seconds,
        "median_s": measured.median_s,
        "efficiency": bound_s / measured.median_s,
        "busy_share": num_microbatches * forward_s / measured.median_s,
    }


def main() -> int:
    options = reporting.parser(__doc__).parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'stages':>6} {'micro-batches':>13} {'bound':>9}   {'median [min max]':<28} {'bound/median':>12} busy")
    for num_stages in sorted({stages for stages, _ in CASES}):
        counts = [number for stages, number in CASES if stages == num_stages]
        rows += _measure(num_stages, counts)
    shortfalls = [
        line
        for one in rows
        for line in reporting.at_least(
            f"{one['stages']} stages, {one['microbatches']} micro-batches: bound / median",
            one["efficiency"],
            MIN_EFFICIENCY,
        )
    ]
    return reporting.finish(options, {"environment": reporting.environment(), "rows": rows}, shortfalls)


def _measure(num_stages: int, counts: Sequence[int]) -> list[dict[str, Any]]:
    steps = tuple(forward_step(num_stages, number) for number in counts)
    run = SleepingRun(steps=steps, servers=("here",) * num_stages, links_budget_s=0.0)
    measured = run_sleeping(run, limit_s=LIMIT_S)
    rows = [row(num_stages, number, of_step) for number, of_step in zip(counts, measured.steps, strict=True)]
    for one in rows:
        print(
            f"{one['stages']:>6} {one['microbatches']:>13} {1e3 * one['bound_s']:>6.1f} ms   "
            f"{reporting.spread(one['seconds']):<28} {one['efficiency']:>12.3f} {100 * one['busy_share']:.0f} %"
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
