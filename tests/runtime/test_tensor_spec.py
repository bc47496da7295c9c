from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_autopipe.core.errors import PipelineRuntimeError
from lightning_autopipe.runtime.tensor_spec import SpecBook, TensorSpec, as_bytes, decode_specs, encode_specs
from lightning_autopipe.runtime.transport import SignatureTable

BASE = torch.arange(24.0).reshape(2, 3, 4)

TENSORS = {
    "contiguous": BASE,
    "permuted": BASE.permute(2, 0, 1),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with gaps": BASE[:, :, ::2],
    "split": BASE.transpose(0, 2)[1:3],
    "expanded": BASE[:1].expand(5, 3, 4),
    "0-dim": torch.tensor(3),
    "no elements": BASE[:0],
    "no elements, permuted": BASE[:, :0].permute(2, 1, 0),
    "one element": BASE[:1, 1:2, 2:3],
    "bool": BASE > 3,
    "complex": torch.complex(BASE, BASE + 1),
    "conjugated": torch.complex(BASE, BASE + 1).conj(),
    "negated": torch.complex(BASE, BASE + 1).conj().imag,
    "bfloat16": BASE.bfloat16(),
    "half": BASE.half(),
    "int8": BASE.to(torch.int8),
    "requires grad": BASE.clone().requires_grad_(),
    "parameter": nn.Parameter(BASE),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_a_tensor_comes_out_as_its_copy(tensor: Tensor) -> None:
    spec = TensorSpec.of(tensor)
    assert decode_specs(encode_specs([spec, spec])) == (spec, spec)
    target = spec.empty(torch.device("cpu"))
    as_bytes(target).copy_(as_bytes(tensor))
    assert as_bytes(tensor).dtype is torch.uint8
    assert as_bytes(tensor).numel() == spec.num_bytes
    assert torch.equal(target, tensor.detach())
    copy = tensor.detach().resolve_conj().resolve_neg().clone()
    assert (target.dtype, target.stride()) == (copy.dtype, copy.stride())
    assert spec.requires_grad == tensor.requires_grad


def test_dense_memory_is_not_copied() -> None:
    assert as_bytes(BASE.permute(2, 0, 1)).data_ptr() == BASE.data_ptr()
    assert as_bytes(BASE[1:]).data_ptr() == BASE[1:].data_ptr()


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.empty(3, device="meta"), "meta device"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "NestedTensor"),
    ],
)
def test_what_has_no_plain_memory_cannot_cross(tensor: Tensor, reason: str) -> None:
    with pytest.raises(PipelineRuntimeError, match=f"cannot cross.*{reason}"):
        TensorSpec.of(tensor)


def test_a_book_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpecBook, "MAX_SIGNATURES", 2)
    book, specs = SpecBook(), (TensorSpec.of(BASE),)
    for signature in "abc":
        book.add(signature, specs)
    assert [book.get(signature) is None for signature in "abc"] == [True, False, False]


def test_a_table_has_one_signature_for_a_key_and_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SignatureTable, "MAX_SIGNATURES", 2)
    table = SignatureTable()
    first = table.signature((1, "a"))
    assert table.signature((1, "a")) is first
    assert table.signature((1, "b")) is not first
    table.signature((1, "c"))
    assert len(table) == 1
    assert table.signature((1, "a")) is not first


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ((), "0 values instead of 1"),
        ((BASE.double(),), "value 0 is float64"),
        ((BASE[:1],), r"\[1, 3, 4\]"),
        ((BASE.permute(0, 2, 1).contiguous().permute(0, 2, 1),), r"stride \[12, 1, 3\]"),
        ((BASE.clone().requires_grad_(),), "requires_grad, it was .* no grad"),
    ],
)
def test_a_book_tells_what_differs(other: tuple[Tensor, ...], difference: str) -> None:
    book = SpecBook()
    book.add("shape", (TensorSpec.of(BASE),))
    book.check("shape", (BASE.clone(),))
    with pytest.raises(PipelineRuntimeError, match=f"signature 'shape'.*{difference}"):
        book.check("shape", other)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(()), True),
        (torch.zeros(2, 1, 3)[:, :, :], True),
        (torch.zeros(3, 2).T, False),
        (torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last), False),
        (torch.zeros(2, dtype=torch.bool), False),
        (torch.zeros(2, dtype=torch.complex64), False),
        (torch.zeros(3, 1).T, True),
    ],
)
def test_what_is_contiguous_and_of_a_common_dtype_is_sent_as_it_is(tensor: torch.Tensor, expected: bool) -> None:
    spec = TensorSpec.of(tensor)
    assert spec.is_sent_as_it_is is expected
    assert spec.num_bytes == tensor.nbytes
    assert spec.is_sent_as_it_is <= spec.empty(torch.device("cpu")).is_contiguous()
