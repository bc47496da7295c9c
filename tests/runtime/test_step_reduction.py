"""Sums that begin in a backward give what sums after it give, to the bit."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.runtime import gradient_buckets
from lightning_autopipe.runtime.errors import CommunicationError
from lightning_autopipe.runtime.executor import StageExecutor
from lightning_autopipe.runtime.gradient_buckets import plan_buckets
from lightning_autopipe.runtime.gradient_reduction import GradientReducer
from lightning_autopipe.runtime.process_groups import create_process_groups
from lightning_autopipe.runtime.step_reduction import StepReduction
from lightning_autopipe.schedules import get_schedule, one_f_one_b
from tests.harness import run_processes
from tests.runtime.toy import Toy, ToyStage, assert_same_gradients, batch, cut, gradients, reference

WIDTH = 8


class Changeable(nn.Module):
    """Uses other parameters from step to step, and from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, WIDTH, sparse=True)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.of_rank_1 = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.large = nn.Parameter(torch.rand(WIDTH, 2 * WIDTH))
        self.of_float64 = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))
        self.end = nn.Linear(2 * WIDTH, 1)

    def forward(self, ids: Tensor, *, uses_sometimes: bool, is_reentrant: bool) -> Tensor:
        h = self.first(self.embedding(ids))
        if dist.get_rank() == 1:
            h = self.of_rank_1(h)
        if uses_sometimes:
            h = self.sometimes(h)
        for _ in range(3):  # under reentrant checkpoints each of them adds to the gradient by itself
            h = checkpoint(self.shared, h, use_reentrant=True) if is_reentrant else self.shared(h)
        h = (torch.tanh(h).double() * self.of_float64).float()
        loss: Tensor = self.end(torch.tanh(h @ self.large)).mean()
        return loss


