"""The two parts of a backward, optimizers' steps, and values that cross several cuts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_autopipe.core import CrossingValue
from lightning_autopipe.profiling import measure_layers
from lightning_autopipe.profiling.findings import with_fixed_bytes
from lightning_autopipe.profiling.layer_replay import LayerRunner
from lightning_autopipe.profiling.optimizer_cost import optimizer_costs
from lightning_autopipe.profiling.sizes import MAX_OTHER_SIZES, affordable_splits, other_splits
from lightning_autopipe.runtime.split_backward import DeferredBackward
from tests.profiling.models import SAMPLES, WIDTH, Crossings, Scale, Stack, features
from tests.profiling.support import CPU, cut, profiled, share

VALUE = SAMPLES * WIDTH * 4


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(self.inner, hidden, use_reentrant=True)


class Slow(torch.autograd.Function):
    """Gives its input; its backward takes as many steps of the clock as it is told."""

    clock = 0.0

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        Slow.clock += ctx.backward_s
        return gradient, None


class SlowScale(nn.Module):
    """Its backward takes so long for its input, and for its factor."""

    def __init__(self, input_s: float, factor_s: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(WIDTH))
        self.factor.register_hook(lambda gradient: self._spend(factor_s))
        self.input_s = input_s

    def forward(self, hidden: Tensor) -> Tensor:
        return Slow.apply(hidden, self.input_s) * self.factor

    def _spend(self, seconds: float) -> None:
        Slow.clock += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what `Slow` says takes time."""
    monkeypatch.setattr("lightning_autopipe.profiling.stopwatch.Stopwatch.host_clock", staticmethod(lambda: Slow.clock))


@pytest.mark.usefixtures("clock")
def test_the_parts_of_a_backward_are_measured() -> None:
    module = Stack(SlowScale(2.0, 5.0), SlowScale(2.0, 5.0), SlowScale(3.0, 1.0))
    module.first = SlowScale(7.0, 4.0)  # type: ignore[assignment]
    module.blocks[1].requires_grad_(False)
    first, both, frozen, other, last = profiled(module, features(), cuts=["blocks.0", "blocks.1", "blocks.2", "last"])[
        1
    ]
    assert (first.backward_s, first.backward_weight_s) == (4.0, 4.0)  # nobody waits for the batch's gradient
    assert (both.backward_s, both.backward_weight_s) == (7.0, 5.0)
    assert (frozen.backward_s, frozen.backward_weight_s) == (2.0, 0.0)
    assert (other.backward_s, other.backward_weight_s) == (4.0, 1.0)
    assert (last.backward_s, last.backward_weight_s) == (0.0, 0.0)
    assert all(layer.backward_split_s == 0 for layer in (first, both, frozen, other, last))


@pytest.mark.usefixtures("clock")
def test_what_two_parts_take_more_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DeferredBackward.run

    def run(self: DeferredBackward) -> None:
        Slow.clock += 3.0
        original(self)

    monkeypatch.setattr(DeferredBackward, "run", run)
    _, own, _ = profiled(Stack(SlowScale(2.0, 4.0)), features(), cuts=["blocks.0", "last"])[1]
    assert (own.backward_s, own.backward_weight_s, own.backward_split_s) == (6.0, 6.0, 3.0)


@pytest.mark.usefixtures("clock")
def test_rounds_that_warm_up_do_not_count() -> None:
    module = Stack(Scale())
    taken = iter([0.0, 9.0, 9.0, 1.0, 2.0, 3.0])  # a look, two rounds to warm up, three that count
    module.first = SlowScale(0.0, 0.0)  # type: ignore[assignment]

    def forward(hidden: Tensor) -> Tensor:
        return Slow.apply(hidden * module.first.factor, next(taken))

    module.first.forward = forward  # type: ignore[method-assign]
    trace = cut(module, features(), ["blocks.0", "last"])
    step = module.training_step
    taken = iter([0.0, 9.0, 9.0, 1.0, 2.0, 3.0])
    first, *_ = measure_layers(trace.trace, trace.table, module, step, (features(), 0), {}, device=CPU, budget_s=0.0)
    assert first.backward_s == 2.0


def test_gradients_of_the_rounds_are_dropped() -> None:
    module = Stack(Scale())
    share(module, at_end=lambda: all(p.grad is None for p in module.parameters()) or pytest.fail("some are left"))


def test_a_backward_that_runs_only_whole_has_one_part() -> None:
    _, own, last = profiled(Stack(Checkpointed()), features(), cuts=["blocks.0", "last"])[1]
    assert own.backward_s > 0
    assert own.backward_weight_s < 0.1 * own.backward_s
    assert last.backward_weight_s <= last.backward_s


