"""Shows plans to people."""

from __future__ import annotations

from lightning_autopipe.visualization.plan_table import plan_table, plan_text

__all__ = ["plan_table", "plan_text"]
