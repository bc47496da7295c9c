"""One pipeline on devices of unlike speeds, without links: the partitioner and the choice of the devices' order.

* Speeds 1, 1, 1, .5, .5, .5, .25, .25: the cuts of public planners, which know one kind of device, in the order of
  devices that is best for them, against ours. Ours is to be the exact optimum: proven by its own branch and bound, and
  held against a bound that is computed here in another way, for all partitions and orders at once.
* The gap to brute force on random models and devices, up to 16 layers and 6 stages, with speeds and limits of memory:
  all partitions in all orders of the devices, 1F1B with plain depths, twice as many micro-batches as stages.

Run: python benchmarks/unlike_devices.py [--check] [--json FILE] [--quick]   (two minutes)
"""

# ruff: noqa: E402
from __future__ import annotations

import math
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # Python puts this file's folder there

from benchmarks.order_gaps import Order, a_device, gaps, orders
from benchmarks.peers import dapple, pipedream, piper
from benchmarks.peers.even import EVEN
from benchmarks.peers.known import known
from benchmarks.reporting import environment, finish, parser
from lightning_autopipe.core import (
    ClusterTopology,
)
from lightning_autopipe.planner import CostModel, Work, simulate
from lightning_autopipe.planner.device_order import choose_device_order
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.objective import Objective, PipelineSetting
from lightning_autopipe.profile_files import load_profile
from lightning_autopipe.schedules import default_depths

Array = NDArray[np.float64]
Cuts = tuple[int, ...]

PROFILES = Path(__file__).parent / "profiles"
NAMES = ("pipedream-resnet50", "dapple-bert-48-pbs-2")
SPEEDS = (1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25)
MIN_RATIO = 1.9
MICROBATCHES_PER_STAGE = (2, 4)
BY_TIME = ("min-max", "PipeDream", "Piper")
"""Peers whose cuts must be so much worse; DAPPLE's only with more micro-batches, as it counts startup and ending. The
others do not look at times: what their cuts are worth here is chance."""
NUM_GAPS = 60
NUM_LIMITS = 400
"""Of what a stage may add to a step, in the independent bound."""
SAME = 1 + 1e-9


# The eight devices ---------------------------------------------------------------


def on_eight_devices(name: str, microbatches_per_stage: int) -> dict[str, Any]:
    cost = CostModel(load_profile(PROFILES / f"{name}.json"))
    devices = tuple(a_device(rank, speed) for rank, speed in enumerate(SPEEDS))
    num_stages = len(devices)
    num_microbatches = microbatches_per_stage * num_stages
    setting = PipelineSetting(
        cost=cost, num_stages=num_stages, num_microbatches=(num_microbatches,), devices=(devices,)
    )
    begin = time.process_time()
    ours = choose_device_order(setting)
    search_s = time.process_time() - begin
    cuts = ours.choice.partition.cut_points
    step_s = simulate(Objective(replace(setting, devices=(ours.devices,))).step_work(cuts, ours.choice.depths)).step_s
    every = [Objective(replace(setting, devices=(order,))) for order in orders(devices)]
    peers = {}
    for planner, peer_cuts in peers_cuts(cost, devices, num_microbatches).items():
        peers[planner] = min(objective.step_s(peer_cuts, default_depths(num_stages)) for objective in every)
    return {
        "profile": name,
        "num_microbatches": num_microbatches,
        "step_s": step_s,
        "speeds": [device.relative_speed for device in ours.devices],
        "cuts": cuts,
        "is_exact": ours.choice.is_exact,
        "search_s": search_s,
        "lower_bound_s": lower_bound_s(cost, devices, num_microbatches),
        "num_orders": len(every),
        "ratios": {planner: peer_s / step_s for planner, peer_s in peers.items()},
    }


def eight_devices() -> list[dict[str, Any]]:
    return [on_eight_devices(name, number) for number in MICROBATCHES_PER_STAGE for name in NAMES]


def peers_cuts(cost: CostModel, devices: Order, num_microbatches: int) -> dict[str, Cuts]:
    """Cuts of planners that take all devices for alike."""
    network, num_stages = LinkNetwork(ClusterTopology(devices=devices)), len(devices)
    layers = known(cost, network)
    found = {name: cuts_of(layers, num_stages) for name, cuts_of in EVEN.items()}
    found["PipeDream"] = pipedream.plan(layers, num_devices=num_stages, num_replicas=1).cuts
    plan = piper.plan(layers, num_devices=num_stages, num_replicas=1, num_microbatches=num_microbatches)
    assert plan is not None, "there is room for everything"
    found["Piper"] = plan.cuts
    plans = dapple.DapplePlanner(layers, network, num_microbatches).equal_plans(num_stages, 1)
    found["DAPPLE"] = min(plans, key=lambda plan: plan.objective).cuts
    return found


