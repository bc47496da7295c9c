"""Shows a plan as a table."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.profile import LayerProfile

_MAX_RANKS_SHOWN = 8


def plan_table(plan: PipelinePlan) -> Table:
    """A rich table of a plan, one row a stage: ranks, layers, parameters, share of the work, bytes to the next stage.

    Where layers were measured, also the predicted time of one micro-batch, and memory at its fullest.

    Parameters are numbers of elements (M million, B billion); a tied one counts in the first stage that uses it, and
    the caption names the stages that hold a copy. Bytes are those of the whole traced batch, forward.
    """
    layout = plan.layout
    title = (
        f"{_count(layout.num_stages, 'stage')} × {_count(layout.num_replicas, 'replica')}, {plan.schedule}, "
        f"{_count(plan.num_microbatches, 'micro-batch')}"
    )
    table = Table(title=title, caption=_tie_note(plan), box=box.SIMPLE_HEAD, show_footer=True, padding=(0, 1, 0, 0))
    layers = plan.layers
    table.add_column("stage", footer="all", justify="right", no_wrap=True)
    table.add_column("rank" if layout.num_replicas == 1 else "ranks", no_wrap=True)
    table.add_column("from … to", overflow="fold", min_width=20)
    table.add_column("layers", footer=str(len(layers)), justify="right", no_wrap=True)
    parameters, trainable = _parameter_counts(layers)
    table.add_column("parameters", footer=parameters, justify="right", no_wrap=True)
    table.add_column("trainable", footer=trainable, justify="right", no_wrap=True)
    table.add_column("work", justify="right", no_wrap=True)
    table.add_column("sends on", justify="right", no_wrap=True)
    if plan.stage_predictions:
        table.add_column("µ-batch", justify="right", no_wrap=True)
        table.add_column("memory", justify="right", no_wrap=True)
    for stage_index in range(plan.num_stages):
        owned = plan.stage_layers(stage_index)
        is_last = stage_index == plan.num_stages - 1
        work = f"{100 * plan.stage_work_shares[stage_index]:.1f} %" if plan.stage_work_shares else "?"
        table.add_row(
            str(stage_index),
            _ranks(layout.stage_ranks(stage_index)),
            # Text and not a string: a module path may hold brackets, which rich would take for markup.
            Text(_layer_range(owned)),
            str(len(owned)),
            *_parameter_counts(owned),
            work,
            "" if is_last else _bytes(owned[-1].boundary_bytes),
            *_predicted(plan, stage_index),
        )
    return table


def plan_text(plan: PipelinePlan, *, width: int = 120) -> str:
    """The same table as plain text without colours, at most ``width`` characters wide, for logs and files."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, force_terminal=False, legacy_windows=False).print(
        plan_table(plan)
    )
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines()) + "\n"


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = [str(rank) for rank in ranks]
    if len(shown) > _MAX_RANKS_SHOWN:
        shown = [*shown[: _MAX_RANKS_SHOWN - 2], "…", shown[-1]]
    return ", ".join(shown)


def _layer_range(layers: Sequence[LayerProfile]) -> str:
    return layers[0].name if len(layers) == 1 else f"{layers[0].name}\n… {layers[-1].name}"


def _parameter_counts(layers: Sequence[LayerProfile]) -> tuple[str, str]:
    total = sum(layer.num_parameters for layer in layers)
    trainable = sum(layer.num_trainable_parameters for layer in layers)
    return _number(total), _number(trainable)


def _number(value: int) -> str:
    if value < 100_000:
        return f"{value:,}"
    return f"{value / 1e6:.1f} M" if value < 1e9 else f"{value / 1e9:.2f} B"


def _bytes(number: int) -> str:
    value = float(number)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _predicted(plan: PipelinePlan, stage_index: int) -> tuple[str, ...]:
    if not plan.stage_predictions:
        return ()
    stage = plan.stage_predictions[stage_index]
    return _seconds(stage.microbatch_s), _bytes(stage.peak_bytes)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _tie_note(plan: PipelinePlan) -> Text | None:
    first_stage: dict[str, int] = {}
    notes: list[str] = []
    for stage_index in range(plan.num_stages):
        names = dict.fromkeys(name for layer in plan.stage_layers(stage_index) for name in layer.parameters)
        copies = [name for name in names if first_stage.setdefault(name, stage_index) != stage_index]
        notes.extend(
            f"stage {stage_index} holds a copy of {name} (tied; counted in stage {first_stage[name]})"
            for name in copies
        )
    return Text("\n".join(notes)) if notes else None
