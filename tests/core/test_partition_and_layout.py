from __future__ import annotations

import pytest

from lightning_autopipe.core import ConfigurationError, ParallelLayout, Partition, PlanError
from lightning_autopipe.core.layout import StageRanks


def test_stages_own_the_layers_between_their_cut_points() -> None:
    partition = Partition(cut_points=(2, 3), num_layers=6)
    assert partition.num_stages == 3
    assert [list(partition.stage_layers(stage)) for stage in range(3)] == [[0, 1], [2], [3, 4, 5]]
    assert [partition.layer_stage(layer) for layer in range(6)] == [0, 0, 1, 2, 2, 2]
    assert list(Partition(cut_points=(), num_layers=4).stage_layers(0)) == [0, 1, 2, 3]


@pytest.mark.parametrize("cut_points", [(0,), (6,), (3, 3), (4, 2), (-1,)])
def test_empty_stages_cannot_be_said(cut_points: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="every stage owns a layer"):
        Partition(cut_points=cut_points, num_layers=6)


def test_positions_out_of_range_are_refused() -> None:
    partition = Partition(cut_points=(2,), num_layers=4)
    for stage_index in (-1, 2):
        with pytest.raises(IndexError, match="stage_index"):
            partition.stage_layers(stage_index)
    with pytest.raises(IndexError, match="layer_index 4"):
        partition.layer_stage(4)


def test_stages_run_backwards_over_ranks() -> None:
    layout = ParallelLayout(num_stages=4, num_replicas=2)
    assert layout.world_size == 8
    assert layout.pipeline_ranks(0) == (3, 2, 1, 0)
    assert layout.pipeline_ranks(1) == (7, 6, 5, 4)
    assert layout.stage_ranks(3) == (0, 4)
    assert (layout.stage_index(0), layout.replica_index(0)) == (3, 0)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_every_rank_runs_exactly_one_stage_of_one_replica(num_stages: int, num_replicas: int) -> None:
    layout = ParallelLayout(num_stages=num_stages, num_replicas=num_replicas)
    ranks = range(layout.world_size)
    assert [layout.global_rank(layout.stage_index(rank), layout.replica_index(rank)) for rank in ranks] == list(ranks)
    assert layout.global_rank(num_stages - 1, 0) == 0


def test_a_layout_refuses_counts_below_one_and_ranks_outside() -> None:
    with pytest.raises(ConfigurationError, match="num_replicas must be an integer >= 1, got 0"):
        ParallelLayout(num_stages=2, num_replicas=0)
    with pytest.raises(IndexError, match="global_rank 2"):
        ParallelLayout(num_stages=2).stage_index(2)


def test_a_layout_that_a_mapping_chose() -> None:
    layout = ParallelLayout(num_stages=2, num_replicas=2, ranks=((3, 1), (0, 2)))
    assert [(layout.stage_index(rank), layout.replica_index(rank)) for rank in range(4)] == [
        (1, 0),
        (0, 1),
        (1, 1),
        (0, 0),
    ]
    assert (layout.pipeline_ranks(0), layout.pipeline_ranks(1)) == ((3, 0), (1, 2))
    assert (layout.stage_ranks(0), layout.stage_ranks(1)) == ((3, 1), (0, 2))
    # The launcher's order, spelled out.
    assert ParallelLayout(num_stages=2, num_replicas=2, ranks=((1, 3), (0, 2))) == ParallelLayout(
        num_stages=2, num_replicas=2
    )


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (((1,), (0,), (2,)), r"2 stages x 1 replicas need 1 ranks for each stage, got \[1, 1, 1\]"),
        (((2,), (0,)), r"every rank from 0 to 1 .* got \[0, 2\]"),
        (((0,), (1,)), "rank 0 must run the last stage of replica 0.* there is rank 1"),
    ],
)
def test_a_layout_that_does_not_place_each_rank_once_is_refused(ranks: StageRanks, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ParallelLayout(num_stages=2, ranks=ranks)
