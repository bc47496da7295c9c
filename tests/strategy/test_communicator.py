from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.runtime.process_groups import create_process_groups
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.environment import make_communicator, with_ties
from tests.harness import run_processes

LAYOUT = ParallelLayout(num_stages=2, num_replicas=2)


def talk() -> dict[str, Any]:
    groups = create_process_groups(LAYOUT, timeout_s=20)
    communicator = make_communicator(groups, LAYOUT, torch.device("cpu"))
    again = make_communicator(groups, LAYOUT, torch.device("cpu"))
    assert again.pipeline_group is communicator.pipeline_group
    me = communicator.global_rank
    long = f"{me}" * 30_000
    answers = {
        "pipeline": communicator.gather_in_pipeline(me),
        "replicas": communicator.gather_over_replicas({"rank": torch.tensor(me)}),
        "long": [len(text) for text in communicator.gather_in_pipeline(long if me % 2 else "short")],
        "from first": communicator.broadcast_in_pipeline(f"from {me}", stage_index=0),
        "from world": communicator.broadcast_in_world(torch.full((3,), me), source=2),
        "numbers": communicator.broadcast_numbers([me, -me], stage_index=1),
        "agree": communicator.all_replicas_agree(me != 3),
        "sum": communicator.sum_in_pipeline(float(me)),
    }
    if communicator.is_first_stage:
        communicator.send(torch.full((2, 2), me, dtype=torch.bfloat16).t(), destination=me - 1)
        communicator.send_object({"rank": me}, destination=me - 1)
    else:
        like = torch.empty(2, 2, dtype=torch.bfloat16)
        answers["received"] = communicator.receive(like, source=me + 1), communicator.receive_object(source=me + 1)
    tied = with_ties(groups, [(0, 1), [1, 0]])
    dist.barrier()  # who leaves closes its connections, and others may still be connecting
    answers["ties"] = {stages: dist.get_process_group_ranks(group) for stages, group in tied.ties.items()}
    return answers


def test_objects_between_ranks() -> None:
    answers = run_processes(4, talk)
    assert [answer["pipeline"] for answer in answers] == [[1, 0], [1, 0], [3, 2], [3, 2]]
    assert [[int(part["rank"]) for part in answer["replicas"]] for answer in answers] == [[0, 2], [1, 3]] * 2
    assert [answer["long"] for answer in answers] == [[30_000, 5]] * 4
    assert [answer["from first"] for answer in answers] == ["from 1", "from 1", "from 3", "from 3"]
    assert all(torch.equal(answer["from world"], torch.full((3,), 2)) for answer in answers)
    assert [answer["numbers"] for answer in answers] == [[0, 0], [0, 0], [2, -2], [2, -2]]
    assert [answer["agree"] for answer in answers] == [True, False, True, False]
    assert [answer["sum"] for answer in answers] == [1.0, 1.0, 5.0, 5.0]
    for last_rank in (0, 2):
        tensor, value = answers[last_rank]["received"]
        assert torch.equal(tensor, torch.full((2, 2), last_rank + 1, dtype=torch.bfloat16))
        assert value == {"rank": last_rank + 1}
    assert all(answer["ties"] == {(0, 1): [0, 1, 2, 3]} for answer in answers)


def test_alone_there_is_nobody_to_wait_for() -> None:
    layout = ParallelLayout(num_stages=1, num_replicas=1)
    communicator = make_communicator(None, layout, torch.device("cpu"))
    value = object()
    assert communicator.broadcast_in_pipeline(value, stage_index=0) is value
    assert communicator.broadcast_in_world(value) is value
    assert communicator.gather_in_pipeline(value) == [value]
    assert communicator.gather_over_replicas(value) == [value]
    assert communicator.all_replicas_agree(True)
    assert communicator.sum_in_pipeline(2.0) == 2.0
    with pytest.raises(AssertionError):
        Communicator.send(communicator, torch.zeros(1), destination=0)
