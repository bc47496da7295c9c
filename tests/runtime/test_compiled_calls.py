"""What is given to `torch.compile`, compiled within stages."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from lightning_autopipe.capture.compiled_calls import Compilation
from lightning_autopipe.capture.records import STEP
from tests.runtime.pipelines import Run, assert_close, make_pipeline, run_pipelines, run_plain
from tests.strategy.compiled_modules import Block, counting, num_graphs
from tests.strategy.modules import WIDTH

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, of what it compiles
BATCH = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Blocks(nn.Module):
    """Residual blocks, with dropout in each where a rate is given."""

    def __init__(self, dropout: float | None = None) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(None if dropout is None else nn.Dropout(dropout)) for _ in range(8)))
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.blocks(batch)).square().mean()


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """As the strategy has it: nothing is compiled but what a pipeline compiles."""
    torch._dynamo.reset()
    num_graphs()
    with torch.compiler.set_stance("force_eager"):
        yield


def module(**options: Any) -> Blocks:
    torch.manual_seed(0)
    return Blocks(**options).double()


def run(blocks: nn.Module, *, num_stages: int, step: int = 0, **options: Any) -> tuple[Run, dict[str, str]]:
    """One step of a module that is compiled as a whole; gives what was told as well."""
    told: dict[str, str] = {}
    pipeline = make_pipeline(blocks, (BATCH, 0), num_stages=num_stages, num_microbatches=3, **options)
    pipeline.store.compilation = Compilation(
        compilers={STEP: torch.compile(nn.Identity(), backend=counting).dynamo_ctx},
        allowed=lambda: torch.compiler.set_stance("default"),
        tell=told.update,
    )
    return run_pipelines([pipeline], [BATCH], step=step), told


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_what_lies_within_a_stage_is_compiled(num_stages: int, schedule: str) -> None:
    blocks = module()
    compiled, told = run(blocks, num_stages=num_stages, schedule=schedule)
    assert num_graphs() > 0
    assert not told
    assert_close(compiled, run_plain(blocks, BATCH))


def test_draws_depend_on_the_layer_and_neither_on_stages_nor_on_what_ran_before() -> None:
    blocks = module(dropout=0.5)
    (whole, told), (again, _), (cut, _) = (run(copy.deepcopy(blocks), num_stages=n) for n in (1, 1, 3))
    assert num_graphs() > 0
    assert list(told) == ["blocks.0"], "it is two layers; the others are one each"
    assert "several layers" in told["blocks.0"]
    assert_close(again, whole)
    assert_close(cut, whole)
    other, _ = run(blocks, num_stages=1, step=1)
    assert not torch.allclose(other.loss, whole.loss)
