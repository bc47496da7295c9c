"""Tables of scored plans, printed and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .case import HALF_COSTS, MICROBATCHES_PER_DEVICE
from .scored import Scored, geometric_mean

TITLES = {
    "a": "(a) Equal replica counts, one schedule",
    "b": "(b) Any replica counts",
    "c": "(c) What ours has beyond that",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Plans for one model, cluster and, in table (a), layout."""

    profile: str
    cluster: str
    ours: Scored | None
    """None where nothing was found that fits the memory."""
    peers: tuple[Scored, ...]

    def ratio(self, planner: str) -> float | None:
        """Step of a peer's plan against ours; None where either does not fit."""
        found = next((peer for peer in self.peers if peer.planner == planner), None)
        return None if found is None or self.ours is None or not found.fits else found.ratio_to(self.ours)


def printed(tables: Mapping[str, Sequence[Row]]) -> str:
    """Each table's rows and summary, for a terminal."""
    lines = []
    for name, rows in tables.items():
        lines += ["", TITLES[name]]
        for row in rows:
            ours = f"{row.ours.plan} {row.ours.step_s:.4g} s" if row.ours else "nothing fits"
            others = "  ".join(f"{peer.planner} {_ratio_text(row, peer.planner)}" for peer in row.peers)
            lines.append(f"{row.profile:22} {row.cluster:17} {ours:26} {others}")
        lines += ["", *(" ".join(f"{cell:>12}" for cell in cells) for cells in _summary(rows))]
    return "\n".join(lines)


def markdown(tables: Mapping[str, Sequence[Row]], shortfalls: Sequence[str]) -> str:
    """The document with conditions, summaries and all rows."""
    lines = [_CONDITIONS.format(microbatches=MICROBATCHES_PER_DEVICE)]
    for name, rows in tables.items():
        lines += ["", f"## {TITLES[name]}", "", _NOTES[name], "", *_table(_summary(rows))]
        if name == "a":
            text = "Ours is never slower." if not shortfalls else "Ours is slower here:"
            lines += ["", text, *(f"- {line}" for line in shortfalls)]
    for name, rows in tables.items():
        lines += ["", f"## All rows of ({name})", "", *_table(_all_rows(rows))]
    return "\n".join(lines) + "\n"


_CONDITIONS = """\
# Planners compared

Written by `python benchmarks/planners.py --markdown docs/planners.md`. A ratio is a peer's simulated step divided by
ours: above 1, ours is quicker.

## Conditions

- Models are profiles that others measured and published ([list](../benchmarks/profiles/README.md)). Clusters are
  examples of `lightning_autopipe/cluster/examples` and two synthetic ones. A device of speed 0.5 takes twice as long
  for everything.
- The peers are *not* their released programs but their objectives, written anew from the papers' formulas in
  `benchmarks/peers`, and optimised exactly (uniform, parameters, min-max, PipeDream, Piper) or by local search
  (DAPPLE). They plan for one kind of device, of the mean speed, and for the bandwidth of the slowest way between two
  devices; DAPPLE for one inside and one between servers. Stages are contiguous in topological order, also Piper's.
  PipeDream's formula charges an all-reduce for each micro-batch, which training with a flush does not have.
- Every plan is scored by this project's simulator: shared links, all-reduce, memory. None was run on devices.
- {microbatches} micro-batches of the profiled size a step for each device, in all layouts.
- Devices: DAPPLE's by its three policies, of equally good ones those that are best simulated; the others' in the order
  of ranks, as the launcher lays stages out. In all plans rank 0 runs the last stage.
- Plans that do not fit a device's memory have no ratio (–); only Piper's objective and ours look at memory. Table (a)
  has each row in which any plan does not fit once more without limits of memory (*roomy*).
- Search times are of Python on one core; PipeDream's and Piper's tables are NumPy's.
- Ours is never begun from a peer's plan."""

_NOTES = {
    "a": """\
The layout is given: stages x replicas on all devices, equal shares of micro-batches, 1F1B with plain depths. Cuts and
devices are chosen. *Balance* is the time that the busiest device computes by the mean one's, *spread* that of the
busiest minus that of the idlest by the mean; ours is uneven where 1F1B hides it.""",
    "b": """\
PipeDream, Piper and DAPPLE choose the number of stages and the devices of each, down to one stage on all devices; so
does ours. Micro-batches are dealt to the devices of a stage. PipeDream's and Piper's plans may leave devices idle,
which on slow links can be right; ours uses all.""",
    "c": f"""\
A ratio is our step with more to choose from by our best plain pipeline (at least two stages, equal counts, plain
depths): below 1 is gained. *Any counts* is ours of (b), one stage on all devices included. *Sizes, slices* assumes that
half a micro-batch takes {HALF_COSTS:g} of a whole one, as the profiles have one size each.""",
}


def _planners(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(peer.planner for row in rows for peer in row.peers))


def _summary(rows: Sequence[Row]) -> list[list[str]]:
    cells = [
        [
            "planner",
            "geometric mean",
            "least",
            "most",
            "plans",
            "do not fit",
            "balance",
            "spread",
            "search, s",
            "longest, s",
        ]
    ]
    ours = [row.ours for row in rows if row.ours is not None]
    for planner in ["ours", *_planners(rows)]:
        plans = ours if planner == "ours" else [peer for row in rows for peer in row.peers if peer.planner == planner]
        ratios = (
            [1.0] * len(ours) if planner == "ours" else [r for row in rows if (r := row.ratio(planner)) is not None]
        )
        cells.append(
            [
                planner,
                f"{geometric_mean(ratios):.3f}",
                f"{min(ratios, default=float('nan')):.3f}",
                f"{max(ratios, default=float('nan')):.3f}",
                str(len(plans)),
                str(sum(not plan.fits for plan in plans)),
                f"{geometric_mean(plan.max_over_mean for plan in plans):.3f}",
                f"{sum(plan.spread for plan in plans) / max(1, len(plans)):.3f}",
                f"{sum(plan.search_s for plan in plans) / max(1, len(plans)):.3f}",
                f"{max((plan.search_s for plan in plans), default=0.0):.2f}",
            ]
        )
    return cells


def _all_rows(rows: Sequence[Row]) -> list[list[str]]:
    planners = _planners(rows)
    cells = [["profile", "cluster", "our plan", "our step, s", *planners]]
    for row in rows:
        ours = [row.ours.plan, f"{row.ours.step_s:.4g}"] if row.ours else ["nothing fits", ""]
        cells.append([row.profile, row.cluster, *ours, *(_ratio_text(row, planner) for planner in planners)])
    return cells


def _ratio_text(row: Row, planner: str) -> str:
    ratio = row.ratio(planner)
    return "–" if ratio is None else f"{ratio:.3f}"


def _table(cells: Sequence[Sequence[str]]) -> list[str]:
    head, *body = (f"| {' | '.join(row)} |" for row in cells)
    return [head, f"|{' --- |' * len(cells[0])}", *body]
