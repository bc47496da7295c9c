"""Simulated against measured step time.

* Layers that sleep instead of computing, as 2, 4 and 8 stages and as replicas, under several schedules: processes of
  this machine over gloo, with the runtime's own executor, transport, process groups and sums of gradients. What is
  predicted comes from each stage's own time, measured alone, and from the links, measured between these processes.
* The recipes (GPT-2, BERT, ResNet) at small sizes as two stages through the Trainer: the simulated step of the plan
  that the strategy made, against the measured ones.

Run: python benchmarks/prediction.py [--check] [--json FILE] [--only sleeping|recipes]   (4 minutes)

--check fails where the median error over the cases with sleeping layers is above 5 %. Slow links between servers are in
benchmarks/measured_mapping.py.
"""

# ruff: noqa: E402
from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Python puts this file's folder first, where `import recipes` would find the benchmark of that name.
sys.path[0] = str(ROOT)

from benchmarks.emulation import RunMeasurement, SleepingRun, run_sleeping
from benchmarks.recipe_steps import RECIPES, recipe_row
from benchmarks.reporting import environment, finish, parser
from lightning_autopipe.cluster import measured_topology
from lightning_autopipe.core import ClusterTopology, Device, Schedule
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.simulator import simulate
from lightning_autopipe.planner.workload import StageWork, StepWork, UnitWork
from lightning_autopipe.schedules.gpipe import gpipe
from lightning_autopipe.schedules.one_f_one_b import one_f_one_b

MAX_MEDIAN_ERROR = 0.05
FORWARD_S = 0.02
"""Of a stage of weight 1; its backward takes twice that."""
WEIGHTS = (1.0, 0.8, 1.2, 0.9, 1.1, 1.0, 0.7, 1.3)
OPTIMIZER_S = 0.01
CROSSING_BYTES = 256 << 10
GRADIENT_BYTES = 4 << 20
"""What the replicas of a stage sum."""
LIMIT_S = 240.0


def sleeping_step(schedule: Schedule, num_replicas: int, *, even: bool = False) -> StepWork:
    """Stages of unlike lengths under a schedule."""
    num_stages = schedule.num_stages
    stages = tuple(
        StageWork(
            units=(
                UnitWork(
                    forward_s=FORWARD_S * weight,
                    backward_s=2 * FORWARD_S * weight,
                    sent_bytes=CROSSING_BYTES if index < num_stages - 1 else 0,
                    gradient_bytes=CROSSING_BYTES if index else 0,
                ),
            ),
            optimizer_s=OPTIMIZER_S,
            reduced_bytes=GRADIENT_BYTES if num_replicas > 1 else 0,
        )
        for index, weight in enumerate([1.0] * num_stages if even else WEIGHTS[:num_stages])
    )
    return StepWork(stages=(stages,) * num_replicas, schedules=(schedule,) * num_replicas)


def sleeping_cases(world_size: int) -> dict[str, StepWork]:
    """By title; a title that says nothing of stages means stages of unlike lengths."""
    cases: dict[int, dict[str, StepWork]] = {
        2: {
            "2 stages, 1F1B, M=4": sleeping_step(one_f_one_b(2, 4), 1),
            "2 even stages, 1F1B, M=16": sleeping_step(one_f_one_b(2, 16), 1, even=True),
            "2 stages, GPipe, M=8": sleeping_step(gpipe(2, 8), 1),
        },
        4: {
            "4 stages, 1F1B, M=4": sleeping_step(one_f_one_b(4, 4), 1),
            "4 even stages, 1F1B, M=16": sleeping_step(one_f_one_b(4, 16), 1, even=True),
            "4 stages, 1F1B of depths 6 4 2 0, M=16": sleeping_step(one_f_one_b(4, 16, (6, 4, 2, 0)), 1),
            "4 stages, GPipe, M=8": sleeping_step(gpipe(4, 8), 1),
            "2 stages x 2 replicas, 1F1B, M=8": sleeping_step(one_f_one_b(2, 8), 2),
        },
        8: {
            "8 stages, 1F1B, M=8": sleeping_step(one_f_one_b(8, 8), 1),
            "8 even stages, 1F1B, M=16": sleeping_step(one_f_one_b(8, 16), 1, even=True),
            "8 stages, 1F1B of depths 14 12 .. 0, M=16": sleeping_step(one_f_one_b(8, 16, range(14, -1, -2)), 1),
            "8 stages, GPipe, M=8": sleeping_step(gpipe(8, 8), 1),
            "4 stages x 2 replicas, 1F1B, M=8": sleeping_step(one_f_one_b(4, 8), 2),
        },
    }
    return cases[world_size]


