"""Which global rank runs which stage of which replica."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_autopipe.core._checks import check_index, check_int
from lightning_autopipe.core.errors import ConfigurationError

StageRanks = tuple[tuple[int, ...], ...]
"""``stage_ranks[s]``: the ranks of stage s, in the order of the replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """``num_replicas`` pipelines of ``num_stages`` stages, each stage on a rank of its own.

    Unless it is told otherwise, stages run backwards over the ranks of a pipeline: ``global_rank = replica_index *
    num_stages + (num_stages - 1 - stage_index)``. Global rank 0 is so the last stage of replica 0, where the loss is::

        4 stages, 2 replicas      stage   0  1  2  3
                      replica 0   rank    3  2  1  0
                      replica 1   rank    7  6  5  4

    Layouts that put every rank in the same place are equal.

    Raises:
        ConfigurationError: a count is below 1, or the given ranks are not all ranks, each once, with rank 0 as the last
            stage of replica 0.
    """

    num_stages: int
    num_replicas: int = 1
    ranks: StageRanks = ()
    """``ranks[s][r]`` runs stage s of replica r, as a device mapping chose; empty: the launcher's order."""

    def __post_init__(self) -> None:
        check_int("ParallelLayout", "num_stages", self.num_stages, minimum=1, error=ConfigurationError)
        check_int("ParallelLayout", "num_replicas", self.num_replicas, minimum=1, error=ConfigurationError)
        if self.ranks:
            self._check_ranks()
            if self.ranks == self._launcher_ranks():
                object.__setattr__(self, "ranks", ())

    def _launcher_ranks(self) -> StageRanks:
        return tuple(
            tuple(replica * self.num_stages + self.num_stages - 1 - stage for replica in range(self.num_replicas))
            for stage in range(self.num_stages)
        )

    def _check_ranks(self) -> None:
        counts = [len(ranks) for ranks in self.ranks]
        if counts != [self.num_replicas] * self.num_stages:
            raise ConfigurationError(
                f"ParallelLayout: {self.num_stages} stages x {self.num_replicas} replicas need {self.num_replicas} "
                f"ranks for each stage, got {counts}"
            )
        used = sorted(rank for ranks in self.ranks for rank in ranks)
        if used != list(range(self.world_size)):
            raise ConfigurationError(
                f"ParallelLayout: every rank from 0 to {self.world_size - 1} runs one stage of one replica, got {used}"
            )
        if self.ranks[-1][0] != 0:
            raise ConfigurationError(
                "ParallelLayout: global rank 0 must run the last stage of replica 0, where the loss is logged; there "
                f"is rank {self.ranks[-1][0]}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks: stages times replicas."""
        return self.num_stages * self.num_replicas

    def stage_index(self, global_rank: int) -> int:
        """The stage that a rank runs."""
        return self._place(global_rank)[0]

    def replica_index(self, global_rank: int) -> int:
        """The replica that a rank belongs to."""
        return self._place(global_rank)[1]

    def _place(self, global_rank: int) -> tuple[int, int]:
        check_index("ParallelLayout", "global_rank", global_rank, self.world_size)
        if not self.ranks:
            return self.num_stages - 1 - global_rank % self.num_stages, global_rank // self.num_stages
        stage_index = next(stage for stage, ranks in enumerate(self.ranks) if global_rank in ranks)
        return stage_index, self.ranks[stage_index].index(global_rank)

    def global_rank(self, stage_index: int, replica_index: int) -> int:
        """The rank that runs a stage of a replica."""
        check_index("ParallelLayout", "stage_index", stage_index, self.num_stages)
        check_index("ParallelLayout", "replica_index", replica_index, self.num_replicas)
        if self.ranks:
            return self.ranks[stage_index][replica_index]
        return replica_index * self.num_stages + (self.num_stages - 1 - stage_index)

    def pipeline_ranks(self, replica_index: int) -> tuple[int, ...]:
        """The ranks of one replica's pipeline, in the order of its stages 0 .. num_stages - 1."""
        return tuple(self.global_rank(stage_index, replica_index) for stage_index in range(self.num_stages))

    def stage_ranks(self, stage_index: int) -> tuple[int, ...]:
        """The ranks that run one stage, in the order of the replicas: the stage's data-parallel group."""
        return tuple(self.global_rank(stage_index, replica_index) for replica_index in range(self.num_replicas))
