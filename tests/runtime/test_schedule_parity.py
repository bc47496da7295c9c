"""Every schedule gives the numbers of one device: slices, split backwards, several stages a rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.runtime.units import halve_no_single_samples, unit_sizes
from tests.runtime.pipelines import (
    apart,
    assert_close,
    assert_identical,
    halves,
    make_pipeline,
    run_apart,
    run_pipelines,
    run_plain,
)
from tests.runtime.step_models import CausalLanguageModel, Chain, GatedBlock, OwnPython, Unet

NUM_SAMPLES = 7
TIED = {"GPT-2": "network.transformer.wte.weight"}
MODELS: dict[str, Callable[[], Any]] = {"GPT-2": CausalLanguageModel, "U-Net": Unet, "own Python": OwnPython}
WHOLE = ["1f1b", ScheduleSpec(name="1f1b", depths=(4, 3, 1)), "gpipe", "zero_bubble"]


def sliced(num_first: int, num_last: int = 0) -> ScheduleSpec:
    return ScheduleSpec(name="sliced_1f1b", num_sliced_first=num_first, num_sliced_last=num_last)


def build(name: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = MODELS[name]().double()
    for sub in module.modules():
        if isinstance(sub, nn.BatchNorm2d):
            sub.eval()
    return module, module.batch(NUM_SAMPLES)


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_every_schedule_gives_the_same(name: str, num_replicas: int) -> None:
    module, batch = build(name)
    plain = run_plain(module, batch)
    batches = [batch] if num_replicas == 1 else halves(batch, NUM_SAMPLES, 4)
    pipelines = [
        make_pipeline(
            module,
            (batches[0], 0),
            num_stages=3,
            num_microbatches=3,
            num_replicas=num_replicas,
            replica_index=replica_index,
        )
        for replica_index in range(num_replicas)
    ]

    def run(schedule: str | ScheduleSpec) -> Any:
        for pipeline in pipelines:
            pipeline.schedule.spec = schedule
        return run_pipelines(pipelines, batches)

    first = None
    for schedule in WHOLE:
        result = run(schedule)
        first = first or result
        assert_close(result, plain)
        assert_identical(result, first)
    every = [pair for pair in itertools.product(range(4), range(4)) if 0 < sum(pair) <= 3]
    for pair in every if name == "own Python" else [(1, 0), (1, 1), (0, 3)]:
        assert_close(run(sliced(*pair)), plain)


@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_several_stages_a_rank(num_microbatches: int) -> None:
    module, batch = build("own Python")
    pipeline = make_pipeline(module, (batch, 0), num_stages=4, num_microbatches=num_microbatches)
    first = run_pipelines([pipeline], [batch])
    pipeline.schedule.spec = ScheduleSpec(name="interleaved_1f1b", stages_per_rank=2)
    assert_identical(run_pipelines([pipeline], [batch]), first)


@pytest.mark.parametrize(("num_ranks", "name"), [(2, "GPT-2"), (2, "own Python"), (3, "own Python")])
def test_ranks_that_hold_the_parameters_of_their_stages_only(num_ranks: int, name: str) -> None:
    module, batch = build(name)
    plain = run_plain(module, batch)
    if num_ranks == 3:
        module.blocks.extend(GatedBlock(module.losses, OwnPython.WIDTH).double() for _ in range(4))
        plain = run_plain(module, batch)
    pipelines = apart(module, (batch, 0), num_stages=num_ranks, num_microbatches=4, schedule="interleaved_1f1b")
    assert pipelines[0].num_stages == 2 * num_ranks
    owned = [pipeline.ownership.owned_parameters(place) for place, pipeline in enumerate(pipelines)]
    assert frozenset.union(*owned) == {name for name, _ in module.named_parameters(remove_duplicate=False)}
    assert_close(run_apart(pipelines, batch), plain)
    with torch.no_grad():
        torch.testing.assert_close(run_apart(pipelines, batch, training=False).loss, plain.loss, rtol=1e-10, atol=0)


def mean_square(h: Tensor, batch: Any) -> dict[str, Tensor]:
    return {"loss": h.square().mean(), "rows": batch["x"][:, 0], "count": torch.tensor(float(len(h)))}


def rows(num_samples: int) -> dict[str, Tensor]:
    return {"x": torch.arange(4.0 * num_samples, dtype=torch.float64).reshape(num_samples, 4) / 10}


def test_batches_of_any_size_are_sliced_as_far_as_they_can() -> None:
    torch.manual_seed(0)
    module = Chain(mean_square).double()
    pipeline = make_pipeline(module, (rows(12), 0), num_stages=3, num_microbatches=4)
    pipeline.schedule.spec = sliced(2, 1)
    for sizes in [(1,), (1,) * 3, (1, 1, 1, 1, 1), (2, 1, 1, 1, 2, 1, 1), (2, 1, 2, 1, 3, 2, 1)]:
        batch = rows(sum(sizes))
        run = run_pipelines([pipeline], [batch])
        assert_close(run, run_plain(module, batch))
        outcome = run.outcomes[0]
        assert outcome.sizes == sizes
        assert torch.equal(torch.cat([output["rows"] for output in outcome.outputs]), batch["x"][:, 0])
        assert [int(output["count"]) for output in outcome.outputs] == list(sizes)
        assert [int(weight) for weight in outcome.weights] == list(sizes)


def test_sizes_of_units() -> None:
    units = [(0, 0), (0, 1), (1, None), (2, 0), (2, 1)]
    assert unit_sizes(units, [5, 4, 3]) == (3, 2, 4, 2, 1)
    assert halve_no_single_samples(sliced(2, 2), [2, 2, 2, 2]) == sliced(2, 2)
    assert halve_no_single_samples(sliced(2, 2), [2, 1, 1]) == sliced(1)
    assert halve_no_single_samples(sliced(2, 2), [2, 2, 2]) == sliced(2, 1)
    assert halve_no_single_samples("gpipe", [1]) == "gpipe"


def test_dropout_does_not_depend_on_stages_or_recomputation() -> None:
    torch.manual_seed(0)
    plain, recomputed = Dropping(recompute=False).double(), Dropping(recompute=True).double()
    recomputed.load_state_dict(plain.state_dict())
    batch = rows(8)
    pipelines = [
        make_pipeline(module, (batch, 0), num_stages=num_stages, num_microbatches=4)
        for module in (plain, recomputed)
        for num_stages in (1, 2, 4)
    ]
    whole = []
    for schedule in ("1f1b", "zero_bubble", sliced(2), sliced(1, 1)):
        runs = []
        for pipeline in pipelines:
            pipeline.schedule.spec = schedule
            runs.append(run_pipelines([pipeline], [batch]))
        for run in runs[1:]:
            assert_identical(run, runs[0])
        whole.append(runs[0])
    assert_identical(whole[1], whole[0])
    alike = {"x": torch.ones(8, 4, dtype=torch.float64)}
    pipelines[0].schedule.spec = sliced(4)
    losses = run_pipelines([pipelines[0]], [alike]).outcomes[0].losses
    assert len(set(map(float, losses))) == len(losses) == 8  # halves draw by themselves


class Dropping(nn.Module):
    """Blocks with dropout 0.5, checkpointed or not."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5)) for _ in range(4))
        self.recompute = recompute

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = batch["x"]
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.recompute else block(h)
        return h.square().mean()


