"""What a step returns, joined over its micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_autopipe.core.errors import PipelineRuntimeError


def join_outputs(outputs: Sequence[Any], *, sizes: Sequence[int], weights: Sequence[float]) -> Any:
    """One output for the whole batch out of one for each micro-batch.

    Tensors whose first dimension is the micro-batch's samples are joined, and so are lists with one entry a sample;
    0-dim tensors and floats are averaged by weight; containers are joined part by part; what is the same in every
    micro-batch stays; anything else becomes a list by micro-batch.

    Args:
        outputs: By micro-batch.
        sizes: Samples by micro-batch.
        weights: Weight by micro-batch, for averages; all 0 counts as all alike.
    """
    if len(outputs) == 1:
        return outputs[0]
    return _Join(sizes=sizes, weights=weights).join(list(outputs))


class _Join:
    def __init__(self, *, sizes: Sequence[int], weights: Sequence[float]) -> None:
        self._sizes = list(sizes)
        total = sum(weights)
        self._shares = [weight / total for weight in weights] if total else [1 / len(weights)] * len(weights)

    def join(self, parts: list[Any]) -> Any:
        first = parts[0]
        if any(type(part) is not type(first) for part in parts):
            return parts
        if isinstance(first, Tensor):
            return self._join_tensors(parts)
        if isinstance(first, float):
            return self._average(parts)
        if isinstance(first, Mapping):
            return self._join_mappings(parts)
        if dataclasses.is_dataclass(first):
            names = [field.name for field in dataclasses.fields(first)]
            joined = {name: self.join([getattr(part, name) for part in parts]) for name in names}
            return _rebuild(lambda: dataclasses.replace(first, **joined), parts)  # type: ignore[type-var]
        if isinstance(first, tuple):
            if any(len(part) != len(first) for part in parts):
                return parts
            members = [self.join(list(column)) for column in zip(*parts, strict=True)]
            is_named = hasattr(first, "_fields")
            return _rebuild(lambda: type(first)(*members) if is_named else type(first)(members), parts)
        if isinstance(first, list):
            return self._join_lists(parts)
        return first if _are_equal(parts) else parts

    def _join_tensors(self, parts: list[Tensor]) -> Any:
        first = parts[0]
        if all(part.ndim == 0 for part in parts):
            return self._average_tensors(parts)
        holds_samples = all(part.ndim and part.shape[0] == size for part, size in zip(parts, self._sizes, strict=True))
        if holds_samples and all(part.shape[1:] == first.shape[1:] for part in parts):
            return torch.cat(parts)
        return parts

    def _average_tensors(self, parts: list[Tensor]) -> Tensor:
        dtype = parts[0].dtype if parts[0].is_floating_point() or parts[0].is_complex() else torch.get_default_dtype()
        # A part of no weight counts for nothing, also where it is NaN.
        counted = [(part.double() if not part.is_complex() else part) * share for part, share in self._weighted(parts)]
        return torch.stack(counted).sum(0).to(dtype)

    def _average(self, parts: list[float]) -> float:
        if _are_equal(parts):
            return parts[0]
        return float(sum(part * share for part, share in self._weighted(parts)))

    def _weighted(self, parts: list[Any]) -> list[tuple[Any, float]]:
        return [(part, share) for part, share in zip(parts, self._shares, strict=True) if share]

    def _join_mappings(self, parts: list[Any]) -> Any:
        first = parts[0]
        if any(part.keys() != first.keys() for part in parts):
            return parts
        joined = {key: self.join([part[key] for part in parts]) for key in first}
        if type(first) is dict:
            return joined
        return _rebuild(lambda: type(first)(**joined), parts, lambda: type(first)(joined), lambda: joined)

    def _join_lists(self, parts: list[Any]) -> Any:
        first = parts[0]
        holds_samples = all(len(part) == size for part, size in zip(parts, self._sizes, strict=True))
        same_length = all(len(part) == len(first) for part in parts)
        if same_length and not first:
            return []
        if same_length:
            members = [self.join(list(column)) for column in zip(*parts, strict=True)]
            # A list of batched tensors (hidden states, say) may be as long as the micro-batch by chance.
            if not holds_samples or all(isinstance(member, Tensor) and member.ndim for member in members):
                return members
        return [member for part in parts for member in part] if holds_samples else parts


def _rebuild(build: Callable[[], Any], parts: list[Any], *others: Callable[[], Any]) -> Any:
    for attempt in (build, *others):
        try:
            return attempt()
        except (TypeError, ValueError):
            continue
    return parts


def _are_equal(parts: list[Any]) -> bool:
    try:
        return all(bool(part == parts[0]) for part in parts)
    except Exception:  # whatever the user's type does when it is compared
        return False


class ElsewhereValue:
    """Stands, on the other stages, for a value that only the last stage has; any use of it explains that."""

    def __init__(self, path: str) -> None:
        object.__setattr__(self, "_path", path)

    def _explain(self, *_: Any, **__: Any) -> NoReturn:
        raise PipelineRuntimeError(
            f"the step's output{self._path} is on the last stage of each pipeline (global rank 0 is one), not here: "
            "other stages get the loss and 0-dim values only. Use it where trainer.is_global_zero is True, or log it."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:
        found = next((value for value in _flatten(args) if isinstance(value, ElsewhereValue)), ElsewhereValue(""))
        found._explain()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # protocols (copy, pickle, numpy) ask for these and go on without
        self._explain()

    __setattr__ = __getitem__ = __setitem__ = __iter__ = __len__ = __bool__ = __float__ = __int__ = _explain
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _explain
    __matmul__ = __rmatmul__ = __pow__ = __lt__ = __le__ = __gt__ = __ge__ = __abs__ = __array__ = _explain

    def __repr__(self) -> str:
        return f"ElsewhereValue({self._path!r})"

    def __reduce__(self) -> tuple[type[ElsewhereValue], tuple[str]]:
        return ElsewhereValue, (self._path,)


def for_other_stages(output: Any, path: str = "") -> Any:
    """A step's output as other stages get it: numbers and 0-dim tensors, each of the rest an `ElsewhereValue`."""
    if isinstance(output, Tensor):
        return output.detach().cpu() if output.ndim == 0 else ElsewhereValue(path)
    if output is None or isinstance(output, (bool, int, float, str)):
        return output
    if isinstance(output, Mapping):
        return {key: for_other_stages(value, f"{path}[{key!r}]") for key, value in output.items()}
    if type(output) in (list, tuple):
        return type(output)(for_other_stages(value, f"{path}[{index}]") for index, value in enumerate(output))
    return ElsewhereValue(path)


def _flatten(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for member in value for leaf in _flatten(member)]
    return [value]
