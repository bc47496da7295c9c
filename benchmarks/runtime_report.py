"""Writes docs/runtime_speed.md from the files of figures of the three benchmarks against peers.

Run: python benchmarks/runtime_report.py OVERHEAD.json COMPUTE.json LINKS.json > docs/runtime_speed.md

The files are those of `--json` of runtime_overhead.py, emulated_compute.py and slow_links.py.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ABOUT = """# How fast steps run

The executor with planned steps, beside torch.distributed.pipelining on the same stage modules, in the same
processes, in turns. {cores} CPU cores, Python {python}, torch {torch}, gloo; medians, the least and the most in
brackets.

```sh
python benchmarks/runtime_overhead.py --check    # half a minute
python benchmarks/emulated_compute.py --check    # 8 minutes
python benchmarks/slow_links.py --check          # 4 minutes, as root: needs ip and tc
```

These are no GPUs. Layers *sleep* for as long as they would compute, so that few cores can stand in for many
devices; the rest is real: messages, autograd, the runtimes. What a stage keeps is counted, 64 MiB for a whole
micro-batch: layers that sleep keep nothing. Plans are those of the planner's own search, from what a stage takes at
several sizes and from links as they were measured; *simulated* is the step that the simulator gives with each
stage's time as it was measured alone, the links as measured, and the CPU time that an action of empty layers takes.
"""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def times(seconds: Sequence[float], digits: int = 0) -> str:
    """Median and extremes, in milliseconds."""
    values = (statistics.median(seconds), min(seconds), max(seconds))
    median, least, most = (f"{1e3 * value:.{digits}f}" for value in values)
    return f"{median} [{least} {most}]"


def percent(value: float) -> str:
    """With its sign."""
    return f"{100 * value:+.1f} %".replace("-", "−")


def kept(row: dict[str, Any]) -> str:
    """What stages keep, in whole micro-batches."""
    unit = 64 << 20
    return " ".join(f"{num_bytes / unit:g}" for num_bytes in row["stash_bytes"])


def load(rows: Iterable[dict[str, Any]]) -> str:
    """Of the machine."""
    loads = [value for row in rows for value in row["load"]]
    return f"Load average {min(loads):.1f} to {max(loads):.1f}."


def short(found: Sequence[str]) -> str:
    """What falls short, or that nothing does."""
    return (
        "\n".join(["Falls short of what was wanted:", "", *(f"- {line}" for line in found)])
        if found
        else ("Nothing falls short of what was wanted.")
    )


def overhead(figures: dict[str, Any]) -> str:
    """A section."""
    rows = [
        (
            str(row["num_microbatches"]),
            times(row["executor_cpu_s"], 1),
            times(row["torch_cpu_s"], 1),
            f"{row['ratio']:.2f}",
            times(row["replayed_cpu_s"], 1),
            f"{1e6 * row['replay_per_action_s']:.0f}",
        )
        for row in figures["rows"]
    ]
    heads = ("M", "executor, ms", "torch 1F1B, ms", "ratio", "with replay, ms", "replay, us")
    return f"""## The runtime by itself

CPU time of a step, all threads of four processes, of four stages with next to nothing to compute: each multiplies by
a parameter. *With replay*: stages cut out of one module by capture, as the strategy runs them; its last column is
what that adds to each forward and backward of a micro-batch on a stage. {load([figures])}

