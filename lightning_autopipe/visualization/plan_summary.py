"""Says in a few lines what a plan chose, what that gains, and what else was looked at."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.prediction import RunnerUp
from lightning_autopipe.core.quantities import duration_text, memory_text
from lightning_autopipe.core.schedule_spec import ScheduleSpec

_PLAIN = "1f1b"
_MAX_RUNNERS_UP = 5
_NOTICEABLE = 5e-4


def plan_title(plan: PipelinePlan) -> str:
    """``4 stages × 2 replicas, 1f1b, 8 micro-batches``."""
    numbers = plan.replica_microbatches or (plan.num_microbatches,)
    microbatches = " + ".join(map(str, numbers)) + f" micro-batch{'' if numbers == (1,) else 'es'}"
    if plan.step_prediction is not None and plan.microbatch_size is not None:
        microbatches += f" of {plan.microbatch_size:g}"
    counts = tuple(len(ranks) for ranks in plan.mapping.stage_ranks)
    return f"{layout_text(counts)}, {plan.schedule}, {microbatches}"


def layout_text(counts: Sequence[int]) -> str:
    """``4 stages × 2 replicas``, or ``2 stages of 3 + 1 replicas``."""
    if len(set(counts)) == 1:
        return f"{_count(len(counts), 'stage')} × {_count(counts[0], 'replica')}"
    return f"{_count(len(counts), 'stage')} of {' + '.join(map(str, counts))} replicas"


def plan_summary(plan: PipelinePlan) -> tuple[str, ...]:
    """What is predicted, what the schedule gains over plain 1F1B and what it keeps for that, what the place of rank 0
    costs, and which devices are idle; nothing of what was not predicted."""
    lines = []
    step = plan.step_prediction
    if step is not None:
        num_replicas = plan.mapping.num_replicas
        samples = f"{step.num_samples:g}"
        if num_replicas is not None and num_replicas > 1 and len(set(plan.replica_microbatches)) < 2:
            samples = f"{num_replicas} × {step.num_samples / num_replicas:g}"
        lines.append(
            f"a step takes {samples} samples in {duration_text(step.step_s)}: {step.samples_per_s:.4g} samples/s, "
            f"bubble {100 * step.bubble_fraction:.1f} %"
        )
        lines.extend(_gain(plan, step.step_s, step.plain_step_s))
        lines.extend(_place_of_rank_0(plan, step.rank_0_costs))
    idle = plan.mapping.idle_ranks(len(plan.devices))
    if idle:
        lines.append(f"idle: {', '.join(f'rank {rank} ({plan.devices[rank].model})' for rank in idle)}")
    return tuple(lines)


def _gain(plan: PipelinePlan, step_s: float, plain_step_s: float) -> list[str]:
    spec = plan.schedule
    if spec == ScheduleSpec(name=_PLAIN) or plan.num_stages == 1:
        return []
    price = _price(plan)
    if step_s == plain_step_s and spec.depths:
        return [f"plain 1F1B does not fit the memory: {price}"]
    change = 1 - step_s / plain_step_s
    word = "shorter" if change >= 0 else "longer"
    return [f"{100 * abs(change):.1f} % {word} than plain 1F1B ({duration_text(plain_step_s)}): {price}"]


def _price(plan: PipelinePlan) -> str:
    """What stages keep instead of what plain 1F1B does."""
    if plan.mapping.num_replicas is None:
        return f"stages run up to {_joined(plan.schedule.depths)} micro-batches ahead"
    if not plan.stage_predictions:
        return str(plan.schedule)
    kept = [stage.stash_size for stage in plan.stage_predictions]
    plain = [stage.plain_stash_size for stage in plan.stage_predictions]
    if kept == plain:
        return "stages keep no more micro-batches"
    text = f"stages keep {_joined(kept)} micro-batches, not {_joined(plain)}"
    more_bytes = [stage.more_stash_bytes for stage in plan.stage_predictions]
    if max(more_bytes) >= 1:
        stage_index = more_bytes.index(max(more_bytes))
        text += f" ({memory_text(more_bytes[stage_index])} more on stage {stage_index})"
    return text


def _place_of_rank_0(plan: PipelinePlan, costs: float) -> list[str]:
    if costs >= _NOTICEABLE:
        return [f"rank 0 in the last stage, where the loss is logged, costs {100 * costs:.1f} % of the step"]
    kinds = {(device.server, device.model) for device in plan.devices}
    is_known = plan.mapping.num_replicas is not None
    return ["rank 0 in the last stage, where the loss is logged, costs nothing"] if is_known and len(kinds) > 1 else []


def runners_up_table(plan: PipelinePlan, *, max_rows: int = _MAX_RUNNERS_UP) -> Table:
    """One row for each choice that was looked at and is predicted to be slower, the best one first."""
    table = Table(title=Text("runners-up"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("stages × replicas", "schedule"):
        table.add_column(name, overflow="fold")
    for name in ("micro-batches", "step", "samples/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for runner_up in plan.runners_up[:max_rows]:
        table.add_row(*runner_up_cells(runner_up))
    return table


def runner_up_cells(runner_up: RunnerUp) -> tuple[str, str, str, str, str]:
    """Stages and replicas, schedule, number of micro-batches, step, samples per second."""
    counts = runner_up.replica_counts
    layout = f"{len(counts)} × {counts[0]}" if len(set(counts)) == 1 else f"{len(counts)} of {_joined(counts, ' + ')}"
    return (
        layout,
        str(runner_up.schedule),
        str(runner_up.num_microbatches),
        duration_text(runner_up.step_s),
        f"{runner_up.samples_per_s:.4g}",
    )


def _joined(numbers: Sequence[float], between: str = "-") -> str:
    return between.join(f"{number:g}" for number in numbers)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
