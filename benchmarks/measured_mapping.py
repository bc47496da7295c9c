"""What mapping devices to stages is worth, measured against what the simulator says.

Two "servers" are network namespaces of this machine with a link of 100 Mbit/s between them. Layers sleep instead of
computing; the rest is the runtime's own: executor, transports, process groups, sums of gradients. Ranks of the two
servers alternate, as a launcher may count them. Links are measured first, then devices are mapped, as
users would do it.

* The launcher's order, with the partition that suits it, against the mapping that `choose_mapping` gives: how much
  faster the step is, by measurement (medians; both in turns) and by the simulator.
* Deeper warm-ups on the slow link, with the two servers one after the other (A,A,B,B) and in turns (A,B,A,B).

Run: python benchmarks/measured_mapping.py [--check] [--json FILE]   (5 minutes, as root; needs ip and tc)

--check fails where a measured gain, or a step with deeper warm-up, is more than 10 % off, and where nothing could be
measured because this machine has no network namespaces or limited links.
"""

# ruff: noqa: E402
from __future__ import annotations

import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # Python puts this file's folder there

from benchmarks.emulation import RunMeasurement, SleepingRun, StepMeasurement, run_sleeping
from benchmarks.namespaces import INTERFACE, NamespacesUnavailableError, two_servers
from benchmarks.reporting import environment, finish, parser
from lightning_autopipe.cluster import measured_topology
from lightning_autopipe.cluster.servers import NETWORK_POINT
from lightning_autopipe.core import (
    ClusterTopology,
    CrossingValue,
    Device,
    DeviceTimes,
    LayerProfile,
    ModelProfile,
)
from lightning_autopipe.planner import CostModel
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.mapper import choose_mapping
from lightning_autopipe.planner.mapping_prices import MappingPrices
from lightning_autopipe.planner.mapping_setting import MappingSetting
from lightning_autopipe.planner.objective import Objective
from lightning_autopipe.planner.partitioner import choose_partition
from lightning_autopipe.planner.placements import Grid, launcher_placement
from lightning_autopipe.planner.simulator import simulate
from lightning_autopipe.planner.workload import StepWork

