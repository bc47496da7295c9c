"""Where cuts are legal, which of them are good, and how the same places are found in other traces."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autopipe.capture.cuts import check_owners, positions_from_keys, positions_from_owners
from lightning_autopipe.core.errors import PlanError
from tests.capture import models
from tests.capture.models import WIDTH, Blocks, features
from tests.capture.support import Traced, traced


class Residual(nn.Module):
    """Attention and feed-forward halves with residual additions."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, 2 * WIDTH), "c": nn.Linear(2 * WIDTH, WIDTH)}
            )
            for _ in range(depth)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = batch
        for block in self.blocks:
            h = h + block["a"](h).tanh()
            h = h + block["c"](block["b"](h).relu())
        return h.pow(2).mean()

    validation_step = training_step


def names(found: Traced, cut: int) -> tuple[str, str]:
    operations = found.trace.operations
    return operations[cut - 1].name.split(".")[-1], operations[cut].module_path


def test_good_cuts_lie_behind_residual_additions() -> None:
    found = traced(Residual(depth=6), (features().float(), 0))
    assert [names(found, cut) for cut in found.layer_cuts] == [
        ("add", f"blocks.{index}.{half}") for index in range(6) for half in "ab"
    ][1:]
    assert [str(layer.key) for layer in found.trace.layers[1:3]] == ["blocks.0.b", "blocks.1.a"]
    layers = found.trace.layers
    assert layers[0].start == 0
    assert layers[-1].stop == len(found.trace.operations)
    assert all(a.stop == b.start for a, b in itertools.pairwise(layers))
    assert all(layer.parameters for layer in layers)
    assert [layer.boundary_bytes for layer in layers] == [4 * WIDTH * 4] * 11 + [0]
    assert layers[1].forward_flops > layers[0].forward_flops > 4 * WIDTH * WIDTH


def test_no_cut_behind_the_last_parameter() -> None:
    found = traced(Residual(), (features().float(), 0))
    last = max(op.index for op in found.trace.operations if op.parameters)
    assert max(found.legal_cuts) == last


def crossing_operations(found: Traced, *names_: str) -> list[int]:
    return [op.index for op in found.trace.operations if op.name.split(".")[-1] in names_ or op.name in names_]


