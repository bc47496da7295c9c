"""Replicas on devices of speeds 1 and 0.5: the micro-batches that the plan gives each, against equal numbers.

Layers sleep instead of computing, for twice as long on the slow devices; the rest is the runtime's own: executor,
transports, process groups, sums of gradients over the replicas, in processes of this machine over gloo. A step has the
same samples either way, in micro-batches of one size. Both ways run in the same processes, in turns.

* One stage, two replicas: what the planner's search chooses.
* Two stages, two replicas, each on devices of one speed: what the planner gives them on these devices.

Predicted is the simulated step, from each stage's own time, measured alone, and from the links, measured between these
processes.

Run: python benchmarks/unlike_replicas.py [--check] [--json FILE] [--repeats N]   (1 minute)

--check fails where a step is more than 10 % off what is predicted, or less than 1.25 times as fast as with equal
numbers.
"""

# ruff: noqa: E402
from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # Python puts this file's folder there

from benchmarks.emulation import RunMeasurement, SleepingRun, StepMeasurement, run_sleeping
from benchmarks.reporting import at_least, at_most, environment, finish, parser, spread
from lightning_autopipe.cluster import measured_topology
from lightning_autopipe.core import ClusterTopology, CrossingValue, Device, DeviceTimes, LayerProfile, ModelProfile
from lightning_autopipe.planner import CostModel, SearchSpace, search, simulate
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.mapping_prices import MappingPrices
from lightning_autopipe.planner.mapping_setting import MappingSetting
from lightning_autopipe.planner.objective import Objective
from lightning_autopipe.planner.partitioner import choose_partition
from lightning_autopipe.planner.placements import Grid, launcher_placement
from lightning_autopipe.planner.workload import StepWork

SPEEDS = (1.0, 0.5)
"""Of each replica's devices."""
NUM_LAYERS = 8
LAYER_FORWARD_S = 0.003
"""Of one layer on a device of speed 1; its backward takes twice that."""
LAYER_BYTES = 256 << 10
"""Of parameters, and of what crosses behind a layer."""
NUM_MICROBATCHES = 12
"""Of each replica on average."""
MIN_GAIN = 1.25
MAX_ERROR = 0.10
LIMIT_S = 240.0


def profile() -> ModelProfile:
    """Equal layers, as a device of speed 1 runs them."""
    return ModelProfile(
        layers=tuple(
            LayerProfile(name=str(index), forward_flops=0, param_bytes=LAYER_BYTES, trainable_bytes=LAYER_BYTES)
            for index in range(NUM_LAYERS)
        ),
        values=tuple(
            CrossingValue(producer=index, last_reader=index + 1, forward_bytes=LAYER_BYTES, gradient_bytes=LAYER_BYTES)
            for index in range(NUM_LAYERS - 1)
        ),
        times=(
            DeviceTimes(
                device_model="speed 1",
                microbatch_size=1,
                forward_s=(LAYER_FORWARD_S,) * NUM_LAYERS,
                backward_s=(2 * LAYER_FORWARD_S,) * NUM_LAYERS,
            ),
        ),
    )


def cluster(num_stages: int) -> ClusterTopology:
    """The devices of one replica after the other."""
    return ClusterTopology(
        devices=tuple(
            Device(
                global_rank=replica * num_stages + index,
                server="here",
                model=f"speed {speed:g}",
                memory_bytes=1 << 40,
                relative_speed=speed,
            )
            for replica, speed in enumerate(SPEEDS)
            for index in range(num_stages)
        )
    )


def searched(*, equal_shares: bool) -> StepWork:
    """What the search chooses for one stage."""
    space = SearchSpace(
        cost=CostModel(profile()),
        network=LinkNetwork(cluster(1)),
        batch_size=NUM_MICROBATCHES,
        num_stages=1,
        num_replicas=len(SPEEDS),
        num_microbatches=NUM_MICROBATCHES,
        equal_shares=equal_shares,
    )
    return search(space).best.work


