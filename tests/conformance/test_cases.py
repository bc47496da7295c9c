"""Rows of the table of what users of pipelines have reported, as items: 4, 5, 6, 9, 10, 13, 16, 18, 19 and 21.

Rows 4 and 5, dropout under recomputation and statistics of batch normalization, are in `test_models` too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.conformance.items import Item, make_test
from tests.conformance.models import (
    CacheModule,
    DropoutModule,
    NothingChanges,
    PaddedBertModule,
    RecomputedIdsModule,
    SkipModule,
    StatisticsModule,
    buffers,
    what_changed,
)
from tests.strategy.anyones_modules import CausalModule, RotaryModule
from tests.strategy.modules import InOrder, LanguageModule, TiedBlocksModule, regression_data, token_data
from tests.strategy.runs import Fit

VECTORS = partial(InOrder, regression_data(24), batch_size=8)
SEQUENCES = partial(InOrder, token_data(24), batch_size=8)
ADAMW = {"optimizer": "adamw", "lr": 0.01}


def fit(module_class: Any, data: Any = VECTORS, **options: Any) -> Fit:
    return Fit(module_class=module_class, module_options=options, data=data)


def nothing_changes(module_class: Any) -> Item:
    measured = Fit(
        module_class=module_class,
        data=VECTORS,
        strategy_options={"profile": "measured", "verify": True},
        callbacks=[NothingChanges],
        after=what_changed,
    )
    return Item(fit=measured, is_same=False, check=lambda plain, ranks: _all_unchanged(ranks))


def _all_unchanged(ranks: Any) -> None:
    assert [rank.after for rank in ranks] == [True] * len(ranks)


ITEMS = {
    "row 5: statistics deferred to the batch": Item(
        fit=Fit(
            module_class=StatisticsModule, data=VECTORS, strategy_options={"deferred_batch_norm": True}, after=buffers
        ),
        is_same=False,
        check=lambda plain, ranks: _same_buffers(plain, ranks),
    ),
    "row 6: planning changes no statistics": nothing_changes(StatisticsModule),
    "row 6: planning draws nothing": nothing_changes(DropoutModule),
    "row 9: a tied head, three steps of AdamW": Item(fit=fit(LanguageModule, SEQUENCES, **ADAMW)),
    "row 10: blocks used twice, nested ties": Item(fit=fit(TiedBlocksModule, **ADAMW)),
    "row 13: a cache without gradient, an integer mask": Item(fit=fit(CacheModule, SEQUENCES)),
    "row 16: BERT with real padding, loss inside": Item(fit=fit(PaddedBertModule, SEQUENCES)),
    "row 18: a skip over blocks": Item(fit=fit(SkipModule)),
    "row 19: one rotary module at several points": Item(fit=fit(RotaryModule, SEQUENCES)),
    "row 19: GPT-2": Item(fit=fit(CausalModule, SEQUENCES)),
    "row 21: all recomputed, where no input requires grad": Item(
        fit=fit(RecomputedIdsModule, SEQUENCES, reentrant=False)
    ),
    "row 21: all recomputed re-entrantly, where no input requires grad": Item(
        fit=fit(RecomputedIdsModule, SEQUENCES, reentrant=True)
    ),
}


def _same_buffers(plain: Any, ranks: Any) -> None:
    assert set(ranks[0].after) == set(plain.after)
    for name, values in plain.after.items():
        assert ranks[0].after[name] == pytest.approx(values, rel=1e-10), name


test_item = make_test(ITEMS)
