"""Ways to lay devices out, and shares of micro-batches."""

from __future__ import annotations

from lightning_autopipe.planner.placements import placements, with_rank_0_last
from tests.planner.mappings import a_cluster


def test_placements() -> None:
    found = placements(a_cluster("AABB"), 2, 2)
    assert found["launcher"] == ((1, 0), (3, 2))
    # Both replicas of a stage in one server.
    assert ((2, 0), (3, 1)) in found.values()
    assert len(set(found.values())) == len(found)
    for grid in found.values():
        assert sorted(rank for ranks in grid for rank in ranks) == [0, 1, 2, 3]


def test_policies_of_placement_differ_where_servers_do_not_divide() -> None:
    """Stages of two replicas on servers of 3 and 3, from the last: append fills A up, fresh begins B."""
    found = placements(a_cluster("AAABBB"), 3, 2).values()
    stages = [[sorted(stage) for stage in zip(*grid, strict=True)] for grid in found]
    assert [[4, 5], [2, 3], [0, 1]] in stages  # append
    assert [[2, 5], [3, 4], [0, 1]] in stages  # fresh
    assert [[2, 5], [1, 4], [0, 3]] in stages  # scatter


def test_rank_0_is_brought_to_its_place() -> None:
    assert with_rank_0_last(((1, 2), (0, 3))) == ((3, 0), (1, 2))
    assert with_rank_0_last(((1, 2), (4, 3))) == ((1, 0), (4, 3))
