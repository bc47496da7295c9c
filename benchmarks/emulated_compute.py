"""Sleeping layers, links that take next to nothing: how near steps come to their bounds, ours and torch's.

Stages sleep, they do not compute; messages, autograd and the runtimes are real, in processes of this machine over gloo.
All entries of a part run in the same processes, in turns; medians, and extremes in brackets.

* Plain 1F1B on this executor and on torch.distributed.pipelining: 20 + 40 ms, p = 2, 4, 8 stages, p, 2p and 4p
  micro-batches: the bound (M + p - 1) (f + b) divided by what was measured.
* What the planner chooses for 8 stages in no more memory than torch's 1F1B needs on each of them, with slices, from
  what a stage takes for a whole micro-batch and for half of one: half as long, 55 %, 60 % or 80 % as long. Against
  torch's 1F1B with as many micro-batches (half as long), or with the better of M whole and 2M half ones.
* Zero-bubble where forward and both parts of the backward last 40 ms, planned for devices with the memory of the first
  stage of 1F1B, against torch's 1F1B, zero-bubble (ZB1P) and V-shaped zero-bubble (ZBV, two stages of half the length
  on each rank).

Run: python benchmarks/emulated_compute.py [--check] [--json FILE] [--repeats N] [--only bounds|planned|zero-bubble]
(7 minutes)

--check fails where a figure falls short.
"""

# ruff: noqa: E402
from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # Python puts this file's folder there

