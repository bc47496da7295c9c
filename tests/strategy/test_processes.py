"""Fits in real processes against the plain module in one process.

The numbers in the names are the rows of the table of failures that users of pipeline parallelism have reported.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.strategy.modules import (
    ClassifierModule,
    ClippingModule,
    GatheringModule,
    Gpt2Module,
    InOrder,
    LanguageModule,
    MlpModule,
    TogglingModule,
    class_data,
    largest_difference,
    regression_data,
    token_data,
)
from tests.strategy.runs import Fit, Report, assert_same_result, fit_in_processes, fit_plain

pytestmark = pytest.mark.filterwarnings("ignore")

# As dealt to two replicas: 1, 7, 3, 0 and 5, 0, 2, 4 labels that count.
VALID = [1, 5, 7, 0, 3, 2, 0, 4]


def predict_afterwards(trainer: Any, module: Any) -> Any:
    batches = trainer.predict(module, DataLoader(regression_data(10, seed=2).tensors[0], batch_size=2))
    return [tuple(batch.shape) for batch in batches], float(torch.cat(batches).sum())


def hook_values(trainer: Any, module: Any) -> Any:
    return module.hook_values


FITS = {
    "1 ignored tokens, 9 tied weights": Fit(
        module_class=LanguageModule,
        module_options={"optimizer": "adamw", "lr": 0.01},
        data=partial(InOrder, token_data(8, valid=VALID), token_data(8, valid=VALID[::-1]), batch_size=8),
        trainer_options={"max_epochs": 3},
    ),
    "2, 3 accumulation": Fit(
        module_class=MlpModule,
        data=partial(InOrder, regression_data(20), batch_size=4),
        strategy_options={"num_microbatches": 2},
        trainer_options={"accumulate_grad_batches": 4},
    ),
    "7 clipping in a hook": Fit(
        module_class=ClippingModule,
        data=partial(InOrder, regression_data(16), batch_size=8),
    ),
    "flags set in the step, sparse gradients, a validation without parameters": Fit(
        module_class=TogglingModule,
        data=partial(InOrder, regression_data(32), regression_data(8, seed=1), batch_size=8, val_batch_size=4),
        strategy_options={"verify": True},
    ),
    "22 uneven batches": Fit(
        module_class=MlpModule,
        module_options={"optimizer": "adamw"},
        data=partial(InOrder, regression_data(18), batch_size=8),
        strategy_options={"num_microbatches": 3},
    ),
    "24 any order": Fit(
        module_class=MlpModule,
        data=partial(InOrder, regression_data(32), regression_data(8, seed=1), batch_size=8, val_batch_size=4),
        trainer_options={"num_sanity_val_steps": 2, "val_check_interval": 0.5},
        after=predict_afterwards,
    ),
    "28 one micro-batch": Fit(
        module_class=GatheringModule,
        data=partial(InOrder, regression_data(16), batch_size=8),
        strategy_options={"num_microbatches": 1, "schedule": "gpipe", "profile": "auto", "verify": "auto"},
    ),
    "28 eight micro-batches": Fit(
        module_class=MlpModule,
        module_options={"optimizer": "adamw"},
        data=partial(InOrder, regression_data(32), batch_size=16),
        strategy_options={"num_microbatches": 8},
    ),
    "a language model of transformers": Fit(
        module_class=Gpt2Module,
        module_options={"optimizer": "adamw", "lr": 0.01},
        data=partial(InOrder, token_data(24), token_data(8, seed=1), batch_size=8),
        trainer_options={"gradient_clip_val": 0.5},
    ),
    "logs of all kinds": Fit(
        module_class=ClassifierModule,
        data=partial(InOrder, class_data(16), class_data(8, seed=1), batch_size=8, val_batch_size=4),
        trainer_options={"max_epochs": 2},
        after=hook_values,
    ),
}


@pytest.fixture(scope="module", params=[(2, 1), (2, 2)], ids=["2 stages", "2 stages x 2 replicas"])
def layout(request: Any) -> tuple[int, int]:
    return request.param


@pytest.fixture(scope="module")
def plain() -> dict[str, Report]:
    return {name: fit_plain(fit) for name, fit in FITS.items()}


@pytest.fixture(scope="module")
def ranks(layout: tuple[int, int]) -> dict[str, list[Report]]:
    return fit_in_processes(FITS, num_stages=layout[0], num_replicas=layout[1])


@pytest.mark.parametrize("name", list(FITS))
def test_equals_the_plain_module(name: str, plain: dict[str, Report], ranks: dict[str, list[Report]]) -> None:
    # transformers takes its losses in float32.
    tolerance = 1e-4 if name == "a language model of transformers" else 1e-10
    assert_same_result(plain[name], ranks[name], tolerance=tolerance)


def test_copies_of_tied_weights_are_bit_identical(ranks: dict[str, list[Report]]) -> None:
    reports = ranks["1 ignored tokens, 9 tied weights"]
    for report in reports:
        assert torch.equal(report.values["head.weight"], reports[0].values["head.weight"])


def test_replicas_are_bit_identical(ranks: dict[str, list[Report]], layout: tuple[int, int]) -> None:
    for reports in ranks.values():
        for global_rank, report in enumerate(reports):
            of_replica_0 = reports[global_rank % layout[0]].values
            for name in report.values:
                assert torch.equal(report.values[name], of_replica_0[name])


def test_gradients_are_reduced_once_a_step(ranks: dict[str, list[Report]], layout: tuple[int, int]) -> None:
    """Row 28; tied parameters are reduced by another reducer."""
    for name in ("2, 3 accumulation", "22 uneven batches", "28 one micro-batch", "28 eight micro-batches"):
        for report in ranks[name]:
            assert report.num_reductions == (len(report.gradients) if layout[1] > 1 else 0)


def test_predictions_come_back_on_every_rank_of_a_pipeline(
    plain: dict[str, Report], ranks: dict[str, list[Report]], layout: tuple[int, int]
) -> None:
    shapes, total = plain["24 any order"].after
    reports = ranks["24 any order"]
    if layout[1] == 1:
        for report in reports:
            assert report.after[0] == shapes
            assert report.after[1] == pytest.approx(total, rel=1e-9)
    else:  # each replica its own, as in any data-parallel run
        assert [report.after[0] for report in reports] == [[(2,), (2,), (1,)]] * 4
        assert reports[0].after[1] + reports[2].after[1] == pytest.approx(total, rel=1e-9)


def test_hooks_see_the_same_values_on_every_rank(ranks: dict[str, list[Report]], plain: dict[str, Report]) -> None:
    for report in ranks["logs of all kinds"]:
        assert report.after["loss"] == pytest.approx(plain["logs of all kinds"].after["loss"], rel=1e-9)
        assert report.after["unlogged"] == pytest.approx(plain["logs of all kinds"].after["unlogged"], rel=1e-5)


def test_dropout_does_not_depend_on_the_number_of_stages(layout: tuple[int, int]) -> None:
    fit = Fit(
        module_class=Gpt2Module,
        module_options={"dropout": 0.5, "optimizer": "adamw", "lr": 0.01},
        data=partial(InOrder, token_data(24), batch_size=8),
    )
    num_stages, num_replicas = layout
    whole = fit_in_processes({"fit": fit}, num_stages=1, num_replicas=num_replicas)["fit"]
    cut = fit_in_processes({"fit": fit}, num_stages=num_stages, num_replicas=num_replicas)["fit"]
    assert largest_difference(whole[0].values, cut[0].values) < 1e-10
    assert cut[0].metrics == pytest.approx(whole[0].metrics, rel=1e-9)
    plain = fit_plain(fit)
    assert largest_difference(plain.values, cut[0].values) > 1e-6, "no dropout at all"
