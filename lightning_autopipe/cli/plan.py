"""``autopipe plan``: makes a plan."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lightning_autopipe.cli.console import make_console, print_notes
from lightning_autopipe.cli.numbers import whole_number
from lightning_autopipe.cli.plan_inputs import (
    Auto,
    Costs,
    cluster_to_plan_for,
    costs_of_profile,
    costs_of_recipe,
)
from lightning_autopipe.cli.plan_step import print_plan, shown_step, write_plan_files
from lightning_autopipe.cli.timelines import add_file_arguments
from lightning_autopipe.core.cluster import ClusterTopology
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.planner import CostModel, SearchSpace, plan_of, search
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.partition_rules import PARTITION_RULES
from lightning_autopipe.planner.schedule_choice import OTHER_KINDS
from lightning_autopipe.profile_files.load import TIME_UNITS
from lightning_autopipe.schedules.catalog import TRAINING_SCHEDULES
from lightning_autopipe.schedules.sliced import NAME as SLICED

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    """Add this command."""
    parser = subparsers.add_parser(
        "plan",
        help="make a plan from a profile or a recipe, for this machine or a cluster that is elsewhere",
        description="Makes a plan: stages, replicas, micro-batches, devices, cuts and schedule with the most predicted "
        "samples per second. Layers cost what a profile says, or what is measured of a recipe's training step here.",
    )
    source = parser.add_argument_group("what is planned").add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--profile", metavar="FILE", help="a saved profile, a text graph of DAPPLE or PipeDream, or Piper's JSON"
    )
    source.add_argument("--recipe", metavar="NAME", help="a recipe (gpt2, bert, resnet): measured in this process")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="with --recipe: its settings, such as model=small"
    )
    files = parser.add_argument_group("profiles of other planners")
    files.add_argument("--time-unit", choices=tuple(TIME_UNITS), help="of the times in it")
    files.add_argument("--microbatch-size", metavar="N", help="samples in a profiled micro-batch")
    files.add_argument("--device-model", metavar="NAME", help="what was profiled, as the cluster names it")
    place = parser.add_argument_group("for which devices").add_mutually_exclusive_group()
    place.add_argument("--cluster", metavar="FILE", help="a cluster file, or an example's name (see autopipe cluster)")
    place.add_argument("--devices", metavar="N", help="processes on this machine; default: one for each device")
    choice = parser.add_argument_group("what may be chosen")
    for name, text in (
        ("stages", "stages of each pipeline"),
        ("replicas", "pipelines side by side"),
        ("microbatches", "micro-batches of each replica's batch"),
    ):
        choice.add_argument(f"--{name}", metavar="N", default="auto", help=f"{text}; default: auto")
    batch = choice.add_mutually_exclusive_group()
    batch.add_argument("--batch-size", metavar="N", help="samples in each replica's batch; a recipe's own is measured")
    batch.add_argument("--global-batch-size", metavar="N", help="samples in a step, whatever the number of replicas")
    schedules = ("auto", *TRAINING_SCHEDULES)
    choice.add_argument("--schedule", choices=schedules, default="auto", help="default: auto, the fastest of all")
    choice.add_argument(
        "--slices",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="micro-batches in halves, where that is faster; default: allowed",
    )
    choice.add_argument(
        "--partition", metavar="RULE", default="auto", help=f"{', '.join(PARTITION_RULES)}, or layers to cut at: 4,8"
    )
    study = parser.add_argument_group("for study: plans that can be simulated, but not run yet")
    study.add_argument(
        "--equal-replicas",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="unlike numbers of replicas for stages, and of micro-batches for replicas (these run); default: equal",
    )
    output = parser.add_argument_group("output")
    output.add_argument("-o", "--output", metavar="FILE", help="write the plan (JSON)")
    output.add_argument("--save-profile", metavar="FILE", help="with --recipe: write what was measured (JSON)")
    output.add_argument("--html", metavar="FILE", help="write a report with tables and picture, one file")
    add_file_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Plan, show, and write what was asked for.

    Raises:
        ConfigurationError: a value is wrong, nothing fits, or a file cannot be written.
        PlanError: the profile is not there, or wrong.
        AutoPipeError: the recipe's step cannot be traced or measured.
    """
    topology, assumed = cluster_to_plan_for(arguments)
    costs = costs_of_profile(arguments) if arguments.recipe is None else costs_of_recipe(arguments, topology)
    space = _space(arguments, costs, topology)
    plan = plan_of(search(space), space, module_fingerprint=costs.module_fingerprint, devices=space.topology.devices)
    notes = [*assumed, *costs.notes(topology), *_notes(plan, costs)]
    step = shown_step(plan, topology)
    # Files first: who reads what is printed may stop reading.
    if arguments.save_profile is not None:
        costs.profile.save(arguments.save_profile)
    if arguments.output is not None:
        plan.save(arguments.output)
    write_plan_files(arguments, plan, step, notes)
    console = make_console()
    print_plan(console, plan, step)
    print_notes(console, notes)


