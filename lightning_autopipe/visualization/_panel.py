"""One timeline in a picture; importing this file imports matplotlib."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.ticker import MaxNLocator

from lightning_autopipe.core.schedule import Action
from lightning_autopipe.core.timeline import Timeline
from lightning_autopipe.visualization.lanes import COMPUTE, Bar, BarKind, Lane, Ranks, make_messages
from lightning_autopipe.visualization.phases import Phase, step_phases

# Okabe and Ito's palette, which stays distinct for colour-blind eyes; slices are paler.
COLOURS = {
    BarKind.FORWARD: "#56B4E9",
    BarKind.FORWARD_SLICE: "#B5DDF5",
    BarKind.BACKWARD: "#E69F00",
    BarKind.BACKWARD_SLICE: "#F8D88F",
    BarKind.BACKWARD_INPUT: "#E69F00",
    BarKind.BACKWARD_WEIGHT: "#D55E00",
    BarKind.TIED_GRADIENTS: "#7B3F8C",
    BarKind.GRADIENTS: "#CC79A7",
    BarKind.EXCHANGE: "#4D4D4D",
    BarKind.OPTIMIZER: "#009E73",
}
IDLE = "#ECECEC"
SENT = (("activations sent", "#0B3C5D"), ("gradients sent", "#8C3B00"))
_PHASE_EDGE = "#888888"
_HEADING_SIZE, TEXT_SIZE, _SMALLEST_NUMBER = 9, 7.5, 4.5

LANES_WIDTH_IN, PHASES_IN = 9.45, 0.19
_REPLICA_GAP, _BAR_SHARE = 0.5, 0.72
"""The gap between replicas, and the height of bars, in lanes."""
_CHARACTER = 0.64
"""Mean width of a digit or letter, in font sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Seconds in units that read well, and their size on paper."""

    unit: str
    per_s: float
    step_s: float
    points_per_s: float

    @classmethod
    def of(cls, step_s: float, width_points: float) -> Scale:
        longest = step_s or 1.0
        units = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
        unit, per_s = next((pair for pair in units if longest * pair[1] >= 1), units[-1])
        return cls(unit=unit, per_s=per_s, step_s=longest, points_per_s=width_points / (1.005 * longest))


class Panel:
    """One timeline."""

    def __init__(self, axes: Axes, lanes: Sequence[Lane], scale: Scale, lane_points: float) -> None:
        self._axes, self._lanes, self._scale, self._lane_points = axes, lanes, scale, lane_points
        self._font_size = min(TEXT_SIZE, 0.62 * lane_points)
        self._top = 72 * PHASES_IN / lane_points
        self._bottom = self._top + num_lanes(lanes)
        self._middle = {
            lane.global_rank: self._top + 0.5 + index + _REPLICA_GAP * lane.replica_index
            for index, lane in enumerate(lanes)
        }
        self.with_messages = [False, False]

    def _gid(self, name: str) -> str:
        return f"{self._axes.get_gid()}-{name.replace(' ', '-')}"

    def draw(self, timeline: Timeline, ranks: Ranks, name: str, *, is_last: bool) -> None:
        self._set_up_axes(timeline, name, is_last=is_last)
        idle = [self._box(lane, 0.0, timeline.step_s) for lane in self._lanes]
        self._axes.add_collection(
            PolyCollection(idle, facecolors=IDLE, linewidths=0, zorder=0.8, gid=self._gid("idle")), autolim=False
        )
        bars: dict[BarKind, list[Bar]] = defaultdict(list)
        boxes: dict[BarKind, list[list[tuple[float, float]]]] = defaultdict(list)
        for lane in self._lanes:
            for bar in lane.bars:
                bars[bar.kind].append(bar)
                boxes[bar.kind].append(self._box(lane, bar.event.start_s, bar.event.end_s))
            self._draw_numbers(lane)
        for kind in BarKind:
            if kind in bars:
                # An outline must not hide what it surrounds.
                narrowest = min(bar.seconds for bar in bars[kind]) * self._scale.points_per_s
                self._axes.add_collection(
                    PolyCollection(
                        boxes[kind],
                        facecolors=COLOURS[kind],
                        edgecolors="white",
                        linewidths=min(0.6, 0.12 * narrowest),
                        gid=self._gid(kind.value),
                    ),
                    autolim=False,
                )
        self._draw_messages(timeline, ranks)
        self._draw_phases(step_phases(timeline), timeline.step_s)

    def _box(self, lane: Lane, start_s: float, end_s: float) -> list[tuple[float, float]]:
        middle = self._middle[lane.global_rank]
        top, bottom = middle - _BAR_SHARE / 2, middle + _BAR_SHARE / 2
        start, end = start_s * self._scale.per_s, end_s * self._scale.per_s
        return [(start, top), (end, top), (end, bottom), (start, bottom)]

    def _set_up_axes(self, timeline: Timeline, name: str, *, is_last: bool) -> None:
        axes, scale = self._axes, self._scale
        axes.set_xlim(0, scale.step_s * 1.005 * scale.per_s)
        axes.set_ylim(self._bottom, 0)
        figures = (
            f"step {timeline.step_s * scale.per_s:.4g} {scale.unit} · bubble {100 * timeline.bubble_fraction:.1f} %"
        )
        heading = f"{cut(name, 1.5 * _HEADING_SIZE)} · {figures}" if name else figures
        axes.set_title(heading, loc="left", fontsize=_HEADING_SIZE, pad=5, gid=self._gid("heading"))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 2.5, 5, 10]))
        axes.tick_params(axis="x", labelsize=TEXT_SIZE, length=3, labelbottom=is_last)
        if is_last:
            axes.set_xlabel(f"time since the step began [{scale.unit}]", fontsize=8, labelpad=2)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        size = min(TEXT_SIZE, max(4.5, 0.8 * self._lane_points))
        stride = -(-int(1.15 * size + 1) // int(self._lane_points))
        shown = [
            lane
            for _, of_replica in groupby(self._lanes, key=lambda lane: lane.replica_index)
            for lane in list(of_replica)[::stride]
        ]
        labels = [lane.label for lane in shown]
        axes.set_yticks([self._middle[lane.global_rank] for lane in shown], labels=labels, fontsize=size)
        axes.tick_params(axis="y", length=0, pad=3)
        self._label_replicas()

    def _label_replicas(self) -> None:
        replicas: dict[int, list[float]] = defaultdict(list)
        for lane in self._lanes:
            replicas[lane.replica_index].append(self._middle[lane.global_rank])
        if len(replicas) == 1:
            return
        for replica_index, middles in replicas.items():
            height_points = len(middles) * self._lane_points
            text = f"replica {replica_index}"
            if _text_points(text, TEXT_SIZE) > height_points:
                text = f"r{replica_index}"
            self._axes.annotate(
                text,
                (-0.115, (middles[0] + middles[-1]) / 2),
                xycoords=("axes fraction", "data"),
                rotation=90,
                fontsize=min(TEXT_SIZE, 0.9 * height_points),
                fontweight="bold",
                ha="center",
                va="center",
                annotation_clip=False,
            )

    def _draw_numbers(self, lane: Lane) -> None:
        """Numbers of micro-batches on a lane's bars: for each kind on all of them, or on none."""
        for kind in COMPUTE:
            bars = [bar for bar in lane.bars if bar.kind is kind]
            size, texts = self._fitting_numbers(bars)
            for text, bar in zip(texts, bars, strict=False):
                middle_s = (bar.event.start_s + bar.event.end_s) / 2
                self._axes.text(
                    middle_s * self._scale.per_s,
                    self._middle[lane.global_rank],
                    text,
                    fontsize=size,
                    ha="center",
                    va="center_baseline",
                )

    def _fitting_numbers(self, bars: Sequence[Bar]) -> tuple[float, list[str]]:
        """The largest size at which numbers fit into all bars, with those of slices if they do; none where none fit."""
        for with_slice in (True, False):
            texts = _numbers(bars, with_slice=with_slice)
            for size in (self._font_size, 0.87 * self._font_size, 0.75 * self._font_size):
                fits = (
                    _text_points(text, size) + 1 <= bar.seconds * self._scale.points_per_s
                    for text, bar in zip(texts, bars, strict=True)
                )
                if size >= _SMALLEST_NUMBER and all(fits):
                    return size, texts
        return 0.0, []

    def _draw_messages(self, timeline: Timeline, ranks: Ranks) -> None:
        lines: tuple[list[list[tuple[float, float]]], ...] = ([], [])
        half = _BAR_SHARE / 2
        for message in make_messages(timeline, ranks):
            event = message.event
            if event.end_s > event.start_s:
                begin, end = self._middle[message.sender], self._middle[message.receiver]
                down = half if end > begin else -half
                per_s = self._scale.per_s
                lines[not message.is_activation].append(
                    [(event.start_s * per_s, begin + down), (event.end_s * per_s, end - down)]
                )
        self.with_messages = [bool(of) for of in lines]
        # Where bars are narrow their messages are close together.
        seconds = [bar.seconds for lane in self._lanes for bar in lane.bars]
        bar_points = median(seconds or [0.0]) * self._scale.points_per_s
        width = max(0.3, min(0.9, 0.04 * self._lane_points, 0.15 * bar_points))
        for of, (name, colour) in zip(lines, SENT, strict=True):
            if of:
                # Behind bars: what goes to a lane further away must not cross out numbers.
                self._axes.add_collection(
                    LineCollection(of, colors=colour, linewidths=width, zorder=0.95, gid=self._gid(name)), autolim=False
                )

    def _draw_phases(self, phases: Sequence[Phase], step_s: float) -> None:
        per_s = self._scale.per_s
        for phase in phases:
            if 0 < phase.start_s < step_s:
                self._axes.plot(
                    [phase.start_s * per_s] * 2,
                    [0.1 * self._top, self._bottom],
                    color=_PHASE_EDGE,
                    linewidth=0.7,
                    linestyle=(0, (3, 2)),
                    zorder=0.9,
                )
            if _text_points(phase.name, TEXT_SIZE) + 4 <= (phase.end_s - phase.start_s) * self._scale.points_per_s:
                self._axes.text(
                    (phase.start_s + phase.end_s) / 2 * per_s,
                    0.5 * self._top,
                    phase.name,
                    fontsize=TEXT_SIZE,
                    fontstyle="italic",
                    color="#444444",
                    ha="center",
                    va="center",
                )


def _numbers(bars: Sequence[Bar], *, with_slice: bool) -> list[str]:
    texts = []
    for bar in bars:
        action = bar.event.action
        assert isinstance(action, Action)
        slice_text = f".{action.slice_index}" if with_slice and action.slice_index is not None else ""
        texts.append(f"{action.microbatch_index}{slice_text}")
    return texts


def cut(text: str, font_size: float) -> str:
    """What fits above the lanes of a text."""
    most = int(LANES_WIDTH_IN * 72 / (1.15 * _CHARACTER * font_size))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _text_points(text: str, font_size: float) -> float:
    return _CHARACTER * font_size * len(text)


def num_lanes(lanes: Sequence[Lane]) -> float:
    return len(lanes) + _REPLICA_GAP * (len({lane.replica_index for lane in lanes}) - 1) + 0.1
