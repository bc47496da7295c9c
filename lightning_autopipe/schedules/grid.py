"""Draws a schedule: ranks down, time to the right."""

from __future__ import annotations

from lightning_autopipe.core.schedule import Action, Schedule
from lightning_autopipe.schedules.dependencies import run_by_dependencies

_IDLE = "."
_MAX_COLUMNS = 32


def draw_grid(schedule: Schedule, *, error_at: tuple[int, int] | None = None, max_columns: int = _MAX_COLUMNS) -> str:
    """A text grid with one row a rank and one column a time slot, every action one slot long.

    An action stands in the first slot in which what it needs is there; actions that can never start follow the last one
    that did. ``error_at`` is a rank and a position in its list (its length: after the end) to mark. Grids wider than
    ``max_columns`` slots show those around the mark, or the first ones.
    """
    progress = run_by_dependencies(schedule)
    cells: list[dict[int, str]] = []
    slots_by_row: list[list[int]] = []
    for rank, actions in enumerate(schedule.actions_by_rank):
        slots = list(progress.slots_by_rank[rank])
        while len(slots) <= len(actions):  # one more than actions: where a mark after the end would stand
            slots.append(slots[-1] + 1 if slots else 0)
        slots_by_row.append(slots)
        cells.append({slot: _cell(action, rank, schedule) for slot, action in zip(slots, actions, strict=False)})
    num_slots = max((slot + 1 for row in cells for slot in row), default=0)
    mark_slot = None if error_at is None else slots_by_row[error_at[0]][error_at[1]]
    if mark_slot is not None:
        num_slots = max(num_slots, mark_slot + 1)
    begin, end = _window(num_slots, mark_slot, max_columns)
    width = max((len(text) for row in cells for text in row.values()), default=1)
    names = [rank_name(schedule, rank) for rank in range(schedule.num_ranks)]
    label_width = max(map(len, names))
    lines = []
    for rank, row in enumerate(cells):
        body = " ".join(row.get(slot, _IDLE).ljust(width) for slot in range(begin, end)).rstrip()
        before, after = "… " if begin > 0 else "", " …" if end < num_slots else ""
        lines.append(f"{names[rank].ljust(label_width)} | {before}{body}{after}")
        if error_at is not None and mark_slot is not None and error_at[0] == rank:
            indent = " " * (len(before) + (width + 1) * (mark_slot - begin))
            lines.append(f"{' ' * label_width} | {indent}{'^' * width} ERROR HERE")
    return "\n".join(lines)


def rank_name(schedule: Schedule, pipeline_rank: int) -> str:
    """How a rank of a pipeline is called: by its stage where it has one."""
    if schedule.stages_per_rank == 1:
        return f"stage {pipeline_rank}"
    stages = schedule.stages_of(pipeline_rank)
    return f"rank {pipeline_rank} (stages {', '.join(map(str, stages))})"


def _cell(action: Action, rank: int, schedule: Schedule) -> str:
    # Where the row says the stage, an action of another one is wrong and shown with its own number.
    text = str(action)
    is_told = schedule.stages_per_rank == 1 and action.stage_index == rank
    return text.removeprefix(str(rank)) if is_told else text


def _window(num_slots: int, mark_slot: int | None, max_columns: int) -> tuple[int, int]:
    begin = 0 if mark_slot is None else max(0, min(mark_slot - max_columns // 2, num_slots - max_columns))
    return begin, min(num_slots, begin + max_columns)