def _space(arguments: argparse.Namespace, costs: Costs, topology: ClusterTopology) -> SearchSpace:
    is_equal = arguments.equal_replicas
    if not is_equal and arguments.global_batch_size is None:
        raise ConfigurationError(
            "--no-equal-replicas shares one batch between all devices of a stage: give --global-batch-size"
        )
    rule, cuts = _partition(arguments.partition)
    if costs.cuts is not None:
        if arguments.partition != "auto":
            raise ConfigurationError("--partition and the recipe's strategy.cut_after both say where stages begin")
        cuts = costs.cuts
    schedule = arguments.schedule
    if schedule == SLICED and not arguments.slices:
        raise ConfigurationError(f"--schedule {SLICED} slices micro-batches, and --no-slices forbids it; leave one out")
    if costs.schedule is not None:
        if schedule not in ("auto", costs.schedule):
            raise ConfigurationError(f"the recipe's loss_over='batch' needs --schedule {costs.schedule}")
        schedule = costs.schedule
    if arguments.global_batch_size is not None:
        batch_size = float(whole_number("global-batch-size", arguments.global_batch_size))
    else:
        assert costs.batch_size is not None
        batch_size = float(costs.batch_size)
    return SearchSpace(
        cost=CostModel(costs.profile),
        network=LinkNetwork(topology),
        batch_size=batch_size,
        batch_of="replica" if arguments.global_batch_size is None else "step",
        num_stages=_number_or_auto(arguments, "stages"),
        num_replicas=_number_or_auto(arguments, "replicas"),
        num_microbatches=_number_or_auto(arguments, "microbatches"),
        schedule=schedule,
        partition=rule,
        cuts=cuts,
        min_samples=float(costs.min_samples),
        kinds=tuple(kind for kind in OTHER_KINDS if arguments.slices or kind != SLICED),
        equal_shares=is_equal,
        equal_counts=is_equal,
        optimizer_state_ratio=costs.optimizer_state_ratio,
    )


def _number_or_auto(arguments: argparse.Namespace, name: str) -> int | Auto:
    text = getattr(arguments, name)
    return "auto" if text == "auto" else whole_number(name, text)


def _partition(text: str) -> tuple[str, tuple[int, ...] | None]:
    """The rule, and the cuts where they are given."""
    if text in PARTITION_RULES:
        return text, None
    try:
        cuts = tuple(int(part) for part in text.split(","))
    except ValueError:
        cuts = ()
    if not cuts or list(cuts) != sorted(set(cuts)) or cuts[0] < 1:
        raise ConfigurationError(
            f"--partition is {', '.join(PARTITION_RULES)}, or the layers at which later stages begin, ascending, such "
            f"as 4,8; got {text!r}"
        )
    return "auto", cuts


def _notes(plan: PipelinePlan, costs: Costs) -> list[str]:
    notes = []
    if not costs.profile.module_fingerprint:
        notes.append("the profile does not say which module it is of: the plan can be shown and simulated, but not run")
    if plan.mapping.num_replicas is None:
        notes.append("this plan can be simulated, but not run yet; leave out --no-equal-replicas for one")
    return notes