def test_without_room_a_split_backward_is_no_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def split_backward(*args: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(LayerRunner, "split_backward", split_backward)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        share(Stack(Scale()))


def test_a_value_crosses_all_cuts_up_to_its_last_reader() -> None:
    found = share(Crossings(), cuts=["middle", "table", "last"])
    hidden, best, is_large = (
        {"forward_bytes": VALUE, "gradient_bytes": VALUE},
        {"forward_bytes": SAMPLES * 8, "gradient_bytes": 0},
        {"forward_bytes": SAMPLES * WIDTH, "gradient_bytes": 0},
    )
    assert found.values == (
        CrossingValue(producer=0, last_reader=1, **hidden),
        CrossingValue(producer=0, last_reader=2, **best),
        CrossingValue(producer=0, last_reader=1, **is_large),
        CrossingValue(producer=1, last_reader=2, **hidden),
        CrossingValue(producer=2, last_reader=3, **hidden),
    )
    sent = [one.sent_bytes for one in found.measurements()]
    by_cut = [
        sum(value.forward_bytes for value in found.values if value.producer <= index < value.last_reader)
        for index in range(found.num_layers)
    ]
    assert by_cut == sent


def test_values_under_autocast_have_the_dtypes_that_ran() -> None:
    module = Stack(nn.Linear(WIDTH, WIDTH))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = share(module, cuts=["blocks.0", "last"])
    assert [value.forward_bytes for value in found.values] == [VALUE // 2] * 2


def test_bytes_that_do_not_grow_are_told_by_a_second_size() -> None:
    def values(*num_bytes: int, last_reader: int = 1) -> list[CrossingValue]:
        return [
            CrossingValue(producer=0, last_reader=last_reader, forward_bytes=n, gradient_bytes=n // 2)
            for n in num_bytes
        ]

    found = with_fixed_bytes(values(40, 100, 30), 4, values(80, 100, 50), 8)
    assert [value.fixed_forward_bytes for value in found] == [0, 100, 10]
    assert [value.fixed_gradient_bytes for value in found] == [0, 50, 5]
    assert list(with_fixed_bytes(values(40), 4, values(40, last_reader=2), 8)) == values(40)


def test_optimizers_step_on_copies_of_each_layers_parameters() -> None:
    a, b, frozen, other = (nn.Parameter(torch.ones(2, n), requires_grad=n != 3) for n in (2, 2, 3, 4))
    a.grad = torch.ones_like(a)
    adam = torch.optim.Adam([{"params": [a]}, {"params": [b], "amsgrad": True}])
    sgd = torch.optim.SGD([frozen, other], lr=0.1)
    adam.register_step_pre_hook(lambda *_: pytest.fail("a hook of the user's ran"))
    torch.optim.lr_scheduler.StepLR(adam, 1)
    before = copy.deepcopy(adam.state_dict())
    random_state = torch.get_rng_state()
    costs = optimizer_costs([adam, sgd], {0: [a], 1: [b], 2: [frozen], 3: [other, a], 4: []}, device=CPU)
    assert costs is not None
    assert {index: cost.num_bytes for index, cost in costs.items()} == {0: 2 * 16, 1: 3 * 16, 2: 0, 3: 2 * 16, 4: 0}
    assert costs[2].seconds == costs[4].seconds == 0
    assert all(cost.seconds >= 0 for cost in costs.values())
    assert adam.state_dict() == before
    assert not sgd.state
    assert torch.equal(a, torch.ones(2, 2))
    assert torch.equal(a.grad, torch.ones(2, 2))
    assert b.grad is None
    assert torch.equal(torch.get_rng_state(), random_state)


def test_an_optimizer_that_cannot_be_tried_has_no_cost() -> None:
    class Picky(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("needs a closure")

    parameter = nn.Parameter(torch.ones(2))
    assert optimizer_costs([Picky([parameter], lr=0.1)], {0: [parameter]}, device=CPU) is None
    assert optimizer_costs([], {0: [parameter]}, device=CPU) is None


@pytest.mark.parametrize(
    ("batch_size", "in_use", "least", "expected"),
    [
        (16, 4, 1, {2: 8, 8: 2, 1: 16}),
        (10, 4, 1, {2: 8, 5: 2, 1: 10, 10: 1}),
        (16, 4, 2, {2: 8, 8: 2, 16: 1}),
        (3, 8, 1, {3: 1}),
        (1, 1, 1, {}),
        (512, 64, 1, {4: 128, 16: 32, 1: 512, 512: 1, 32: 16}),
    ],
)
def test_sizes_lie_around_the_one_in_use(batch_size: int, in_use: int, least: int, expected: dict[int, int]) -> None:
    found = other_splits(batch_size, in_use, min_samples=least)
    assert {**found, **expected} == found
    assert -(-batch_size // min(in_use, max(1, batch_size // least))) not in found
    assert all(-(-batch_size // number) == size for size, number in found.items())


def test_named_sizes_are_those_that_the_batch_can_have() -> None:
    assert other_splits(10, 1, sizes=[3, 5, 10, 100]) == {3: 4, 5: 2}
    assert other_splits(10, 5, sizes=[2, 4]) == {4: 3}
    assert other_splits(10, 5, min_samples=2, sizes=[1]) == {}


def test_what_takes_too_long_is_left_out() -> None:
    splits = {4: 8, 16: 2, 1: 32, 32: 1, 64: 1}
    assert affordable_splits(splits, least_s=1.0, size_in_use=8, budget_s=5.0) == ({4: 8, 16: 2, 1: 32}, [32, 64])
    chosen, left_out = affordable_splits(splits, least_s=1.0, size_in_use=8, budget_s=100.0)
    assert len(chosen) == MAX_OTHER_SIZES
    assert left_out == []