def alike_cluster(measured: RunMeasurement, world_size: int) -> ClusterTopology:
    """Devices of one server, with its links as they were measured."""
    devices = tuple(
        Device(global_rank=rank, server="here", model="sleep", memory_bytes=1 << 40) for rank in range(world_size)
    )
    return measured_topology(ClusterTopology(devices=devices), measured.links)


def sleeping_rows(world_size: int) -> list[dict[str, Any]]:
    cases = sleeping_cases(world_size)
    empty = sleeping_step(one_f_one_b(2, 32), world_size // 2)
    idle = replace(empty.stages[0][0], units=(UnitWork(forward_s=0, backward_s=0),), optimizer_s=0, reduced_bytes=0)
    empty = replace(empty, stages=((idle, idle),) * len(empty.stages))
    run = SleepingRun(steps=(*cases.values(), empty), servers=("here",) * world_size)
    measured = run_sleeping(run, limit_s=LIMIT_S)
    cluster = alike_cluster(measured, world_size)
    network = LinkNetwork(cluster)
    route = network.route(0, 1)
    *measurements, of_empty = measured.steps
    rows = []
    for title, step in zip(cases, measurements, strict=True):
        simulated_s = simulate(replace(step.priced, network=network)).step_s
        actions = max(len(actions) for actions in step.priced.schedules[0].actions_by_rank)
        rows.append(
            {
                "case": title,
                "world_size": world_size,
                "measured_s": step.median_s,
                "fastest_s": min(step.seconds),
                "simulated_s": simulated_s,
                "error": simulated_s / step.median_s - 1,
                "left_over_per_action_s": (step.median_s - simulated_s) / actions,
                "empty_action_s": of_empty.median_s / 64,
                "load": measured.load,
                "latency_s": route.latency_s,
                "bandwidth_bytes_per_s": route.bandwidth_bytes_per_s,
            }
        )
    return rows


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{title:<46} measured   fastest simulated    error   load")
    for row in rows:
        print(
            f"{row['case']:<46} {row['measured_s']:>8.4f}  {row['fastest_s']:>8.4f}  {row['simulated_s']:>8.4f} "
            f"{row['error']:>+8.2%}   {row['load'][0]:.1f} {row['load'][1]:.1f}",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--only", choices=["sleeping", "recipes"], help="only this part")
    options = made.parse_args(arguments)
    results: dict[str, Any] = {
        **environment(),
        "sleeping": [],
        "recipes": [],
    }
    found = []
    if options.only != "recipes":
        print("Layers sleep, they do not compute; messages and sums of gradients are real, over gloo on this machine.")
        for world_size in (2, 4, 8):
            rows = sleeping_rows(world_size)
            results["sleeping"] += rows
            show(f"{world_size} processes", rows)
            print(
                f"  between two of them: {1e6 * rows[0]['latency_s']:.0f} us, "
                f"{rows[0]['bandwidth_bytes_per_s'] / 1e9:.2f} GB/s; an action of empty layers takes "
                f"{1e6 * rows[0]['empty_action_s']:.0f} us; not foreseen for each action: "
                f"{1e6 * statistics.median(row['left_over_per_action_s'] for row in rows):.0f} us"
            )
        errors = [abs(row["error"]) for row in results["sleeping"]]
        results["median_error"] = statistics.median(errors)
        print(f"\nMedian error {results['median_error']:.2%}, largest {max(errors):.2%} (sleeping layers)")
        if results["median_error"] > MAX_MEDIAN_ERROR:
            found.append(f"sleeping layers: median error {results['median_error']:.2%}, not {MAX_MEDIAN_ERROR:.0%}")
    if options.only != "sleeping":
        results["recipes"] = [recipe_row(name) for name in RECIPES]
        show("recipes, 2 stages, by the Trainer", results["recipes"])
    return finish(options, results, found)


if __name__ == "__main__":
    sys.exit(main())
