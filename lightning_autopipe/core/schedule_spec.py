"""Which schedule a plan runs, before it is written out as lists of actions."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_autopipe.core._checks import check_int, check_text, check_tuple
from lightning_autopipe.core.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """A schedule by name, with what was chosen for it; `lightning_autopipe.schedules.get_schedule` writes it out.

    Raises:
        PlanError: a number is negative, or a stage's warm-up is deeper than that of the stage before.
    """

    name: str
    depths: tuple[int, ...] = ()
    """Warm-up of each stage in micro-batches, of all its ranks together where stages have unlike numbers of them;
    empty: the schedule's own."""
    num_sliced_first: int = 0
    """Micro-batches at the begin that go through as two halves."""
    num_sliced_last: int = 0
    """Micro-batches at the end that do."""
    merges_slices: bool = True
    """Whether both halves may go as one message, where the receiver is past its warm-up."""
    stages_per_rank: int = 1
    """Stages that each rank runs, going round the ranks."""

    def __post_init__(self) -> None:
        owner = "ScheduleSpec"
        check_text(owner, "name", self.name, error=PlanError)
        check_tuple(owner, "depths", self.depths, int, error=PlanError)
        for stage_index, depth in enumerate(self.depths):
            check_int(owner, f"depths[{stage_index}]", depth, minimum=0, error=PlanError)
            if stage_index and depth > self.depths[stage_index - 1]:
                raise PlanError(
                    f"{owner}: depths[{stage_index}]={depth} is more than the {self.depths[stage_index - 1]} of the "
                    "stage before, from which it gets its micro-batches"
                )
        for name in ("num_sliced_first", "num_sliced_last"):
            check_int(owner, name, getattr(self, name), minimum=0, error=PlanError)
        if not isinstance(self.merges_slices, bool):
            raise PlanError(f"{owner}: merges_slices must be true or false, got {self.merges_slices!r}")
        check_int(owner, "stages_per_rank", self.stages_per_rank, minimum=1, error=PlanError)

    @property
    def is_sliced(self) -> bool:
        """Whether some micro-batches go through in halves."""
        return bool(self.num_sliced_first or self.num_sliced_last)

    def __str__(self) -> str:
        parts = [self.name]
        if self.depths:
            parts.append(f"warm-up {'-'.join(map(str, self.depths))}")
        if self.is_sliced:
            parts.append(f"{self.num_sliced_first} + {self.num_sliced_last} sliced")
        if self.stages_per_rank > 1:
            parts.append(f"{self.stages_per_rank} stages a rank")
        return ", ".join(parts)
