"""Splitting a batch into micro-batches: which leaves, along which dimension, into which sizes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_autopipe.capture import tree
from lightning_autopipe.core.errors import BatchError

# Tells whether the step runs on these arguments, and which tensors' values it reads (their `id`s); None where it fails.
Probe = Callable[[Any], "frozenset[int] | None"]
_MAX_PROBES = 64
_SCALARS = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """For each leaf that is split, its dimension; all other leaves go whole to every micro-batch."""

    dims: Mapping[tree.LeafPath, int]

    def batch_size(self, batch: Any) -> int:
        """Give the number of samples of a batch, 1 where nothing is split.

        Raises:
            BatchError: the split leaves disagree.
        """
        sizes = {path: _size(tree.get(batch, path), dim) for path, dim in self.dims.items()}
        if len(set(sizes.values())) > 1:
            told = ", ".join(f"{_told(path)}: {size}" for path, size in sizes.items())
            raise BatchError(
                f"The batch's leaves have different numbers of samples ({told}). Each must have one entry a sample; "
                "name the leaves that are no samples with split_batch={...: None}. Where they come from several "
                "loaders, give these one batch_size, and drop_last=True."
            )
        return next(iter(sizes.values()), 1)

    def split(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Give one batch for each size; the sizes sum up to the batch size. What is split is copied.

        Views would share one version counter: a step that writes into its batch would spoil the graphs of the others.
        """
        if len(sizes) == 1:
            return [batch]
        pieces = {path: _split_leaf(tree.get(batch, path), dim, sizes) for path, dim in self.dims.items()}
        return [_replace(batch, {path: piece[index] for path, piece in pieces.items()}) for index in range(len(sizes))]