{table(heads, rows)}
{short(figures["falls_short"])}
"""


def compute(figures: dict[str, Any]) -> str:
    """A section."""
    bounds = [row for row in figures["bounds"] if "share" in row]
    peers = {row["title"].removeprefix("torch, "): row for row in figures["bounds"] if "share" not in row}
    bound_rows = []
    for row in bounds:
        name = row["title"].removeprefix("ours, ")
        ours, theirs = times(row["seconds"]), times(peers[name]["seconds"])
        shares = (f"{row['share']:.3f}", f"{row['torch_share']:.3f}")
        bound_rows.append((name, ours, theirs, *shares, percent(row["error"])))
    planned = [
        (
            row["title"],
            row["schedule"],
            kept(row),
            times(row["seconds"]),
            f"{row['gain']:.3f}" if "gain" in row else "",
            f"{1e3 * row['planned_s']:.0f}" if "planned_s" in row else "",
            percent(row["error"]) if "error" in row else "",
        )
        for row in figures["planned"]
    ]
    split = [
        (
            row["title"],
            row["schedule"],
            times(row["seconds"]),
            f"{row['units']:g}" if "units" in row else "",
            percent(row["share"] - 1) if "share" in row else "",
            ", ".join(f"{name} {gain:.3f}" for name, gain in row.get("gains", {}).items()),
        )
        for row in figures["zero-bubble"]
    ]
    every = [*figures["bounds"], *figures["planned"], *figures["zero-bubble"]]
    bound_heads = ("", "ours, ms", "torch, ms", "bound / ours", "bound / torch", "simulated")
    planned_heads = ("", "schedule", "keeps", "measured, ms", "torch / ours", "planned for, ms", "simulated")
    split_heads = ("", "schedule", "measured, ms", "units", "above them", "torch / ours")
    return f"""## Links that take next to nothing

{load(every)}

Plain 1F1B, 20 + 40 ms a micro-batch; the bound is (M + p − 1) (f + b):

{table(bound_heads, bound_rows)}
What the planner chooses for eight stages in the memory of torch's 1F1B, stage by stage, from what a whole
micro-batch takes and what half of one takes (half as long; 55 %; 60 %). Torch beside it has as many micro-batches,
or the better of M whole and 2M half ones. Where half takes 80 %, the planner does not slice.

{table(planned_heads, planned)}
Zero-bubble: forward and both parts of the backward take 40 ms each, eight stages keep at most eight micro-batches.
One unit is 40 ms.

{table(split_heads, split)}
{short(figures["falls_short"])}
"""


def links(figures: dict[str, Any]) -> str:
    """A section."""
    sections: list[str] = []
    for order in dict.fromkeys(row["order"] for row in figures["rows"]):
        rows = [row for row in figures["rows"] if row["order"] == order]
        heads = ("", "M", "schedule", "keeps", "measured, ms", "torch / ours", "simulated")
        lines = [
            (
                row["title"],
                str(row["num_microbatches"]),
                row["schedule"],
                kept(row),
                times(row["seconds"]),
                f"{row['gain']:.2f}" if "gain" in row else "",
                percent(row["error"]) if "error" in row else "",
            )
            for row in rows
        ]
        bandwidth, latency_s, duplex, sharing = rows[0]["link"]
        sections.append(
            f"Stages on servers {order} (measured: {bandwidth / 1e6:.1f} MB/s, {1e6 * latency_s:.0f} us, "
            f"{duplex} duplex, {sharing}):\n\n{table(heads, lines)}"
        )
    errors = [abs(row["error"]) for row in figures["rows"] if "error" in row]
    return f"""## Slow links

Two servers (network namespaces) joined at 200 Mbit/s; four stages, 10 + 20 ms and 500 kB each way for each of 16
micro-batches. The bounds for whole micro-batches are 610 ms (A,A,B,B) and 1030 ms (A,B,A,B). *torch's stash*: in
the memory that each stage of torch's 1F1B needs. {load(figures["rows"])}

{chr(10).join(sections)}
Simulated against measured: median error {100 * statistics.median(errors):.1f} %, largest {100 * max(errors):.1f} %.

{short(figures["falls_short"])}
"""


def main(names: Sequence[str]) -> int:
    if len(names) != len((overhead, compute, links)):
        print(__doc__, file=sys.stderr)
        return 2
    of_overhead, of_compute, of_links = (json.loads(Path(name).read_text()) for name in names)
    if "skipped" in of_links:
        print(f"nothing was measured over slow links: {of_links['skipped']}", file=sys.stderr)
        return 1
    text = "\n".join([ABOUT.format(**of_overhead), overhead(of_overhead), compute(of_compute), links(of_links)])
    print(text.replace("\n\n\n", "\n\n").rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
