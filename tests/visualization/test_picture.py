from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from lightning_autopipe.core import ActionType, ConfigurationError, StepEnd, Timeline
from lightning_autopipe.schedules import gpipe, sliced_one_f_one_b
from lightning_autopipe.visualization import save_picture, timeline_figure, timeline_svg

from .timelines import a_timeline, an_unlike_timeline

SVG = "{http://www.w3.org/2000/svg}"


def elements(svg: str, group: str) -> int:
    """How many paths a group of a picture has."""
    root = ET.fromstring(svg)
    groups = [found for found in root.iter(f"{SVG}g") if found.get("id") == group]
    assert len(groups) <= 1
    return sum(len(list(found.iter(f"{SVG}path"))) for found in groups)


def texts(svg: str) -> list[str]:
    return ["".join(found.itertext()).strip() for found in ET.fromstring(svg).iter(f"{SVG}text")]


def count(timeline: Timeline, *kinds: ActionType | StepEnd, is_sliced: bool = False) -> int:
    actions = [event.action for event in timeline.events]
    return sum(
        action in kinds
        if isinstance(action, StepEnd)
        else action.type in kinds and (action.slice_index is not None) == is_sliced
        for action in actions
    )


def test_every_action_is_one_bar_and_every_message_one_line() -> None:
    timeline = a_timeline(3, 4, 2, exchange_s=0.001, is_tied=True)
    svg = timeline_svg({"": timeline})
    for group, kind in (
        ("forward", ActionType.FORWARD),
        ("backward", ActionType.BACKWARD),
        ("activations-sent", ActionType.SEND_ACTIVATION),
        ("gradients-sent", ActionType.SEND_GRADIENT),
        ("sum-of-tied-gradients", StepEnd.TIED_GRADIENTS),
        ("sum-of-gradients", StepEnd.GRADIENTS),
        ("exchange", StepEnd.EXCHANGE),
        ("optimizer", StepEnd.OPTIMIZER),
    ):
        assert elements(svg, f"timeline-0-{group}") == count(timeline, kind) > 0, group
    assert elements(svg, "timeline-0-idle") == 6


def test_slices_are_bars_of_their_own() -> None:
    timeline = a_timeline(3, 4, schedule=sliced_one_f_one_b(3, 4, num_sliced_first=2))
    svg = timeline_svg({"": timeline})
    for kind in (ActionType.FORWARD, ActionType.BACKWARD):
        name = kind.name.lower()
        assert elements(svg, f"timeline-0-{name}") == count(timeline, kind) == 6
        assert elements(svg, f"timeline-0-{name}-of-a-slice") == count(timeline, kind, is_sliced=True) == 12
    assert "1.0" in texts(svg)


def test_several_timelines_stand_on_one_axis_of_time() -> None:
    timelines = {"predicted": a_timeline(2, 4), "measured": a_timeline(2, 4, bandwidth_bytes_per_s=1e8)}
    svg = timeline_svg(timelines)
    assert elements(svg, "timeline-0-forward") == elements(svg, "timeline-1-forward") == 8
    for name, timeline in timelines.items():
        assert f"{name} · step {1e3 * timeline.step_s:.4g} ms · bubble {100 * timeline.bubble_fraction:.1f} %" in texts(
            svg
        )
    first, second = timeline_figure(timelines).axes
    assert first.get_xlim() == second.get_xlim()
    assert first.get_position().y0 > second.get_position().y1


def test_equal_timelines_give_equal_files_whatever_the_user_has_set(tmp_path: Path) -> None:
    timelines = {"<predicted> & $x$": a_timeline(2, 4)}
    first = timeline_svg(timelines, title="a <b> & $c$")
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert timeline_svg(timelines, title="a <b> & $c$") == first
        assert mpl.rcParams["font.size"] == 30
    assert "date" not in first.lower()
    assert "a <b> & $c$" in texts(first)
    for name in ("a.png", "b.png"):
        save_picture(tmp_path / name, timelines)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_numbers_are_there_where_they_fit() -> None:
    small = texts(timeline_svg({"": a_timeline(2, 4)}))
    assert [small.count(str(index)) for index in range(1, 4)] == [4, 4, 4]
    large = texts(timeline_svg({"": a_timeline(16, 64)}))
    assert not [text for text in large if text == "63"]
    assert "stage 15 · rank 0" in large


def test_stages_with_unlike_numbers_of_ranks_have_a_lane_for_each() -> None:
    timeline = an_unlike_timeline()
    svg = timeline_svg({"": timeline})
    labels = [text for text in texts(svg) if text.startswith("stage")]
    assert labels == ["stage 0 · rank 1", "stage 0 · rank 2", "stage 1 · rank 0"]
    assert not [text for text in texts(svg) if text.startswith("replica")]
    assert elements(svg, "timeline-0-activations-sent") == elements(svg, "timeline-0-gradients-sent") == 6
    # What passes a lane by is drawn behind its bars and numbers.
    (axes,) = timeline_figure({"": timeline}).axes
    lines, bars = (
        [artist for artist in axes.collections if isinstance(artist, kind) and "idle" not in (artist.get_gid() or "")]
        for kind in (LineCollection, PolyCollection)
    )
    assert len(lines) == 2
    assert max(line.get_zorder() for line in lines) < min(bar.get_zorder() for bar in bars)