def microbatch_sizes(batch_size: int, num_microbatches: int, *, min_samples: int = 1) -> tuple[int, ...]:
    """Give sizes as even as they can be, larger ones first; fewer micro-batches where there are fewer samples.

    None has fewer than `min_samples`, as far as there are so many.
    """
    count = max(1, min(num_microbatches, batch_size // min_samples))
    base, larger = divmod(batch_size, count)
    return tuple(base + 1 if index < larger else base for index in range(count))


def structure_of(batch: Any) -> tuple[Any, ...]:
    """Give what must be equal for two batches to be split alike: the leaves and their numbers of dimensions."""
    return tuple((path, leaf.dim() if isinstance(leaf, Tensor) else None) for path, leaf in _units(batch))


def find_split(
    batch: Any, probe: Probe, *, given: Mapping[str, int | None] | None = None, trusts_sizes: bool = False
) -> BatchSplit:
    """Find out how a batch is split, by running the step on shapes with another number of samples.

    Each leading size that occurs is tried as the batch size; the step must run with exactly one of them. A leaf whose
    size equals the batch size by chance (class weights, a square mask) makes the step fail when it is split, or run
    either way: then only the user can tell.

    Args:
        batch: the step's arguments with the first batch, as `(args, kwargs)`.
        probe: runs the step on shapes.
        given: the user's `split_batch`, by leaf path joined with dots.
        trusts_sizes: whether leaves of the batch's size have one entry a sample, where the step runs either way.

    Raises:
        BatchError: no way or more than one way to split the batch keeps the step running.
    """
    units = dict(_units(batch))
    for path, leaf in units.items():
        if not isinstance(leaf, (Tensor, list, tuple, *_SCALARS)):
            raise BatchError(
                f"The batch holds a {type(leaf).__name__} at {_told(path)}, which cannot be split into micro-batches. "
                "Use tensors, lists, tuples, mappings or dataclasses, or set num_microbatches=1."
            )
    chosen = _from_user(units, given)
    if chosen is not None:
        return chosen
    candidates = _candidates(units)
    if not candidates:
        return BatchSplit(dims={})
    running = [split for split in candidates if _runs(batch, units, split, probe) is not None]
    if not running:
        running = _leaving_some_whole(batch, units, candidates, probe)
    if len(running) != 1:
        raise BatchError(_explain(units, running))
    if not trusts_sizes:
        _refuse_ambiguous(batch, units, running[0], probe)
    return running[0]


def assume_split(batch: Any) -> BatchSplit:
    """Give the likely split of a batch that stays whole, where only the number of samples matters."""
    candidates = _candidates(dict(_units(batch)))
    return candidates[0] if candidates else BatchSplit(dims={})


def _leaving_some_whole(
    batch: Any, units: Mapping[tree.LeafPath, Any], candidates: Sequence[BatchSplit], probe: Probe
) -> list[BatchSplit]:
    """One or two leaves may equal the batch size by chance: give what runs with as few left whole as possible."""
    for num_whole in (1, 2):
        fewer = [
            BatchSplit(dims={path: dim for path, dim in split.dims.items() if path not in whole})
            for split in candidates
            for whole in itertools.combinations(split.dims, num_whole)
            if len(split.dims) > num_whole
        ]
        running = [split for split in fewer[:_MAX_PROBES] if _runs(batch, units, split, probe) is not None]
        if running:
            return running
    return []


def _refuse_ambiguous(batch: Any, units: Mapping[tree.LeafPath, Any], split: BatchSplit, probe: Probe) -> None:
    read = _runs(batch, units, BatchSplit(dims={}), probe) or frozenset()
    paths = [path for path in split.dims if id(units[path]) in read]
    if len(paths) < 2:
        return  # the only leaf that the step computes with has the samples
    ambiguous = []
    # A mask that hides nothing may be dropped by the model before anything depends on its size.
    masks = {path: mask for path in paths if (mask := _masking_something(units[path])) is not None}
    with_masks, has_masks = {**units, **masks}, bool(masks)
    for path in paths:
        whole = BatchSplit(dims={p: d for p, d in split.dims.items() if p != path})
        # A leaf from which each sample takes its own row (an attention mask) runs with more rows, but not with fewer.
        if _runs(batch, units, whole, probe) is None or _runs(batch, units, split, probe, fewer=path) is None:
            continue
        if not has_masks or _runs(batch, with_masks, split, probe, fewer=path) is not None:
            ambiguous.append(path)
    if ambiguous:
        told = ", ".join(f"{_told(path)} of shape {tuple(units[path].shape)}" for path in ambiguous)
        name, dim = _told(ambiguous[-1]), split.dims[ambiguous[-1]]
        raise BatchError(
            f"The step runs whether these leaves of the batch are split into micro-batches or not: {told}. Their "
            f"meaning cannot be told from shapes. Say it: split_batch={{{name!r}: {dim}}} if {name} has one entry a "
            f"sample, split_batch={{{name!r}: None}} if not."
        )


def _masking_something(leaf: Any) -> Tensor | None:
    """A mask of ones and zeros with a zero in each row; None for what is no mask."""
    if not isinstance(leaf, Tensor) or leaf.dim() < 2 or not bool(((leaf == 1) | (leaf == 0)).all()):
        return None
    mask = leaf.clone()
    mask[..., -1] = 0
    return mask


def _runs(
    batch: Any,
    units: Mapping[tree.LeafPath, Any],
    split: BatchSplit,
    probe: Probe,
    *,
    fewer: tree.LeafPath | None = None,
) -> frozenset[int] | None:
    """Run the step with a number of samples that no other dimension has; the leaf `fewer` has one sample less."""
    taken = {size for leaf in units.values() if isinstance(leaf, Tensor) for size in leaf.shape}
    num_samples = next(n for n in (3, 5, 7, 11, 13, 17, 19, 23, 29, 31) if n not in taken) if taken else 3
    resized = {
        path: _resize(units[path], dim, num_samples - 1 if path == fewer else num_samples)
        for path, dim in split.dims.items()
    }
    return probe(_replace(batch, resized))


def _from_user(units: Mapping[tree.LeafPath, Any], given: Mapping[str, int | None] | None) -> BatchSplit | None:
    if not given:
        return None
    by_name = {_told(path): path for path in units}
    unknown = sorted(set(given) - set(by_name))
    if unknown:
        raise BatchError(f"split_batch names {unknown}, but the batch has {sorted(by_name)}.")
    dims: dict[tree.LeafPath, int] = {}
    told = {by_name[name]: dim for name, dim in given.items()}
    for path, dim in told.items():
        if dim is not None and not _is_splittable(units[path], dim):
            raise BatchError(_explain_dimension(path, units[path], dim))
    sizes = Counter(_size(units[p], d) for p, d in told.items() if d is not None) or _leading_sizes(units)
    batch_size = sizes.most_common(1)[0][0] if sizes else 1
    for path, leaf in units.items():
        if path in told:
            dim = told[path]
            if dim is not None:
                dims[path] = dim
        elif _is_splittable(leaf, 0) and _size(leaf, 0) == batch_size:
            dims[path] = 0
    return BatchSplit(dims=dims)


def _explain_dimension(path: tree.LeafPath, leaf: Any, dim: int) -> str:
    """What the user's dimension of a leaf is against what the leaf has."""
    if isinstance(leaf, Tensor):
        what, num_dims = f"a tensor of shape {tuple(leaf.shape)}", leaf.dim()
    else:
        what, num_dims = f"a {type(leaf).__name__}", int(isinstance(leaf, (list, tuple)))
    numbers = {0: "", 1: "0, or "}.get(num_dims, f"0 to {num_dims - 1}, or ")
    return (
        f"split_batch={{{_told(path)!r}: {dim}}} names dimension {dim} of {what}. Allowed are {numbers}None for a leaf "
        "that stays whole."
    )


def _candidates(units: Mapping[tree.LeafPath, Any]) -> list[BatchSplit]:
    """One way to split for each leading size: leaves of that size by it, others by their second dimension if equal."""
    splits = []
    for size, _ in _leading_sizes(units).most_common():
        dims: dict[tree.LeafPath, int] = {}
        for path, leaf in units.items():
            dim = next((d for d in (0, 1) if _is_splittable(leaf, d) and _size(leaf, d) == size), None)
            if dim is not None:
                dims[path] = dim
        splits.append(BatchSplit(dims=dims))
    return splits


def _leading_sizes(units: Mapping[tree.LeafPath, Any]) -> Counter[int]:
    return Counter(_size(leaf, 0) for leaf in units.values() if isinstance(leaf, Tensor) and leaf.dim() > 0)


def _units(batch: Any, path: tree.LeafPath = ()) -> list[tuple[tree.LeafPath, Any]]:
    """Leaves of a batch, where a list of plain values or a tuple of strings counts as one leaf.

    Of the names of samples torch's collation makes a list where samples are mappings, a tuple where they are tuples.
    """
    if isinstance(batch, list) and batch and all(isinstance(item, _SCALARS) for item in batch):
        return [(path, batch)]
    is_in_batch = len(path) > 1  # not the arguments themselves
    if type(batch) is tuple and is_in_batch and batch and all(isinstance(item, (str, bytes)) for item in batch):
        return [(path, batch)]
    if not tree.is_container(batch):
        return [(path, batch)]
    return [unit for key, child in tree.children(batch) for unit in _units(child, (*path, key))]


def _is_splittable(leaf: Any, dim: int) -> bool:
    return (isinstance(leaf, Tensor) and leaf.dim() > dim) or (isinstance(leaf, (list, tuple)) and dim == 0)


def _size(leaf: Any, dim: int) -> int:
    return len(leaf) if isinstance(leaf, (list, tuple)) else int(leaf.shape[dim])


def _split_leaf(leaf: Any, dim: int, sizes: Sequence[int]) -> Sequence[Any]:
    if isinstance(leaf, Tensor):
        return [piece.clone() for piece in torch.split(leaf, list(sizes), dim)]
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [leaf[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _resize(leaf: Any, dim: int, num_samples: int) -> Any:
    indices = [index % max(_size(leaf, dim), 1) for index in range(num_samples)]
    if isinstance(leaf, Tensor):
        return leaf.index_select(dim, torch.tensor(indices, device=leaf.device))
    return type(leaf)(leaf[index] for index in indices)


def _replace(batch: Any, new: Mapping[tree.LeafPath, Any], path: tree.LeafPath = ()) -> Any:
    if path in new:
        return new[path]
    if not tree.is_container(batch) or not any(known[: len(path)] == path for known in new):
        return batch
    return tree.rebuild(batch, {key: _replace(child, new, (*path, key)) for key, child in tree.children(batch)})


def _told(path: tree.LeafPath) -> str:
    """Name a leaf as the user sees it: paths begin with the place of the batch among the step's arguments."""
    return ".".join(str(key) for key in path[2:]) or "<batch>"


def _explain(units: Mapping[tree.LeafPath, Any], running: Sequence[BatchSplit]) -> str:
    leaves = ", ".join(f"{_told(p)}: {tuple(leaf.shape)}" for p, leaf in units.items() if isinstance(leaf, Tensor))
    if not running:
        lists = _lists_of_tensors(units)
        if lists:
            return (
                f"The batch cannot be split into micro-batches: {lists} is a list of tensors, which counts as one leaf "
                "for each tensor and not as one entry a sample. Stack them in collate_fn (pad them where their sizes "
                "differ), or set num_microbatches=1."
            )
        return (
            f"The batch ({leaves}) cannot be split into micro-batches: the step fails on shapes with any other number "
            "of samples. Say which leaves have one entry a sample with split_batch={leaf: dimension or None}, or set "
            "num_microbatches=1."
        )
    ways = " or ".join("{" + ", ".join(f"{_told(p)!r}: {d}" for p, d in s.dims.items()) + "}" for s in running)
    return (
        f"The batch ({leaves}) can be split into micro-batches in more than one way: {ways}. Say which with "
        "split_batch={leaf: dimension or None}."
    )


def _lists_of_tensors(units: Mapping[tree.LeafPath, Any]) -> str:
    """Name the lists whose tensors may be the samples: as long as the longest, and more than two."""
    lengths = Counter(
        path[:-1] for path, leaf in units.items() if isinstance(leaf, Tensor) and isinstance(path[-1], int)
    )
    longest = max(lengths.values(), default=0)
    return ", ".join(_told(path) for path, length in lengths.items() if length == longest) if longest > 2 else ""
