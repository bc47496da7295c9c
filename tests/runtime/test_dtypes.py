"""Values cross in the dtype in which one device hands them on."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.runtime.pipelines import apart, run_apart

WIDTH = 8
NUM_SAMPLES = 6


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch).tanh()
        return F.mse_loss(batch.float(), torch.ones_like(batch, dtype=torch.float32))


@pytest.mark.parametrize(
    ("parameters", "autocast", "num_bytes"),
    [
        (torch.float32, None, 4),
        (torch.float64, None, 8),
        (torch.bfloat16, None, 2),
        (torch.float16, None, 2),
        (torch.float32, torch.bfloat16, 2),
        (torch.float32, torch.float16, 2),
    ],
)
def test_bytes_that_cross(parameters: torch.dtype, autocast: torch.dtype | None, num_bytes: int) -> None:
    module, batch = Chain().to(parameters), torch.randn(NUM_SAMPLES, WIDTH).to(parameters)
    context: Any = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
    with context:
        pipelines = apart(module, (batch, 0), num_stages=3, num_microbatches=3)
        run_apart(pipelines, batch)
    one_value = NUM_SAMPLES * WIDTH * num_bytes
    assert [pipeline.runner.sent_bytes for pipeline in pipelines] == [
        (one_value, 0),
        (one_value, one_value),
        (0, one_value),
    ]
