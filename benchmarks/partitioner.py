"""How good and how quick the partitioner is.

* The reference chain (embedding, 24 transformer blocks in halves, head; algorithms of AutoPipe's planner): the proven
  optimum at plain warm-up depth, and what partition and depths together reach, with the micro-batches kept for it.
* The gap of the search to the best of all partitions, for up to 16 layers on up to 6 stages with random times, on like
  and unlike devices (where the order of devices is searched, too). The search is made to do without looking at all.
* The time for a 96-layer model in about 200 sub-blocks on 16 stages.

Run: python benchmarks/partitioner.py [--check] [--json FILE]   (about a minute)
"""

# ruff: noqa: E402
from __future__ import annotations

import math
import random
import sys
import time
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # Python puts this file's folder there

from benchmarks.reporting import environment, finish, parser
from lightning_autopipe.core import Device, DeviceTimes, LayerProfile, ModelProfile
from lightning_autopipe.planner import CostModel, simulate
from lightning_autopipe.planner.depths import choose_partition_and_depths
from lightning_autopipe.planner.device_order import choose_device_order
from lightning_autopipe.planner.objective import Objective, PipelineSetting
from lightning_autopipe.planner.partitioner import choose_partition
from lightning_autopipe.schedules import default_depths

PLAIN_S = {8: 452_810, 16: 485_430}
DEPTHS_FREE_S = {8: 414_010, 16: 449_390}
MAX_CHAIN_SEARCH_S = 30.0
MAX_LARGE_SEARCH_S = 1.0
NUM_GAPS = {"like devices": 150, "unlike devices": 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A result and the processor's time for it."""

    value: Any
    search_s: float


def timed(function: Any, *args: Any, **kwargs: Any) -> Timed:
    begin = time.process_time()
    value = function(*args, **kwargs)
    return Timed(value=value, search_s=time.process_time() - begin)


def a_setting(
    forward_s: list[float], backward_s: list[float], num_stages: int, num_microbatches: int
) -> PipelineSetting:
    """Layers of known times on devices that are all like the profiled one."""
    times = DeviceTimes(
        device_model="profiled", microbatch_size=1, forward_s=tuple(forward_s), backward_s=tuple(backward_s)
    )
    layers = tuple(LayerProfile(name=str(index), forward_flops=0) for index in range(len(forward_s)))
    cost = CostModel(ModelProfile(layers=layers, times=(times,)))
    return PipelineSetting(cost=cost, num_stages=num_stages, num_microbatches=(num_microbatches,))


def the_chain(num_stages: int) -> PipelineSetting:
    forward_s = [50.0, *[900.0, 1100.0] * 24, 2500.0]
    backward_s = [60.0, *[1800.0, 2200.0] * 24, 5000.0]
    return a_setting(forward_s, backward_s, num_stages, 2 * num_stages)


def reference_chains() -> list[dict[str, Any]]:
    rows = []
    for num_stages in PLAIN_S:
        setting = the_chain(num_stages)
        for name, choose in (("plain depth", choose_partition), ("depths free", choose_partition_and_depths)):
            result = timed(choose, setting)
            choice = result.value
            timeline = simulate(Objective(setting).step_work(choice.partition.cut_points, choice.depths))
            rows.append(
                {
                    "num_stages": num_stages,
                    "search": name,
                    "step_s": timeline.step_s,
                    "cut_points": choice.partition.cut_points,
                    "stash": [min(depth + 1, 2 * num_stages) for depth in choice.depths],
                    "search_s": result.search_s,
                }
            )
    return rows


def gaps() -> dict[str, list[float]]:
    """By how much the search's steps are longer than the best ones."""
    chance = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in NUM_GAPS}
    for _ in range(NUM_GAPS["like devices"]):
        setting = a_random_setting(chance, max_layers=16, max_stages=6)
        best_s = best_of_all([setting])
        found["like devices"].append(choose_partition(setting, max_exact=0).step_s / best_s - 1)
    for _ in range(NUM_GAPS["unlike devices"]):
        setting = a_random_setting(chance, max_layers=10, max_stages=5)
        devices = tuple(
            Device(
                global_rank=rank,
                server="server",
                model="gpu",
                memory_bytes=1,
                relative_speed=chance.choice([1.0, 0.5, 0.25]),
            )
            for rank in range(setting.num_stages)
        )
        roomy = tuple(replace(device, memory_bytes=1 << 40) for device in devices)
        by_order = {tuple(device.relative_speed for device in order): order for order in permutations(roomy)}
        best_s = best_of_all([replace(setting, devices=(order,)) for order in by_order.values()])
        choice = choose_device_order(replace(setting, devices=(roomy,)), max_exact=0).choice
        found["unlike devices"].append(choice.step_s / best_s - 1)
    return found


