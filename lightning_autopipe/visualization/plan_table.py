"""Shows a plan as a table."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.profile import LayerProfile
from lightning_autopipe.core.quantities import duration_text, memory_text
from lightning_autopipe.visualization.plan_summary import plan_summary, plan_title

_MAX_RANKS_SHOWN = 8


def plan_table(plan: PipelinePlan) -> Table:
    """A rich table of a plan, one row a stage: ranks, layers, parameters, share of the work, bytes to the next stage.

    Where layers were measured, the predicted time of one micro-batch, and memory at its fullest, in place of shares.
    Under the table: `plan_summary`, and the stages that hold a copy of a tied parameter. It fits 80 columns: the module
    that all layers are in is named once.

    Parameters are numbers of elements (M million, B billion), or bytes where those were not counted; a tied one counts
    in the first stage that uses it. Where some are frozen, those that are trained stand below. What a stage sends on,
    forward, is that of a micro-batch where layers were measured, else that of the whole traced batch.
    """
    layers = plan.layers
    has_frozen = any(layer.num_trainable_parameters < layer.num_parameters for layer in layers)
    notes = "\n".join([*plan_summary(plan), *_tie_notes(plan)])
    table = Table(
        title=Text(plan_title(plan)),
        title_justify="left",
        caption=Text(notes) if notes else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_footer=True,
        padding=(0, 1, 0, 0),
    )
    table.add_column("stage", footer="all", justify="right", no_wrap=True)
    table.add_column("ranks", overflow="fold", min_width=5)
    module_path = _common_path([layer.name for layer in layers])
    footer = f"in {module_path.removesuffix('.')}" if module_path else ""
    # Text and not a string: a module path may hold brackets, which rich would take for markup.
    table.add_column("from … to", footer=Text(footer), overflow="fold", min_width=9)
    table.add_column("layers", footer=str(len(layers)), justify="right", no_wrap=True)
    # A header of two words takes two lines where it is narrow.
    name = "param. trained" if has_frozen else "param."
    table.add_column(name, footer=_parameters(layers, has_frozen), justify="right", min_width=7)
    if not plan.stage_predictions:
        table.add_column("work", justify="right", no_wrap=True)
    table.add_column("sends on", justify="right", min_width=8)
    if plan.stage_predictions:
        table.add_column("µ-batch", justify="right", no_wrap=True)
        table.add_column("memory", justify="right", no_wrap=True)
    for stage_index in range(plan.num_stages):
        owned = plan.stage_layers(stage_index)
        is_last = stage_index == plan.num_stages - 1
        table.add_row(
            str(stage_index),
            _ranks(plan.stage_ranks(stage_index)),
            Text(_layer_range([layer.name.removeprefix(module_path) for layer in owned])),
            str(len(owned)),
            _parameters(owned, has_frozen),
            *([] if plan.stage_predictions else [_work_share(plan, stage_index)]),
            "" if is_last else memory_text(_sent_bytes(owned[-1])),
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


def _ranks(ranks: Sequence[int]) -> str:
    shown = [str(rank) for rank in ranks]
    if len(shown) > _MAX_RANKS_SHOWN:
        shown = [*shown[: _MAX_RANKS_SHOWN - 2], "…", shown[-1]]
    return ", ".join(shown)


def _sent_bytes(layer: LayerProfile) -> int:
    return layer.boundary_bytes if layer.measured is None else layer.measured.sent_bytes


def _common_path(names: Sequence[str]) -> str:
    """The module that all layers are in, with a dot at its end; empty where there is none."""
    paths = [name.split(".")[:-1] for name in names]
    common = list(itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))
    return "".join(f"{parts[0]}." for parts in common)


def _layer_range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}\n… {names[-1]}"


def _parameters(layers: Sequence[LayerProfile], has_frozen: bool) -> str:
    num_bytes = sum(layer.param_bytes for layer in layers)
    if num_bytes and not any(layer.num_parameters for layer in layers):  # all that profiles from elsewhere tell
        return memory_text(num_bytes)
    total = _number(sum(layer.num_parameters for layer in layers))
    trained = _number(sum(layer.num_trainable_parameters for layer in layers))
    return f"{total}\n{trained}" if has_frozen else total


def _number(value: int) -> str:
    if value < 100_000:
        return f"{value:,}"
    return f"{value / 1e6:.1f} M" if value < 1e9 else f"{value / 1e9:.2f} B"


def _work_share(plan: PipelinePlan, stage_index: int) -> str:
    return f"{100 * plan.stage_work_shares[stage_index]:.1f} %" if plan.stage_work_shares else "?"


def _predicted(plan: PipelinePlan, stage_index: int) -> tuple[str, ...]:
    if not plan.stage_predictions:
        return ()
    stage = plan.stage_predictions[stage_index]
    return duration_text(stage.microbatch_s), memory_text(stage.peak_bytes)


def _tie_notes(plan: PipelinePlan) -> list[str]:
    first_stage: dict[str, int] = {}
    notes: list[str] = []
    for stage_index in range(plan.num_stages):
        names = dict.fromkeys(name for layer in plan.stage_layers(stage_index) for name in layer.parameters)
        copies = [name for name in names if first_stage.setdefault(name, stage_index) != stage_index]
        notes.extend(
            f"stage {stage_index} holds a copy of {name} (tied; counted in stage {first_stage[name]})"
            for name in copies
        )
    return notes
