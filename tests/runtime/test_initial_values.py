"""Values of tensors that were recorded while a module was built are those of the module built at once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.core.errors import CaptureError
from lightning_autopipe.runtime.initial_values import InitialValues
from lightning_autopipe.runtime.recorded_calls import SMALL, RecordedCall

WIDTH = 64


class AllKinds(nn.Module):
    """What constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True), 2)
        self.recurrent = nn.LSTM(WIDTH, WIDTH)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.embedding = nn.Embedding(100, WIDTH, padding_idx=3)
        self.tied = nn.Linear(WIDTH, 100, bias=False)
        self.tied.weight = self.embedding.weight
        places = torch.arange(2000).unsqueeze(1)
        table = torch.zeros(2000, WIDTH)
        table[:, 0::2] = torch.sin(places * torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(1e4) / WIDTH)))
        self.register_buffer("table", table)
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.read = self.own.norm().item()
        self.written = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            nn.init.trunc_normal_(self.written.weight, std=0.02)
            self.written.weight[0].zero_()
            self.written.weight.data.mul_(2.0)
            self.written.bias.copy_(self.own[0])
        self.assigned = nn.Linear(WIDTH, WIDTH)
        self.assigned.weight.data = torch.rand(WIDTH, WIDTH)
        nn.init.orthogonal_(self.assigned.weight[:32])
        with torch.device("meta"):
            self.without = nn.Linear(WIDTH, WIDTH)
        self.without.to_empty(device="cpu")
        nn.init.kaiming_normal_(self.without.weight, generator=torch.Generator().manual_seed(3))
        nn.init.zeros_(self.without.bias)
        self.small = nn.Linear(4, 4)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 50, "n_positions": 32, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


@pytest.mark.parametrize("make", [AllKinds, gpt2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_later_draws_are_those_of_the_module_built_at_once(make: Any, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(3)
        plain, draw = make(), torch.rand(3)
        torch.manual_seed(3)
        values = InitialValues()
        with values.recording():
            module = make()
        assert torch.equal(torch.rand(3), draw)
    finally:
        torch.set_default_dtype(torch.float32)
    expected = plain.state_dict(keep_vars=True)
    found = module.state_dict(keep_vars=True)
    assert found.keys() == expected.keys()
    recorded = {name for name, tensor in found.items() if is_absent(tensor)}
    assert recorded >= {name for name, tensor in expected.items() if tensor.numel() >= SMALL}
    alone = {name: values.compute([found[name]])[0] for name in recorded}
    together = dict(zip(recorded, values.compute([found[name] for name in recorded]), strict=True))
    for name, tensor in expected.items():
        for value in (alone.get(name, found[name]), together.get(name, found[name])):
            assert torch.equal(value, tensor), name
            assert value.dtype == tensor.dtype, name
            assert value.stride() == tensor.stride(), name
        assert found[name].requires_grad == tensor.requires_grad
    if make is AllKinds:
        assert module.read == plain.read


def test_pretrained_values_are_taken_from_where_they_are(tmp_path: Path) -> None:
    pretrained = nn.Linear(WIDTH, WIDTH)
    torch.save(pretrained.state_dict(), tmp_path / "net.pt")
    values = InitialValues()
    with values.recording():
        module = nn.Linear(WIDTH, WIDTH)
        module.load_state_dict(torch.load(tmp_path / "net.pt", mmap=True))
    assert torch.equal(values.compute([module.weight])[0], pretrained.weight)
    assert torch.equal(module.bias, pretrained.bias)
    assert len(values._needed([module.weight.meta])) == 3, "what is overwritten is not made"


def test_given_values_must_stay_as_they_are() -> None:
    given, values = torch.ones(WIDTH, WIDTH), InitialValues()
    with values.recording():
        module = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            module.weight.copy_(given)
    given.add_(1.0)
    with pytest.raises(CaptureError, match="was written afterwards"):
        values.compute([module.weight])


def test_computing_makes_no_more_than_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = InitialValues()
    with values.recording():
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    made: list[Tensor] = []
    run = RecordedCall.run
    monkeypatch.setattr(RecordedCall, "run", lambda call, real: made.extend(out := run(call, real)) or out)
    values.compute([module[5].weight])
    assert len({tensor.untyped_storage().data_ptr() for tensor in made}) == 1
