"""Fits under every schedule, between processes: the numbers of one device."""

from __future__ import annotations

from functools import partial

import pytest

from tests.strategy.modules import InOrder, LanguageModule, MlpModule, regression_data, token_data
from tests.strategy.runs import Fit, assert_same_result, fit_in_processes, fit_plain

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_every_schedule(num_replicas: int) -> None:
    # With one replica the last batch has five samples, for four micro-batches.
    num_samples = 21 if num_replicas == 1 else 24
    mlp = partial(Fit, module_class=MlpModule, data=partial(InOrder, regression_data(num_samples), batch_size=8))
    tied = partial(Fit, module_class=LanguageModule, data=partial(InOrder, token_data(12), batch_size=6))
    fits = {
        **{
            name: mlp(strategy_options={"schedule": name})
            for name in ("sliced_1f1b", "zero_bubble", "interleaved_1f1b")
        },
        "tied": tied(strategy_options={"schedule": "interleaved_1f1b"}),
    }
    plain = {name: fit_plain(fit) for name, fit in fits.items()}
    for name, ranks in fit_in_processes(fits, num_stages=2, num_replicas=num_replicas).items():
        assert_same_result(plain[name], ranks)
