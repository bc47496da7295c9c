from __future__ import annotations

import copy

import pytest
import torch

from lightning_autopipe.capture.absent import AbsentTensor, AbsentValueError, absent_like, computing_shapes, is_absent

CPU = torch.device("cpu")


def absent(*shape: int, dtype: torch.dtype = torch.float32) -> AbsentTensor:
    return absent_like(torch.empty(*shape, dtype=dtype), "stage 3", CPU)


def test_it_has_everything_but_values() -> None:
    tensor = absent_like(torch.empty(4, 3, dtype=torch.bfloat16).t(), "stage 3", torch.device("cuda", 1))
    assert is_absent(tensor)
    assert tensor.shape == (3, 4)
    assert tensor.stride() == (1, 3)
    assert tensor.dtype is torch.bfloat16
    assert tensor.device == torch.device("cuda", 1)
    assert not tensor.requires_grad
    assert tensor.requires_grad_().requires_grad
    assert "stage 3" in repr(tensor)


def test_a_lookup_finds_a_placeholder() -> None:
    """Lightning looks parameters up in an optimizer's with `torch.equal`."""
    first, second = absent(2), absent(2)
    assert torch.equal(first, first)
    assert not torch.equal(first, second)
    assert not torch.equal(first, torch.zeros(2))


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t + 1,
        lambda t: t.sum(),
        lambda t: t[0],
        lambda t: t.tolist(),
        lambda t: t.numpy(),
        lambda t: t.clone(),
        lambda t: bool(t[0] > 0),
        lambda t: t.zero_(),
    ],
)
def test_a_read_names_the_place_of_the_value(read: object) -> None:
    with pytest.raises(AbsentValueError, match=r"shape \(2,\).*it is on stage 3\. .*in the groups of trainer"):
        read(absent(2))  # type: ignore[operator]


def test_detached_and_moved_it_stays_absent_and_keeps_its_place() -> None:
    for other in (absent(2).detach(), absent(2).double(), copy.deepcopy(absent(2)), absent(2).data):
        assert is_absent(other)
        assert "stage 3" in repr(other)


def test_operations_give_shapes_devices_and_graphs() -> None:
    weight = absent(3, 4).requires_grad_()
    with computing_shapes():
        out = (torch.ones(2, 4) @ weight.t()).relu_().sum(1, keepdim=True).half()
        assert is_absent(out)
        assert out.shape == (2, 1)
        assert out.dtype is torch.float16
        assert out.device == CPU
        assert out.requires_grad
        assert out.grad_fn is not None
    with pytest.raises(AbsentValueError):
        out + 1


def test_writes_give_the_same_object_and_views_share() -> None:
    with computing_shapes():
        tensor = absent(3, 4)
        row = tensor[1]
        assert row.add_(1) is row
        assert row.meta.untyped_storage()._cdata == tensor.meta.untyped_storage()._cdata
        assert tensor.clone().meta.untyped_storage()._cdata != tensor.meta.untyped_storage()._cdata


@pytest.mark.parametrize("read", [lambda t: t.item(), bool, lambda t: t.nonzero(), lambda t: [1, 2][t.long()]])
def test_values_are_refused_while_shapes_are_computed(read: object) -> None:
    with computing_shapes(), pytest.raises(AbsentValueError):
        read(absent(1)[0])  # type: ignore[operator]


def test_a_mask_of_the_batch_gives_a_known_number_of_rows() -> None:
    with computing_shapes():
        assert absent(4, 3)[torch.tensor([True, False, True, True])].shape == (3, 3)


def test_it_cannot_be_saved() -> None:
    with pytest.raises(AbsentValueError, match=r"cannot be saved.*stage 3"):
        copy.copy(absent(2))


def test_shapes_do_not_depend_on_what_is_deterministic_elsewhere() -> None:
    """torch computes shapes of `histc` on the CPU, which is deterministic, as if it ran on CUDA, where it is not."""
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        with computing_shapes():
            assert torch.histc(absent(6), bins=4, min=0, max=3).shape == (4,)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
