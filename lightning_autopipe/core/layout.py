"""Which global rank runs which stage of which replica."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_autopipe.core._checks import check_index, check_int
from lightning_autopipe.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """``num_replicas`` pipelines of ``num_stages`` stages, each stage on a rank of its own.

    Stages run backwards over the ranks of a pipeline: ``global_rank = replica_index * num_stages + (num_stages - 1 -
    stage_index)``. Global rank 0 is so the last stage of replica 0, where the loss is::

        4 stages, 2 replicas      stage   0  1  2  3
                      replica 0   rank    3  2  1  0
                      replica 1   rank    7  6  5  4

    Raises:
        ConfigurationError: a count is below 1.
    """

    num_stages: int
    num_replicas: int = 1

    def __post_init__(self) -> None:
        check_int("ParallelLayout", "num_stages", self.num_stages, minimum=1, error=ConfigurationError)
        check_int("ParallelLayout", "num_replicas", self.num_replicas, minimum=1, error=ConfigurationError)

    @property
    def world_size(self) -> int:
        """Number of ranks: stages times replicas."""
        return self.num_stages * self.num_replicas

    def stage_index(self, global_rank: int) -> int:
        """The stage that a rank runs."""
        check_index("ParallelLayout", "global_rank", global_rank, self.world_size)
        return self.num_stages - 1 - global_rank % self.num_stages

    def replica_index(self, global_rank: int) -> int:
        """The replica that a rank belongs to."""
        check_index("ParallelLayout", "global_rank", global_rank, self.world_size)
        return global_rank // self.num_stages

    def global_rank(self, stage_index: int, replica_index: int) -> int:
        """The rank that runs a stage of a replica."""
        check_index("ParallelLayout", "stage_index", stage_index, self.num_stages)
        check_index("ParallelLayout", "replica_index", replica_index, self.num_replicas)
        return replica_index * self.num_stages + (self.num_stages - 1 - stage_index)

    def pipeline_ranks(self, replica_index: int) -> tuple[int, ...]:
        """The ranks of one replica's pipeline, in the order of its stages 0 .. num_stages - 1."""
        return tuple(self.global_rank(stage_index, replica_index) for stage_index in range(self.num_stages))

    def stage_ranks(self, stage_index: int) -> tuple[int, ...]:
        """The ranks that run one stage, in the order of the replicas: the stage's data-parallel group."""
        return tuple(self.global_rank(stage_index, replica_index) for replica_index in range(self.num_replicas))
