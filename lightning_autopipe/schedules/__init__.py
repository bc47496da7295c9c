"""Pure functions that give schedules, lower them to sends and receives, and check them."""

from __future__ import annotations

from lightning_autopipe.schedules.catalog import SCHEDULES, TRAINING_SCHEDULES, get_schedule
from lightning_autopipe.schedules.forward_only import forward_only
from lightning_autopipe.schedules.gpipe import gpipe
from lightning_autopipe.schedules.grid import draw_grid
from lightning_autopipe.schedules.interleaved import interleaved_1f1b
from lightning_autopipe.schedules.lowering import lower
from lightning_autopipe.schedules.merging import merged_microbatches
from lightning_autopipe.schedules.one_f_one_b import default_depths, one_f_one_b
from lightning_autopipe.schedules.sliced import sliced_one_f_one_b
from lightning_autopipe.schedules.stash import peak_stash, peak_stash_size, slice_counts
from lightning_autopipe.schedules.torch_csv import from_torch_csv, to_torch_csv
from lightning_autopipe.schedules.validation import validate
from lightning_autopipe.schedules.zero_bubble import zero_bubble

__all__ = [
    "SCHEDULES",
    "TRAINING_SCHEDULES",
    "default_depths",
    "draw_grid",
    "forward_only",
    "from_torch_csv",
    "get_schedule",
    "gpipe",
    "interleaved_1f1b",
    "lower",
    "merged_microbatches",
    "one_f_one_b",
    "peak_stash",
    "peak_stash_size",
    "slice_counts",
    "sliced_one_f_one_b",
    "to_torch_csv",
    "validate",
    "zero_bubble",
]
