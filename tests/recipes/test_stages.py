"""BERT and ResNet give the same losses and weights on any number of stages and replicas.

Everything that could differ is in: dropout, hidden tokens drawn while reading, tied weights, batch normalization,
clipping, an incomplete last batch, torchmetrics.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.harness import run_processes
from tests.recipes.fits import TEXT, Fit, Report, run_fit, run_fits

pytestmark = pytest.mark.filterwarnings(
    r"ignore:.*isinstance\(treespec, LeafSpec\)",
    "ignore:.*does not have many workers",
    "ignore:.*Checkpoint directory .* exists and is not empty",
)
RECIPES = ("bert", "resnet")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return str(tmp_path)


def in_processes(fits: list[Fit], folder: str) -> list[list[Report]]:
    """For each fit the reports by global rank."""
    num_processes = fits[0].num_stages * fits[0].num_replicas
    by_rank = run_processes(num_processes, run_fits, fits, folder, initialize_process_group=False, timeout_s=110.0)
    return [[reports[index] for reports in by_rank] for index in range(len(fits))]


def assert_same(ranks: list[Report], expected: Report, *, buffers: bool = True) -> None:
    assert len(expected.losses) >= 4
    assert len(set(expected.losses)) == len(expected.losses)
    for rank in ranks:
        assert rank.losses == pytest.approx(expected.losses, rel=1e-9)
        if buffers:
            assert rank.metrics == pytest.approx(expected.metrics, rel=1e-9)
    assert ranks[0].state.keys() == expected.state.keys()
    for name, value in ranks[0].state.items():
        if buffers or not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            torch.testing.assert_close(value, expected.state[name], rtol=1e-8, atol=1e-10, msg=name)


def test_two_stages_and_one(folder: str) -> None:
    fits = [Fit(recipe=recipe, num_stages=2) for recipe in RECIPES]
    for fit, ranks in zip(fits, in_processes(fits, folder), strict=True):
        assert_same(ranks, run_fit(replace(fit, num_stages=1), folder))


def test_two_stages_and_the_plain_trainer(folder: str) -> None:
    """Without dropout, whose draws are keyed otherwise; batch normalization sees whole batches with one micro-batch."""
    fits = [
        Fit(recipe="bert", num_stages=2, dropout=0.0, distributed_sampler=False),
        Fit(recipe="resnet", num_stages=2, num_microbatches=1, distributed_sampler=False),
    ]
    for fit, ranks in zip(fits, in_processes(fits, folder), strict=True):
        assert_same(ranks, run_fit(replace(fit, num_stages=1, strategy="auto"), folder))


def test_two_stages_in_two_replicas_and_one_process_that_reads_what_both_read(folder: str) -> None:
    fits = [Fit(recipe=recipe, num_stages=2, num_replicas=2, dropout=0.0, dynamic_masking=False) for recipe in RECIPES]
    for fit, ranks in zip(fits, in_processes(fits, folder), strict=True):
        single = run_fit(replace(fit, num_stages=1, num_replicas=1, replica_order=True), folder)
        # Running statistics are those of one replica's micro-batches.
        assert_same(ranks, single, buffers=fit.recipe != "resnet")


@pytest.mark.parametrize("recipe", RECIPES)
def test_continued_with_another_number_of_stages(folder: str, recipe: str) -> None:
    checkpoint = str(Path(folder) / f"{recipe}.ckpt")
    run_fit(Fit(recipe=recipe, max_epochs=1, save_as=checkpoint), folder)
    more = Fit(recipe=recipe, max_epochs=3, ckpt_path=checkpoint)
    single = run_fit(more, folder)
    (ranks,) = in_processes([replace(more, num_stages=2, save_as=checkpoint + "2")], folder)
    assert_same(ranks, single)
    back = run_fit(replace(more, max_epochs=4, ckpt_path=checkpoint + "2"), folder)
    assert len(back.losses) == 4
    assert min(back.losses) < single.losses[0]