class Embedding(nn.Module):
    """Ids to vectors and a layer, recomputed; then layers."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.use_reentrant = use_reentrant

    def start(self, ids: Tensor, anchor: Tensor | None = None) -> Tensor:
        return self.first(self.embedding(ids)).tanh()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.use_reentrant is None:
            h = self.start(batch["ids"])
        elif self.use_reentrant:
            # A reentrant checkpoint needs an input that requires a gradient: ids have none.
            anchor = torch.zeros(1, requires_grad=True)
            h = checkpoint(self.start, batch["ids"], anchor, use_reentrant=True)
        else:
            h = checkpoint(self.start, batch["ids"], use_reentrant=False)
        for layer in self.layers:
            h = layer(h).tanh()
        return F.mse_loss(h, batch["target"])


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", sliced(1, 1)])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_embedding_has_its_gradient(use_reentrant: bool, schedule: str | ScheduleSpec) -> None:
    torch.manual_seed(0)
    module = Embedding(use_reentrant).double()
    batch = {"ids": torch.arange(12).reshape(6, 2) % 7, "target": torch.randn(6, 2, 4, dtype=torch.float64)}
    reference = Embedding(None).double()
    reference.load_state_dict(module.state_dict())
    plain = run_plain(reference, batch)
    assert plain.gradients["embedding.weight"].abs().sum() > 0
    pipeline = make_pipeline(module, (batch, 0), num_stages=2, num_microbatches=3)
    pipeline.schedule.spec = schedule
    assert_close(run_pipelines([pipeline], [batch]), plain)


def test_batch_normalization_is_never_sliced() -> None:
    module = Unet().double()
    batch = module.batch(8)
    pipeline = make_pipeline(module, (batch, 0), num_stages=2, num_microbatches=2)
    pipeline.schedule.spec = sliced(1)
    with pytest.raises(PlanError, match=r"1 \+ 0 sliced.*batch normalization"):
        run_pipelines([pipeline], [batch])
    module.eval()
    run_pipelines([pipeline], [batch])
