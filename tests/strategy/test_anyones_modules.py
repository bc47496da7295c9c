"""Modules of all kinds in real processes, against the plain module in one process.

The numbers in the names are the rows of the table of failures that users of pipeline parallelism have reported; "found"
marks what was found while the method was tried.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.strategy.anyones_modules import (
    BranchingModule,
    CausalModule,
    CustomFunctionModule,
    InPlaceModule,
    RecomputedStartModule,
    RecurrentModule,
    RotaryModule,
    SeveralLengths,
    TwoTowersModule,
    WeightNormModule,
)
from tests.strategy.modules import InOrder, largest_difference, regression_data, token_data
from tests.strategy.runs import Fit, Report, assert_same_result, fit_in_processes, fit_plain

pytestmark = pytest.mark.filterwarnings("ignore")

SEQUENCES = partial(InOrder, token_data(16), batch_size=8)
VECTORS = partial(InOrder, regression_data(16), batch_size=8)
WITH_DROPOUT = "4 recomputation inside the model, dropout"
FITS = {
    WITH_DROPOUT: Fit(module_class=CausalModule, module_options={"dropout": 0.5, "recompute": True}, data=SEQUENCES),
    "11 adapters of peft": Fit(
        module_class=CausalModule,
        module_options={"low_rank": True, "optimizer": "adamw", "lr": 0.01},
        data=SEQUENCES,
        trainer_options={"gradient_clip_val": 0.01},
    ),
    "19 a rotary module called at three points": Fit(module_class=RotaryModule, data=SEQUENCES),
    "19 a tiny GPT-2": Fit(module_class=CausalModule, data=SEQUENCES),
    "21 recomputed from the token ids on": Fit(module_class=RecomputedStartModule, data=SEQUENCES),
    "22 variable lengths": Fit(module_class=CausalModule, data=partial(SeveralLengths, batch_size=4)),
    "found: recomputation inside the model": Fit(
        module_class=CausalModule, module_options={"recompute": True}, data=SEQUENCES
    ),
    "found: LSTM": Fit(module_class=RecurrentModule, data=SEQUENCES),
    "found: weight norm by parametrization": Fit(module_class=WeightNormModule, data=VECTORS),
    "found: custom function": Fit(module_class=CustomFunctionModule, data=VECTORS),
    "found: in place on either side": Fit(module_class=InPlaceModule, data=VECTORS),
    "found: contrastive towers, one micro-batch": Fit(
        module_class=TwoTowersModule, data=VECTORS, strategy_options={"num_microbatches": 1}
    ),
    "found: a branch between two layers": Fit(
        module_class=BranchingModule,
        data=partial(InOrder, regression_data(16), batch_size=2),
        strategy_options={"num_microbatches": 1},
    ),
}


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Report]]:
    return fit_in_processes(FITS, num_stages=2, timeout_s=300)  # a dozen fits


@pytest.mark.parametrize("name", [name for name in FITS if name != WITH_DROPOUT])
def test_equals_the_plain_module(name: str, ranks: dict[str, list[Report]]) -> None:
    plain = fit_plain(FITS[name])
    assert plain.gradients[0]
    assert_same_result(plain, ranks[name])


def test_both_branches_were_taken(ranks: dict[str, list[Report]]) -> None:
    taken = {
        name.split(".")[2]
        for step in ranks["found: a branch between two layers"][1].gradients
        for name in step
        if "blocks.1." in name
    }
    assert taken == {"positive", "negative"}


def test_recomputation_draws_the_same_dropout_on_any_number_of_stages(ranks: dict[str, list[Report]]) -> None:
    """Row 4 with `gradient_checkpointing_enable()`."""
    cut = ranks[WITH_DROPOUT]
    fit = {WITH_DROPOUT: FITS[WITH_DROPOUT]}
    (whole,) = fit_in_processes(fit, num_stages=1)[WITH_DROPOUT]  # in a process, which has the seed of the others
    assert_same_result(whole, cut, tolerance=1e-12)
    assert largest_difference(fit_plain(FITS[WITH_DROPOUT]).values, cut[0].values) > 1e-6, "no dropout at all"
