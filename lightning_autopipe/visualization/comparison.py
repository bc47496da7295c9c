"""Predicted and measured side by side, rank by rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from lightning_autopipe.core.quantities import duration_text
from lightning_autopipe.core.timeline import Timeline
from lightning_autopipe.visualization.lanes import BarKind, Lane, Ranks, make_lanes

_FORWARD = (BarKind.FORWARD, BarKind.FORWARD_SLICE)
_BACKWARD = (BarKind.BACKWARD, BarKind.BACKWARD_SLICE, BarKind.BACKWARD_INPUT, BarKind.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeconds:
    """What one rank does in a step, in seconds."""

    stages: str
    """Those that it runs."""
    global_rank: int
    forward_s: float
    backward_s: float
    idle_s: float
    """Neither computing nor summing gradients."""
    predicted_forward_s: float | None = None
    """The same as predicted; None where it was not."""
    predicted_backward_s: float | None = None
    predicted_idle_s: float | None = None


def compare(measured: Timeline, predicted: Timeline | None = None, *, ranks: Ranks = ()) -> tuple[RankSeconds, ...]:
    """A measured step rank by rank, with what was predicted.

    Raises:
        PlanError: a timeline does not tell which rank runs what.
    """
    expected = {} if predicted is None else {lane.global_rank: lane for lane in make_lanes(predicted, ranks)}
    rows = []
    for lane in make_lanes(measured, ranks):
        other = expected.get(lane.global_rank)
        forward_s, backward_s, idle_s = _seconds(lane, measured)
        then: Sequence[float | None] = (None, None, None)
        if other is not None and predicted is not None:
            then = _seconds(other, predicted)
        rows.append(
            RankSeconds(
                stages=lane.stages_text,
                global_rank=lane.global_rank,
                forward_s=forward_s,
                backward_s=backward_s,
                idle_s=idle_s,
                predicted_forward_s=then[0],
                predicted_backward_s=then[1],
                predicted_idle_s=then[2],
            )
        )
    return tuple(rows)


def comparison_table(rows: Sequence[RankSeconds], *, title: str = "") -> Table:
    """One row a rank: forwards, backwards and idle time of a step, measured and, in brackets, predicted."""
    table = Table(
        title=Text(title),
        title_justify="left",
        caption=Text("in brackets as predicted" if any(row.predicted_idle_s is not None for row in rows) else ""),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("stage", "rank", "forward", "backward", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.stages,
            str(row.global_rank),
            _pair(row.forward_s, row.predicted_forward_s),
            _pair(row.backward_s, row.predicted_backward_s),
            _pair(row.idle_s, row.predicted_idle_s),
        )
    return table


def _seconds(lane: Lane, timeline: Timeline) -> tuple[float, float, float]:
    forward_s = sum(bar.seconds for bar in lane.bars if bar.kind in _FORWARD)
    backward_s = sum(bar.seconds for bar in lane.bars if bar.kind in _BACKWARD)
    return forward_s, backward_s, max(0.0, timeline.step_s - lane.busy_s)


def _pair(measured_s: float, predicted_s: float | None) -> str:
    return duration_text(measured_s) + ("" if predicted_s is None else f" ({duration_text(predicted_s)})")
