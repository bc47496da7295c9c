"""Backwards in two parts against whole ones, on single stages."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lightning_autopipe.runtime.backward import run_backward, run_input_backward, run_weight_backward
from lightning_autopipe.runtime.stage import StageOutput

WIDTH = 6


class Scale(torch.autograd.Function):
    """A custom function with a weight; forgets what it saved once it has run, as some do, and counts."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.kept = (x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        Scale.runs += 1
        x, weight = ctx.kept
        del ctx.kept
        return gradient * weight, (gradient * x).sum(0)


class Stage(nn.Module):
    """Layers with a step given as a function of itself and what is received; gives what is sent."""

    def __init__(self, step: Callable[[Any, Tensor, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.step = step
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.embedding = nn.Embedding(5, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return self.step(self, x, y)


def chain(stage: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    h = stage.norm(stage.a(x).tanh() + y)
    h = h + stage.conv(h.transpose(1, 2)).transpose(1, 2).relu()
    return (stage.lstm(h)[0] * stage.scale, y)


def repeated(stage: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (stage.b(stage.a(stage.norm(stage.a(x).relu()))) + y,)


def tied(stage: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    h = stage.b(x + stage.embedding(torch.arange(4)))
    return (F.linear(h, stage.embedding.weight), stage.normed(y))


def shared_beside_the_path(stage: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    weight = stage.normed.weight  # computed once, used twice
    return (F.linear(F.linear(x, weight).relu(), weight) + stage.b(y),)


def custom_function(stage: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (stage.b(Scale.apply(stage.a(x).flatten(0, 1), stage.scale)).unflatten(0, (3, 4)) + y,)


def custom_function_beside_the_path(stage: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (stage.a(x) * Scale.apply(stage.b.weight, stage.scale).sum(0) + y,)


def checkpointed(stage: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (stage.b(checkpoint(lambda h: stage.a(h).tanh() * stage.scale, x, use_reentrant=False)) + y,)


def reentrant(stage: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (stage.b(checkpoint(lambda h: stage.a(h).tanh() * stage.scale, x, use_reentrant=True)) + y,)


def in_place(stage: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    h = stage.a(x)
    h[:, 0] = stage.b(y[:, 1])
    h[:, 1].mul_(stage.scale)
    return (h.relu_(),)


def only_parameters(stage: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """A value of parameters alone, one of them used on the path as well, and a received value that is passed on."""
    return (stage.a(x), stage.scale * stage.b.weight.sum(), stage.a.bias, y)


def unused(stage: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (stage.a(x.detach()), stage.b(y))


def nothing_received(stage: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (stage.a(x.detach()),)


def double_backward(stage: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    h = stage.a(x).tanh()
    (inner,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
    return (h + inner * stage.scale + y,)


def scaled_by_a_hook(stage: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    h = stage.a(x)
    h.register_hook(lambda gradient: gradient * 3)
    return (stage.b(h) + y,)


STEPS = [
    chain,
    repeated,
    tied,
    shared_beside_the_path,
    custom_function,
    custom_function_beside_the_path,
    checkpointed,
    reentrant,
    in_place,
    only_parameters,
    unused,
    nothing_received,
    double_backward,
    scaled_by_a_hook,
]


def run(stage: Stage, *, split: bool, num_units: int = 2) -> tuple[list[Tensor], dict[str, Tensor | None], set[str]]:
    """Gradients of what was received and of the parameters, and the parameters that had one after the first part."""
    stage.zero_grad(set_to_none=True)
    sent_back: list[Tensor] = []
    early: set[str] = set()
    rests = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_units):
        received = tuple(torch.randn(3, 4, WIDTH, generator=generator).requires_grad_() for _ in range(2))
        output = StageOutput(sent=stage(*received))
        gradients = [torch.randn(sent.shape, generator=generator) for sent in output.sent if sent.requires_grad]
        if not split:
            sent_back += run_backward(received, output, gradients)
            continue
        found, rest = run_input_backward(received, output, gradients)
        sent_back += found
        rests.append(rest)
    early = {name for name, parameter in stage.named_parameters() if parameter.grad is not None}
    for rest in rests:
        run_weight_backward(rest)
    return sent_back, {name: parameter.grad for name, parameter in stage.named_parameters()}, early


@pytest.mark.parametrize("step", STEPS)
def test_both_parts_give_the_bits_of_the_whole(step: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    stage = Stage(step)
    sent_back, expected, _ = run(stage, split=False)
    found, gradients, _ = run(stage, split=True)
    assert len(found) == len(sent_back)
    for mine, theirs in zip(found, sent_back, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()
    for name, gradient in expected.items():
        mine = gradients[name]
        assert (mine is None) == (gradient is None), name
        if mine is not None and gradient is not None:
            assert torch.equal(mine, gradient), name


@pytest.mark.parametrize(
    ("step", "early"),
    [
        (chain, set()),
        (repeated, {"a.weight", "a.bias"}),
        (tied, {"embedding.weight"}),
        (custom_function, {"scale"}),
        (checkpointed, {"a.weight", "a.bias", "scale"}),
        (nothing_received, set()),
        (only_parameters, {"a.bias"}),
        (reentrant, {"a.weight", "a.bias", "b.weight", "b.bias", "scale"}),
    ],
)
def test_parameters_wait_where_they_can(step: Callable[..., Any], early: set[str]) -> None:
    torch.manual_seed(0)
    assert run(Stage(step), split=True)[2] == early


def test_custom_functions_run_once() -> None:
    for step in (custom_function, custom_function_beside_the_path):
        Scale.runs = 0
        run(Stage(step), split=True, num_units=1)
        assert Scale.runs == 1


def test_hooks_of_parameters_are_called_once_a_unit() -> None:
    calls: list[str] = []
    for step in (chain, repeated, custom_function, checkpointed, nothing_received, only_parameters):
        stage = Stage(step)
        for name, parameter in stage.named_parameters():
            parameter.register_hook(lambda gradient, name=name: calls.append(f"before {name}"))
            parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: calls.append(f"after {name}"))
        counts = []
        for split in (False, True):
            calls.clear()
            run(stage, split=split, num_units=1)
            counts.append(sorted(calls))
        assert counts[0] == counts[1], step


class Token:
    """Lives as long as the node of the graph that has it."""

    alive: weakref.WeakSet[Token] = weakref.WeakSet()

    def __init__(self) -> None:
        Token.alive.add(self)


class Counted(torch.autograd.Function):
    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = Token()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Counted.runs += 1
        return gradient


def test_the_path_runs_once_and_the_graph_is_gone_afterwards() -> None:
    def step(stage: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (stage.b(Counted.apply(stage.a(Counted.apply(x)).sigmoid())) + y,)

    stage = Stage(step)
    Counted.runs = 0
    gc.disable()  # only reference counts may free it
    try:
        received = tuple(torch.randn(3, 4, WIDTH).requires_grad_() for _ in range(2))
        output = StageOutput(sent=stage(*received))
        _, rest = run_input_backward(received, output, [torch.ones(3, 4, WIDTH)])
        assert (Counted.runs, len(Token.alive)) == (2, 2)
        del received, output
        run_weight_backward(rest)
        assert Counted.runs == 2
        assert len(Token.alive) == 0
    finally:
        gc.enable()


def test_autocast() -> None:
    stage = Stage(chain)
    results = []
    for split in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(run(stage, split=split)[:2])
    (sent_back, expected), (found, gradients) = results
    assert all(map(torch.equal, found, sent_back))
    for name, gradient in expected.items():
        if gradient is not None:
            assert torch.equal(gradients[name], gradient), name  # type: ignore[arg-type]
