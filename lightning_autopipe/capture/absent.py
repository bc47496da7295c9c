"""Absent tensors: shape, dtype, strides, device and `requires_grad`, but no storage.

A stage runs the whole Python of a training step but computes only its own part. What it does not own is an
:class:`AbsentTensor`: model code can ask it for its shape, dtype and (true) device, build masks from them and hand it
on, but nobody can read a value. While a step is traced, operations on absent tensors give absent results, computed by
torch's meta kernels; at any other time an operation on one is an error that names the place where the value lives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lightning_autopipe.core.errors import CaptureError

_META = torch.device("meta")
_SOMEWHERE = "another stage"
_WAY_OUT_OF_HOOKS = (
    " Where a hook or callback did this, let it go through the parameters that this process has: those in the groups "
    "of trainer.optimizers[0]."
)
_computing_shapes = False


class AbsentValueError(CaptureError):
    """The value of a tensor that this process does not hold was needed."""


class AbsentTensor(torch.Tensor):
    """A tensor without storage; `meta` is its twin on the meta device, which carries aliasing between views."""

    meta: torch.Tensor
    home: str

    @staticmethod
    def __new__(
        cls, meta: torch.Tensor, device: torch.device, requires_grad: bool = False, home: str = _SOMEWHERE
    ) -> AbsentTensor:
        result: AbsentTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            layout=meta.layout,
            device=device,
            requires_grad=requires_grad,
        )
        result.meta = meta
        result.home = home
        return result

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.equal.default and not _computing_shapes:
            return args[0] is args[1]  # what looks a parameter up in a list
        if not _computing_shapes and func not in _SHAPELESS:
            raise _value_needed(func, args, kwargs)
        return _run_on_meta(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}', at={self.home})"

    def tolist(self) -> Any:
        """Raises: there are no values."""
        raise _value_needed("Tensor.tolist", (self,), {})

    def numpy(self, *, force: bool = False) -> Any:
        """Raises: there are no values."""
        raise _value_needed("Tensor.numpy", (self,), {})

    def __format__(self, spec: str) -> str:
        if spec:
            raise _value_needed("Tensor.__format__", (self,), {})
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentTensor:
        with computing_shapes(), torch.no_grad():
            copied = self.detach().clone()  # an operation like others, for who records them
        assert isinstance(copied, AbsentTensor)
        copied.home = self.home
        copied.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied._is_param = True
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AbsentValueError(
            f"A tensor of shape {tuple(self.shape)} cannot be saved here: its value is on {self.home}."
        )


# What keeps no value: allowed at any time, so that `detach()`, `requires_grad_()` and moving a module do not fail.
_SHAPELESS = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten._to_copy.default})


def absent_like(tensor: torch.Tensor, home: str, device: torch.device) -> AbsentTensor:
    """Give an absent tensor with the geometry and dtype of `tensor`, said to be on `device`."""
    meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)
    return AbsentTensor(meta, device, home=home)


def is_absent(obj: Any) -> bool:
    """Tell whether `obj` is an absent tensor."""
    return type(obj) is AbsentTensor


@contextlib.contextmanager
def computing_shapes() -> Iterator[None]:
    """Within, operations on absent tensors give absent results; outside they raise :class:`AbsentValueError`."""
    global _computing_shapes
    before, _computing_shapes = _computing_shapes, True
    try:
        yield
    finally:
        _computing_shapes = before


def _value_needed(func: Any, args: Any, kwargs: Any) -> AbsentValueError:
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, AbsentTensor):
            return AbsentValueError(
                f"{func} needs the value of a tensor of shape {tuple(leaf.shape)} that this process does not hold: "
                f"it is on {leaf.home}." + ("" if leaf.home == _SOMEWHERE else _WAY_OUT_OF_HOOKS)
            )
    return AbsentValueError(f"{func} needs a value that this process does not hold.")


def _run_on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one ATen operation on meta twins and wrap what it gives; an input that is given back keeps its identity."""
    twins: dict[int, AbsentTensor] = {}
    device: torch.device | None = None
    home = args[0].home if func in _SHAPELESS else _SOMEWHERE

    def to_meta(leaf: Any) -> Any:
        nonlocal device
        if isinstance(leaf, AbsentTensor):
            twins[id(leaf.meta)] = leaf
            if device is None or (device.type == "cpu" and leaf.dim() > 0):
                device = leaf.device
            return leaf.meta
        if isinstance(leaf, torch.Tensor):
            return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=_META)
        return leaf

    if func is torch.ops.aten.index.Tensor:
        args = _bool_masks_to_indices(args)
    meta_args, meta_kwargs = pytree.tree_map(to_meta, (args, kwargs))
    if meta_kwargs.get("device") is not None:
        device = torch.device(meta_kwargs["device"])
        meta_kwargs["device"] = _META
    meta_kwargs.pop("pin_memory", None)
    try:
        result = _call_on_meta(func, meta_args, meta_kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if _lacks_shapes_alone(func, error):
            result = _shapes_by_running(func, args, kwargs)
        elif isinstance(error, NotImplementedError) or "meta tensor" in str(error).lower():
            raise AbsentValueError(f"{func} depends on the values of a tensor, not on its shape alone.") from error
        else:
            raise

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        known = twins.get(id(leaf))
        if known is not None:
            if torch.Tag.inplace_view in func.tags:
                _change_shape(func, args, kwargs)
            return known
        assert device is not None
        # In inference mode the view of a tensor that was made outside has to be like its base.
        outer = torch.is_inference_mode_enabled() and any(_is_outer_base(t, leaf) for t in twins.values())
        with torch.inference_mode(False) if outer else contextlib.nullcontext():
            return AbsentTensor(leaf, device, home=home)

    return pytree.tree_map(wrap, result)


def _is_outer_base(tensor: AbsentTensor, meta: torch.Tensor) -> bool:
    return not tensor.is_inference() and tensor.meta.untyped_storage()._cdata == meta.untyped_storage()._cdata


def _change_shape(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Let an in-place change of the shape (`transpose_`) act on the absent tensor itself, as it did on its twin."""
    with torch.utils._mode_utils.no_dispatch():
        before = torch._C._meta_in_tls_dispatch_include()
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            func(*args, **kwargs)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)


def _call_on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if torch.are_deterministic_algorithms_enabled():
        # Some shapes are refused for what CUDA's kernel would do; the real operation is asked where it runs.
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        torch._C._set_deterministic_algorithms(False)
        try:
            return _call_on_meta(func, args, kwargs)
        finally:
            torch._C._set_deterministic_algorithms(True, warn_only=warn_only)
    if func is not torch.ops.aten._grouped_mm.default:
        return func(*args, **kwargs)
    # Its meta kernel takes bfloat16 alone, though others run; the shape of the result does not depend on the dtype.
    dtype = kwargs.get("out_dtype") or args[0].dtype
    as_bfloat16 = [a.to(torch.bfloat16) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    return func(*as_bfloat16, **{k: v for k, v in kwargs.items() if k != "out_dtype"}).to(dtype)


def _lacks_shapes_alone(func: Any, error: Exception) -> bool:
    """Tell whether somebody's operation came without a kernel for shapes, though values do not decide on them."""
    by_value = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    return "fake impl" in str(error) and not func._schema.is_mutable and by_value.isdisjoint(func.tags)


def _shapes_by_running(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on zeros of the true sizes; give what the meta kernel would give."""

    def to_zeros(leaf: Any) -> Any:
        if not isinstance(leaf, AbsentTensor):
            return leaf
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device).zero_()

    def to_meta(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=_META)

    real_args, real_kwargs = pytree.tree_map(to_zeros, (args, kwargs))
    return pytree.tree_map(to_meta, func(*real_args, **real_kwargs))


def _bool_masks_to_indices(args: Any) -> Any:
    """`x[mask]` with a real mask: the number of rows is known, though not from shapes alone."""
    tensor, indices = args
    new: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype is torch.bool and not isinstance(index, AbsentTensor):
            new.extend(index.nonzero(as_tuple=True))
        else:
            new.append(index)
    return tensor, new
