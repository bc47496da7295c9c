"""``autopipe simulate``: runs a step in simulated time."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from lightning_autopipe.cli.console import make_console, print_notes
from lightning_autopipe.cli.numbers import whole_number
from lightning_autopipe.cli.plan_step import assumptions, shown_step
from lightning_autopipe.cli.timelines import ShownStep, add_file_arguments, write_files
from lightning_autopipe.cluster import find_cluster_file, load_topology
from lightning_autopipe.core.cluster import ClusterTopology, Device, Link, rank_point
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.schedule import Action, Schedule
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.planner.links import LinkNetwork
from lightning_autopipe.planner.simulator import simulate
from lightning_autopipe.planner.workload import StageWork, StepWork, UnitWork
from lightning_autopipe.schedules import SCHEDULES, draw_grid, get_schedule
from lightning_autopipe.schedules.interleaved import NAME as INTERLEAVED
from lightning_autopipe.schedules.sliced import NAME as SLICED
from lightning_autopipe.schedules.zero_bubble import NAME as ZERO_BUBBLE
from lightning_autopipe.visualization import timeline_table
from lightning_autopipe.visualization.lanes import make_lanes

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_MAX_ACTIONS = 200_000
_MAX_SHOWN = 32
_MS = 1e-3
_OF_NO_PLAN = (
    "stages",
    "microbatches",
    "forward",
    "backward",
    "weight_gradients",
    "schedule",
    "depths",
    "sliced",
    "stages_per_rank",
    "transfer",
    "optimizer",
)


def add_parser(subparsers: Subparsers) -> None:
    """Add this command."""
    parser = subparsers.add_parser(
        "simulate",
        help="simulate the step of a plan, or of a schedule with times that you give",
        description="Simulates one step of a plan, or of a schedule with times that you give, and shows when each "
        "stage does what.",
    )
    parser.add_argument("plan", nargs="?", metavar="PLAN", help="a plan's JSON file; or leave it out and give:")
    parser.add_argument("--stages", metavar="N", help="number of stages, all ranks' together")
    parser.add_argument("--microbatches", metavar="M", help="number of micro-batches")
    parser.add_argument("--forward", metavar="MS", help="milliseconds of a forward; or one number a stage, 10,12,11")
    parser.add_argument("--backward", metavar="MS", help="the same of a backward; default: twice the forward")
    parser.add_argument("--weight-gradients", metavar="MS", help="its part for the parameters; default: half of it")
    parser.add_argument("--schedule", metavar="NAME", help=f"one of {', '.join(SCHEDULES)}; default: 1f1b")
    parser.add_argument("--depths", metavar="W,W,…", help="depth of the warm-up of each stage")
    parser.add_argument("--sliced", metavar="K[,K]", help="micro-batches in halves, first and last; default: 1,0")
    parser.add_argument("--stages-per-rank", metavar="N", help="those of each rank (interleaved_1f1b); default: 2")
    parser.add_argument("--transfer", metavar="MS", help="milliseconds of each message between stages; default: 0")
    parser.add_argument("--optimizer", metavar="MS", help="milliseconds of the optimizer; default: 0")
    parser.add_argument("--cluster", metavar="FILE", help="with a plan: a cluster file, or an example's name")
    add_file_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Simulate, show, and write what was asked for.

    Raises:
        ConfigurationError: a number is wrong or missing, or a file cannot be written.
        PlanError: the plan is not there, or wrong.
    """
    notes: list[str] = []
    given = [name for name in _OF_NO_PLAN if getattr(arguments, name) is not None]
    if arguments.plan is not None:
        if given:
            options = " ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigurationError(f"a plan says this itself; leave out {options}, or the plan")
        plan = PipelinePlan.load(arguments.plan)
        cluster = None if arguments.cluster is None else load_topology(find_cluster_file(arguments.cluster))
        step = shown_step(plan, cluster)
        notes = assumptions(plan, cluster)
    else:
        if arguments.cluster is not None:
            raise ConfigurationError("--cluster goes with a plan, which says how many bytes are sent; use --transfer")
        step = _given_step(arguments)
    write_files(arguments, step)
    console = make_console()
    for text in _order(step):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        console.print()
    console.print(timeline_table(step.timeline, ranks=step.ranks))
    print_notes(console, notes)


def _order(step: ShownStep) -> list[str]:
    """The schedule as a grid for each number of micro-batches that a replica has; where stages have unlike numbers of
    ranks, what each of them computes, in its order."""
    lanes = make_lanes(step.timeline, step.ranks)
    if step.schedules[0].num_stages == 1 + max(lane.stage_indices[-1] for lane in lanes):
        return [draw_grid(schedule) for schedule in dict.fromkeys(step.schedules)]
    labels = [f"stage {lane.stages_text}, rank {lane.global_rank}" for lane in lanes]
    width = max(map(len, labels))
    lines = []
    for label, lane in zip(labels, lanes, strict=True):
        actions = [bar.event.action for bar in lane.bars if isinstance(bar.event.action, Action)]
        texts = [str(action).removeprefix(str(lane.stage_index)) for action in actions[:_MAX_SHOWN]]
        lines.append(f"{label.ljust(width)} | {' '.join(texts)}{' …' if len(actions) > _MAX_SHOWN else ''}")
    return ["\n".join(lines)]


