"""Whether a cut step gives the numbers of the uncut one, for many architectures.

For each architecture of `tests/architectures` (small, random weights, double precision unless it has none) the module's
training_step is traced, and run as a pipeline in one process with one micro-batch: as two stages at every layer
boundary, and as four stages. Loss and every gradient are compared with those of the plain step: 0.0 where all bits are
equal, else the largest difference relative to the largest element, and which sums have another order. A second run has
the dropout that the architecture comes with: four stages against one, which draw alike.

Run: python benchmarks/architectures.py [--check] [--json FILE] [--only NAME ...] [--write-table]   (some minutes)

--check fails with the name of each architecture that differs by more than rounding or has too few layers.
--write-table writes docs/architectures.md anew.
"""

# ruff: noqa: E402
from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # Python puts this file's folder there

from benchmarks.reporting import environment, finish, parser
from tests.architectures.architecture import Architecture
from tests.architectures.catalog import ARCHITECTURES
from tests.architectures.parity import (
    MAX_RELATIVE_DIFFERENCE,
    difference,
    planned_cuts,
    through_stages,
    uncut,
)
from tests.capture.support import traced

TABLE = Path(__file__).resolve().parent.parent / "docs" / "architectures.md"
NUM_TRACES = 3
COLUMNS = (
    "architecture",
    "kind",
    "trace, ms",
    "operations",
    "layers",
    "legal cuts",
    "largest difference",
    "with dropout",
    "remark",
)
PAGE = """# Architectures

An unchanged `training_step`, cut where the strategy finds layers, against the same step uncut.

{table}

Made by `python benchmarks/architectures.py --write-table` ({num_runs} runs; torch {torch}, transformers
{transformers}, on a CPU). Each model is small, has random weights and computes in double precision, where it has
it; its LightningModule returns the model's own loss. The step is traced (CPU time, the fastest of {num_traces}),
and runs as a pipeline in one process, with one micro-batch: as two stages at every layer boundary, and as four
stages. Loss and every gradient are compared with those of the plain step, without dropout: 0.0 says that all bits
are equal; other numbers are relative to the largest element of a gradient, and the remark says which sums have
another order. "With dropout" compares four stages with one, where the model comes with random draws. `--check`
fails where a difference is more than rounding or layers are missing; `--only BERT Swin` runs some.
[tests/architectures](../tests/architectures) holds the models, and a quick form of this that runs with every
change.
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    kind: str
    trace_ms: float
    num_operations: int
    num_layers: int
    num_legal_cuts: int
    num_runs: int
    largest_difference: float
    differing: tuple[str, ...]
    """Names of what differs in the run with the largest difference."""
    reason: str
    largest_difference_with_draws: float | None
    """None where the architecture draws nothing."""
    remark: str


def measure(name: str, architecture: Architecture) -> Row:
    module, batch = architecture.module(), architecture.batch()
    reference = uncut(module, batch)
    times = []
    for _ in range(NUM_TRACES):
        begin = time.thread_time()  # other processes disturb wall time
        found = traced(module, (batch, 0))
        times.append(time.thread_time() - begin)
    num_layers = len(found.trace.layers)
    differences = [difference(module, batch, found, cuts, reference) for cuts in planned_cuts(num_layers)]
    worst = max(differences, key=lambda found: found.relative)
    return Row(
        name=name,
        kind=architecture.kind,
        trace_ms=min(times) * 1e3,
        num_operations=len(found.trace.operations),
        num_layers=num_layers,
        num_legal_cuts=len(found.legal_cuts),
        num_runs=len(differences),
        largest_difference=worst.relative,
        differing=worst.names,
        reason=worst.reason,
        largest_difference_with_draws=with_draws(architecture),
        remark=architecture.remark,
    )


def with_draws(architecture: Architecture) -> float | None:
    """Compare the most stages with one, both with the architecture's own random draws."""
    module, batch = architecture.module(draws=True), architecture.batch()
    found = traced(module, (batch, 0))
    if not found.draws:
        return None
    *_, most_stages = planned_cuts(len(found.trace.layers))
    _, one_stage = through_stages(module, batch, ())
    return difference(module, batch, found, most_stages, one_stage).relative


def shortfalls(rows: list[Row]) -> list[str]:
    """Name each architecture that misses its bound."""
    missed = []
    for row in rows:
        architecture = ARCHITECTURES[row.name]
        allowed = MAX_RELATIVE_DIFFERENCE[architecture.dtype]
        for what, value in (("", row.largest_difference), (" with dropout", row.largest_difference_with_draws or 0.0)):
            if not value <= allowed:
                missed.append(f"{row.name}: differs by {value:.1e}{what}, at most {allowed:.0e} is rounding")
        if row.num_layers < architecture.min_layers:
            missed.append(f"{row.name}: {row.num_layers} layers, at least {architecture.min_layers} should be found")
    return missed


def table(rows: list[Row]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    for row in rows:
        remarks = "; ".join(filter(None, (row.reason, row.remark)))
        lines.append(
            f"| {row.name} | {row.kind} | {row.trace_ms:.0f} | {row.num_operations} | {row.num_layers} "
            f"| {row.num_legal_cuts} | {_shown(row.largest_difference)} | {_shown(row.largest_difference_with_draws)} "
            f"| {remarks} |"
        )
    return "\n".join(lines)


def page(rows: list[Row]) -> str:
    return PAGE.format(
        table=table(rows),
        num_runs=sum(row.num_runs for row in rows),
        torch=torch.__version__.split("+")[0],
        transformers=transformers.__version__,
        num_traces=NUM_TRACES,
    )


def _shown(value: float | None) -> str:
    if value is None:
        return "–"
    return "0.0" if value == 0.0 else f"{value:.1e}"


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES), metavar="NAME")
    made.add_argument("--write-table", action="store_true")
    options = made.parse_args()
    if options.write_table and len(options.only) < len(ARCHITECTURES):
        made.error("--write-table needs all architectures: leave --only away")
    torch.set_num_threads(1)
    rows = []
    for name in options.only:
        row = measure(name, ARCHITECTURES[name])
        rows.append(row)
        print(
            f"{name:22s} trace {row.trace_ms:4.0f} ms  {row.num_operations:3d} operations  {row.num_layers:2d} layers  "
            f"{row.num_legal_cuts:3d} cuts  difference {_shown(row.largest_difference):7s} "
            f"with dropout {_shown(row.largest_difference_with_draws):7s} {row.reason}",
            flush=True,
        )
    if options.write_table:
        TABLE.write_text(page(rows))
    return finish(options, {**environment(), "rows": [asdict(row) for row in rows]}, shortfalls(rows))


if __name__ == "__main__":
    sys.exit(main())
