"""Every cut: loss, gradients, outputs and buffers stay what they are uncut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.capture import models
from tests.capture.models import DOUBLE, features, token_ids
from tests.capture.support import assert_same_at_every_cut

CASES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "getters": lambda: (models.Getters(), features()),
    "written tensors": lambda: (models.WrittenTensors(), features()),
    "in place": lambda: (models.InPlace(), features()),
    "aliases": lambda: (models.Aliases(), features()),
    "custom functions": lambda: (models.CustomFunctions(), features()),
    "checkpoint": lambda: (models.Checkpointed(use_reentrant=False), features()),
    "checkpoint, reentrant": lambda: (models.Checkpointed(use_reentrant=True), features()),
    "auxiliary losses": lambda: (models.AuxiliaryLosses(), features()),
    "hooks": lambda: (models.Hooks(), features()),
    "shared parts": lambda: (models.SharedParts(), token_ids()),
    "random parts": lambda: (models.RandomParts(), features()),
    "LayerDrop by torch": lambda: (models.LayerDrop(by_python=False), features()),
    "LayerDrop by Python": lambda: (models.LayerDrop(by_python=True), features()),
    "containers": lambda: (
        models.Containers(),
        {
            "sample": models.Sample(features(), {"x": []}),
            "rest": (models.Pair(features(), features()), [1, 2, 3]),
        },
    ),
    "masked indexing": lambda: (models.MaskedIndexing(), features()),
    "written buffers": lambda: (models.WrittenBuffers(), features()),
    "written parameters": lambda: (models.WrittenParameters(), features()),
    "U-Net": lambda: (
        models.Unet(),
        (torch.randn(2, 3, 8, 8, dtype=DOUBLE), torch.randn(2, 1, 8, 8, dtype=DOUBLE)),
    ),
    "LSTM": lambda: (models.Sequence(nn.LSTM(8, 8, 2, batch_first=True, dropout=0.2)), token_ids()),
    "GRU": lambda: (models.Sequence(nn.GRU(8, 8, batch_first=True)), token_ids()),
    "TransformerEncoder": lambda: (
        models.Sequence(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)),
        token_ids(),
    ),
    "weight and spectral norm": lambda: (models.Normalised(), features()),
}

# Where a parameter is used at three places its gradients are summed in another order when they are apart.
TOLERANCES = {"checkpoint": 1e-12, "checkpoint, reentrant": 1e-12}


@pytest.mark.parametrize("name", CASES)
def test_every_cut(name: str) -> None:
    torch.manual_seed(0)
    module, batch = CASES[name]()
    found = assert_same_at_every_cut(module.double(), (batch, 0), tolerance=TOLERANCES.get(name, 0.0))
    assert len(found.layer_cuts) >= (1 if name == "masked indexing" else 2)
