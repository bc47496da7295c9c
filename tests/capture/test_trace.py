"""What a trace records, what it leaves alone, and what it refuses."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.capture.interception import OperationMode
from lightning_autopipe.core.errors import CaptureError
from tests.capture.models import (
    WIDTH,
    Blocks,
    CustomFunctions,
    Getters,
    ScaledSquare,
    SharedParts,
    features,
    token_ids,
)
from tests.capture.support import assert_same_at_every_cut, traced


class Untidy(Blocks):
    """Changes everything it can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Any] = []
        self.cache: dict[str, Any] = {"nested": [[]]}
        self.seen: set[int] = set()
        self.recent: collections.deque[Any] = collections.deque(maxlen=3)
        self.count = 0
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("counter", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        self.new = batch
        h = self.norm(self.blocks[1](F.dropout(self.blocks[0](batch["x"]))))
        self.history.append(h)
        self.cache["nested"][0].append(h)
        self.cache["h"] = h
        self.seen.add(batch_idx)
        self.recent.append(h)
        self.counter += 1
        with torch.no_grad():
            self.average.mul_(0.9).add_(h.mean(0))
            self.blocks[2].bias.zero_()
        self.average = self.average * 2
        random.random()
        torch.rand(3)
        batch["x"][0] = 0
        batch["y"].add_(1)
        out = self.blocks[2](h)
        self.accuracy(out, batch["label"])
        del self.blocks[0].extra
        return F.cross_entropy(out, batch["label"])


def test_a_trace_changes_nothing() -> None:
    torch.manual_seed(0)
    module = Untidy().double()
    module.blocks[0].extra = 1
    batch = {"x": features(), "y": features(), "label": torch.tensor([0, 1, 2, 3])}

    def state() -> list[Any]:
        attributes = [(path, sorted(vars(sub)), sub.training) for path, sub in module.named_modules()]
        tensors = [*module.state_dict(keep_vars=True).values(), *batch.values()]
        metric = [value.clone() for value in module.accuracy.metric_state.values()]
        return [
            attributes,
            [id(tensor) for tensor in tensors],
            *(tensor.detach().clone() for tensor in tensors),
            *metric,
            torch.get_rng_state(),
            random.getstate(),
            (list(module.history), str(module.cache), set(module.seen), list(module.recent), module.count),
            [parameter.grad is None for parameter in module.parameters()],
            [sorted(vars(sub)) for sub in module.accuracy.modules()],
        ]

    before = state()
    found = traced(module, (batch, 0))
    assert {"average", "counter", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"} <= {
        name for op in found.trace.operations for name in op.buffers
    }
    assert found.trace.written_parameters == {"blocks.2.bias"}
    for old, new in zip(before, state(), strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new
    assert not any(is_absent(value) for value in module.accuracy.metric_state.values())


def test_a_failing_trace_changes_nothing_either() -> None:
    class Failing(Untidy):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.history.append(self.blocks[0](batch["x"]))
            raise ArithmeticError("of the user's")

    module = Failing().double()
    before = [sorted(vars(sub)) for sub in module.modules()]
    with pytest.raises(CaptureError, match=r"ArithmeticError.*test_trace\.py:\d+.*of the user's"):
        traced(module, ({"x": features()}, 0))
    assert module.history == []
    assert [sorted(vars(sub)) for sub in module.modules()] == before
    assert module.blocks[0](features()).requires_grad


def test_getters_of_tensors_are_operations_and_getters_of_facts_are_not() -> None:
    names = [op.name for op in traced(Getters().double(), (features(), 0)).trace.operations]
    getters = [name for name in names if name == "getset_descriptor.__get__" or "__get__" in name]
    assert len(getters) >= 7  # T T mT H real, real imag data
    assert not any("size" in name or "dim" in name for name in names)


def test_batch_data_and_buffers_that_nobody_writes_are_no_operations() -> None:
    class Rotary(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.linspace(0, 1, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            angle = torch.arange(len(x))[:, None] * self.frequencies
            mask = (x > 0).double()
            for block in self.blocks:
                x = block(x) * angle.cos() * mask
            return x

    found = traced(Rotary().double(), (features(), 0))
    assert [op.name.split(".")[-1] for op in found.trace.operations] == ["linear", "mul", "mul"] * 3 + ["pow", "mean"]
    assert all(len(found.table.crossing[cut]) == 1 for cut in found.legal_cuts)
    assert not any(op.buffers for op in found.trace.operations)


def test_operations_name_parameters_modules_and_calls() -> None:
    found = traced(SharedParts().double(), (token_ids(), 0))
    trace = found.trace
    by_path: dict[str, set[str]] = {}
    for op in trace.operations:
        by_path.setdefault(op.module_path, set()).update(op.parameters)
    assert by_path["head"] == {"embedding.weight"}
    assert by_path[""] == {"class_token", "positions"}
    assert [call.call_index for call in trace.calls if call.module_path == "norm"] == [0, 1]
    assert "unused.weight" not in {name for op in trace.operations for name in op.parameters}
    for position in range(len(trace.operations)):
        assert trace.position_of(trace.key_of(position, len(trace.operations))) == position


def test_what_a_custom_function_uses_and_writes_belongs_to_it() -> None:
    """The function of a reentrant checkpoint is given none of the module's parameters and buffers."""

    class Checkpointed(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return checkpoint(self.norm, self.blocks[0](batch["x"]), use_reentrant=True).sum()

    trace = traced(Checkpointed().double(), ({"x": features()}, 0)).trace
    (operation,) = (op for op in trace.operations if op.name == "CheckpointFunction.apply")
    assert set(operation.parameters) == {"norm.weight", "norm.bias"}
    assert set(operation.buffers) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_a_custom_function_is_one_operation() -> None:
    names = [op.name for op in traced(CustomFunctions().double(), (features(), 0)).trace.operations]
    assert [name for name in names if name.endswith(".apply")] == [
        "Reversed.apply",
        "ScaledSquare.apply",
        "Doubled.apply",
    ]
    assert len(names) == 9


def test_gradients_are_on_in_a_trace() -> None:
    class Asking(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            h = self.blocks[0](x)
            assert torch.is_grad_enabled()
            assert h.requires_grad
            assert h.grad_fn is not None
            with torch.no_grad():
                assert not self.blocks[1](x).requires_grad
            return self.blocks[2](self.blocks[1](h))

    traced(Asking().double(), (features(), 0))


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda h: h.sum().item(),
    "if": lambda h: bool(h.sum() > 0),
    "tolist": lambda h: h.tolist(),
    "float": lambda h: float(h[0, 0]),
    "format": lambda h: f"{h.sum():.2f}",
    "nonzero": lambda h: (h > 0).nonzero(),
    "unique": lambda h: h.round().unique(),
    "numpy": lambda h: h.detach().numpy(),
}


class Inner(nn.Module):
    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.read(h)
        return h


@pytest.mark.parametrize("name", READS)
def test_a_value_read_between_layers_is_an_error_with_its_place(name: str) -> None:
    module = nn.Module()
    module.first, module.second = Inner(READS[name]), nn.Linear(WIDTH, 2)  # more than half of it is in the first
    module.training_step = lambda batch, batch_idx: module.second(module.first(batch)).sum()
    with pytest.raises(CaptureError) as caught:
        traced(module.double(), (features(), 0))
    message = str(caught.value)
    assert "training_step reads the value of an activation in first, at " in message
    assert "test_trace.py:" in message
    assert "2 trainable parameters come after this place (first: second.bias)" in message


@pytest.mark.parametrize("name", READS)
def test_a_value_read_behind_the_last_parameter_ends_the_trace(name: str) -> None:
    module = Inner(READS[name])
    module.training_step = lambda batch, batch_idx: module(batch).sum()
    found = traced(module.double(), (features(), 0))
    assert found.trace.end_reason is not None
    assert "test_trace.py:" in found.trace.end_reason


def test_a_shape_changed_in_place_is_an_error() -> None:
    class Squeezing(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x).unsqueeze(0).squeeze_(0))

    with pytest.raises(CaptureError, match="changes the shape of a tensor in place"):
        traced(Squeezing().double(), (features(), 0))


class Toggling(Blocks):
    """Freezes a block in the middle of a step, in every other call."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for parameter in self.blocks[1].parameters():
            parameter.requires_grad_(batch_idx % 2 == 0)
        self.blocks[0].bias.requires_grad = batch_idx % 2 == 0
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()


@pytest.mark.parametrize("batch_idx", [0, 1])
def test_flags_of_parameters_are_set_on_every_stage(batch_idx: int) -> None:
    module = Toggling().double()
    found = assert_same_at_every_cut(module, (features().double(), batch_idx))
    assert not any("requires_grad" in op.name for op in found.trace.operations)
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    traced(module, (features().double(), batch_idx))
    assert all(parameter.requires_grad for parameter in module.parameters()), "a trace changes nothing"


def test_handling_a_custom_function_is_no_operation_of_the_step() -> None:
    """What the mode itself calls meanwhile (sizes, strides) was once taken for more operations, on other twins."""
    handled: list[object] = []

    class Mode(OperationMode):
        def operation(self, function: Any, args: Any, kwargs: Any, run: Any) -> Any:
            handled.append(function)
            args[0].stride(), args[0] * 2
            return run(*args, **kwargs)

    x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with Mode():
        squared, _ = ScaledSquare.apply(x, weight, 2)
        squared.sum()
    assert handled == [ScaledSquare, torch.Tensor.sum]
