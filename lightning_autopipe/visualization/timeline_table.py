"""Shows timelines and the use of links as tables."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_autopipe.core.quantities import duration_text, memory_text
from lightning_autopipe.core.timeline import Timeline
from lightning_autopipe.visualization.lanes import COMPUTE, BarKind, Lane, Ranks, make_lanes
from lightning_autopipe.visualization.traffic import LinkUse

_MAX_ROWS = 64
_MAX_FLOWS = 6
_SHARES = {
    "compute": COMPUTE,
    "reduce": (BarKind.TIED_GRADIENTS, BarKind.GRADIENTS),
    "optimizer": (BarKind.OPTIMIZER,),
}


def timeline_table(timeline: Timeline, *, ranks: Ranks = (), max_rows: int = _MAX_ROWS) -> Table:
    """One row a rank: how long it computes, sums gradients and runs the optimizer, how long it is idle, and the most
    memory in use. What takes no time on any rank is left out.

    Args:
        timeline: to be shown.
        ranks: ``ranks[r][s]`` runs stage s of replica r; empty: as the timeline tells.
        max_rows: how many ranks are shown.

    Raises:
        PlanError: the timeline does not tell which rank runs what.
    """
    lanes = make_lanes(timeline, ranks)
    has_replicas = any(lane.replica_index for lane in lanes)
    there = {bar.kind for lane in lanes for bar in lane.bars}
    shares = {name: kinds for name, kinds in _SHARES.items() if there.intersection(kinds)}
    title = f"step {duration_text(timeline.step_s)}, bubble {100 * timeline.bubble_fraction:.1f} %"
    table = _table(title)
    for name in ("stage", *(["replica"] if has_replicas else []), "rank", *shares):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("idle", "bubble", *(["memory"] if timeline.peak_bytes else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for lane in lanes[:max_rows]:
        idle_s = max(0.0, timeline.step_s - lane.busy_s)
        table.add_row(
            lane.stages_text,
            *([str(lane.replica_index)] if has_replicas else []),
            str(lane.global_rank),
            *(_seconds_of(lane, kinds) for kinds in shares.values()),
            duration_text(idle_s),
            _percent(idle_s / timeline.step_s) if timeline.step_s else "",
            *([_memory(timeline, lane)] if timeline.peak_bytes else []),
        )
    return _cut(table, len(lanes), max_rows, "ranks")


def traffic_table(uses: Sequence[LinkUse], *, max_rows: int = _MAX_ROWS) -> Table:
    """One row a link, or pair of ranks: what goes over it, how long it is busy, and which flows meet there."""
    is_of_links = any(use.contended_share is not None for use in uses)
    has_sums = any(use.summed_bytes for use in uses)
    table = _table("links in one step" if is_of_links else "messages between stages in one step")
    table.add_column("from → to", overflow="fold", min_width=9)
    counts = [] if is_of_links else ["messages"]
    sums = ["of sums"] if has_sums else []
    for name in (*counts, "bytes", *sums, "busy", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    if is_of_links:
        table.add_column("contended", justify="right", no_wrap=True)
        table.add_column("by flows", overflow="fold", min_width=8)
    for use in uses[:max_rows]:
        meeting: list[str | Text] = [_percent(use.contended_share or 0.0), _flows(use.contending)]
        table.add_row(
            Text(use.name),
            *([] if is_of_links else ["?" if use.num_messages is None else str(use.num_messages)]),
            "?" if use.num_bytes is None else memory_text(use.num_bytes),
            *([memory_text(use.summed_bytes)] if has_sums else []),
            duration_text(use.busy_s),
            _percent(use.busy_share),
            *(meeting if is_of_links else []),
        )
    return _cut(table, len(uses), max_rows, "links")


def timeline_text(timeline: Timeline, *, ranks: Ranks = (), width: int = 120) -> str:
    """The table of a timeline as plain text without colours, at most ``width`` characters wide."""
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(timeline_table(timeline, ranks=ranks))
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines()) + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _flows(names: Sequence[str]) -> Text:
    more = f" +{len(names) - _MAX_FLOWS}" if len(names) > _MAX_FLOWS else ""
    return Text(", ".join(names[:_MAX_FLOWS]) + more)


def _seconds_of(lane: Lane, kinds: Sequence[BarKind]) -> str:
    return duration_text(sum(bar.seconds for bar in lane.bars if bar.kind in kinds))


def _memory(timeline: Timeline, lane: Lane) -> str:
    is_known = lane.global_rank < len(timeline.peak_bytes)
    return memory_text(timeline.peak_bytes[lane.global_rank]) if is_known else "?"


def _table(title: str) -> Table:
    return Table(
        title=Text(title),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )


def _cut(table: Table, num_rows: int, max_rows: int, noun: str) -> Table:
    if num_rows > max_rows:
        table.caption = Text(f"{num_rows - max_rows} more {noun}")
    return table