from benchmarks.contest import Contest, ContestTimes, Entry, EntryTimes, run_contest
from benchmarks.peers import torch_pipelining
from benchmarks.planned_steps import (
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
from lightning_autopipe.planner.candidate import Candidate
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.schedules.sliced import NAME as SLICED
from lightning_autopipe.schedules.zero_bubble import NAME as ZERO_BUBBLE

WHOLE = Seconds(0.020, 0.040)
SPLIT = Seconds(0.040, 0.040, 0.040)
NUM_SAMPLES = 8
"""Of a whole micro-batch."""
SAMPLE_BYTES = 8 << 10
NUM_STAGES = 8
NUM_MICROBATCHES = (16, 8)
MIN_LINEAR_GAINS = {16: 1.14, 8: 1.25}
SHARES = (0.55, 0.6, 0.8)
"""What half a micro-batch takes of a whole one."""
MIN_GAINS = {(0.55, 16): 1.02, (0.55, 8): 1.0, (0.6, 16): 1.04, (0.6, 8): 1.0}
"""By that share and micro-batches. With 8 micro-batches none can be much better than 2M half ones."""
NEVER_SLICED = 0.8
MAX_UNITS = {16: 57, 8: 31}
"""Of a zero-bubble step, in forwards."""
MAX_OF_UNITS = 1.06
LIMIT_S = 540.0


class Part:
    """Entries on some processes, with what is to be told of them."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._entries: dict[str, Entry] = {"empty": empty_entry(num_stages)}
        self._candidates: dict[str, Candidate] = {}
        self._times: dict[str, EntryTimes] = {}
        self.rows: dict[str, dict[str, Any]] = {}

    def torch(
        self,
        title: str,
        model: PlannedModel,
        *,
        num_samples: int | None = None,
        schedule: str = torch_pipelining.ONE_F_ONE_B,
        stages_per_rank: int = 1,
    ) -> None:
        """Adds a step of torch's, with micro-batches of some size; None: whole ones."""
        size = num_samples or model.whole
        entry = Entry(
            title=title,
            model=model.maker(),
            num_microbatches=model.batch_size // size,
            num_samples=size,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
        )
        is_plain = schedule == torch_pipelining.ONE_F_ONE_B
        stash = model.plain_stash_bytes(size) if is_plain else ()  # the others' is not known here
        self._add(entry, {"schedule": schedule, "stash_bytes": stash})

    def ours(self, title: str, model: PlannedModel, candidate: Candidate) -> None:
        """Adds a planned step."""
        self._candidates[title] = candidate
        facts = {
            "schedule": str(candidate.schedule),
            "stash_bytes": stash_bytes(candidate, model),
            "planned_s": candidate.step_s,
        }
        self._add(model.entry(title, candidate), facts)

    def _add(self, entry: Entry, facts: Mapping[str, Any]) -> None:
        self._entries[entry.title] = entry
        self.rows[entry.title] = {"title": entry.title, "num_microbatches": entry.num_microbatches, **facts}

    def run(self, num_repeats: int) -> None:
        """Measures all."""
        contest = Contest(
            entries=tuple(self._entries.values()),
            servers=("here",) * self._num_stages,
            num_repeats=num_repeats,
            links_budget_s=8.0,
        )
        measured = run_contest(contest, limit_s=LIMIT_S)
        self._times = dict(zip(self._entries, measured.entries, strict=True))
        overhead_s = empty_action_s(self._times["empty"], self._num_stages)
        network = self._network(measured)
        for title, row in self.rows.items():
            times = self._times[title]
            row.update(seconds=times.seconds, median_s=times.median_s, load=measured.load, overhead_s=overhead_s)
            if title in self._candidates:
                simulated_s = predicted_s(self._candidates[title], times, network, overhead_s)
                row.update(simulated_s=simulated_s, error=simulated_s / times.median_s - 1)

    def _network(self, measured: ContestTimes) -> LinkNetwork:
        model = PlannedModel(num_stages=self._num_stages, num_microbatches=1, seconds={1: WHOLE})
        return LinkNetwork(measured_topology(model.space().topology, measured.links))

    def median_s(self, title: str) -> float:
        """What was measured."""
        return float(self.rows[title]["median_s"])

    def show(self) -> None:
        """Prints all rows."""
        for row in self.rows.values():
            print(f"{row['title']}: {spread(row['seconds'])}", end="")
            if "planned_s" in row:
                print(
                    f"; simulated {1e3 * row['simulated_s']:.1f} ms ({row['error']:+.1%}), planned for "
                    f"{1e3 * row['planned_s']:.1f} ms",
                    end="",
                )
            mebibytes = "-".join(f"{num_bytes / 2**20:g}" for num_bytes in row["stash_bytes"])
            keeps = f"; keeps {mebibytes} MiB" if mebibytes else ""
            print(f"\n    M={row['num_microbatches']}, {row['schedule']}{keeps}")
        load, overhead_s = (next(iter(self.rows.values()))[name] for name in ("load", "overhead_s"))
        print(
            f"    an empty action takes {1e6 * overhead_s:.0f} us of CPU; load {load[0]:.1f} {load[1]:.1f}", flush=True
        )


def a_model(num_stages: int, num_microbatches: int, seconds: Mapping[int, Seconds]) -> PlannedModel:
    return PlannedModel(
        num_stages=num_stages, num_microbatches=num_microbatches, seconds=seconds, sample_bytes=SAMPLE_BYTES
    )


def bounds(num_repeats: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Plain 1F1B against its bound."""
    rows: list[dict[str, Any]] = []
    found: list[str] = []
    for num_stages in (2, 4, 8):
        part = Part(num_stages)
        counts = [times * num_stages for times in (1, 2, 4)]
        for number in counts:
            model = a_model(num_stages, number, {NUM_SAMPLES: WHOLE})
            part.torch(f"torch, p={num_stages} M={number}", model)
            plain = replace(model.space(num_microbatches=number), schedule="1f1b")
            part.ours(f"ours, p={num_stages} M={number}", model, planned(plain))
        part.run(num_repeats)
        part.show()
        for number in counts:
            name = f"p={num_stages} M={number}"
            bound_s = (number + num_stages - 1) * (WHOLE.forward + WHOLE.backward)
            ours, peer = (bound_s / part.median_s(f"{who}, {name}") for who in ("ours", "torch"))
            print(f"{name}: bound / measured: ours {ours:.3f}, torch {peer:.3f}")
            found += at_least(f"{name}: bound / measured, against torch's", ours, peer)
            part.rows[f"ours, {name}"].update(share=ours, torch_share=peer)
        rows += part.rows.values()
    return rows, found


def halved(share: float) -> dict[int, Seconds]:
    """What whole and half micro-batches take."""
    return {NUM_SAMPLES: WHOLE, NUM_SAMPLES // 2: WHOLE.times(share)}


def planned_choices(num_repeats: int) -> tuple[list[dict[str, Any]], list[str]]:
    """What the planner chooses, against torch's 1F1B."""
    rows: list[dict[str, Any]] = []
    found: list[str] = []
    for number in NUM_MICROBATCHES:
        part = Part(NUM_STAGES)
        linear = a_model(NUM_STAGES, number, linear_seconds(WHOLE, NUM_SAMPLES))
        part.torch(f"torch, M={number}", linear)
        kept: dict[str, Any] = {"memory_of": "each stage of 1F1B", "kinds": [SLICED]}
        part.ours(f"planned, M={number}", linear, planned(linear.space(num_microbatches=number, **kept)))
        for share in SHARES:
            model = a_model(NUM_STAGES, number, halved(share))
            candidate = planned(model.space(**kept))
            if share == NEVER_SLICED:
                print(f"M={number}, half size charged {share:.0%}: the planner chooses {candidate.schedule}")
                if candidate.schedule.is_sliced:
                    found.append(f"M={number}, half size charged {share:.0%}: it slices, {candidate.schedule}")
                continue
            part.ours(f"planned, M={number}, half {share:.0%}", model, candidate)
            part.torch(f"torch, 2M={2 * number}, half {share:.0%}", model, num_samples=NUM_SAMPLES // 2)
        part.run(num_repeats)
        part.show()
        found += planned_shortfalls(part, number)
        rows += part.rows.values()
    return rows, found


def planned_shortfalls(part: Part, number: int) -> list[str]:
    """What falls short of one number of micro-batches; says what there is."""
    found = []
    peer_s = part.median_s(f"torch, M={number}")
    gain = peer_s / part.median_s(f"planned, M={number}")
    print(f"M={number}, linear: planned is {gain:.3f}x as fast as torch's 1F1B")
    found += at_least(f"M={number}, linear: torch's 1F1B against planned", gain, MIN_LINEAR_GAINS[number])
    part.rows[f"planned, M={number}"]["gain"] = gain
    for (share, of), wanted in MIN_GAINS.items():
        if of == number:
            name = f"half {share:.0%}"
            best_s = min(peer_s, part.median_s(f"torch, 2M={2 * number}, {name}"))
            gain = best_s / part.median_s(f"planned, M={number}, {name}")
            print(f"M={number}, {name}: planned is {gain:.3f}x as fast as torch's 1F1B with the better of M and 2M")
            found += at_least(f"M={number}, {name}: torch's better 1F1B against planned", gain, wanted)
            part.rows[f"planned, M={number}, {name}"]["gain"] = gain
    limits = part.rows[f"torch, M={number}"]["stash_bytes"]
    for title, row in part.rows.items():
        found += [
            f"{title}: stage {stage} keeps {ours} bytes, torch {limit}"
            for stage, (ours, limit) in enumerate(zip(row["stash_bytes"], limits, strict=True))
            if ours > limit
        ]
    return found


def zero_bubble(num_repeats: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Split backwards."""
    part, found = Part(NUM_STAGES), []
    simulated = {}
    for number in NUM_MICROBATCHES:
        model = a_model(NUM_STAGES, number, {NUM_SAMPLES: SPLIT})
        space = model.space(num_microbatches=number, memory_of="first stages of 1F1B", kinds=[ZERO_BUBBLE])
        candidate = planned(space)
        simulated[number] = round(candidate.step_s / SPLIT.forward, 6)
        part.ours(f"planned, M={number}", model, candidate)
        part.torch(f"torch 1F1B, M={number}", model)
        part.torch(f"torch ZB1P, M={number}", model, schedule=torch_pipelining.ZERO_BUBBLE)
        halves = a_model(NUM_STAGES, number, {NUM_SAMPLES: SPLIT.times(0.5)})
        part.torch(f"torch ZBV, M={number}", halves, schedule=torch_pipelining.ZERO_BUBBLE_V, stages_per_rank=2)
    part.run(num_repeats)
    part.show()
    for number, units in simulated.items():
        ours_s = part.median_s(f"planned, M={number}")
        share = ours_s / (units * SPLIT.forward)
        gains = {name: part.median_s(f"torch {name}, M={number}") / ours_s for name in ("1F1B", "ZB1P", "ZBV")}
        print(
            f"M={number}: {units:.1f} units simulated, measured {share:.3f} of that; against torch's "
            + ", ".join(f"{name} {gain:.3f}x" for name, gain in gains.items())
        )
        part.rows[f"planned, M={number}"].update(units=units, share=share, gains=gains)
        found += at_most(f"zero-bubble, M={number}: simulated units", units, MAX_UNITS[number])
        found += at_most(f"zero-bubble, M={number}: measured against simulated", share, MAX_OF_UNITS)
        most = max(part.rows[f"torch 1F1B, M={number}"]["stash_bytes"])
        found += at_most(
            f"zero-bubble, M={number}: bytes kept", max(part.rows[f"planned, M={number}"]["stash_bytes"]), most
        )
    return list(part.rows.values()), found


PARTS = {"bounds": bounds, "planned": planned_choices, "zero-bubble": zero_bubble}


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=5, help="turns (default: %(default)s)")
    made.add_argument("--only", choices=PARTS, help="only this part")
    options = made.parse_args(arguments)
    results: dict[str, Any] = environment()
    found: list[str] = []
    print("Layers sleep, they do not compute; messages, autograd and the runtimes are real.")
    for name, part in PARTS.items():
        if options.only in (None, name):
            print(f"\n--- {name} ---")
            results[name], short = part(options.repeats)
            found += short
    errors = [row["error"] for name in PARTS for row in results.get(name, ()) if "error" in row]
    found += error_shortfalls(errors)
    results["median_error"] = statistics.median(map(abs, errors))
    return finish(options, results, found)


if __name__ == "__main__":
    sys.exit(main())