MAX_ERROR = 0.10
BITS_PER_S = 100e6
NUM_LAYERS = 16
LAYER_FORWARD_S = 0.005
"""Of one layer on a device of speed 1; its backward takes twice that."""
REFERENCE = "speed 1"
LIMIT_S = 280.0
FOLLOWED, ALTERNATING = ((3, 1, 2, 0),), ((3, 2, 1, 0),)
"""Ranks of stages 0 to 3; even ranks are on server A, odd ones on server B."""
DEPTHS = {
    "A,A,B,B": (FOLLOWED, ((3, 2, 1, 0), (5, 4, 1, 0))),
    "A,B,A,B": (ALTERNATING, ((3, 2, 1, 0), (6, 5, 3, 0))),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model in some stages and replicas on ranks that alternate between two servers."""

    title: str
    num_stages: int
    num_replicas: int = 1
    num_microbatches: int
    crossing_bytes: int
    parameter_bytes: int = 0
    """Of each layer."""
    speeds: tuple[float, float] = (1.0, 1.0)
    """Of the servers' devices."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.num_stages * self.num_replicas

    def profile(self) -> ModelProfile:
        """Equal layers."""
        num_bytes = self.parameter_bytes
        crossing = {"forward_bytes": self.crossing_bytes, "gradient_bytes": self.crossing_bytes}
        return ModelProfile(
            layers=tuple(
                LayerProfile(name=str(index), forward_flops=0, param_bytes=num_bytes, trainable_bytes=num_bytes)
                for index in range(NUM_LAYERS)
            ),
            values=tuple(
                CrossingValue(producer=index, last_reader=index + 1, **crossing) for index in range(NUM_LAYERS - 1)
            ),
            times=(
                DeviceTimes(
                    device_model=REFERENCE,
                    microbatch_size=1,
                    forward_s=(LAYER_FORWARD_S,) * NUM_LAYERS,
                    backward_s=(2 * LAYER_FORWARD_S,) * NUM_LAYERS,
                ),
            ),
        )

    def cluster(self) -> ClusterTopology:
        """The devices, before links are measured."""
        return ClusterTopology(
            devices=tuple(
                Device(
                    global_rank=rank,
                    server="AB"[rank % 2],
                    model=f"speed {self.speeds[rank % 2]:g}",
                    memory_bytes=1 << 40,
                    relative_speed=self.speeds[rank % 2],
                )
                for rank in range(self.world_size)
            )
        )


CASES = (
    Case(title="4 stages", num_stages=4, num_microbatches=16, crossing_bytes=480_000),
    Case(
        title="4 stages, server B half as fast",
        num_stages=4,
        num_microbatches=12,
        crossing_bytes=480_000,
        speeds=(1.0, 0.5),
    ),
    Case(
        title="4 stages x 2 replicas",
        num_stages=4,
        num_replicas=2,
        num_microbatches=12,
        crossing_bytes=480_000,
        parameter_bytes=300_000,
    ),
    Case(title="8 stages", num_stages=8, num_microbatches=8, crossing_bytes=320_000),
)


def a_run(namespaces: tuple[str, str], world_size: int, steps: tuple[StepWork, ...]) -> RunMeasurement:
    """Steps on ranks that alternate between the servers; without steps, their links."""
    run = SleepingRun(
        steps=steps,
        servers=tuple("AB"[rank % 2] for rank in range(world_size)),
        namespaces=tuple(namespaces[rank % 2] for rank in range(world_size)),
        interface=INTERFACE,
        num_repeats=3,
        links_budget_s=0.0 if steps else 30.0,
    )
    return run_sleeping(run, limit_s=LIMIT_S)


def setting_of(case: Case, measured: RunMeasurement) -> MappingSetting:
    return MappingSetting(
        cost=CostModel(case.profile()),
        network=LinkNetwork(measured_topology(case.cluster(), measured.links)),
        num_stages=case.num_stages,
        num_replicas=case.num_replicas,
        num_microbatches=case.num_microbatches,
    )


def launchers_step(setting: MappingSetting) -> StepWork:
    """The ranks as they were counted, with the partition that suits them."""
    grid = launcher_placement(setting.num_stages, setting.num_replicas)
    pipelines = setting.pipelines(grid, MappingPrices(setting).even_shares())
    choice = choose_partition(pipelines)
    return Objective(pipelines).step_work(choice.partition.cut_points, choice.depths)


def step_on(setting: MappingSetting, grid: Grid, depths: tuple[int, ...]) -> StepWork:
    """Equal stages on given ranks."""
    cuts = tuple(NUM_LAYERS * stage // setting.num_stages for stage in range(1, setting.num_stages))
    return Objective(setting.pipelines(grid, (setting.num_microbatches,))).step_work(cuts, depths)


def simulated_s(step: StepMeasurement) -> float:
    return simulate(step.priced).step_s


def case_row(case: Case, namespaces: tuple[str, str]) -> dict[str, Any]:
    links = a_run(namespaces, case.world_size, ())
    setting = setting_of(case, links)
    mapping = choose_mapping(setting)
    mapped = Objective(mapping.setting).step_work(mapping.partition.cut_points, mapping.depths)
    measured = a_run(namespaces, case.world_size, (launchers_step(setting), mapped))
    naive, best = measured.steps
    gain, simulated_gain = naive.median_s / best.median_s, simulated_s(naive) / simulated_s(best)
    return {
        "case": case.title,
        "stage_servers": [["AB"[rank % 2] for rank in ranks] for ranks in mapping.mapping.stage_ranks],
        "cut_points": mapping.partition.cut_points,
        "replica_microbatches": mapping.num_microbatches,
        "launcher": [naive.median_s, simulated_s(naive)],
        "mapped": [best.median_s, simulated_s(best)],
        "gain": gain,
        "simulated_gain": simulated_gain,
        "error": simulated_gain / gain - 1,
        "network": network_of(setting),
        "load": measured.load,
    }


def network_of(setting: MappingSetting) -> list[Any]:
    link = next(link for link in setting.topology.links if link.b == NETWORK_POINT)
    return [link.bandwidth_bytes_per_s, link.latency_s, link.duplex, link.sharing]


def depth_rows(namespaces: tuple[str, str]) -> list[dict[str, Any]]:
    case = CASES[0]
    setting = setting_of(case, a_run(namespaces, case.world_size, ()))
    titles, steps = [], []
    for order, (grid, all_depths) in DEPTHS.items():
        for depths in all_depths:
            titles.append(f"{order}, depths {' '.join(map(str, depths))}")
            steps.append(step_on(setting, grid, depths))
    measured = a_run(namespaces, case.world_size, tuple(steps))
    return [
        {
            "case": title,
            "measured_s": step.median_s,
            "simulated_s": simulated_s(step),
            "error": simulated_s(step) / step.median_s - 1,
            "load": measured.load,
        }
        for title, step in zip(titles, measured.steps, strict=True)
    ]


def show_case(row: dict[str, Any]) -> None:
    servers = " ".join("".join(of_stage) for of_stage in row["stage_servers"])
    print(
        f"{row['case']}: launcher {row['launcher'][0]:.3f} s (simulated {row['launcher'][1]:.3f}), mapped "
        f"{row['mapped'][0]:.3f} s ({row['mapped'][1]:.3f}): {row['gain']:.3f}x, simulated "
        f"{row['simulated_gain']:.3f}x ({row['error']:+.1%})\n    stages on servers {servers}, cuts "
        f"{row['cut_points']}, micro-batches {row['replica_microbatches']}; link {row['network'][0] / 1e6:.2f} MB/s, "
        f"{1e6 * row['network'][1]:.0f} us, {row['network'][2]} duplex, {row['network'][3]}; load "
        f"{row['load'][0]:.1f} {row['load'][1]:.1f}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__).parse_args(arguments)
    results: dict[str, Any] = {
        **environment(),
        "cases": [],
        "depths": [],
    }
    skipped: str | None = None
    try:
        with two_servers(BITS_PER_S) as namespaces:
            print("Layers sleep, they do not compute; servers are network namespaces with a limited link between them.")
            for case in CASES:
                results["cases"].append(case_row(case, namespaces))
                show_case(results["cases"][-1])
            results["depths"] = depth_rows(namespaces)
    except NamespacesUnavailableError as error:
        skipped = str(error)
    for row in results["depths"]:
        print(
            f"{row['case']}: {row['measured_s']:.3f} s, simulated {row['simulated_s']:.3f} s ({row['error']:+.1%}); "
            f"load {row['load'][0]:.1f} {row['load'][1]:.1f}"
        )
    rows = [*results["cases"], *results["depths"]]
    if not skipped:
        print(f"Median error {statistics.median(abs(row['error']) for row in rows):.1%}")
    found = [f"{row['case']}: off by {row['error']:+.1%}" for row in rows if abs(row["error"]) > MAX_ERROR]
    return finish(options, results, found, skipped=skipped)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else the namespaces would stay
    sys.exit(main())
