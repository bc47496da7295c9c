"""Random operations one after the other in the same four processes, for half an hour.

Fits (new ones, and others that go on from a checkpoint under another layout), tests, validations and predictions of a
tiny module, each with stages, replicas, schedule, micro-batches and batch size drawn anew. Numbers must be those of one
process; open files, threads, child processes and memory of each rank must be the same before and after.

Run: python benchmarks/random_operations.py [--minutes 30] [--seed 1] [--check] [--json FILE]
"""

# ruff: noqa: E402
from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # Python puts this file's folder there

from benchmarks.reporting import environment, finish, parser
from tests.harness import run_processes
from tests.strategy.random_operations import left_behind, operate

NUM_RANKS = 4
MOST_MEMORY_BYTES = 32 * 2**20
"""By which a rank may grow in all, whatever the number of operations."""


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--minutes", type=float, default=30.0, help="how long (default: %(default)s)")
    made.add_argument("--seed", type=int, default=1, help="of the operations (default: %(default)s)")
    options = made.parse_args(arguments)
    seconds = 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        found = run_processes(
            NUM_RANKS,
            operate,
            options.seed,
            seconds,
            Path(folder),
            initialize_process_group=False,
            timeout_s=1.5 * seconds + 300,
        )
    print(f"{sum(found[0].operations.values())} operations, {len(found[0].wrong)} wrong: {dict(found[0].operations)}")
    for global_rank, rank in enumerate(found):
        print(f"rank {global_rank}: before {rank.before}\n        after  {rank.after}")
    ranks = [{"before": asdict(rank.before), "after": asdict(rank.after)} for rank in found]
    missed = [*found[0].wrong, *left_behind(found, most_memory_bytes=MOST_MEMORY_BYTES)]
    return finish(
        options, {"environment": environment(), "operations": dict(found[0].operations), "ranks": ranks}, missed
    )


if __name__ == "__main__":
    sys.exit(main())
