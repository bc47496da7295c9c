"""A process that is killed takes the others along, and leaves sound checkpoints; benchmarks/kills.py kills all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.strategy.kills import Kill, kill_one, resume_all

pytestmark = pytest.mark.filterwarnings("ignore")

KILLS = [
    Kill(num_stages=2, num_replicas=2, place=place, global_rank=global_rank)
    for place, global_rank in (("all-reduce", 3), ("write", 0))
]


def test_killed_processes(tmp_path: Path) -> None:
    folders = [tmp_path / kill.place for kill in KILLS]
    wrong = [problem for kill, folder in zip(KILLS, folders, strict=True) for problem in kill_one(kill, folder)[1]]
    assert not wrong, "\n".join(wrong)
    assert not resume_all(KILLS, folders, tmp_path / "uninterrupted")
