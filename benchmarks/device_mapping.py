"""What mapping devices to stages is worth, as predicted, and how quickly it is found.

* The example clusters, with a transformer of 96 blocks in halves (194 layers): the mapped step against the launcher's
  order of ranks, whose partition is searched just as long, both by the simulator; what rank 0 costs; the links that
  are busiest.
* Clusters of unlike servers that grow: the search's time, the step against the best placement of fresh, append and
  scatter, servers in the order of ranks or of speed, and its gap to a bound that no mapping can be below.

What a mapping is worth by measurement is in benchmarks/measured_mapping.py.

Run: python benchmarks/device_mapping.py [--check] [--json FILE] [--largest DEVICES]   (half a minute; 1,024: minutes)
"""

# ruff: noqa: E402
from __future__ import annotations

import math
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # Python puts this file's folder there

from benchmarks.reporting import environment, finish, parser
from lightning_autopipe.cluster import example_names, find_cluster_file, load_topology, synthetic_cluster
from lightning_autopipe.core import ClusterTopology, CrossingValue, DeviceTimes, LayerProfile, ModelProfile
from lightning_autopipe.planner import CostModel
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.mapper import MAX_SIMULATED, choose_mapping
from lightning_autopipe.planner.mapping_prices import MappingPrices
from lightning_autopipe.planner.mapping_setting import MappingSetting
from lightning_autopipe.planner.objective import Objective
from lightning_autopipe.planner.partitioner import PartitionSearch, choose_partition
from lightning_autopipe.planner.placements import Grid, launcher_placement, placements, with_rank_0_last

BLOCK_BYTES = 4_000_000
"""Of the parameters of half a block, in float32."""
CROSSING_BYTES = 8_000_000
"""Of the values between two layers, for one micro-batch."""
FORWARD_S = 0.004
"""Of half a block on a device of speed 1."""
SIZES = {
    "no_peer_access_4": ((4, 1), (2, 2)),
    "nvlink_2x8": ((16, 1), (4, 4), (2, 8)),
    "rtx3090_v100": ((12, 1), (4, 3), (2, 6)),
    "rtx4090_8": ((8, 1), (4, 2)),
    "slow_network": ((4, 1), (2, 2)),
    "uneven_1_2_1": ((4, 1), (2, 2)),
}
GROWING = ((2, 8, 2), (8, 16, 4), (32, 16, 16), (128, 32, 32))
"""Servers of eight devices, stages and replicas."""
PLACED_EFFORT = 60_000
"""Actions that may be gone through for the partition of a placement that the mapping is compared with."""
NUM_RUNS = 3
MAX_REPEATED = 16
"""Devices up to which the median time of three searches counts; in the processor's time, as all is one thread."""
MAX_SEARCH_S = {16: 1.0, 64: 10.0, 1024: 600.0}
SAME = 1 + 1e-9


def the_model() -> ModelProfile:
    """96 blocks in halves between an embedding and a head, with times that vary a little."""
    chance = random.Random(1)
    weights = [0.2, *(chance.uniform(0.9, 1.1) * half for half in [0.9, 1.1] * 96), 2.5]
    forward_s = tuple(FORWARD_S * weight for weight in weights)
    layer = {"forward_flops": 0, "param_bytes": BLOCK_BYTES, "trainable_bytes": BLOCK_BYTES}
    return ModelProfile(
        layers=tuple(LayerProfile(name=str(index), **layer) for index in range(len(weights))),
        values=tuple(
            CrossingValue(
                producer=index, last_reader=index + 1, forward_bytes=CROSSING_BYTES, gradient_bytes=CROSSING_BYTES
            )
            for index in range(len(weights) - 1)
        ),
        times=(
            DeviceTimes(
                device_model="speed 1",
                microbatch_size=1,
                forward_s=forward_s,
                backward_s=tuple(2 * seconds for seconds in forward_s),
            ),
        ),
    )


def a_setting(topology: ClusterTopology, num_stages: int, num_replicas: int) -> MappingSetting:
    return MappingSetting(
        cost=CostModel(the_model()),
        network=LinkNetwork(topology),
        num_stages=num_stages,
        num_replicas=num_replicas,
        num_microbatches=4 * num_stages * num_replicas,
    )


def mapped(setting: MappingSetting) -> tuple[Any, dict[str, Any]]:
    times = []
    for _ in range(NUM_RUNS if setting.topology.world_size <= MAX_REPEATED else 1):
        begin = time.process_time()
        choice = choose_mapping(setting)
        times.append(time.process_time() - begin)
    return choice, {
        "num_stages": setting.num_stages,
        "num_replicas": setting.num_replicas,
        "num_devices": setting.topology.world_size,
        "step_s": choice.step_s,
        "search_s": statistics.median(times),
        "num_scored": choice.num_scored,
        "rank_0_costs": choice.rank_0_costs,
        "is_exact": choice.is_exact,
        "is_simulated": choice.is_simulated,
        "gap_to_bound": choice.step_s / choice.lower_bound_s - 1,
        "idle_ranks": choice.idle_ranks,
        "stage_ranks": choice.mapping.stage_ranks,
        "num_microbatches": choice.num_microbatches,
    }


