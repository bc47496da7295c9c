"""Servers joined by a slow link: this runtime with planned steps against torch.distributed.pipelining's 1F1B.

Two servers are network namespaces of this machine, joined at 200 Mbit/s. Four stages of 10 + 20 ms a micro-batch hand
on 500 kB of activations, and as much of gradients, 16 micro-batches a step. Layers sleep, they do not compute; the
rest is real: messages, autograd, the runtimes. Stages are on servers A,A,B,B or A,B,A,B; links are measured first, then
the planner's own search chooses, from these links and from what a stage takes at several sizes (half the size: half the
time). All entries run in the same processes, in turns; medians, and extremes in brackets.

* torch's 1F1B, and the same schedule on this executor.
* planned depths: 16 whole micro-batches, as much memory as wanted; and the same with slices.
* torch's stash: 16 micro-batches, and as many as the planner likes, in the memory that torch's 1F1B needs.
* for A,B,A,B: what the mapper makes of it where it may change the order of stages.

Printed beside each time: micro-batches, depths, the bytes that each stage keeps at most (a whole micro-batch keeps 64
MiB, by the planner's account: sleeping layers keep nothing), and the simulated step with stages and links as measured.

Run: python benchmarks/slow_links.py [--check] [--json FILE] [--repeats N]   (3 minutes, as root; needs ip and tc)

--check fails where a figure falls short; it ends with status 3 where this machine has no network namespaces or limited
links, and nothing was measured.
"""

# ruff: noqa: E402
from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # Python puts this file's folder there

from benchmarks.contest import Contest, ContestTimes, Entry, run_contest
from benchmarks.namespaces import INTERFACE, NamespacesUnavailableError, two_servers
from benchmarks.peers import torch_pipelining
from benchmarks.planned_steps import (
    MemoryOf,
    PlannedModel,
    empty_action_s,
    empty_entry,
    error_shortfalls,
    linear_seconds,
    planned,
    predicted_s,
    stash_bytes,
)
from benchmarks.reporting import at_least, at_most, environment, finish, parser, spread
from benchmarks.stage_modules import Seconds
from lightning_autopipe.cluster import measured_topology
from lightning_autopipe.core.cluster import Link
from lightning_autopipe.planner.candidate import Candidate
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.schedules.sliced import NAME as SLICED

BITS_PER_S = 200e6
NUM_STAGES, NUM_MICROBATCHES = 4, 16
WHOLE = Seconds(0.010, 0.020)
NUM_SAMPLES = 8
"""Of a whole micro-batch."""
SAMPLE_BYTES = 500_000 // NUM_SAMPLES
ORDERS = {"A,A,B,B": ("B", "B", "A", "A"), "A,B,A,B": ("B", "A", "B", "A")}
"""Servers of ranks 0 to 3; the launcher's order has stage s on rank 3 - s, torch on rank s: both servers are alike."""
BOUNDS_S = {"A,A,B,B": 0.610, "A,B,A,B": 1.030}
MAX_OF_BOUND = 1.15
MIN_GAINS = {
    "planned depths": {"A,A,B,B": 1.65, "A,B,A,B": 1.5},
    "torch's stash": {"A,A,B,B": 1.25, "A,B,A,B": 1.25},
    "torch's stash, any M": {"A,A,B,B": 1.9, "A,B,A,B": 1.6},
}
"""torch's step against ours."""
THEIRS: MemoryOf = "each stage of 1F1B"
MAPPED = "mapper's order, planned depths"
LIMIT_S = 300.0


def a_contest(order: str, namespaces: tuple[str, str], entries: Sequence[Entry], **options: Any) -> ContestTimes:
    servers = ORDERS[order]
    contest = Contest(
        entries=tuple(entries),
        servers=servers,
        namespaces=tuple(namespaces["AB".index(server)] for server in servers),
        interface=INTERFACE,
        **options,
    )
    return run_contest(contest, limit_s=LIMIT_S)


def candidates_of(order: str, model: PlannedModel, links: tuple[Link, ...]) -> dict[str, Candidate]:
    """What the planner chooses, by title."""
    common: dict[str, Any] = {"servers": ORDERS[order], "links": links}
    fixed = {**common, "num_microbatches": NUM_MICROBATCHES, "is_pinned": True}
    spaces = {
        "plain 1F1B": replace(model.space(**fixed), schedule="1f1b"),
        "planned depths": model.space(**fixed),
        "planned depths and slices": model.space(**fixed, kinds=[SLICED]),
        "torch's stash": model.space(**fixed, kinds=[SLICED], memory_of=THEIRS),
        "torch's stash, any M": model.space(**common, kinds=[SLICED], is_pinned=True, memory_of=THEIRS),
    }
    if order == "A,B,A,B":
        spaces[MAPPED] = model.space(**common, num_microbatches=NUM_MICROBATCHES)
    return {title: planned(space) for title, space in spaces.items()}


