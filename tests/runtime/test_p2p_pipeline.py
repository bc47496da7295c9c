"""The executor between real processes."""

from __future__ import annotations

import random
import time
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.core.schedule import Schedule
from lightning_autopipe.runtime.executor import StageExecutor
from lightning_autopipe.runtime.p2p_transport import P2PTransport
from lightning_autopipe.runtime.process_groups import ProcessGroups, create_process_groups
from lightning_autopipe.runtime.stage import StageOutput
from lightning_autopipe.schedules import get_schedule, one_f_one_b
from tests.harness import run_processes
from tests.runtime.toy import Toy, assert_same_gradients, batch, cut, gradients, reference, weighted_loss

CPU = torch.device("cpu")


def connect(num_stages: int, num_replicas: int = 1, timeout_s: float = 20) -> tuple[ProcessGroups, P2PTransport]:
    groups = create_process_groups(
        ParallelLayout(num_stages=num_stages, num_replicas=num_replicas), timeout_s=timeout_s
    )
    transport = groups.transport(CPU)
    transport.warm_up()
    return groups, transport


def schedule_of(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """By name; "deep" is 1F1B with a warm-up that runs further ahead than plain 1F1B's."""
    if name == "deep":
        return one_f_one_b(num_stages, num_microbatches, range(2 * num_stages, 0, -2))
    return get_schedule(name, num_stages, num_microbatches)


def train_toy(num_stages: int, num_replicas: int, steps: list[tuple[str, int, int]]) -> list[tuple[Any, Any]]:
    """Loss (last stage) and own gradients of each step (schedule, samples, micro-batches)."""
    groups, transport = connect(num_stages, num_replicas)
    executor = StageExecutor(stage_index=groups.stage_index, num_stages=num_stages, transport=transport)
    results = []
    for name, num_samples, num_microbatches in steps:
        toy, ids = Toy(), batch(num_samples)
        part = ids.tensor_split(num_replicas)[groups.replica_index]
        train = name != "forward_only"
        stage = cut([toy] * num_stages, part, num_microbatches, total=len(ids), train=train)[groups.stage_index]
        with torch.set_grad_enabled(train):
            executor.run(stage, schedule_of(name, num_stages, num_microbatches))
        results.append((weighted_loss(stage) if stage.losses else None, gradients(toy)))
    return results


@pytest.mark.parametrize(("num_stages", "num_replicas"), [(2, 2), (4, 1), (1, 2)])
def test_real_processes_give_the_uncut_gradients(num_stages: int, num_replicas: int) -> None:
    steps = [("1f1b", 8, 4), ("forward_only", 6, 2), ("gpipe", 7, 3), ("1f1b", 8, 1), ("1f1b", 5, 2), ("deep", 24, 12)]
    by_rank = run_processes(num_stages * num_replicas, train_toy, num_stages, num_replicas, steps)
    for step, (name, num_samples, _) in enumerate(steps):
        loss, expected = reference(Toy(), batch(num_samples))
        losses = [results[step][0] for results in by_rank if results[step][0] is not None]
        torch.testing.assert_close(torch.stack(losses).sum(), loss, rtol=1e-12, atol=0)
        total: dict[str, Tensor | None] = dict.fromkeys(expected)
        for results in by_rank:
            for parameter, gradient in results[step][1].items():
                if gradient is not None:
                    known = total[parameter]
                    total[parameter] = gradient if known is None else known + gradient
        assert_same_gradients(total, expected if name != "forward_only" else dict.fromkeys(expected))


class OddStage:
    """Sends tensors of every kind; the next stage checks and returns them in the loss."""

    def __init__(self, stage_index: int) -> None:
        self.stage_index = stage_index
        self.parameter = nn.Parameter(torch.arange(12.0).reshape(3, 4))

    def signature(self, microbatch_index: int) -> Hashable:
        return microbatch_index % 2

    def values(self, microbatch_index: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(microbatch_index)
        base = torch.rand(3, 4, generator=generator) * self.parameter
        many = tuple(base.detach()[:1, :1] + index for index in range(60 if microbatch_index % 2 else 0))
        return (
            base.t(),
            base[:, ::2],
            base.expand(2, 3, 4),
            base.sum(),
            base[:0],
            base.half(),
            base.bfloat16().detach(),
            torch.complex(base, base).conj(),
            base.detach() > 2,
            base.detach().to(torch.int16),
            base.double().permute(1, 0).contiguous().permute(1, 0),
            torch.rand(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
            *many,
        )

    def forward(self, microbatch_index: int, received: tuple[Tensor, ...]) -> StageOutput:
        if self.stage_index == 0:
            return StageOutput(sent=self.values(microbatch_index))
        expected = self.values(microbatch_index)
        for index, (mine, theirs) in enumerate(zip(expected, received, strict=True)):
            assert torch.equal(mine, theirs), index
            assert (mine.dtype, mine.requires_grad) == (theirs.dtype, theirs.requires_grad), index
            assert theirs.stride() == mine.clone().stride(), index
        loss = sum((tensor * tensor).abs().double().sum() for tensor in received if tensor.requires_grad)
        assert isinstance(loss, Tensor)
        return StageOutput(loss=loss)


def send_odd_tensors(num_microbatches: int) -> Tensor | None:
    groups, transport = connect(2)
    executor = StageExecutor(stage_index=groups.stage_index, num_stages=2, transport=transport)
    stage = OddStage(groups.stage_index)
    for _ in range(2):
        executor.run(stage, one_f_one_b(2, num_microbatches))
    return stage.parameter.grad


def test_tensors_of_every_kind_cross() -> None:
    last, first = run_processes(2, send_odd_tensors, 4)
    assert last is None
    stage, expected = OddStage(0), torch.zeros(3, 4)
    for microbatch_index in range(4):
        values = stage.values(microbatch_index)
        loss = sum((tensor * tensor).abs().double().sum() for tensor in values if tensor.requires_grad)
        expected += 2 * torch.autograd.grad(loss, stage.parameter)[0]
    torch.testing.assert_close(first, expected)


class SleepyStage:
    def __init__(self, *, stage_index: int, num_stages: int, num_bytes: int) -> None:
        self.is_last = stage_index == num_stages - 1
        self.num_elements = num_bytes // 4
        self.parameter = nn.Parameter(torch.ones(()))
        self.random = random.Random(stage_index)

    def signature(self, microbatch_index: int) -> Hashable:
        return self.num_elements

    def sleep(self, gradient: Tensor) -> None:
        time.sleep(self.random.uniform(0, 0.05))

    def forward(self, microbatch_index: int, received: tuple[Tensor, ...]) -> StageOutput:
        time.sleep(self.random.uniform(0, 0.05))
        h = received[0] if received else torch.full((self.num_elements,), float(microbatch_index))
        h = h * self.parameter
        h.register_hook(self.sleep)
        return StageOutput(loss=h.mean()) if self.is_last else StageOutput(sent=(h,))


def pass_large_messages(schedule_name: str, num_bytes: int) -> float:
    groups, transport = connect(4)
    stage = SleepyStage(stage_index=groups.stage_index, num_stages=4, num_bytes=num_bytes)
    executor = StageExecutor(stage_index=groups.stage_index, num_stages=4, transport=transport)
    executor.run(stage, get_schedule(schedule_name, 4, 8))
    assert stage.parameter.grad is not None
    return float(stage.parameter.grad)


@pytest.mark.parametrize("schedule_name", ["1f1b", "gpipe"])
def test_large_messages_with_random_pauses(schedule_name: str) -> None:
    assert run_processes(4, pass_large_messages, schedule_name, 8 * 2**20) == [28.0] * 4
