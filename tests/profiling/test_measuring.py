"""What is run, by whom, and that nothing changes."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_autopipe.core import LayerMeasurement
from lightning_autopipe.profiling import ProfilingError, join_findings, optimizer_state_ratio, profiler
from lightning_autopipe.profiling.findings import OptimizerCost
from lightning_autopipe.profiling.groups import share_out
from lightning_autopipe.profiling.layer_replay import LayerRunner
from tests.profiling.models import LOGGED, WIDTH, Restless, Scale, Stack, features
from tests.profiling.support import by_name, profiled, share, state_hash


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """How often the layer that begins at a position has run forward."""
    counts: dict[int, int] = {}
    forward = LayerRunner.forward

    def counted(self: LayerRunner, *args: Any) -> Any:
        counts[self.program.start] = counts.get(self.program.start, 0) + 1
        return forward(self, *args)

    monkeypatch.setattr(LayerRunner, "forward", counted)
    return counts


def test_everything_is_as_before() -> None:
    LOGGED.clear()
    module, batch = Restless(), features()
    module.first.weight.grad = torch.ones_like(module.first.weight)
    module.last.requires_grad_(False)
    module.norm.eval()
    module.norm.train()
    calls: list[Any] = []
    module.last.weight.requires_grad_(True)
    module.last.weight.register_post_accumulate_grad_hook(calls.append)
    before = state_hash(module, batch)
    _, measured = profiled(module, batch)
    assert len(measured) >= 2
    assert state_hash(module, batch) == before
    assert not calls
    assert not LOGGED
    module.training_step(batch, 0)
    assert len(LOGGED) == 2  # and a step by itself still logs
    module.last.weight.pow(2).sum().backward()
    assert len(calls) == 1  # nor are hooks lost


def test_everything_is_as_before_when_a_layer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = Restless(), features()
    before = state_hash(module, batch)

    def fail(self: LayerRunner, *args: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(LayerRunner, "backward", fail)
    with pytest.raises(ProfilingError, match=r"cannot be measured one by one: RuntimeError.*no kernel"):
        profiled(module, batch)
    assert state_hash(module, batch) == before


def test_equal_layers_are_measured_once(runs: dict[int, int]) -> None:
    module = Stack(*(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    cuts = [*(f"blocks.{block}.{part}" for block in range(4) for part in range(3)), "last"]
    found, measured = profiled(module, features(), cuts=cuts)
    layers = by_name(found, measured)
    assert len(layers) == 14
    assert len(runs) == 5
    # Once to look at it, then in each round; twice where the backward has two parts (not in the first layer and Tanh).
    num_rounds = profiler._WARM_UP_ROUNDS + profiler._MIN_ROUNDS
    assert sorted(runs.values()) == [1 + num_rounds] * 2 + [1 + 2 * num_rounds] * 3
    for part in range(3):
        assert len({layers[f"blocks.{block}.{part}"] for block in range(4)}) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda block: block.weight.requires_grad_(False),
        lambda block: block.register_parameter("weight", nn.Parameter(torch.ones(1))),
    ],
    ids=["frozen", "other shape"],
)
def test_unlike_layers_are_measured_apart(runs: dict[int, int], change: Any) -> None:
    module = Stack(Scale(), Scale(), Scale())
    change(module.blocks[1])
    profiled(module, features(), cuts=["blocks.0", "blocks.1", "blocks.2", "last"])
    assert len(runs) == 4


def test_layers_with_other_constants_are_measured_apart(runs: dict[int, int]) -> None:
    module = Stack(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(p)) for p in (0.1, 0.2, 0.2)))
    profiled(module, features(), cuts=["blocks.0", "blocks.1", "blocks.2", "last"])
    assert len(runs) == 4


def test_members_share_the_work_and_end_with_the_same(runs: dict[int, int]) -> None:
    module = Stack(Scale(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    shares = [share(module, member_index=m, num_members=3) for m in range(3)]
    indices = [index for found in shares for index in found.layers]
    assert sorted(indices) == list(range(shares[0].num_layers))
    joined = join_findings(shares)
    assert joined == join_findings(shares[::-1])
    assert all(isinstance(one, LayerMeasurement) for one in joined.measurements())
    cost = OptimizerCost(seconds=1.0, num_bytes=1)
    tried = [replace(found, optimizer=dict.fromkeys(found.layers, cost)) for found in shares]
    assert set(join_findings(tried).optimizer or ()) == set(indices)
    assert join_findings([*tried[:2], shares[2]]).optimizer is None  # it could not be tried everywhere


def test_what_a_forward_takes_besides_its_layer_is_told() -> None:
    """Python before the layer is not the layer's, but every stage takes it; the first layer begins with the step."""

    class Slow(Stack):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.02)
            return super().training_step(batch, batch_idx)

    found = share(Slow(Scale(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)))
    assert 0.01 <= found.overhead_s < 0.02
    assert all(one.forward_s < 0.01 for one in found.measurements()[1:])


def test_shares_of_unlike_steps_are_refused() -> None:
    mine = share(Stack(Scale()), num_members=2)
    with pytest.raises(ProfilingError, match="unlike steps"):
        join_findings([mine])
    with pytest.raises(ProfilingError, match="unlike steps"):
        join_findings([mine, share(Stack(Scale(), Scale()), member_index=1, num_members=2)])
    theirs = share(Stack(Scale()), member_index=1, num_members=2)
    assert join_findings([mine, theirs]).values == mine.values
    with pytest.raises(ProfilingError, match="unlike steps"):
        join_findings([mine, replace(theirs, values=())])


def test_the_budget_ends_measuring(runs: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10**6))
    monkeypatch.setattr(profiler.time, "perf_counter", lambda: float(next(now)))
    profiled(Stack(Scale()), features(), budget_s=1e9)
    assert max(runs.values()) == 1 + 2 * (profiler._WARM_UP_ROUNDS + profiler._MAX_ROUNDS)


def test_dtypes_under_autocast_are_those_that_run() -> None:
    module = Stack(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, measured = profiled(module, features())
    assert measured[0].sent_bytes == features().numel() * 2


def test_work_is_shared_evenly() -> None:
    assert share_out({0: 5.0, 1: 1.0, 2: 4.0, 3: 2.0}, 2) == [[0, 1], [2, 3]]
    assert share_out({0: 1.0}, 3) == [[0], [], []]
    assert share_out({0: 0.0, 1: 0.0}, 2) == [[0], [1]]


@pytest.mark.parametrize(
    ("make", "ratio"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0.0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1.0),
        (lambda p: torch.optim.AdamW(p), 2.0),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3.0),
    ],
    ids=["SGD", "momentum", "AdamW", "AMSGrad"],
)
def test_optimizer_state_is_that_of_the_optimizer(make: Any, ratio: float) -> None:
    parameter = nn.Parameter(torch.ones(3, 3))
    optimizer = make([parameter])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a step of its own on the optimizer
    before = copy.deepcopy(optimizer.state_dict())
    assert optimizer_state_ratio([optimizer]) == ratio
    assert optimizer.state_dict() == before
    assert parameter.grad is None
    assert torch.equal(parameter, torch.ones(3, 3))
    del scheduler


def test_without_an_optimizer_that_can_be_tried_it_is_adamw() -> None:
    assert optimizer_state_ratio([]) == 2.0
    broken = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    broken.param_groups = []
    assert optimizer_state_ratio([broken]) == 2.0
