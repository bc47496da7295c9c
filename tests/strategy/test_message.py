from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_autopipe import BatchError
from lightning_autopipe.strategy.message import pack, unpack

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Sample:
    ids: Tensor
    name: str


def send(value: Any) -> Any:
    message = pack(value)
    assert message.dtype is torch.uint8
    return unpack(message, CPU)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.arange(6).view(2, 3), id="int64"),
        pytest.param(torch.tensor(1.5), id="scalar"),
        pytest.param(torch.zeros(0, 3), id="empty"),
        pytest.param(torch.tensor([True, False]), id="bool"),
        pytest.param(torch.randn(3, dtype=torch.bfloat16), id="bfloat16"),
        pytest.param(torch.randn(2, dtype=torch.complex64), id="complex"),
        pytest.param(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), id="channels last"),
        pytest.param(torch.randn(4, 3).t(), id="transposed"),
        pytest.param(torch.randn(10)[::2], id="with gaps"),
        pytest.param(torch.randn(3).expand(2, 3), id="expanded"),
        pytest.param(torch.randn(2, dtype=torch.complex64).conj(), id="conjugated"),
        pytest.param(torch.randn(3, requires_grad=True), id="requires grad"),
    ],
)
def test_tensors(tensor: Tensor) -> None:
    received = send(tensor)
    assert torch.equal(received, tensor)
    assert received.dtype is tensor.dtype
    assert received.requires_grad == tensor.requires_grad
    if tensor.is_contiguous(memory_format=torch.channels_last) and tensor.ndim == 4:
        assert received.stride() == tensor.stride()


def test_structures() -> None:
    value = {
        "list": [torch.ones(2), "text", None],
        "pair": Pair(torch.zeros(1), 3),
        "sample": Sample(torch.arange(3), "a"),
        "ordered": OrderedDict(b=1, a=torch.tensor(2)),
    }
    received = send(value)
    assert received["list"][1:] == ["text", None]
    assert type(received["pair"]) is Pair
    assert received["sample"].name == "a"
    assert torch.equal(received["sample"].ids, torch.arange(3))
    assert list(received["ordered"]) == ["b", "a"]


def test_what_aliases_and_what_does_not() -> None:
    shared = torch.ones(3)
    received = send([shared, shared, torch.ones(3)])
    assert received[0] is received[1]
    storages = {tensor.untyped_storage().data_ptr() for tensor in received}
    assert len(storages) == 2
    base = torch.arange(4.0)
    left, right = send([base[:2], base[2:]])
    assert left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr()
    assert left.untyped_storage().nbytes() == 8


def test_special_tensors_pickle_themselves() -> None:
    sparse = torch.eye(3).to_sparse()
    parameter = torch.nn.Parameter(torch.ones(2))
    received = send([sparse, parameter])
    assert torch.equal(received[0].to_dense(), torch.eye(3))
    assert isinstance(received[1], torch.nn.Parameter)


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(BatchError, match=r"type dict cannot be sent .* picklable"):
        pack({"function": lambda: None})
