"""Numbers in other formats."""

from __future__ import annotations

from functools import partial

from tests.conformance.items import Item, make_test
from tests.strategy.modules import FloatModule, InOrder, MlpModule, float_data, regression_data
from tests.strategy.runs import Fit

ITEMS = {
    "precision: 64-true": Item(
        fit=Fit(
            module_class=MlpModule,
            module_options={"optimizer": "adamw"},
            data=partial(InOrder, regression_data(32), regression_data(8, seed=1), batch_size=8),
        ),
    ),
    "precision: 32-true": Item(
        fit=Fit(
            module_class=FloatModule,
            module_options={"optimizer": "adamw"},
            data=partial(InOrder, float_data(32), batch_size=8),
            trainer_options={"precision": "32-true"},
        ),
        tolerance=1e-4,
    ),
}

test_item = make_test(ITEMS)