def placed(num_stages: int, *, equal_shares: bool) -> StepWork:
    """The planner's numbers and cuts for replicas on devices of one speed each."""
    num_replicas = len(SPEEDS)
    setting = MappingSetting(
        cost=CostModel(profile()),
        network=LinkNetwork(cluster(num_stages)),
        num_stages=num_stages,
        num_replicas=num_replicas,
        num_microbatches=NUM_MICROBATCHES * num_replicas,
        equal_shares=equal_shares,
    )
    grid: Grid = launcher_placement(num_stages, num_replicas)
    prices = MappingPrices(setting)
    shares = prices.shares(grid, prices.cuts(grid, prices.even_shares()))
    pipelines = setting.pipelines(grid, shares)
    choice = choose_partition(pipelines)
    return Objective(pipelines).step_work(choice.partition.cut_points, choice.depths)


def numbers(step: StepWork) -> list[int]:
    """Micro-batches of each replica."""
    return [schedule.num_microbatches for schedule in step.schedules]


def row_of(title: str, steps: Sequence[StepWork], num_repeats: int) -> dict[str, Any]:
    """Measures the plan's numbers and equal ones."""
    num_stages = steps[0].num_stages
    run = SleepingRun(
        steps=tuple(steps),
        servers=("here",) * (num_stages * len(SPEEDS)),
        num_rounds=num_repeats,
        num_repeats=1,
        links_budget_s=5.0,
    )
    measured = run_sleeping(run, limit_s=LIMIT_S)
    network = LinkNetwork(measured_topology(cluster(num_stages), measured.links))
    unlike, equal = (of_step(one, numbers(step), network) for one, step in zip(measured.steps, steps, strict=True))
    return {
        "case": title,
        "unlike": unlike,
        "equal": equal,
        "gain": equal["median_s"] / unlike["median_s"],
        "predicted_gain": equal["predicted_s"] / unlike["predicted_s"],
        "load": load_of(measured),
    }


def of_step(step: StepMeasurement, microbatches: list[int], network: LinkNetwork) -> dict[str, Any]:
    predicted_s = simulate(replace(step.priced, network=network)).step_s
    return {
        "microbatches": microbatches,
        "seconds": step.seconds,
        "median_s": step.median_s,
        "predicted_s": predicted_s,
        "error": predicted_s / step.median_s - 1,
    }


def load_of(measured: RunMeasurement) -> list[float]:
    return list(measured.load)


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['case']}: {row['gain']:.3f} times as fast as with equal numbers, predicted {row['predicted_gain']:.3f}"
    )
    for name in ("unlike", "equal"):
        way = row[name]
        print(
            f"    micro-batches {way['microbatches']}: {spread(way['seconds'])}, predicted "
            f"{1e3 * way['predicted_s']:.1f} ms ({way['error']:+.1%})"
        )
    print(f"    load {row['load'][0]:.1f} {row['load'][1]:.1f}", flush=True)


def shortfalls(row: dict[str, Any]) -> list[str]:
    found = at_least(f"{row['case']}: gain over equal numbers", row["gain"], MIN_GAIN)
    for name in ("unlike", "equal"):
        found += at_most(f"{row['case']}: error of the prediction, {name}", abs(row[name]["error"]), MAX_ERROR)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=7, help="of each step, besides one to warm up; default: 7")
    options = made.parse_args(arguments)
    print("Layers sleep, they do not compute; messages and sums of gradients are real, over gloo on this machine.")
    cases = {
        "1 stage x 2 replicas": [searched(equal_shares=equal) for equal in (False, True)],
        "2 stages x 2 replicas": [placed(2, equal_shares=equal) for equal in (False, True)],
    }
    rows, found = [], []
    for title, steps in cases.items():
        row = row_of(title, steps, options.repeats)
        show(row)
        rows.append(row)
        found += shortfalls(row)
    return finish(options, {**environment(), "rows": rows}, found)


if __name__ == "__main__":
    sys.exit(main())
