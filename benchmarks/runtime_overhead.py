"""What the runtime itself takes: CPU time of steps in which next to nothing is computed.

Four stages in processes of their own, over gloo, with 8, 16 and 32 micro-batches: the executor on plain modules (no
capture, no replay), torch.distributed.pipelining on the very same modules, and the executor on stages that are cut out
of one whole module and replayed, as the strategy runs them; the last one shows what replay adds. All in the same
processes, in turns. Counted is the CPU time of all threads of all processes; medians of turns of some steps each.

Run: python benchmarks/runtime_overhead.py [--check] [--json FILE] [--repeats N]   (half a minute)

--check fails where the executor takes more than 0.6 of what torch takes.
"""

# ruff: noqa: E402
from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # Python puts this file's folder there

from benchmarks.contest import Contest, Entry, run_contest
from benchmarks.peers import torch_pipelining
from benchmarks.reporting import at_most, environment, finish, parser, spread
from benchmarks.stage_modules import Tiny
from lightning_autopipe.schedules import get_schedule

NUM_STAGES = 4
NUM_MICROBATCHES = (8, 16, 32)
NUM_SAMPLES = 4
"""Of a micro-batch."""
NUM_STEPS = 20
"""Of a turn: after some of them the caches hold what this entry uses, as they do in training."""
MAX_RATIO = 0.6
LIMIT_S = 240.0


def entries() -> tuple[Entry, ...]:
    """Ours, torch's and replayed, for each number of micro-batches."""
    made = []
    for number in NUM_MICROBATCHES:
        common: dict[str, Any] = {"model": Tiny(), "num_microbatches": number, "num_samples": NUM_SAMPLES}
        schedule = get_schedule("1f1b", NUM_STAGES, number)
        made += [
            Entry(title=f"executor, M={number}", schedule=schedule, **common),
            Entry(title=f"torch 1F1B, M={number}", schedule=torch_pipelining.ONE_F_ONE_B, **common),
            Entry(title=f"executor with replay, M={number}", schedule=schedule, is_replayed=True, **common),
        ]
    return tuple(made)


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=9, help="turns (default: %(default)s)")
    options = made.parse_args(arguments)
    contest = Contest(
        entries=entries(),
        servers=("here",) * NUM_STAGES,
        num_repeats=options.repeats,
        num_steps=NUM_STEPS,
        is_prompt=False,
        measures_alone=False,
    )
    measured = run_contest(contest, limit_s=LIMIT_S)
    print("CPU time of a step, all threads of 4 processes: median [least most]; ratios are of medians")
    rows, found = [], []
    for number, position in zip(NUM_MICROBATCHES, range(0, len(measured.entries), 3), strict=True):
        ours, peer, replayed = measured.entries[position : position + 3]
        ratio = ours.median_cpu_s / peer.median_cpu_s
        replay_s = replayed.median_cpu_s - ours.median_cpu_s
        rows.append(
            {
                "num_microbatches": number,
                "executor_cpu_s": ours.cpu_s,
                "torch_cpu_s": peer.cpu_s,
                "replayed_cpu_s": replayed.cpu_s,
                "ratio": ratio,
                "replay_per_action_s": replay_s / (NUM_STAGES * number),
            }
        )
        print(
            f"M={number}: executor {spread(ours.cpu_s)}, torch {spread(peer.cpu_s)}: {ratio:.3f}x\n"
            f"    with replay {spread(replayed.cpu_s)}: replay adds {1e3 * replay_s:.1f} ms, "
            f"{1e6 * replay_s / (NUM_STAGES * number):.0f} us for each forward and backward of a micro-batch on a stage"
        )
        found += at_most(f"M={number}: CPU time against torch's", ratio, MAX_RATIO)
    print(f"load {measured.load[0]:.1f} {measured.load[1]:.1f}")
    return finish(options, {**environment(), "rows": rows, "load": measured.load}, found)


if __name__ == "__main__":
    sys.exit(main())
