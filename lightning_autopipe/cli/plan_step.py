"""A plan's step as commands show it."""

from __future__ import annotations

import argparse

from rich.console import Console

from lightning_autopipe.cli.timelines import ShownStep, write_files
from lightning_autopipe.core.cluster import ClusterTopology, is_same_model
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.timeline import Timeline
from lightning_autopipe.planner.contention import LinkLoad, link_loads
from lightning_autopipe.planner.plan_step import boundary_bytes, plan_step
from lightning_autopipe.planner.simulator import simulate
from lightning_autopipe.planner.workload import StepWork
from lightning_autopipe.visualization import (
    LinkUse,
    link_uses,
    plan_table,
    plan_title,
    runners_up_table,
    save_report,
    timeline_table,
    traffic_table,
)

_MAX_ROWS = 24
_NOT_MEASURED = (
    "The plan's layers were not measured: a micro-batch is taken to need one second in all, shared as the counted "
    "operations are."
)
_NO_CLUSTER = "No cluster is given: transfers and sums of gradients are taken to need no time."


def shown_step(plan: PipelinePlan, cluster: ClusterTopology | None) -> ShownStep:
    """A plan's step, simulated on a cluster if there is one.

    Raises:
        ConfigurationError: the cluster does not fit the plan.
    """
    step = plan_step(plan, cluster=cluster)
    timeline = simulate(step)
    num_replicas = plan.mapping.num_replicas
    turns = plan.schedule.stages_per_rank
    ranks = () if num_replicas is None else tuple(turns * plan.mapping.pipeline_ranks(r) for r in range(num_replicas))
    bytes_of_cuts = boundary_bytes(step)
    uses = _loads(step, timeline) if cluster else link_uses(timeline, ranks=ranks, boundary_bytes=bytes_of_cuts)
    return ShownStep(
        timeline=timeline,
        title=plan_title(plan),
        schedules=step.schedules,
        ranks=ranks,
        boundary_bytes=bytes_of_cuts,
        uses=uses,
        cluster=cluster,
    )


def assumptions(plan: PipelinePlan, cluster: ClusterTopology | None) -> list[str]:
    """What the prediction takes for granted, in sentences."""
    is_measured = plan.step_prediction is not None or plan.stage_predictions
    notes = [] if is_measured else [_NOT_MEASURED]
    if cluster is None:
        return [*notes, _NO_CLUSTER]
    others = [
        f"rank {planned.global_rank} is {found.model}, planned for {planned.model}"
        for planned, found in zip(plan.devices, cluster.devices, strict=False)
        if not is_same_model(planned.model, found.model) and not is_same_model(found.model, planned.model)
    ]
    more = f", and {len(others) - 1} more" if len(others) > 1 else ""
    return [*notes, f"The cluster is not what the plan is for: {others[0]}{more}."] if others else notes


def print_plan(console: Console, plan: PipelinePlan, step: ShownStep, *, max_rows: int = _MAX_ROWS) -> None:
    """Print a plan's tables: stages, ranks, links, runners-up."""
    console.print(plan_table(plan))
    console.print()
    console.print(timeline_table(step.timeline, ranks=step.ranks, max_rows=max_rows))
    if step.uses:
        console.print(traffic_table(step.uses, max_rows=max_rows))
    if plan.runners_up:
        console.print(runners_up_table(plan))


def write_plan_files(arguments: argparse.Namespace, plan: PipelinePlan, step: ShownStep, notes: list[str]) -> None:
    """Write the picture, trace and report that options ask for.

    Raises:
        ConfigurationError: a file cannot be written, or a library for it is not installed.
    """
    write_files(arguments, step)
    if arguments.html is None:
        return
    try:
        save_report(
            arguments.html,
            plan,
            {"predicted": step.timeline},
            ranks=step.ranks,
            uses=step.uses,
            notes=notes,
            title=step.title,
        )
    except ImportError as error:
        raise ConfigurationError(str(error)) from error


def _loads(step: StepWork, timeline: Timeline) -> tuple[LinkUse, ...]:
    return tuple(
        LinkUse(
            name=f"{load.sender} {'↔' if load.link.duplex == 'half' else '→'} {load.receiver}",
            num_messages=None,
            num_bytes=load.num_bytes,
            summed_bytes=load.reduction_bytes,
            busy_s=load.busy_share * timeline.step_s,
            busy_share=load.busy_share,
            contended_share=load.contended_share,
            contending=_flow_names(load),
        )
        for load in link_loads(step, timeline)
    )


def _flow_names(load: LinkLoad) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{flow.sender}→{flow.receiver}" for flow in load.contending_flows))