def on_examples() -> list[dict[str, Any]]:
    rows = []
    for name in example_names():
        topology = load_topology(find_cluster_file(name))
        for num_stages, num_replicas in SIZES.get(name, ((topology.world_size, 1),)):
            setting = a_setting(topology, num_stages, num_replicas)
            choice, row = mapped(setting)
            grid = launcher_placement(num_stages, num_replicas)
            even = MappingPrices(setting).even_shares()
            launcher_s = choose_partition(setting.pipelines(grid, even)).step_s
            links = [
                {
                    "from": load.sender,
                    "to": load.receiver,
                    "bytes": load.num_bytes,
                    "busy_share": load.busy_share,
                    "contended_share": load.contended_share,
                    "contending_flows": [(flow.sender, flow.receiver) for flow in load.contending_flows],
                }
                for load in choice.link_loads()[:3]
            ]
            rows.append({"cluster": name, "launcher_s": launcher_s, "busiest_links": links} | row)
    return rows


def growing(largest: int) -> list[dict[str, Any]]:
    rows = []
    for num_servers, num_stages, num_replicas in GROWING:
        topology = synthetic_cluster(num_servers, devices_per_server=8)
        if topology.world_size > largest:
            continue
        setting = a_setting(topology, num_stages, num_replicas)
        _, row = mapped(setting)
        rows.append(row | {"placements_s": best_placements_s(setting)})
    return rows


def best_placements_s(setting: MappingSetting) -> dict[str, float]:
    """The best append, fresh and scatter placements, fastest or slowest devices first or in the order of ranks.

    With cuts and shares that suit them. One that is the same as another policy's counts there only.
    """
    prices = MappingPrices(setting)
    found: dict[str, float] = {}
    for name, grid in placements(setting.topology, setting.num_stages, setting.num_replicas).items():
        policy = name.split(",")[0]
        if policy != "launcher":
            found[policy] = min(found.get(policy, math.inf), placed_s(setting, prices, with_rank_0_last(grid)))
    return found


def placed_s(setting: MappingSetting, prices: MappingPrices, grid: Grid) -> float:
    """Seconds of a step, simulated where the mapper does so, too; infinite where nothing is found that fits."""
    shares = prices.shares(grid, prices.cuts(grid, prices.even_shares()))
    objective = Objective(setting.pipelines(grid, shares))
    search = PartitionSearch(objective, setting.depths, effort=PLACED_EFFORT)
    search.look_around([prices.cuts(grid, shares), search.quick_start()])
    if search.overflow_bytes:
        return math.inf
    num_actions = 2 * setting.num_stages * setting.num_microbatches
    if num_actions * setting.topology.world_size > MAX_SIMULATED:
        return search.step_s
    return objective.predicted_s(search.best, setting.depths)


def shortfalls(results: dict[str, Any]) -> list[str]:
    found = []
    for row in results["examples"]:
        if row["step_s"] > row["launcher_s"] * SAME:
            found.append(f"{title(row)}: {row['step_s']:.4f} s, the launcher's order {row['launcher_s']:.4f} s")
    for row in results["growing"]:
        for policy, placed_s in row["placements_s"].items():
            if row["step_s"] > placed_s * SAME:
                found.append(f"{title(row)}: {row['step_s']:.4f} s, {policy} placement {placed_s:.4f} s")
    for row in [*results["examples"], *results["growing"]]:
        limit_s = min((limit for number, limit in MAX_SEARCH_S.items() if row["num_devices"] <= number), default=None)
        if limit_s is not None and row["search_s"] > limit_s:
            found.append(f"{title(row)}: searched for {row['search_s']:.2f} s, limit {limit_s:g} s")
    return found


def title(row: dict[str, Any]) -> str:
    name = row.get("cluster", f"{row['num_devices']} unlike devices")
    return f"{name}, {row['num_stages']} stages x {row['num_replicas']} replicas"


def show(results: dict[str, Any]) -> None:
    for row in results["examples"]:
        print(
            f"{title(row)}: {row['step_s']:.4f} s, launcher {row['launcher_s']:.4f} s, "
            f"{row['launcher_s'] / row['step_s']:.3f}x; rank 0 costs {100 * row['rank_0_costs']:.2f} %; "
            f"{row['num_scored']} mappings in {row['search_s']:.2f} s{', exact' if row['is_exact'] else ''}"
        )
        for link in row["busiest_links"]:
            print(
                f"    {link['from']} -> {link['to']}: {link['bytes'] / 1e9:.2f} GB, busy "
                f"{100 * link['busy_share']:.1f} %, contended "
                f"{100 * link['contended_share']:.1f} % by {len(link['contending_flows'])} flows"
            )
    for row in results["growing"]:
        placed = ", ".join(
            f"{policy} {placed_s:.4f} s ({placed_s / row['step_s']:.3f}x)"
            for policy, placed_s in row["placements_s"].items()
        )
        print(
            f"{title(row)}: {row['step_s']:.4f} s, {100 * row['gap_to_bound']:.1f} % above the bound; {placed}; "
            f"{row['num_scored']} mappings in {row['search_s']:.2f} s{'' if row['is_simulated'] else ', not simulated'}"
        )


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--largest", type=int, default=64, help="devices of the largest cluster (default 64)")
    options = made.parse_args()
    results: dict[str, Any] = {
        **environment(),
        "examples": on_examples(),
        "growing": growing(options.largest),
    }
    show(results)
    return finish(options, results, shortfalls(results))


if __name__ == "__main__":
    sys.exit(main())