def _given_step(arguments: argparse.Namespace) -> ShownStep:
    for name in ("stages", "microbatches", "forward"):
        if getattr(arguments, name) is None:
            raise ConfigurationError(f"give a plan, or --stages, --microbatches and --forward; --{name} is missing")
    num_stages = whole_number("stages", arguments.stages)
    num_microbatches = whole_number("microbatches", arguments.microbatches)
    if num_stages * num_microbatches > _MAX_ACTIONS:
        raise ConfigurationError(
            f"--stages {num_stages} times --microbatches {num_microbatches} is more than {_MAX_ACTIONS}, which takes "
            "too long; give fewer"
        )
    schedule = _schedule(arguments, num_stages, num_microbatches)
    forward_s = _times_s("forward", arguments.forward, num_stages)
    backward_s = [2 * seconds for seconds in forward_s]
    if arguments.backward is not None:
        backward_s = _times_s("backward", arguments.backward, num_stages)
    weight_s = [seconds / 2 for seconds in backward_s]
    if arguments.weight_gradients is not None:
        weight_s = _times_s("weight-gradients", arguments.weight_gradients, num_stages)
    for weight, backward in zip(weight_s, backward_s, strict=True):
        if weight > backward:
            raise ConfigurationError(
                f"--weight-gradients {weight / _MS:g} is more than the whole backward of {backward / _MS:g} ms"
            )
    transfer_s, optimizer_s = (
        _times_s(name, getattr(arguments, name) or "0", 1)[0] for name in ("transfer", "optimizer")
    )
    num_bytes = 1.0 if transfer_s else 0.0
    stages = tuple(
        StageWork(
            units=tuple(
                UnitWork(
                    forward_s=forward / k,
                    backward_s=backward / k,
                    backward_weight_s=weight / k,
                    sent_bytes=num_bytes / k,
                    gradient_bytes=num_bytes / k,
                )
                for k in (1, 2)
            ),
            optimizer_s=optimizer_s,
        )
        for forward, backward, weight in zip(forward_s, backward_s, weight_s, strict=True)
    )
    network = _chain(schedule.num_ranks, transfer_s) if transfer_s else None
    timeline = simulate(StepWork(stages=(stages,), schedules=(schedule,), network=network))
    # Nothing was said about memory.
    timeline = replace(timeline, peak_bytes=())
    title = f"{schedule.name} · {_count(num_stages, 'stage')} · {_count(num_microbatches, 'micro-batch', 'es')}"
    return ShownStep(timeline=timeline, title=title, schedules=(schedule,))


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _schedule(arguments: argparse.Namespace, num_stages: int, num_microbatches: int) -> Schedule:
    name = arguments.schedule or "1f1b"
    for option, schedule_name in (
        ("sliced", SLICED),
        ("stages_per_rank", INTERLEAVED),
        ("weight_gradients", ZERO_BUBBLE),
    ):
        if getattr(arguments, option) is not None and name != schedule_name:
            raise ConfigurationError(
                f"--{option.replace('_', '-')} goes with --schedule {schedule_name}, not with {name}"
            )
    num_first, num_last = 0, 0
    if name == SLICED:
        first, _, last = (arguments.sliced or "1").partition(",")
        num_first, num_last = (whole_number("sliced", text, minimum=0) for text in (first, last or "0"))
        if num_first + num_last > num_microbatches:
            raise ConfigurationError(
                f"--sliced {num_first},{num_last} is more than the {num_microbatches} micro-batches; give fewer"
            )
    depths = arguments.depths.split(",") if arguments.depths is not None else ()
    stages_per_rank = 1
    if name == INTERLEAVED:
        stages_per_rank = whole_number("stages-per-rank", arguments.stages_per_rank or "2")
        if num_stages % stages_per_rank:
            raise ConfigurationError(
                f"--stages {num_stages} cannot go round ranks that run {stages_per_rank} each; give a multiple, or "
                "another --stages-per-rank"
            )
    spec = ScheduleSpec(
        name=name,
        depths=tuple(whole_number("depths", text, minimum=0) for text in depths),
        num_sliced_first=num_first,
        num_sliced_last=num_last,
        stages_per_rank=stages_per_rank,
    )
    return get_schedule(spec, num_stages, num_microbatches)


def _chain(num_ranks: int, transfer_s: float) -> LinkNetwork:
    """A way of its own between each two neighbours, on which a byte takes so long; also from the last to the first."""
    ranks = ParallelLayout(num_stages=num_ranks).pipeline_ranks(0)
    devices = tuple(
        Device(global_rank=rank, server=f"of rank {rank}", model="any", memory_bytes=1) for rank in range(num_ranks)
    )
    links = tuple(
        Link(a=rank_point(before), b=rank_point(after), bandwidth_bytes_per_s=1 / transfer_s)
        for before, after in pairwise((*ranks, ranks[0]) if num_ranks > 2 else ranks)
    )
    return LinkNetwork(ClusterTopology(devices=devices, links=links))


def _times_s(name: str, text: str, count: int) -> list[float]:
    """Seconds from milliseconds: one number for all, or one each."""
    try:
        times = [float(part) * _MS for part in text.split(",")]
    except ValueError:
        times = [math.nan]
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in times):
        raise ConfigurationError(f"--{name} must be milliseconds >= 0, one number or one a stage, got {text!r}")
    if len(times) not in (1, count):
        raise ConfigurationError(f"--{name} gives {len(times)} times for {count}; give one for all, or one each")
    return times * count if len(times) == 1 else times
