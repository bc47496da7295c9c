"""Which leaves of a batch are split into micro-batches, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autopipe.core.errors import BatchError
from lightning_autopipe.runtime.batch import BatchSplit, find_split, microbatch_sizes
from tests.runtime.pipelines import assert_close, make_pipeline, run_once, run_plain
from tests.runtime.step_models import Chain

PREFIX = (0, 0)


@pytest.mark.parametrize(
    ("batch_size", "num_microbatches", "sizes"),
    [(8, 3, (3, 3, 2)), (8, 4, (2, 2, 2, 2)), (2, 4, (1, 1)), (1, 4, (1,)), (7, 1, (7,)), (0, 2, (0,))],
)
def test_sizes(batch_size: int, num_microbatches: int, sizes: tuple[int, ...]) -> None:
    assert microbatch_sizes(batch_size, num_microbatches) == sizes


def split_of(batch: Any, step: Callable[[Any], Any], given: Any = None) -> dict[str, int]:
    """Find the split with a probe that runs a plain function; names instead of paths."""

    def probe(arguments: Any) -> frozenset[int] | None:
        read: set[int] = set()

        class Reading(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                read.update(id(leaf) for leaf in torch.utils._pytree.tree_leaves((args, kwargs)))
                return func(*args, **(kwargs or {}))

        try:
            with Reading():
                step(arguments[0][0])
        except (RuntimeError, IndexError, ValueError):
            return None
        return frozenset(read)

    split = find_split(((batch,), {}), probe, given=given)
    return {".".join(map(str, path[2:])): dim for path, dim in split.dims.items()}


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Sample:
    x: Tensor
    names: list[str]


@pytest.mark.parametrize(
    ("batch", "step", "expected"),
    [
        (torch.ones(4, 3), lambda b: b.sum(), {"": 0}),
        ((torch.ones(4, 3), torch.ones(4)), lambda b: (b[0].sum(1) * b[1]).sum(), {"0": 0, "1": 0}),
        (Pair(torch.ones(4, 3), torch.ones(4)), lambda b: (b.x.sum(1) * b.y).sum(), {"0": 0, "1": 0}),
        (Sample(torch.ones(3, 2), ["a", "b", "c"]), lambda b: b.x.sum(), {"x": 0, "names": 0}),
        ((torch.ones(3, 2), ("a", "b", "c")), lambda b: b[0].sum(), {"0": 0, "1": 0}),
        ({"a": [torch.ones(4), (torch.ones(4),)]}, lambda b: b["a"][0] @ b["a"][1][0], {"a.0": 0, "a.1.0": 0}),
        # A label that the step does not use goes along.
        ((torch.ones(4, 3), torch.ones(4)), lambda b: b[0].mean(), {"0": 0, "1": 0}),
        # Scalars and shared tables of another size go whole to every micro-batch.
        (
            {"x": torch.ones(4, 3), "w": torch.ones(3), "t": 0.5, "n": torch.tensor(2)},
            lambda b: (b["x"] @ torch.ones(3, 3) @ b["w"] * b["t"]).sum(),
            {"x": 0},
        ),
        # Sequence first, of a length that the step expects, with one scale a sample.
        (
            {"x": torch.ones(5, 4, 3), "scale": torch.ones(4)},
            lambda b: (torch.ones(5) @ b["x"].sum(2) * b["scale"]).sum(),
            {"x": 1, "scale": 0},
        ),
    ],
)
def test_leaves(batch: Any, step: Callable[[Any], Any], expected: dict[str, int]) -> None:
    assert split_of(batch, step) == expected


def test_class_weights_of_the_batch_size_stay_whole() -> None:
    batch = {"x": torch.ones(4, 4), "label": torch.arange(4), "weight": torch.ones(4)}
    found = split_of(batch, lambda b: F.cross_entropy(b["x"], b["label"], b["weight"]))
    assert found == {"x": 0, "label": 0}


def test_a_square_mask_of_the_batch_size_stays_whole() -> None:
    batch = {"x": torch.ones(5, 5, 2), "mask": torch.ones(5, 5)}
    found = split_of(batch, lambda b: (b["x"] + b["mask"] @ b["x"]).sum())
    assert found == {"x": 0}


def test_a_mask_that_each_sample_indexes_is_split() -> None:
    def step(batch: dict[str, Tensor]) -> Tensor:
        rows = torch.arange(batch["x"].shape[0])
        return (batch["x"] * batch["mask"][rows]).sum()

    assert split_of({"x": torch.ones(4, 5), "mask": torch.ones(4, 5)}, step) == {"x": 0, "mask": 0}


def test_what_shapes_cannot_tell_is_an_error_that_names_the_setting() -> None:
    batch = {"x": torch.ones(4, 3), "prototypes": torch.ones(4, 3)}

    def step(b: dict[str, Tensor]) -> Tensor:
        return (b["x"] @ b["prototypes"].T).logsumexp(1).mean()

    with pytest.raises(BatchError, match=r"x of .*prototypes of .*split_batch=\{'prototypes': 0\} if"):
        split_of(batch, step)
    assert split_of(batch, step, given={"prototypes": None}) == {"x": 0}
    with pytest.raises(BatchError, match=r"split_batch names \['y'\], but the batch has \['prototypes', 'x'\]"):
        split_of(batch, step, given={"y": 0})


@pytest.mark.parametrize(
    ("name", "dim", "told"),
    [
        ("x", 2, r"dimension 2 of a tensor of shape \(4, 3\)\. Allowed are 0 to 1, or None"),
        ("y", 1, r"dimension 1 of a tensor of shape \(4,\)\. Allowed are 0, or None"),
        ("names", 1, r"dimension 1 of a list\. Allowed are 0, or None"),
        ("rate", 0, r"dimension 0 of a float\. Allowed are None"),
    ],
)
def test_a_dimension_that_a_leaf_does_not_have_is_an_error(name: str, dim: int, told: str) -> None:
    batch = {"x": torch.ones(4, 3), "y": torch.ones(4), "names": ["a", "b", "c", "d"], "rate": 0.5}
    with pytest.raises(
        BatchError, match=rf"split_batch=\{{'{name}': {dim}\}} names {told} for a leaf that stays whole"
    ):
        split_of(batch, lambda b: b["x"].mean(), given={name: dim})


def test_sequence_first_of_any_length_is_an_error() -> None:
    batch = {"x": torch.ones(5, 4, 3), "scale": torch.ones(4)}

    def step(b: dict[str, Tensor]) -> Tensor:
        return (b["x"].sum((0, 2)) * b["scale"]).sum()

    with pytest.raises(BatchError, match=r"more than one way: .*'x': 1, 'scale': 0"):
        split_of(batch, step)
    assert split_of(batch, step, given={"x": 1}) == {"x": 1, "scale": 0}


def test_two_batch_sizes_are_an_error() -> None:
    batch = {"a": torch.ones(4, 3), "b": torch.ones(6, 3)}
    with pytest.raises(BatchError, match=r"more than one way.*'a': 0.*'b': 0"):
        split_of(batch, lambda b: b["a"].mean() + b["b"].mean())


def test_a_fixed_size_is_an_error() -> None:
    with pytest.raises(BatchError, match="any other number of samples"):
        split_of(torch.ones(4, 3), lambda b: b.view(4, 3).sum())


def test_an_opaque_object_is_an_error() -> None:
    with pytest.raises(BatchError, match=r"holds a Opaque at 1.*num_microbatches=1"):
        split_of((torch.ones(4), Opaque()), lambda b: b[0].sum())


class Opaque:
    pass


def test_leaves_that_disagree_are_an_error() -> None:
    split = BatchSplit(dims={(*PREFIX, "x"): 0, (*PREFIX, "y"): 0})
    with pytest.raises(BatchError, match=r"x: 4, y: 3.*several loaders.*drop_last=True"):
        split.batch_size((({"x": torch.ones(4), "y": torch.ones(3)},), {}))


def test_pieces_are_copies_in_order() -> None:
    batch = ((Sample(torch.arange(5), list("abcde")),), {})
    split = BatchSplit(dims={(*PREFIX, "x"): 0, (*PREFIX, "names"): 0})
    pieces = [piece[0][0] for piece in split.split(batch, (2, 2, 1))]
    assert [piece.names for piece in pieces] == [["a", "b"], ["c", "d"], ["e"]]
    assert torch.equal(torch.cat([piece.x for piece in pieces]), torch.arange(5))
    pieces[0].x.zero_()
    assert [piece.x._version for piece in pieces] == [1, 0, 0]  # a step that writes into one spoils no other's graph
    assert torch.equal(batch[0][0].x, torch.arange(5))
    assert isinstance(pieces[0], Sample)
    named = BatchSplit(dims={(*PREFIX, 0): 0, (*PREFIX, 1): 0}).split(
        (((torch.arange(3), ("a", "b", "c")),), {}), (2, 1)
    )
    assert [piece[0][0][1] for piece in named] == [("a", "b"), ("c",)]


class Attention(nn.Module):
    """A causal mask of (length, length) in the batch, class weights beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        h = self.mix(self.embedding(batch["ids"]))
        h = F.scaled_dot_product_attention(h, h, h, attn_mask=batch["mask"])
        return F.cross_entropy(self.head(h).transpose(1, 2), batch["ids"], batch["weight"])


