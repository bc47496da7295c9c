"""``autopipe show PLAN``: shows a plan."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lightning_autopipe.cli.console import make_console, print_notes
from lightning_autopipe.cli.plan_step import assumptions, print_plan, shown_step, write_plan_files
from lightning_autopipe.cli.timelines import add_file_arguments
from lightning_autopipe.cluster import find_cluster_file, load_topology
from lightning_autopipe.core.plan import PipelinePlan

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    """Add this command."""
    parser = subparsers.add_parser(
        "show",
        help="show a plan, with the step that it predicts",
        description="Shows a saved plan: its stages, and the step that it predicts, as tables, picture, trace, report.",
    )
    parser.add_argument("plan", metavar="PLAN", help="a plan's JSON file")
    parser.add_argument("--cluster", metavar="FILE", help="devices and links: a cluster file, or an example's name")
    parser.add_argument("--html", metavar="FILE", help="write a report with tables and picture, one file")
    add_file_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Show what was asked for.

    Raises:
        ConfigurationError: the cluster file is wrong or does not fit the plan, or a file cannot be written.
        PlanError: the plan is not there, or wrong.
    """
    plan = PipelinePlan.load(arguments.plan)
    cluster = None if arguments.cluster is None else load_topology(find_cluster_file(arguments.cluster))
    step = shown_step(plan, cluster)
    notes = assumptions(plan, cluster)
    write_plan_files(arguments, plan, step, notes)
    console = make_console()
    print_plan(console, plan, step, max_rows=64)
    print_notes(console, notes)
