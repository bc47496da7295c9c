"""``autopipe show PLAN``: shows a plan."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lightning_autopipe.cli.console import make_console
from lightning_autopipe.cli.timelines import ShownStep, add_file_arguments, step_title, write_files
from lightning_autopipe.cluster import find_cluster_file, load_topology
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.planner.plan_step import boundary_bytes, plan_step
from lightning_autopipe.planner.simulator import simulate
from lightning_autopipe.visualization import link_uses, plan_table, save_report, timeline_table, traffic_table

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

NOT_MEASURED = (
    "The plan's layers were not measured: a micro-batch is taken to need one second in all, shared as the counted "
    "operations are."
)
NO_CLUSTER = "No cluster is given: transfers and sums of gradients are taken to need no time."


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
    step = shown_step(plan, arguments.cluster)
    uses = link_uses(step.timeline, boundary_bytes=step.boundary_bytes)
    console = make_console()
    console.print(plan_table(plan))
    console.print(timeline_table(step.timeline))
    if uses:
        console.print(traffic_table(uses))
    notes = assumptions(plan, arguments.cluster)
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    write_files(arguments, step)
    if arguments.html is not None:
        try:
            save_report(arguments.html, plan, {"predicted": step.timeline}, uses=uses, notes=notes, title=step.title)
        except ImportError as error:
            raise ConfigurationError(str(error)) from error


def shown_step(plan: PipelinePlan, cluster_name: str | None) -> ShownStep:
    """A plan's step, simulated on a cluster if one is named."""
    cluster = None if cluster_name is None else load_topology(find_cluster_file(cluster_name))
    step = plan_step(plan, cluster=cluster)
    return ShownStep(
        timeline=simulate(step),
        title=step_title(plan.schedule.name, plan.num_stages, plan.layout.num_replicas, plan.num_microbatches),
        boundary_bytes=boundary_bytes(step),
        cluster=cluster,
    )


def assumptions(plan: PipelinePlan, cluster_name: str | None) -> list[str]:
    """What the prediction takes for granted, in sentences."""
    notes = [] if plan.stage_predictions else [NOT_MEASURED]
    return notes if cluster_name is not None else [*notes, NO_CLUSTER]
