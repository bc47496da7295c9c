"""Torch itself reads, checks and dry-runs what is written; what it writes is read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from lightning_autopipe.core import PlanError, Schedule
from lightning_autopipe.schedules import (
    from_torch_csv,
    get_schedule,
    gpipe,
    interleaved_1f1b,
    lower,
    one_f_one_b,
    sliced_one_f_one_b,
    to_torch_csv,
    zero_bubble,
)

SCHEDULES = [
    one_f_one_b(4, 6),
    one_f_one_b(3, 5, [4, 2, 0]),
    gpipe(3, 4),
    zero_bubble(4, 7),
    zero_bubble(1, 2),
    interleaved_1f1b(3, 7, 2),
    interleaved_1f1b(2, 4, 3),
]


def loaded_by_torch(text: str, schedule: Schedule, folder: Path) -> dict[int, list[torch_schedules._Action | None]]:
    """The lists that torch's runtime makes of a file, with sends and receives, once it has dry-run them."""
    path = folder / "schedule.csv"
    path.write_text(text)
    num_stages = schedule.num_stages
    runtime = object.__new__(torch_schedules._PipelineScheduleRuntime)
    runtime.__dict__.update(
        pipeline_order={},
        _defer_pp_recv=False,
        _num_stages=num_stages,
        _n_microbatches=schedule.num_microbatches,
        pp_group_size=schedule.num_ranks,
        stage_index_to_group_rank={index: schedule.pipeline_rank(index) for index in range(num_stages)},
        _stages=[SimpleNamespace(stage_index_to_group_rank={}, is_first=False)],
    )
    runtime._load_csv(str(path))
    torch_schedules._validate_schedule(
        runtime.pipeline_order, schedule.num_ranks, num_stages, schedule.num_microbatches
    )
    with_sends = {
        rank: [action for action in actions if "SHARD" not in str(action) and "REDUCE" not in str(action)]
        for rank, actions in runtime.pipeline_order_with_comms.items()
    }
    torch_schedules._simulate_comms_compute(with_sends, schedule.pipeline_rank, num_stages)
    return runtime.pipeline_order


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_torch_loads_and_checks_what_is_written(schedule: Schedule, tmp_path: Path) -> None:
    text = to_torch_csv(schedule)
    order = loaded_by_torch(text, schedule, tmp_path)
    for rank, actions in enumerate(schedule.actions_by_rank):
        assert [str(action) for action in order[rank]] == [str(action) for action in actions]
    assert from_torch_csv(text, name=schedule.name) == schedule
    assert to_torch_csv(lower(schedule)) == text


def test_slices_of_all_micro_batches_are_micro_batches_of_their_own() -> None:
    halves = sliced_one_f_one_b(3, 4, num_sliced_first=2, num_sliced_last=2, max_stash=[2, 1.5, 1])
    assert from_torch_csv(to_torch_csv(halves)).num_microbatches == 8
    assert to_torch_csv(halves).splitlines()[2].startswith("2F0,2F1,2B0,2F2,2B1,2F3")
    with pytest.raises(PlanError, match=r"slices micro-batches \[0\] of 4; torch's CSV knows equal"):
        to_torch_csv(sliced_one_f_one_b(3, 4, num_sliced_first=1))


def test_what_torch_writes_is_read() -> None:
    text = "0F0,0F1,0F2,,,0B0,0B1,0B2\n,1F0,1B0,1F1,1B1,1F2,1B2\n"
    schedule = from_torch_csv(text)
    assert schedule.name == "csv"
    assert [str(action) for action in schedule.actions_by_rank[1]] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]
    assert from_torch_csv(to_torch_csv(get_schedule("forward_only", 2, 3))).num_microbatches == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no computations"),
        ("0F0,0SEND_F0\n", "no action: '0SEND_F0'"),
        ("0F0,0SA0\n1F0\n", "row 0 of the CSV text has '0SA0'"),
        ("0F0.0,0F0.1\n", "row 0 of the CSV text has '0F0.0'"),
        ("0F0\n1F0,2F0\n", "3 stages on 2 ranks"),
        ("0F0,3F0\n1F0,2F0\n", r"the action belongs to stage 3, but is in the list of rank 0 \(stages 0, 2\)"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "deadlock"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        from_torch_csv(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F30000000\n", "names stage 0 and micro-batch 30000000, but has only 1 computations"),
        ("0F" + "1" * 10_000 + "\n", "no CSV text of computations"),
        ("0F" + "1" * 200_000 + "\n", "no CSV text of computations"),
    ],
)
def test_numbers_without_end_are_refused_at_once(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        from_torch_csv(text)


def test_empty_rows_at_the_end_are_no_ranks() -> None:
    text = to_torch_csv(one_f_one_b(2, 3))
    assert from_torch_csv(text + "\n\n", "1f1b") == one_f_one_b(2, 3)
