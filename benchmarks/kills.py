"""Kills each process in turn, at each place of a fit, and looks at what is left.

On every layout each rank gets a SIGKILL once in a forward, a backward, the sum of gradients, while a checkpoint is
collected, while it is written (rank 0), and in validation. The other processes must end within 30 s, no checkpoint may
be damaged, and a run that goes on from the last one must end with the parameters, bit for bit, of one that nothing has
interrupted.

Run: python benchmarks/kills.py [--layouts 3x1 2x2] [--check] [--json FILE]   (5 minutes)
"""

# ruff: noqa: E402
from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # Python puts this file's folder there

from benchmarks.reporting import environment, finish, parser
from tests.strategy.kills import all_kills, kill_one, resume_all


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--layouts", nargs="+", default=["3x1", "2x2"], help="stages x replicas (default: 3x1 2x2)")
    options = made.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    for layout in options.layouts:
        num_stages, num_replicas = map(int, layout.split("x"))
        kills = all_kills(num_stages, num_replicas)
        with tempfile.TemporaryDirectory() as name:
            folders = [Path(name) / str(index) for index in range(len(kills))]
            for kill, folder in zip(kills, folders, strict=True):
                seconds, wrong = kill_one(kill, folder)
                missed += wrong
                print(f"{kill}: the others end after {seconds:.1f} s; {wrong or 'sound'}", flush=True)
                rows.append({"layout": layout, "place": kill.place, "rank": kill.global_rank, "seconds": seconds})
            differing = resume_all(kills, folders, Path(name) / "uninterrupted")
        missed += differing
        print(f"{layout}: {len(kills)} kills, {len(differing)} parameters differ after resuming", flush=True)
    print(f"the slowest end took {max(row['seconds'] for row in rows):.1f} s")
    return finish(options, {"environment": environment(), "rows": rows}, missed)


if __name__ == "__main__":
    sys.exit(main())
