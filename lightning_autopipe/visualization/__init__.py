"""Shows plans and timelines to people: tables, pictures, traces, reports."""

from __future__ import annotations

from lightning_autopipe.visualization.chrome_trace import chrome_trace, save_chrome_trace
from lightning_autopipe.visualization.picture import save_picture, timeline_figure, timeline_svg
from lightning_autopipe.visualization.plan_summary import plan_summary, plan_title, runners_up_table
from lightning_autopipe.visualization.plan_table import plan_table, plan_text
from lightning_autopipe.visualization.report import report_html, save_report
from lightning_autopipe.visualization.timeline_table import timeline_table, timeline_text, traffic_table
from lightning_autopipe.visualization.traffic import LinkUse, link_uses

__all__ = [
    "LinkUse",
    "chrome_trace",
    "link_uses",
    "plan_summary",
    "plan_table",
    "plan_text",
    "plan_title",
    "report_html",
    "runners_up_table",
    "save_chrome_trace",
    "save_picture",
    "save_report",
    "timeline_figure",
    "timeline_svg",
    "timeline_table",
    "timeline_text",
    "traffic_table",
]
