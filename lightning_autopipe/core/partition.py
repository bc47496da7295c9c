"""Which layers each stage owns."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from lightning_autopipe.core._checks import check_index, check_int, check_tuple
from lightning_autopipe.core.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Contiguous layers for each stage: stage s owns layers ``[cut_points[s-1], cut_points[s])``; no stage is empty.

    Raises:
        PlanError: the cut points do not rise strictly, or one lies outside ``1 .. num_layers - 1``.
    """

    cut_points: tuple[int, ...]
    """Layer index at which each stage after the first begins, rising; ``()`` is one stage."""
    num_layers: int

    def __post_init__(self) -> None:
        check_int("Partition", "num_layers", self.num_layers, minimum=1, error=PlanError)
        check_tuple("Partition", "cut_points", self.cut_points, int, error=PlanError)
        previous = 0
        for position, cut in enumerate(self.cut_points):
            if not previous < cut < self.num_layers:
                raise PlanError(
                    f"Partition: cut_points[{position}] is {cut}, allowed are {previous + 1} to {self.num_layers - 1}: "
                    f"cut points rise strictly within the {self.num_layers} layers, so that every stage owns a layer "
                    f"(cut_points={self.cut_points})"
                )
            previous = cut

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.cut_points) + 1

    def stage_layers(self, stage_index: int) -> range:
        """Indices of the layers that a stage owns."""
        check_index("Partition", "stage_index", stage_index, self.num_stages)
        begin = 0 if stage_index == 0 else self.cut_points[stage_index - 1]
        end = self.num_layers if stage_index == self.num_stages - 1 else self.cut_points[stage_index]
        return range(begin, end)

    def layer_stage(self, layer_index: int) -> int:
        """The stage that owns a layer."""
        check_index("Partition", "layer_index", layer_index, self.num_layers)
        return bisect_right(self.cut_points, layer_index)