def order_rows(order: str, namespaces: tuple[str, str], num_repeats: int) -> list[dict[str, Any]]:
    """The figures of one order of servers."""
    first = a_contest(order, namespaces, [empty_entry(NUM_STAGES)], links_budget_s=20.0, measures_alone=False)
    overhead_s = empty_action_s(first.entries[0], NUM_STAGES)
    model = PlannedModel(
        num_stages=NUM_STAGES,
        num_microbatches=NUM_MICROBATCHES,
        seconds=linear_seconds(WHOLE, NUM_SAMPLES),
        sample_bytes=SAMPLE_BYTES,
        overhead_s=overhead_s,
    )
    topology = measured_topology(model.space(servers=ORDERS[order]).topology, first.links)
    candidates = candidates_of(order, model, topology.links)
    peer = Entry(
        title="torch 1F1B",
        model=model.maker(),
        num_microbatches=NUM_MICROBATCHES,
        num_samples=NUM_SAMPLES,
        schedule=torch_pipelining.ONE_F_ONE_B,
    )
    entries = [peer, *(model.entry(title, candidate) for title, candidate in candidates.items())]
    measured = a_contest(order, namespaces, entries, num_repeats=num_repeats)
    of_peer, *of_ours = measured.entries
    network = LinkNetwork(topology)
    slowest = min(topology.links, key=lambda link: link.bandwidth_bytes_per_s)
    common = {"order": order, "load": measured.load, "overhead_s": overhead_s}
    common["link"] = [slowest.bandwidth_bytes_per_s, slowest.latency_s, slowest.duplex, slowest.sharing]
    rows = [
        {
            **common,
            "title": "torch 1F1B",
            "num_microbatches": NUM_MICROBATCHES,
            "schedule": torch_pipelining.ONE_F_ONE_B,
            "stash_bytes": model.plain_stash_bytes(),
            "seconds": of_peer.seconds,
            "median_s": of_peer.median_s,
        }
    ]
    for (title, candidate), times in zip(candidates.items(), of_ours, strict=True):
        simulated_s = predicted_s(candidate, times, network, overhead_s)
        rows.append(
            {
                **common,
                "title": title,
                "num_microbatches": candidate.num_microbatches,
                "schedule": str(candidate.schedule),
                "stage_servers": ",".join(ORDERS[order][rank] for (rank,) in candidate.mapping.stage_ranks),
                "stash_bytes": stash_bytes(candidate, model),
                "planned_s": candidate.step_s,
                "seconds": times.seconds,
                "median_s": times.median_s,
                "gain": of_peer.median_s / times.median_s,
                "simulated_s": simulated_s,
                "error": simulated_s / times.median_s - 1,
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    bandwidth, latency_s, duplex, sharing = rows[0]["link"]
    print(
        f"\nstages on servers {rows[0]['order']}: link measured {bandwidth / 1e6:.2f} MB/s, {1e6 * latency_s:.0f} us, "
        f"{duplex} duplex, {sharing}; an empty action {1e6 * rows[0]['overhead_s']:.0f} us of CPU; load "
        f"{rows[0]['load'][0]:.1f} {rows[0]['load'][1]:.1f}"
    )
    for row in rows:
        mebibytes = "-".join(f"{num_bytes / 2**20:g}" for num_bytes in row["stash_bytes"])
        print(f"{row['title']}: {spread(row['seconds'])}", end="")
        if "gain" in row:
            print(
                f", {row['gain']:.3f}x; simulated {1e3 * row['simulated_s']:.1f} ms ({row['error']:+.1%}), planned for "
                f"{1e3 * row['planned_s']:.1f} ms; servers {row['stage_servers']}",
                end="",
            )
        print(f"\n    M={row['num_microbatches']}, {row['schedule']}; keeps {mebibytes} MiB", flush=True)


def shortfalls(rows: Sequence[dict[str, Any]]) -> list[str]:
    found = []
    of = {(row["order"], row["title"]): row for row in rows}
    for order, bound_s in BOUNDS_S.items():
        share = of[order, "planned depths"]["median_s"] / bound_s
        found += at_most(f"{order}: planned depths against the bound of {1e3 * bound_s:.0f} ms", share, MAX_OF_BOUND)
        for title, wanted in MIN_GAINS.items():
            row = of[order, title]
            found += at_least(f"{order}: torch's 1F1B against {title}", row["gain"], wanted[order])
            if title.startswith("torch's stash"):
                theirs = of[order, "torch 1F1B"]["stash_bytes"]
                found += [
                    f"{order}, {title}: stage {stage} keeps {ours} bytes, torch {limit}"
                    for stage, (ours, limit) in enumerate(zip(row["stash_bytes"], theirs, strict=True))
                    if ours > limit
                ]
    given, mapped = (of["A,B,A,B", title] for title in ("planned depths", MAPPED))
    found += at_least("the mapper's order against A,B,A,B", given["median_s"] / mapped["median_s"], 1.0)
    return found + error_shortfalls([row["error"] for row in rows if "error" in row])


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=5, help="turns (default: %(default)s)")
    options = made.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    try:
        with two_servers(BITS_PER_S) as namespaces:
            print("Layers sleep, they do not compute; servers are network namespaces with a limited link between them.")
            for order in ORDERS:
                rows += order_rows(order, namespaces, options.repeats)
                show([row for row in rows if row["order"] == order])
    except NamespacesUnavailableError as error:
        return finish(options, environment(), [], skipped=str(error))
    given, mapped = (
        next(row for row in rows if (row["order"], row["title"]) == ("A,B,A,B", title))
        for title in ("planned depths", MAPPED)
    )
    print(f"\nThe mapper's order is {given['median_s'] / mapped['median_s']:.3f}x as fast as A,B,A,B.")
    return finish(options, {**environment(), "rows": rows}, shortfalls(rows))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else the namespaces would stay
    sys.exit(main())