def test_a_legend_names_what_is_there_and_no_more() -> None:
    names = texts(timeline_svg({"": a_timeline(2, 4, bandwidth_bytes_per_s=None)}))
    assert {"forward", "backward", "optimizer", "idle", "warm-up", "steady", "cool-down"} <= set(names)
    assert not {"exchange", "sum of gradients", "activations sent"} & set(names)
    assert "time since the step began [ms]" in names


@pytest.mark.parametrize(("seconds", "unit"), [(20.0, "s"), (0.02, "ms"), (2e-5, "µs")])
def test_the_axis_has_units_that_read_well(seconds: float, unit: str) -> None:
    timeline = a_timeline(1, 1)
    factor = seconds / timeline.step_s
    events = tuple(
        type(event)(
            action=event.action,
            global_rank=event.global_rank,
            start_s=event.start_s * factor,
            end_s=event.end_s * factor,
        )
        for event in timeline.events
    )
    scaled = Timeline(events=events, step_s=seconds, bubble_fraction=0.0)
    assert f"step 20 {unit} · bubble 0.0 %" in texts(timeline_svg({"": scaled}))


PICTURES: Mapping[str, Mapping[str, Timeline]] = {
    "1 x 1": {"": a_timeline(1, 1)},
    "2 x 4": {"": a_timeline(2, 4)},
    "gpipe 8 x 16": {"": a_timeline(8, 16, schedule=gpipe(8, 16))},
    "sliced": {"": a_timeline(4, 8, schedule=sliced_one_f_one_b(4, 8, num_sliced_first=4))},
    "replicas": {"": a_timeline(4, 8, 2, exchange_s=0.001, is_tied=True)},
    "one stage, 12 replicas": {"": a_timeline(1, 4, 12)},
    "8 x 8 x 8": {"": a_timeline(8, 8, 8)},
    "64 x 8": {"": a_timeline(64, 8)},
    "2 + 1": {"": an_unlike_timeline()},
    "16 x 64": {"": a_timeline(16, 64)},
    "two": {"predicted": a_timeline(4, 8), "measured": a_timeline(4, 8, bandwidth_bytes_per_s=2e8)},
}


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_is_cut_off_or_lies_on_another(name: str) -> None:
    figure = timeline_figure(PICTURES[name], title=f"A title that is {'very ' * 40}long")
    assert overlapping_texts(figure) == []


def overlapping_texts(figure: Figure) -> list[str]:
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    with mpl.rc_context({"text.parse_math": False}):
        canvas.draw()
        renderer = canvas.get_renderer()
        hidden = {
            tick.label1
            for axes in figure.axes
            for tick in axes.xaxis.get_major_ticks()
            if not axes.get_xlim()[0] <= tick.get_loc() <= axes.get_xlim()[1]
        }
        shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text() and text not in hidden]
        boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in shown]
    page = figure.bbox
    outside = [
        text for text, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > page.x1 + 0.5 or box.y1 > page.y1 + 0.5
    ]
    overlapping = [
        f"{text} on {other}"
        for (text, box), (other, other_box) in combinations(boxes, 2)
        if min(box.x1, other_box.x1) - max(box.x0, other_box.x0) > 0.5
        and min(box.y1, other_box.y1) - max(box.y0, other_box.y0) > 2
    ]
    return outside + overlapping


def test_files_are_of_the_kind_that_their_names_say(tmp_path: Path) -> None:
    timelines = {"": a_timeline(2, 4)}
    save_picture(tmp_path / "new" / "a.PNG", timelines)
    head = (tmp_path / "new" / "a.PNG").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:])
    assert width == 11 * 144
    assert 200 < height < 500
    save_picture(tmp_path / "a.svg", timelines)
    assert (tmp_path / "a.svg").read_text(encoding="utf-8") == timeline_svg(timelines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.svg", "new"]


@pytest.mark.parametrize("name", ["a.pdf", "png", "a.svg.txt"])
def test_other_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"ends in \.png or \.svg"):
        save_picture(tmp_path / name, {"": a_timeline(1, 1)})
    assert list(tmp_path.iterdir()) == []


def test_no_timeline_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="at least one timeline"):
        timeline_figure({})


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-autopipe\[plot\]'"):
        timeline_svg({"": a_timeline(1, 1)})


def test_matplotlib_is_loaded_on_use_and_no_window_system_with_it() -> None:
    script = (
        "import sys; import lightning_autopipe.visualization as v; print('matplotlib' in sys.modules);"
        "from tests.visualization.timelines import a_timeline; v.timeline_svg({'': a_timeline(1, 1)});"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=root)
    assert result.stdout.split() == ["False", "False"], result.stderr