def test_no_cut_where_an_alias_would_be_severed() -> None:
    class Alias(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            h = self.blocks[0](x)
            view = h[:, :2]
            middle = self.blocks[1](h.tanh())
            h.add_(1)
            return self.blocks[2](middle) + h + view.sum()

    found = traced(Alias().double(), (features(), 0))
    (write,) = crossing_operations(found, "add_")
    (view,) = crossing_operations(found, "__getitem__")
    assert not any(found.table.legal[view + 1 : write + 1])
    assert found.table.legal[view]
    assert found.table.legal[write + 1]


@pytest.mark.parametrize("how", ["mask", "places", "rows", "of the batch", "table", "written"])
def test_no_cut_where_the_size_of_a_value_depends_on_values(how: str) -> None:
    class Picking(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(3, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            mask = x[:, 0] > 0
            places = mask.nonzero().flatten()
            h = self.blocks[0](x)
            if how == "mask":
                h = h[mask]
            elif how == "places":
                h = h[places]
            elif how == "rows":
                h = h.index_select(0, places.view(-1))
            elif how == "of the batch":
                h = self.blocks[0](x[mask])
            elif how == "table":  # as many rows as indices, whatever their values
                h = h + self.table[torch.arange(len(x)).view(2, 2) % 3].flatten(0, 1)
            else:
                row = torch.zeros(len(x), dtype=x.dtype).index_fill(0, places, 1.0)
                h = h.index_add(0, places, torch.ones(len(places), WIDTH, dtype=x.dtype)) + row[:, None]
            return self.blocks[2](self.blocks[1](h).tanh())

    found = traced(Picking().double(), (features(), 0))
    (read,) = crossing_operations(found, "tanh")
    assert found.table.legal[read + 1] == (how in ("table", "written"))


def test_no_cut_between_the_uses_of_a_written_buffer_or_parameter() -> None:
    class Written(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            h = self.blocks[0](x)
            self.average.mul_(0.5).add_(h.detach().mean(0))
            h = self.blocks[1](h)
            h = h + self.average
            return self.blocks[2](h)

    found = traced(Written().double(), (features(), 0))
    uses = [op.index for op in found.trace.operations if op.buffers]
    assert len(uses) == 3
    assert not any(found.table.legal[uses[0] + 1 : uses[-1] + 1])
    assert found.table.legal[uses[0]]
    assert found.table.legal[uses[-1] + 1]
    written = traced(models.WrittenParameters().double(), (features(), 0))
    clamp = crossing_operations(written, "clamp_")[0]
    assert not written.table.legal[clamp + 1]


def test_no_cut_inside_checkpoints_and_modules_with_backward_hooks() -> None:
    found = traced(models.Checkpointed(use_reentrant=False).double(), (features(), 0))
    for position, (before, after) in enumerate(itertools.pairwise(found.trace.operations), 1):
        if before.region is not None and before.region == after.region:
            assert not found.table.legal[position]
    assert len({op.region for op in found.trace.operations} - {None}) == 3
    hooked = traced(models.Hooks().double(), (features(), 0))
    applies = [op.index for op in hooked.trace.operations if op.name == "BackwardHookFunction.apply"]
    assert len(applies) == 4
    assert not any(hooked.table.legal[applies[0] + 1 : applies[1] + 1])


def test_skips_are_counted_at_every_cut_between() -> None:
    found = traced(models.Unet().double(), ((torch.ones(1, 3, 8, 8).double(), torch.ones(1, 1, 8, 8).double()), 0))
    counts = {len(found.table.crossing[cut]) for cut in found.layer_cuts}
    assert counts == {1, 2}
    assert max(len(found.table.crossing[cut]) for cut in found.legal_cuts) == 3
    assert len(found.layer_cuts) >= 5


def test_the_same_places_are_found_for_other_shapes_and_steps() -> None:
    module = Residual(depth=6).eval()
    planned = traced(module, (features().float(), 0))
    keys = [layer.key for layer in planned.trace.layers[1:]]
    with torch.no_grad():
        other = traced(module, (features(7).float(), 0), "validation_step")
    assert positions_from_keys(other.trace, other.table, keys) == planned.layer_cuts
    assert positions_from_keys(other.trace, other.table, keys[::-1]) is None
    bounds = [0, *planned.layer_cuts, len(planned.trace.operations)]
    owners: dict[str, frozenset[int]] = {}
    for stage_index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        for op in planned.trace.operations[start:stop]:
            owners.update({name: frozenset({stage_index}) for name in op.parameters})
    last_stage = len(bounds) - 2
    assert check_owners(other.trace, bounds, owners, last_stage)
    assert not check_owners(other.trace, [0, *[cut + 3 for cut in planned.layer_cuts], bounds[-1]], owners, last_stage)
    found = positions_from_owners(other.trace, other.table, owners, last_stage + 1, "validation_step")
    assert check_owners(other.trace, [0, *found, bounds[-1]], owners, last_stage)
    assert all(len(other.table.crossing[position]) == 1 for position in found)


def test_a_step_in_another_order_is_refused_and_a_part_of_the_stages_is_not() -> None:
    class Other(Blocks):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.blocks[0](self.blocks[2](batch)).sum()

        def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.blocks[1](batch).sum()

    module = Other().double()
    owners = {f"blocks.{n}.{kind}": frozenset({n}) for n in range(3) for kind in ("weight", "bias")}
    with torch.no_grad():
        part = traced(module, (features(), 0), "validation_step")
    assert positions_from_owners(part.trace, part.table, owners, 3, "validation_step") == [
        0,
        len(part.trace.operations),
    ]
    module.requires_grad_(False)
    backwards = traced(module, (features(), 0))
    with pytest.raises(PlanError, match=r"training_step uses the module's parameters in an order.*3 stages"):
        positions_from_owners(backwards.trace, backwards.table, owners, 3, "training_step")


def test_one_heavy_layer_and_no_layer_without_work() -> None:
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.big = nn.Linear(1024, 1024)
            self.small = nn.Linear(1024, 2)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            h = batch * self.scale
            h = self.big(h).relu()
            return F.cross_entropy(self.small(h), torch.zeros(len(batch), dtype=torch.long))

    found = traced(Uneven(), (torch.ones(4, 1024), 0))
    assert [layer.parameters for layer in found.trace.layers] == [
        ("scale", "big.weight", "big.bias"),
        ("small.weight", "small.bias"),
    ]