def lower_bound_s(cost: CostModel, devices: Order, num_microbatches: int) -> float:
    """What no partition in any order of the devices is below.

    A step takes all stages' forwards and backwards once, and what the stage adds that adds most: (M - 1) backwards and
    M - 1 - w forwards. For a limit of what stages add, the least sum is found by dynamic programming over sets of used
    devices and cuts; between two limits a step takes at least the lower limit and the sum for the upper one.
    """
    kinds = Counter(device.relative_speed for device in devices)
    speeds = sorted(kinds)
    forward, backward = np.array(cost.prefix_s(Work.FORWARD)), np.array(cost.prefix_s(Work.BACKWARD))
    total = between(forward + backward)
    depths = default_depths(len(devices))
    adds = [
        (num_microbatches - 1) * between(backward) + max(0, num_microbatches - 1 - depth) * between(forward)
        for depth in depths
    ]

    def least_sum(limit: float) -> float:
        used: dict[tuple[int, ...], Array] = {(0,) * len(speeds): np.append(0.0, np.full(cost.num_layers, np.inf))}
        for stage_adds in adds:
            priced = [np.where(stage_adds <= limit * speed, total / speed, np.inf) for speed in speeds]
            after: dict[tuple[int, ...], Array] = {}
            for state, sums in used.items():
                for index, speed in enumerate(speeds):
                    if state[index] < kinds[speed]:
                        key = (*state[:index], state[index] + 1, *state[index + 1 :])
                        best = (sums[:, None] + priced[index]).min(axis=0)
                        after[key] = np.minimum(after[key], best) if key in after else best
            used = after
        (sums,) = used.values()
        return float(sums[-1])

    slowest = sum((forward + backward)[-1] / speed for speed in SPEEDS[:1])
    low = num_microbatches * slowest / sum(SPEEDS) / 2
    limits = np.geomspace(low, 4 * num_microbatches * slowest, NUM_LIMITS)
    bound = math.inf
    for lower, upper in pairwise(limits):
        if lower >= bound:
            break
        bound = min(bound, float(lower) + least_sum(float(upper)))
    return bound


def between(prefix: Array) -> Array:
    """``[i][j]``: what layers i to j - 1 sum to; infinite where there are none."""
    sums: Array = np.where(np.tri(len(prefix), dtype=bool), np.inf, prefix[None, :] - prefix[:, None])
    return sums


# ---------------------------------------------------------------------------------------


def shortfalls(results: dict[str, Any]) -> list[str]:
    found = []
    for row in results["eight_devices"]:
        name = f"{row['profile']}, {row['num_microbatches']} micro-batches"
        planners = BY_TIME if row["num_microbatches"] < 4 * len(SPEEDS) else (*BY_TIME, "DAPPLE")
        for planner in planners:
            if row["ratios"][planner] < MIN_RATIO:
                found.append(
                    f"{name}: {planner}'s step is {row['ratios'][planner]:.3f} of ours, wanted are {MIN_RATIO}"
                )
        if not row["is_exact"]:
            found.append(f"{name}: ours is not proven to be the best of all orders and partitions")
        if row["step_s"] * SAME < row["lower_bound_s"]:
            found.append(f"{name}: ours {row['step_s']:.6g} s is below the bound {row['lower_bound_s']:.6g} s")
    worst = max(results["gaps"]["as planned"])
    if worst > SAME - 1:
        found.append(f"random models: ours is {100 * worst:.2f} % above brute force")
    return found


def markdown(rows: list[dict[str, Any]]) -> str:
    """A section on the eight devices."""
    planners = list(rows[0]["ratios"])
    heads = ["profile", "micro-batches", "our step, s", "is the optimum", "search, s", *planners]
    lines = [
        "## Unlike devices without links",
        "",
        f"Speeds {', '.join(f'{speed:g}' for speed in SPEEDS)}, one pipeline of eight stages. The others' cuts are in",
        "the order of devices that is best for them; a ratio is their step divided by ours. Ours is the optimum of all",
        "orders and partitions where branch and bound has proven it. *Uniform* and *parameters* do not look at times.",
        "",
        f"| {' | '.join(heads)} |",
        f"|{' --- |' * len(heads)}",
    ]
    for row in rows:
        ratios = [f"{row['ratios'][planner]:.3f}" for planner in planners]
        figures = [f"{row['step_s']:.5g}", "yes" if row["is_exact"] else "not proven", f"{row['search_s']:.2f}"]
        lines.append(f"| {' | '.join([row['profile'], str(row['num_microbatches']), *figures, *ratios])} |")
    return "\n".join(lines) + "\n"


def show(results: dict[str, Any]) -> None:
    for row in results["eight_devices"]:
        exact = "the best of all" if row["is_exact"] else "not proven to be the best"
        name = f"{row['profile']}, {row['num_microbatches']} micro-batches"
        print(f"{name}: {row['step_s']:.6g} s, {exact}, found in {row['search_s']:.2f} s")
        print(f"    speeds {row['speeds']}, cuts {row['cuts']}")
        print(
            f"    {100 * (row['step_s'] / row['lower_bound_s'] - 1):.2f} % above a bound for all orders and partitions"
        )
        ratios = ", ".join(f"{planner} {ratio:.3f}" for planner, ratio in row["ratios"].items())
        print(f"    others' cuts in the best of {row['num_orders']} orders, against ours: {ratios}")
    for name, values in results["gaps"].items():
        ordered = sorted(values)
        at = {share: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.9, 0.99)}
        spread = ", ".join(f"{100 * share:.0f} % within {100 * gap:.2f} %" for share, gap in at.items())
        exact = sum(gap < SAME - 1 for gap in values)
        print(f"random models, {name}: {exact} of {len(values)} exact; {spread}; worst {100 * ordered[-1]:.2f} %")


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--quick", action="store_true", help="fewer random models")
    options = made.parse_args()
    results: dict[str, Any] = {
        **environment(),
        "eight_devices": eight_devices(),
        "gaps": gaps(10 if options.quick else NUM_GAPS),
    }
    show(results)
    return finish(options, results, shortfalls(results))


if __name__ == "__main__":
    sys.exit(main())
