from __future__ import annotations

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightning_autopipe.core import DeviceMapping, ParallelLayout, Partition, RunnerUp, ScheduleSpec, Timeline
from lightning_autopipe.visualization import link_uses, report_html, save_report

from .test_plan_table import a_layer, a_plan
from .timelines import a_timeline

EVIL = "<script>alert('x')</script> & \"q\""
SLOWER = RunnerUp(
    replica_counts=(1,) * 6,
    schedule=ScheduleSpec(name="1f1b", depths=(5, 4, 3, 2, 1, 0)),
    num_microbatches=12,
    step_s=2.0,
    samples_per_s=16.0,
)
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that elements nest, and collects tags, attributes and texts."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.extend(attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.extend(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return a_timeline(3, 4, 2)


def test_a_report_holds_tables_figures_and_picture(timeline: Timeline) -> None:
    page = Page(
        report_html(
            a_plan(runners_up=(SLOWER, SLOWER)),
            {"predicted": timeline, "measured": timeline},
            uses=link_uses(timeline),
            notes=["A note."],
            title="A title",
        )
    )
    assert page.tags.count("svg") == 1
    assert page.tags.count("table") == 5
    headings = ["Figures", "Timeline", "Stages", "Ranks, predicted", "Ranks, measured", "Links", "Runners-up"]
    assert [text for text in page.texts if text in headings] == headings
    for text in (
        "A title",
        "A note.",
        "38.6 M\n38.6 M",
        "h[1]",
        "rank 0 → rank 1",
        "6 × 1",
        "1f1b, warm-up 5-4-3-2-1-0",
    ):
        assert text in page.texts, text
    assert f"{1e3 * timeline.step_s:.3g} ms" in page.texts


def test_what_is_not_given_is_not_there() -> None:
    page = Page(report_html(a_plan(), {}))
    assert page.tags.count("table") == 1
    assert "svg" not in page.tags
    assert not {"Links", "Runners-up", "Timeline", "Figures"} & set(page.texts)


def test_all_text_is_escaped(timeline: Timeline) -> None:
    plan = a_plan(
        module_fingerprint=EVIL,
        layers=(a_layer(EVIL, 1, parameters=(EVIL,)), a_layer("b", 1, parameters=(EVIL,))),
        runners_up=(replace(SLOWER, schedule=ScheduleSpec(name=EVIL)),),
        partition=Partition(cut_points=(1,), num_layers=2),
        mapping=DeviceMapping.of_layout(ParallelLayout(num_stages=2)),
        stage_work_shares=(),
    )
    html = report_html(plan, {EVIL: timeline}, notes=[EVIL], title=EVIL)
    page = Page(html)
    assert "script" not in page.tags
    assert "<script" not in html
    # Title twice, fingerprint, layer, note, runner-up, figures, heading of ranks, picture, tie.
    assert sum(EVIL in text for text in page.texts) >= 10


def test_it_needs_nothing_from_elsewhere(timeline: Timeline) -> None:
    html = report_html(a_plan(), {"": timeline}, uses=link_uses(timeline))
    page = Page(html)
    assert not {"link", "script", "img", "iframe", "image", "object"} & set(page.tags)
    addresses = [value for name, value in page.attributes if name in ("src", "href", "xlink:href") and value]
    assert all(address.startswith("#") for address in addresses)
    assert all(address.startswith("#") for address in re.findall(r"url\(([^)]*)\)", html))
    assert set(re.findall(r"https?://[^\"]*", html)) <= {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}
    assert html.lower().count("<!doctype") == 1


def test_equal_input_gives_equal_files(tmp_path: Path, timeline: Timeline) -> None:
    save_report(tmp_path / "a.html", a_plan(), {"": timeline})
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == report_html(a_plan(), {"": timeline})


def test_without_jinja_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-autopipe\[plot\]'"):
        report_html(a_plan(), {})
