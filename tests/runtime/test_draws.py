"""Random draws do not depend on the number of stages: not for other shapes, nor for other paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.runtime.pipelines import assert_close, assert_identical, make_pipeline, run_pipelines

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.dropout(self.up(x).relu(), 0.3)), 0.3)


class SkipsBlocks(nn.Module):
    """A draw decides which of the later blocks are left out; the first ones are always run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.ModuleList(Block() for _ in range(3))
        self.later = nn.ModuleList(Block() for _ in range(2))
        self.end = Block()
        self.double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.first:
            batch = block(batch)
        for block in self.later:
            if float(torch.rand([])) > 0.5:
                batch = block(batch)
        return self.end(batch).square().mean()


class Lengths(nn.Module):
    """Long inputs take another layer at the beginning."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shorten = Block()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch.shape[1] > 4:
            batch = self.shorten(batch)[:, ::2]
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()


def data(length: int) -> Tensor:
    return torch.randn(8, length, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_other_shapes(num_stages: int) -> None:
    module, lengths = Lengths(), (6, 4)
    cut, uncut = (
        make_pipeline(module, (data(lengths[0]), 0), num_stages=stages, num_microbatches=2)
        for stages in (num_stages, 1)
    )
    for step, length in enumerate(lengths):
        reference = run_pipelines([uncut], [data(length)], step=step)
        # Not to the bit: shortened values cross without the gaps between them, and some CPUs' kernels sum what has gaps
        # in another order.
        assert_close(run_pipelines([cut], [data(length)], step=step), reference)


@pytest.mark.parametrize("cut_points", [[2], [3], [2, 4]])
def test_other_paths(cut_points: list[int]) -> None:
    module, batch = SkipsBlocks(), data(4)
    options: dict[str, Any] = {"num_microbatches": 2}
    uncut = make_pipeline(module, (batch, 0), num_stages=1, **options)
    cut = make_pipeline(module, (batch, 0), num_stages=len(cut_points) + 1, partition=cut_points, **options)
    losses = set()
    for step in range(6):
        reference = run_pipelines([uncut], [batch], step=step)
        assert_identical(run_pipelines([cut], [batch], step=step), reference)
        losses.add(float(reference.loss))
    assert len(losses) == 6