class NeverCompleted:
    """A sum that others have not joined yet."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        """Gives itself."""


@pytest.mark.parametrize("keeps_order", [True, False])
def test_where_order_is_kept_timing_does_not_decide_where_a_sum_begins(
    keeps_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_buckets, "all_reduce", lambda *_: NeverCompleted())
    parameters = {str(index): nn.Parameter(torch.rand(2)) for index in range(9)}
    group: Any = None
    step = StepReduction(parameters, group=group, expected=parameters, bucket_bytes=1, keeps_order=keeps_order)
    step.watch(contextlib.nullcontext)
    sum((parameter * 2).sum() for parameter in parameters.values()).backward()
    step.unwatch()
    assert step.num_collectives == (9 if keeps_order else 6)


STEPS = (
    {"uses_sometimes": True, "is_reentrant": False},
    {"uses_sometimes": True, "is_reentrant": False},
    {"uses_sometimes": False, "is_reentrant": False},  # expected, and not there
    {"uses_sometimes": True, "is_reentrant": True},  # there, and not expected; others change after they have left
    {"uses_sometimes": True, "is_reentrant": True},
)


def reduce_under_way() -> list[tuple[dict[str, Tensor | None], dict[str, Tensor | None], int, int]]:
    """For each step the gradients that were summed in the backward and after it; the sums so far, and early ones."""
    rank = dist.get_rank()
    results = []
    early = GradientReducer(dist.group.WORLD, name="everybody", bucket_bytes=4 * WIDTH * (WIDTH + 1))
    late = GradientReducer(dist.group.WORLD, name="everybody", bucket_bytes=4 * WIDTH * (WIDTH + 1))
    module = Changeable()
    for step, options in enumerate(STEPS):
        ids = torch.arange(6).reshape(2, 3) % 5 if rank == 0 else torch.tensor([[step % 5, 4, 4]])
        twin = copy.deepcopy(module)
        for one, reducer in ((module, early), (twin, late)):
            one.zero_grad()
            one(ids * 0, **options).backward()  # an earlier micro-batch
            loss = one(ids, **options)
            parameters = dict(one.named_parameters())
            if reducer is early:
                reducer.arm(parameters)
            loss.backward()
            reducer.start(parameters)
            for name, gradient in reducer.finish().items():
                parameters[name].grad = gradient
            one(ids, **options)  # nobody watches any more
        results.append((dense(gradients(module)), dense(gradients(twin)), early.num_collectives, early.num_early))
    assert early.num_reductions == len(STEPS)
    return results


def dense(named: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if g is None else g.to_dense().clone() for name, g in named.items()}


def test_equal_to_sums_after_the_backward() -> None:
    by_rank = run_processes(2, reduce_under_way)
    for step, (of_0, of_1) in enumerate(zip(*by_rank, strict=True)):
        assert of_0[2] == of_1[2], "members sum the same buckets"
        for name, gradient in of_0[0].items():
            absent = "never" in name or ("sometimes" in name and not STEPS[step]["uses_sometimes"])
            for other in (of_0[1][name], of_1[0][name], of_1[1][name]):
                if absent:
                    assert gradient is None
                    assert other is None
                elif step == 3 and name.startswith("shared"):  # the late part is added to the sum, not summed with it
                    torch.testing.assert_close(gradient, other)
                else:
                    assert torch.equal(gradient, other), (step, name)
    num_early = [result[3] for result in by_rank[1]]
    assert num_early[0] == 0, "the first reduction finds out what there is"
    assert num_early[1] == num_early[2], "what is missing holds up what comes behind it"
    assert 0 < num_early[1] < num_early[3] < num_early[4]


def train_with_replicas(num_microbatches: int) -> list[tuple[dict[str, Tensor | None], int, int, int, int]]:
    """Three steps; how many reductions, collectives and early ones there were, and forwards before the first."""
    groups = create_process_groups(ParallelLayout(num_stages=2, num_replicas=2), timeout_s=20)
    transport = groups.transport(torch.device("cpu"))
    executor = StageExecutor(stage_index=groups.stage_index, num_stages=2, transport=transport)
    reducer = GradientReducer(groups.stage, name=f"the replicas of stage {groups.stage_index}", bucket_bytes=340)
    toy, ids = Toy(), batch(2 * num_microbatches)
    part = ids.tensor_split(2)[groups.replica_index]
    stage = cut([toy] * 2, part, num_microbatches, total=len(ids))[groups.stage_index]
    # The stage's own ones, in the order of their use: the toy is whole on every rank.
    names = ("head", "blocks.3", "blocks.2") if groups.stage_index else ("blocks.1", "blocks.0", "embedding")
    parameters = {name: p for name, p in toy.named_parameters() if name.startswith(names)}
    results = []
    for _ in range(3):
        toy.zero_grad()
        num_forwards = _count_forwards(stage)
        seen: list[int] = []

        def arm(num_forwards: list[int] = num_forwards, seen: list[int] = seen) -> None:
            seen.append(len(num_forwards))
            reducer.arm(parameters)

        # The last one writes gradients of parameters in a part of the backward of its own.
        schedule = one_f_one_b(2, num_microbatches) if num_microbatches < 8 else get_schedule("zero_bubble", 2, 8)
        executor.run(stage, schedule, before_last_backward=arm)
        reducer.reduce(parameters)
        counts = (reducer.num_reductions, reducer.num_collectives, reducer.num_early)
        results.append((dense(gradients(toy)), *counts, *seen))
    return results


def _count_forwards(stage: ToyStage) -> list[int]:
    forwards: list[int] = []

    def forward(microbatch_index: int, received: Any) -> Any:
        forwards.append(microbatch_index)
        return ToyStage.forward(stage, microbatch_index, received)

    stage.forward = forward  # type: ignore[method-assign]
    return forwards


def train_with_numbers_of_microbatches(numbers: tuple[int, ...]) -> list[Any]:
    return [train_with_replicas(number) for number in numbers]


def test_each_stage_reduces_once_after_its_last_backward() -> None:
    """Row 28 of the table of failures."""
    numbers = (1, 2, 8)
    by_rank = run_processes(4, train_with_numbers_of_microbatches, numbers)
    num_buckets = {1: 4, 0: 3}  # by stage: of weight and bias of each block, and of what is larger
    for of_number, number in zip(zip(*by_rank, strict=True), numbers, strict=True):
        _, expected = reference(Toy(), batch(2 * number))
        for last, first in ((0, 1), (2, 3)):
            for of_last, of_first in zip(of_number[last], of_number[first], strict=True):
                grads = {k: v if v is not None else of_first[0][k] for k, v in of_last[0].items()}
                assert_same_gradients(grads, expected)
        for global_rank, steps in enumerate(of_number):
            in_all = 1 + num_buckets[1 - global_rank % 2]
            early = in_all - 1
            assert [step[1:] for step in steps] == [
                (1, in_all, 0, number),
                (2, 2 * in_all, early, number),
                (3, 3 * in_all, 2 * early, number),
            ]


def test_buckets_come_in_the_order_in_which_they_are_full() -> None:
    parameters = {
        name: nn.Parameter(torch.zeros(size, dtype=dtype))
        for name, size, dtype in (
            ("a", 4, torch.float64),
            ("b", 1, torch.float32),
            ("c", 2, torch.float64),
            ("d", 9, torch.float64),
            ("e", 1, torch.float64),
            ("f", 1, torch.float32),
        )
    }
    assert plan_buckets(parameters, 48) == [("a", "c"), ("d",), ("e",), ("b", "f")]
    assert plan_buckets({}, 48) == []


def sum_what_is_complete() -> tuple[int, dict[str, Tensor | None]]:
    """How many sums begin before a backward that changes one of two layers; one of them changes against expectation."""
    reducer = GradientReducer(dist.group.WORLD, name="everybody", bucket_bytes=4)
    layers = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(3))
    parameters = dict(layers.named_parameters())
    x = torch.full((1, 2), 1.0 + dist.get_rank())
    for step in range(2):
        layers.zero_grad()
        sum(layer(x) for layer in layers).sum().backward()
        reducer.arm(parameters, complete=["1.weight", "2.weight"] if step else [])
        (layers[0](x) + layers[1](x)).sum().backward()
        num_early = reducer.num_early
        reducer.reduce(parameters)
    # Of the last reduction; the first one finds out what there is.
    return reducer.num_early - num_early, gradients(layers)


def test_what_a_backward_does_not_change_is_summed_at_once() -> None:
    for num_early, summed in run_processes(2, sum_what_is_complete):
        assert num_early == 3
        for name, times in (("0.weight", 2), ("1.weight", 2), ("2.weight", 1)):
            assert torch.equal(summed[name], torch.full((1, 2), times * 3.0)), name


def lose_a_member() -> str:
    """Rank 1 ends in the middle of the backward; what rank 0 then says."""
    reducer = GradientReducer(dist.group.WORLD, name="everybody", bucket_bytes=4)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    parameters = dict(module.named_parameters())
    module(torch.ones(1, 4)).sum().backward()
    reducer.reduce(parameters)
    loss = module(torch.ones(1, 4)).sum()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    reducer.arm(parameters)
    try:
        loss.backward()
        reducer.reduce(parameters)
    except CommunicationError as error:
        return str(error)
    return "no error"


def test_a_member_that_is_gone_is_an_error() -> None:
    error = run_processes(2, lose_a_member, process_group_timeout_s=5.0)[0]
    assert error.startswith("global rank 0: the sum of gradients over everybody (global ranks [0, 1]) failed: ")
