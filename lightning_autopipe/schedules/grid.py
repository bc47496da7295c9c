"""Draws a schedule: stages down, time to the right."""

from __future__ import annotations

from lightning_autopipe.core.schedule import Action, Schedule
from lightning_autopipe.schedules.dependencies import run_by_dependencies

_IDLE = "."
_MAX_COLUMNS = 32


def draw_grid(schedule: Schedule, *, error_at: tuple[int, int] | None = None, max_columns: int = _MAX_COLUMNS) -> str:
    """A text grid with one row a stage and one column a time slot, every action one slot long.

    An action stands in the first slot in which what it needs is there; actions that can never start follow the last one
    that did. ``error_at`` is a stage and a position in its list (its length: after the end) to mark. Grids wider than
    ``max_columns`` slots show those around the mark, or the first ones.
    """
    progress = run_by_dependencies(schedule)
    cells: list[dict[int, str]] = []
    slots_by_stage: list[list[int]] = []
    for stage_index, actions in enumerate(schedule.actions_by_rank):
        slots = list(progress.slots_by_stage[stage_index])
        while len(slots) <= len(actions):  # one more than actions: where a mark after the end would stand
            slots.append(slots[-1] + 1 if slots else 0)
        slots_by_stage.append(slots)
        cells.append({slot: _cell(action, stage_index) for slot, action in zip(slots, actions, strict=False)})
    num_slots = max((slot + 1 for row in cells for slot in row), default=0)
    mark_slot = None if error_at is None else slots_by_stage[error_at[0]][error_at[1]]
    if mark_slot is not None:
        num_slots = max(num_slots, mark_slot + 1)
    begin, end = _window(num_slots, mark_slot, max_columns)
    width = max((len(text) for row in cells for text in row.values()), default=1)
    label_width = len(f"stage {schedule.num_stages - 1}")
    lines = []
    for stage_index, row in enumerate(cells):
        body = " ".join(row.get(slot, _IDLE).ljust(width) for slot in range(begin, end)).rstrip()
        before, after = "… " if begin > 0 else "", " …" if end < num_slots else ""
        lines.append(f"{f'stage {stage_index}'.ljust(label_width)} | {before}{body}{after}")
        if error_at is not None and mark_slot is not None and error_at[0] == stage_index:
            indent = " " * (len(before) + (width + 1) * (mark_slot - begin))
            lines.append(f"{' ' * label_width} | {indent}{'^' * width} ERROR HERE")
    return "\n".join(lines)


def _cell(action: Action, stage_index: int) -> str:
    # The row says the stage; an action of another one is wrong and shown with its own number.
    text = str(action)
    return text.removeprefix(str(stage_index)) if action.stage_index == stage_index else text


def _window(num_slots: int, mark_slot: int | None, max_columns: int) -> tuple[int, int]:
    begin = 0 if mark_slot is None else max(0, min(mark_slot - max_columns // 2, num_slots - max_columns))
    return begin, min(num_slots, begin + max_columns)
