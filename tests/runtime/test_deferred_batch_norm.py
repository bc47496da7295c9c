"""Row 5: running statistics of batch normalization, per micro-batch and deferred to the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_autopipe.runtime.batch_norm_moments import combined, moments_of
from lightning_autopipe.runtime.deferred_batch_norm import BatchNormStatistics
from tests.runtime.pipelines import Run, assert_close, fresh, make_pipeline, run_pipelines, run_plain

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Convolutional(nn.Module):
    """conv-BN-conv of any dimension; `checkpointed` recomputes the middle."""

    def __init__(self, *, dims: int = 2, checkpointed: bool | None = None, **options: Any) -> None:
        super().__init__()
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
        self.first = convolution(2, 4, 3)
        self.norm = norm(4, **options)
        self.last = nn.Sequential(convolution(4, 3, 3), nn.ReLU(), convolution(3, 2, 1))
        self.checkpointed = checkpointed

    def middle(self, h: Tensor) -> Tensor:
        return self.norm(h).relu()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = self.first(batch)
        if self.checkpointed is None:
            h = self.middle(h)
        else:
            h = checkpoint(self.middle, h, use_reentrant=self.checkpointed)
        return self.last(h).square().mean()


class Dense(nn.Module):
    """Two-dimensional inputs; one layer called three times, one without parameters, one frozen, one without memory."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.on_inputs = nn.BatchNorm1d(4, affine=False, **options)
        self.shared = nn.BatchNorm1d(4, **options)
        self.frozen = nn.BatchNorm1d(4, **options).eval()
        self.forgetful = nn.BatchNorm1d(4, track_running_stats=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = self.layers[0](self.on_inputs(batch))
        h = self.shared(self.shared(self.layers[1](self.shared(h)).relu()))
        h = self.forgetful(self.layers[2](self.frozen(h)))
        return self.layers[3](h).square().mean()


def seeded(make: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return make(**options).double()


def images(num_samples: int, dims: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return 3 + torch.randn(num_samples, 2, *[7] * dims, generator=generator, dtype=torch.float64)


def statistics(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def run(module: Any, batch: Any, *, deferred: bool, num_stages: int, num_microbatches: int = 4, steps: int = 2) -> Run:
    """Steps of one pipeline in this process."""
    pipeline = make_pipeline(
        module,
        (batch, 0),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        batch_norm=BatchNormStatistics(module, deferred=deferred),
    )
    for step in range(steps):
        result = run_pipelines([pipeline], [batch], step=step)
    assert not any("forward" in vars(submodule) for submodule in module.modules())
    return result


def run_whole(module: Any, batch: Any, steps: int = 2) -> None:
    for _ in range(steps):
        run_plain(module, batch)


def run_in_a_row(module: Any, batch: Any, num_microbatches: int = 4, steps: int = 2) -> None:
    for _ in range(steps):
        for microbatch in batch.chunk(num_microbatches):
            run_plain(module, microbatch)


def assert_same_statistics(module: nn.Module, expected: nn.Module) -> None:
    for name, buffer in statistics(expected).items():
        torch.testing.assert_close(module.get_buffer(name), buffer, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("checkpointed", [None, True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_per_micro_batch(num_stages: int, checkpointed: bool | None, momentum: float | None) -> None:
    """As a loop over the micro-batches; recomputation adds nothing to it."""
    plain = seeded(Convolutional, momentum=momentum)
    run_in_a_row(plain, images(8))
    module = seeded(Convolutional, checkpointed=checkpointed, momentum=momentum)
    run(module, images(8), deferred=False, num_stages=num_stages)
    assert_same_statistics(module, plain)
    assert module.norm.num_batches_tracked == 8


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("checkpointed", [None, True, False])
@pytest.mark.parametrize("num_samples", [8, 11])
def test_deferred(num_stages: int, checkpointed: bool | None, num_samples: int) -> None:
    """As one pass over the whole batch; gradients are still those of micro-batches."""
    plain = seeded(Convolutional)
    run_whole(plain, images(num_samples))
    module, per_microbatch = seeded(Convolutional, checkpointed=checkpointed), seeded(Convolutional)
    result = run(module, images(num_samples), deferred=True, num_stages=num_stages)
    assert_same_statistics(module, plain)
    assert module.norm.num_batches_tracked == 2
    assert_close(result, run(per_microbatch, images(num_samples), deferred=False, num_stages=1))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_deferred_in_any_dimension_with_any_momentum(dims: int, momentum: float | None) -> None:
    plain = seeded(Convolutional, dims=dims, momentum=momentum)
    run_whole(plain, images(8, dims), steps=3)
    module = seeded(Convolutional, dims=dims, momentum=momentum)
    run(module, images(8, dims), deferred=True, num_stages=3, steps=3)
    assert_same_statistics(module, plain)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_deferred_over_several_calls(num_stages: int, momentum: float | None) -> None:
    """One update per call, in order. What the later calls see depends on how the earlier ones normalize."""
    batch = torch.randn(12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    module, single = seeded(Dense, momentum=momentum), seeded(Dense, momentum=momentum)
    before = statistics(module)
    calls: list[Tensor] = []
    with torch.no_grad():
        for microbatch in batch.chunk(4):
            probe = fresh(single)
            probe.shared.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0]))
            probe.training_step(microbatch, 0)
        single.on_inputs(batch)
        for index in range(3):
            single.shared(torch.cat(calls[index::3]))
    run(module, batch, deferred=True, num_stages=num_stages, steps=1)
    assert module.shared.num_batches_tracked == 3
    assert_same_statistics(module, single)
    for name in STATISTICS:
        assert torch.equal(module.get_buffer(f"frozen.{name}"), before[f"frozen.{name}"])


def test_evaluation_leaves_the_statistics_alone() -> None:
    module = seeded(Convolutional)
    pipeline = make_pipeline(
        module,
        (images(8), 0),
        num_stages=2,
        num_microbatches=4,
        batch_norm=BatchNormStatistics(module, deferred=True),
    )
    before = statistics(module)
    module.eval()
    with torch.no_grad():
        pipeline.run("training_step", (images(8), 0), {}, training=False, step=0)
    module.train()
    for name, buffer in before.items():
        assert torch.equal(module.get_buffer(name), buffer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deferred_statistics_are_combined_in_float64(dtype: torch.dtype) -> None:
    """Means that are large beside the deviations, of which half precision keeps nothing."""
    samples = (100 + torch.randn(64, 3, generator=torch.Generator().manual_seed(2))).to(dtype)
    _, mean, squares = combined([moments_of(part) for part in samples.split([3, 30, 31])])
    expected = samples.double()
    torch.testing.assert_close(mean, expected.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(squares / 63, expected.var(0), rtol=1e-4, atol=0)
    assert mean.dtype is torch.float64
