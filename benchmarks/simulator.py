"""How fast the event simulator is, with stages that share links.

One pipeline over servers of four devices: devices hang on a PCIe switch each (half duplex, fair), servers on a network
switch (full duplex, fair or first-in-first-out), so that several boundaries share links. The whole way is timed: from
lowered lists of actions to a `Timeline`, in the processor's time (it is one thread). The best of some runs counts, as
everything else on the machine only slows them.

Run: python benchmarks/simulator.py [--check] [--json FILE]   (some seconds)
"""

# ruff: noqa: E402
from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # Python puts this file's folder there

from benchmarks.reporting import environment, finish, parser
from lightning_autopipe.core import ClusterTopology, Device, Link, Schedule
from lightning_autopipe.planner import simulate
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.workload import StageWork, StepWork, UnitWork
from lightning_autopipe.schedules import lower, one_f_one_b

DEVICES_PER_SERVER = 4
LIMITS_S = {(16, 64): 0.020, (64, 512): 1.5}
NUM_RUNS = {(16, 64): 40, (64, 512): 3}


def a_cluster(num_devices: int, sharing: str) -> LinkNetwork:
    """Servers of four devices on a PCIe switch each, joined by a network switch."""
    devices = []
    links = []
    for rank in range(num_devices):
        server = f"server {rank // DEVICES_PER_SERVER}"
        devices.append(Device(global_rank=rank, server=server, model="gpu", memory_bytes=24 << 30))
        links.append(Link(a=f"rank {rank}", b=server, bandwidth_bytes_per_s=12e9, latency_s=5e-6, duplex="half"))
        if rank % DEVICES_PER_SERVER == 0:
            links.append(
                Link(a=server, b="switch", bandwidth_bytes_per_s=3e9, latency_s=2e-5, duplex="full", sharing=sharing)
            )
    return LinkNetwork(ClusterTopology(devices=tuple(devices), links=tuple(links)))


def a_step(num_stages: int, schedule: Schedule, sharing: str) -> StepWork:
    """Uneven stages whose neighbours are on different servers, so that all boundaries cross the network."""
    stages = tuple(
        StageWork(
            units=(
                UnitWork(
                    forward_s=0.010 + 0.001 * (stage % 3),
                    backward_s=0.021 + 0.002 * (stage % 2),
                    sent_bytes=4e6,
                    gradient_bytes=4e6,
                ),
            )
        )
        for stage in range(num_stages)
    )
    num_servers = num_stages // DEVICES_PER_SERVER
    ranks = tuple(
        DEVICES_PER_SERVER * (stage % num_servers) + stage // num_servers for stage in reversed(range(num_stages))
    )
    return StepWork(stages=(stages,), schedules=(schedule,), ranks=(ranks,), network=a_cluster(num_stages, sharing))


def measure(num_stages: int, num_microbatches: int, sharing: str) -> dict[str, Any]:
    """The best time of some runs, in seconds."""
    schedule = lower(one_f_one_b(num_stages, num_microbatches))
    step = a_step(num_stages, schedule, sharing)
    times = []
    for _ in range(NUM_RUNS[num_stages, num_microbatches]):
        begin = time.process_time()
        timeline = simulate(step)
        times.append(time.process_time() - begin)
    return {
        "num_stages": num_stages,
        "num_microbatches": num_microbatches,
        "sharing": sharing,
        "simulation_s": min(times),
        "limit_s": LIMITS_S[num_stages, num_microbatches],
        "num_events": len(timeline.events),
        "step_s": timeline.step_s,
    }


def main() -> int:
    options = parser(__doc__).parse_args()
    results = [measure(*sizes, sharing) for sizes in LIMITS_S for sharing in ("fair", "fifo")]
    failures = []
    for result in results:
        name = f"{result['num_stages']} stages x {result['num_microbatches']} micro-batches, {result['sharing']} links"
        print(
            f"{name}: {1e3 * result['simulation_s']:.1f} ms (limit {1e3 * result['limit_s']:.0f} ms), "
            f"{result['num_events']} events"
        )
        if result["simulation_s"] > result["limit_s"]:
            failures.append(f"{name}: {result['simulation_s']:.4f} s is above the limit of {result['limit_s']} s")
    return finish(options, {**environment(), "results": results}, failures)


if __name__ == "__main__":
    sys.exit(main())
