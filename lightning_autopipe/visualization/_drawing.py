"""The whole picture: panels above each other, title and legend; importing this file imports matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lightning_autopipe.core.timeline import Timeline
from lightning_autopipe.visualization._panel import (
    COLOURS,
    IDLE,
    LANES_WIDTH_IN,
    PHASES_IN,
    SENT,
    TEXT_SIZE,
    Panel,
    Scale,
    cut,
    num_lanes,
)
from lightning_autopipe.visualization.lanes import BarKind, Ranks, make_lanes

_TITLE_SIZE = 10.5
_LEFT_IN, _RIGHT_IN = 1.35, 0.2
_TITLE_IN, _HEADING_IN, _TICKS_IN, _AXIS_IN, _LEGEND_IN = 0.3, 0.28, 0.16, 0.42, 0.24


def draw(timelines: Mapping[str, Timeline], ranks: Ranks, title: str) -> Figure:
    """As `timeline_figure`."""
    all_lanes = [make_lanes(timeline, ranks) for timeline in timelines.values()]
    lane_in = _lane_height_in(sum(map(len, all_lanes)))
    heights_in = [PHASES_IN + lane_in * num_lanes(lanes) for lanes in all_lanes]
    titles_in = _TITLE_IN if title else 0.0
    between_in = (len(heights_in) - 1) * _TICKS_IN
    total_in = titles_in + sum(heights_in) + len(heights_in) * _HEADING_IN + between_in + _AXIS_IN + _LEGEND_IN
    width_in = _LEFT_IN + LANES_WIDTH_IN + _RIGHT_IN
    figure = Figure(figsize=(width_in, total_in))
    FigureCanvasAgg(figure)
    if title:
        height = 1 - 0.2 / total_in
        shown = cut(title, _TITLE_SIZE)
        figure.text(
            _LEFT_IN / width_in, height, shown, fontsize=_TITLE_SIZE, fontweight="bold", va="center", gid="title"
        )
    scale = Scale.of(max(timeline.step_s for timeline in timelines.values()), LANES_WIDTH_IN * 72)
    kinds: dict[BarKind, None] = {}
    with_messages = [False, False]
    top_in = total_in - titles_in
    for index, ((name, timeline), lanes, height_in) in enumerate(
        zip(timelines.items(), all_lanes, heights_in, strict=True)
    ):
        top_in -= _HEADING_IN
        area = (
            _LEFT_IN / width_in,
            (top_in - height_in) / total_in,
            LANES_WIDTH_IN / width_in,
            height_in / total_in,
        )
        axes = figure.add_axes(area, gid=f"timeline-{index}")
        panel = Panel(axes, lanes, scale, lane_in * 72)
        panel.draw(timeline, ranks, name, is_last=index == len(heights_in) - 1)
        kinds.update(dict.fromkeys(bar.kind for lane in lanes for bar in lane.bars))
        with_messages = [before or now for before, now in zip(with_messages, panel.with_messages, strict=True)]
        top_in -= height_in + _TICKS_IN
    _draw_legend(figure, _LEFT_IN / width_in, kinds, with_messages)
    return figure


def _draw_legend(figure: Figure, left: float, kinds: Iterable[BarKind], with_messages: Sequence[bool]) -> None:
    handles: list[Patch | Line2D] = [
        Patch(facecolor=COLOURS[kind], edgecolor="#333333", linewidth=0.4, label=kind.value)
        for kind in BarKind
        if kind in set(kinds)
    ]
    handles.append(Patch(facecolor=IDLE, edgecolor="#333333", linewidth=0.4, label="idle"))
    for is_there, (label, colour) in zip(with_messages, SENT, strict=True):
        if is_there:
            handles.append(Line2D([], [], color=colour, linewidth=1.0, label=label))
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(left, 0.0),
        ncols=len(handles),
        frameon=False,
        fontsize=TEXT_SIZE,
        handlelength=1.1,
        handletextpad=0.4,
        columnspacing=1.2,
        borderaxespad=0.2,
        borderpad=0.2,
    )


def _lane_height_in(num_lanes: int) -> float:
    """Lanes get thinner as they get more, down to what an eye can still tell apart."""
    return max(0.1, min(0.34, 7.0 / num_lanes))
