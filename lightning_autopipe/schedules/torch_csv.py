"""Schedules as the CSV that torch.distributed.pipelining reads and writes, in its form of computations alone."""

from __future__ import annotations

import csv
import io

from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.schedule import Action, Schedule
from lightning_autopipe.schedules.stash import slice_counts
from lightning_autopipe.schedules.validation import validate


def to_torch_csv(schedule: Schedule) -> str:
    """The CSV text of a schedule: a row for each rank, a cell for each of its computations (``2F0``, ``2I0``, ``2W0``).

    Where all micro-batches run in equally many slices, each slice is a micro-batch of its own there.

    Raises:
        PlanError: only some micro-batches are sliced, which the form has no way to say.
    """
    counts = slice_counts(schedule)
    if len(set(counts)) > 1:
        sliced = [index for index, count in enumerate(counts) if count > 1]
        raise PlanError(
            f"schedule {schedule.name!r} slices micro-batches {sliced} of {schedule.num_microbatches}; torch's CSV "
            "knows equal micro-batches alone: slice all of them, or none"
        )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for actions in schedule.actions_by_rank:
        writer.writerow([_cell(action, counts[0]) for action in actions if action.type.is_compute])
    return text.getvalue()


def _cell(action: Action, num_slices: int) -> str:
    microbatch_index = num_slices * action.microbatch_index + (action.slice_index or 0)
    return f"{action.stage_index}{action.type.value}{microbatch_index}"


def from_torch_csv(text: str, name: str = "csv") -> Schedule:
    """The schedule that a CSV text of computations says; empty cells are left out.

    Args:
        text: as `to_torch_csv` gives it, or torch's ``_dump_csv(…, format="compute_only")``.
        name: of the schedule.

    Raises:
        PlanError: a cell is no computation, stages do not go round the ranks, or the schedule is invalid (see
            `validate`).
    """
    try:
        rows = _parsed(text)
    except (csv.Error, TypeError, ValueError) as error:
        raise PlanError(f"this is no CSV text of computations: {error}") from error
    actions = [action for row in rows for action in row]
    if not actions:
        raise PlanError("the CSV text has no computations; expected a row for each rank, as in '0F0,0F1,0B0,0B1'")
    num_stages, num_microbatches = (
        1 + max(getattr(action, name) for action in actions) for name in ("stage_index", "microbatch_index")
    )
    if num_stages * num_microbatches > len(actions):
        raise PlanError(
            f"the CSV text names stage {num_stages - 1} and micro-batch {num_microbatches - 1}, but has only "
            f"{len(actions)} computations; each stage runs each micro-batch"
        )
    stages_per_rank, left = divmod(num_stages, len(rows))
    if left:
        raise PlanError(f"the CSV text has {num_stages} stages on {len(rows)} ranks; each rank has to run equally many")
    schedule = Schedule(
        name=name,
        actions_by_rank=tuple(map(tuple, rows)),
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
    )
    validate(schedule)
    return schedule


def _parsed(text: str) -> list[list[Action]]:
    """The computations of each rank; rows at the end that hold none are left out."""
    rows = [
        [_computation(cell, row) for cell in cells if cell.strip()]
        for row, cells in enumerate(csv.reader(io.StringIO(text)))
    ]
    while rows and not rows[-1]:
        rows.pop()
    return rows


def _computation(cell: str, row: int) -> Action:
    action = Action.parse(cell)
    if not action.type.is_compute or action.slice_index is not None:
        raise PlanError(f"row {row} of the CSV text has {cell.strip()!r}; expected F, B, I or W of a whole micro-batch")
    return action