@pytest.mark.parametrize("num_microbatches", [2, 3])
def test_chance_sizes_in_a_pipeline(num_microbatches: int) -> None:
    torch.manual_seed(0)
    module = Attention().double()
    ids = torch.randint(0, 5, (5, 5), generator=torch.Generator().manual_seed(0))
    weight = torch.linspace(1, 2, 5, dtype=torch.float64)
    for batch in (
        {"ids": ids, "mask": torch.ones(5, 5).tril().bool(), "weight": weight},
        {"ids": ids[:4], "mask": torch.ones(5, 5).tril().bool(), "weight": weight},
    ):
        plain = run_plain(module, batch)
        assert_close(run_once(module, batch, num_stages=2, num_microbatches=num_microbatches), plain)


def test_an_autoencoder_that_ignores_its_labels() -> None:
    torch.manual_seed(0)
    module = Chain(lambda h, batch: F.mse_loss(h, batch["x"])).double()
    batch = {"x": torch.randn(6, 4, dtype=torch.float64), "y": torch.arange(6)}
    assert_close(run_once(module, batch, num_stages=2, num_microbatches=3), run_plain(module, batch))


def test_a_later_batch_of_another_size_is_split_alike() -> None:
    module = Chain(lambda h, batch: F.mse_loss(h, batch["x"])).double()
    pipeline = make_pipeline(module, ({"x": torch.ones(6, 4).double()}, 0), num_stages=2, num_microbatches=4)
    for num_samples, sizes in ((6, (2, 2, 1, 1)), (4, (1, 1, 1, 1)), (2, (1, 1)), (1, (1,)), (9, (3, 2, 2, 2))):
        batch = {"x": torch.ones(num_samples, 4).double()}
        assert pipeline.run("training_step", (batch, 0), {}, training=True, step=0).sizes == sizes


class Masked(nn.Module):
    """Drops a mask that hides nothing, as `transformers` does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        h = self.embedding(batch["ids"])
        mask = None if batch["mask"].all() else batch["mask"][:, None].bool()
        h = F.scaled_dot_product_attention(h, h, h, attn_mask=mask)
        return F.cross_entropy(self.head(h).transpose(1, 2), batch["ids"])


@pytest.mark.parametrize("hidden_row", [None, 5])
def test_a_mask_that_hides_nothing_in_the_first_rows(hidden_row: int | None) -> None:
    torch.manual_seed(0)
    module = Masked().double()
    mask = torch.ones(6, 7, dtype=torch.long)
    if hidden_row is not None:
        mask[hidden_row, 4:] = 0
    batch = {"ids": torch.randint(0, 5, (6, 7), generator=torch.Generator().manual_seed(0)), "mask": mask}
    assert_close(run_once(module, batch, num_stages=2, num_microbatches=3), run_plain(module, batch))
