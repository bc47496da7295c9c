"""A plan and its step as one HTML file that needs nothing else (with the extra ``plot``)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from rich.table import Table
from rich.text import Text

from lightning_autopipe.core.files import write_whole
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.quantities import duration_text, memory_text
from lightning_autopipe.core.timeline import Timeline
from lightning_autopipe.visualization.lanes import Ranks
from lightning_autopipe.visualization.picture import timeline_svg
from lightning_autopipe.visualization.plan_summary import runners_up_table
from lightning_autopipe.visualization.plan_table import plan_table
from lightning_autopipe.visualization.timeline_table import timeline_table, traffic_table
from lightning_autopipe.visualization.traffic import LinkUse

_TEMPLATE = "report.html.j2"
_ALL_ROWS = 10**6


def report_html(
    plan: PipelinePlan,
    timelines: Mapping[str, Timeline],
    *,
    ranks: Ranks = (),
    uses: Sequence[LinkUse] = (),
    notes: Sequence[str] = (),
    title: str = "Pipeline plan",
) -> str:
    """The report as HTML text: equal input gives equal text. The plan's own runners-up are in it.

    Args:
        plan: the plan.
        timelines: of its step, by name, such as predicted and measured; none: no picture.
        ranks: ``ranks[r][s]`` runs stage s of replica r; empty: as the timelines tell.
        uses: of links; none: no table of them.
        notes: sentences to be shown under the figures.
        title: of the page.

    Raises:
        ImportError: Jinja2 or matplotlib is not installed.
        PlanError: a timeline does not tell which rank runs what.
    """
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise ImportError(
            "HTML reports need Jinja2, which cannot be imported: install it with pip install "
            f"'lightning-autopipe[plot]' ({error})"
        ) from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(resources.files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8"))
    svg = timeline_svg(timelines, ranks=ranks) if timelines else ""
    tables = [_cells(plan_table(plan), "Stages")]
    for name, timeline in timelines.items():
        tables.append(_cells(timeline_table(timeline, ranks=ranks, max_rows=_ALL_ROWS), f"Ranks, {name}".rstrip(", ")))
    if uses:
        tables.append(_cells(traffic_table(uses, max_rows=_ALL_ROWS), "Links"))
    if plan.runners_up:
        tables.append(_cells(runners_up_table(plan, max_rows=_ALL_ROWS), ""))
    return template.render(
        title=title,
        figures=[_figures(name, timeline) for name, timeline in timelines.items()],
        notes=notes,
        # Made by us, and its texts are escaped; what precedes the element does not belong into a page.
        picture=Markup(svg[svg.find("<svg") :]) if svg else "",
        tables=tables,
        fingerprint=plan.module_fingerprint,
    )


def save_report(
    path: str | os.PathLike[str], plan: PipelinePlan, timelines: Mapping[str, Timeline], **options: Any
) -> None:
    """Write the report to a file, whole or not at all. Options and errors as of `report_html`, and:

    Raises:
        ConfigurationError: the file cannot be written.
    """
    write_whole(path, report_html(plan, timelines, **options))


def _figures(name: str, timeline: Timeline) -> dict[str, str]:
    figures = {
        "": name,
        "step": duration_text(timeline.step_s),
        "bubble": f"{100 * timeline.bubble_fraction:.1f} %",
    }
    if any(timeline.peak_bytes):
        figures["most memory on a rank"] = memory_text(max(timeline.peak_bytes))
    return figures


def _cells(table: Table, heading: str) -> dict[str, Any]:
    """What a rich table shows, as texts."""
    columns = table.columns
    return {
        "heading": heading or _plain(table.title).capitalize(),
        "title": _plain(table.title) if heading else "",
        "header": [_plain(column.header) for column in columns],
        "numeric": [column.justify == "right" for column in columns],
        "rows": list(zip(*([_plain(cell) for cell in column.cells] for column in columns), strict=True)),
        "footer": [_plain(column.footer) for column in columns] if table.show_footer else [],
        "caption": _plain(table.caption),
    }


def _plain(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell or "")