def a_random_setting(chance: random.Random, *, max_layers: int, max_stages: int) -> PipelineSetting:
    num_layers = chance.randint(4, max_layers)
    num_stages = chance.randint(2, min(max_stages, num_layers))
    forward_s = [chance.random() * chance.choice([1, 1, 1, 5]) for _ in range(num_layers)]
    backward_s = [seconds * chance.uniform(1, 3) for seconds in forward_s]
    return a_setting(forward_s, backward_s, num_stages, chance.choice([1, 2, 4]) * num_stages)


def best_of_all(settings: list[PipelineSetting]) -> float:
    best_s = math.inf
    for setting in settings:
        objective, depths = Objective(setting), default_depths(setting.num_stages)
        for cuts in combinations(range(1, objective.num_layers), setting.num_stages - 1):
            if objective.bound_s(cuts, depths) < best_s:
                best_s = min(best_s, objective.step_s(cuts, depths))
    return best_s


def large_models() -> list[dict[str, Any]]:
    """96 blocks in halves between an embedding and a head, with times that vary a little."""
    rows = []
    for num_microbatches in (16, 32, 64, 128):
        chance = random.Random(1)
        forward_s = [0.2, *(chance.uniform(0.9, 1.1) * seconds for seconds in [0.9, 1.1] * 96), 2.5]
        setting = a_setting(forward_s, [2 * seconds for seconds in forward_s], 16, num_microbatches)
        for name, choose in (("plain depth", choose_partition), ("depths free", choose_partition_and_depths)):
            result = timed(choose, setting)
            rows.append(
                {
                    "num_layers": len(forward_s),
                    "num_stages": 16,
                    "num_microbatches": num_microbatches,
                    "search": name,
                    "step_s": result.value.step_s,
                    "search_s": result.search_s,
                }
            )
    return rows


def shortfalls(results: dict[str, Any]) -> list[str]:
    found = []
    for row in results["reference_chains"]:
        name = f"reference chain on {row['num_stages']} stages, {row['search']}"
        is_plain = row["search"] == "plain depth"
        limit_s = (PLAIN_S if is_plain else DEPTHS_FREE_S)[row["num_stages"]]
        if row["step_s"] > limit_s or (is_plain and row["step_s"] != limit_s):
            found.append(f"{name}: {row['step_s']:,.0f} instead of {limit_s:,}")
        if row["search_s"] > MAX_CHAIN_SEARCH_S:
            found.append(f"{name}: searched for {row['search_s']:.1f} s, limit {MAX_CHAIN_SEARCH_S:.0f} s")
    for row in results["large_models"]:
        if row["search_s"] > MAX_LARGE_SEARCH_S and row["search"] == "plain depth":
            name = f"{row['num_layers']} layers, {row['num_microbatches']} micro-batches"
            found.append(f"{name}: searched for {row['search_s']:.2f} s, limit {MAX_LARGE_SEARCH_S:.0f} s")
    return found


def show(results: dict[str, Any]) -> None:
    for row in results["reference_chains"]:
        print(f"reference chain, {row['num_stages']} stages, {row['search']}: {row['step_s']:,.0f}")
        print(f"    cuts {row['cut_points']}, stash {row['stash']}, found in {row['search_s']:.3f} s")
    for name, values in results["gaps"].items():
        ordered = sorted(values)
        exact = sum(gap < 1e-9 for gap in values)
        at = {share: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.9, 0.99)}
        spread = ", ".join(f"{100 * share:.0f} % within {100 * gap:.2f} %" for share, gap in at.items())
        print(f"gap of the search, {name}: {exact} of {len(values)} exact; {spread}; worst {100 * ordered[-1]:.2f} %")
    for row in results["large_models"]:
        print(
            f"{row['num_layers']} layers, {row['num_stages']} stages, {row['num_microbatches']} micro-batches, "
            f"{row['search']}: step {row['step_s']:.1f}, found in {row['search_s']:.3f} s"
        )


def main() -> int:
    options = parser(__doc__).parse_args()
    results: dict[str, Any] = {
        **environment(),
        "reference_chains": reference_chains(),
        "gaps": gaps(),
        "large_models": large_models(),
    }
    show(results)
    return finish(options, results, shortfalls(results))


if __name__ == "__main__":
    sys.exit(main())
