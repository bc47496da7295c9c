"""With one micro-batch every sum has one device's order, so that a pipeline's numbers are its numbers bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.strategy.modules import Gpt2Module, InOrder, LanguageModule, MlpModule, regression_data, token_data
from tests.strategy.runs import Fit, assert_same_result, fit_in_processes, fit_plain

pytestmark = pytest.mark.filterwarnings("ignore")


class GroupsModule(MlpModule):
    """Decays weights but not biases, whose group comes first."""

    def configure_optimizers(self) -> Any:
        biases = [p for name, p in self.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in self.named_parameters() if not name.endswith("bias")]
        return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": weights}], lr=0.01)


class ForeachOffModule(MlpModule):
    """Clips by its own call, tensor by tensor."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05, norm_type=3.0, foreach=False))
        super().on_before_optimizer_step(optimizer)


CLIPPED: Any = {"gradient_clip_val": 0.05, "max_epochs": 2}
VECTORS = partial(InOrder, regression_data(32), batch_size=4)
FITS = {
    "clipping of all parameters": Fit(
        module_class=MlpModule,
        module_options={"depth": 8, "optimizer": "adamw"},
        data=VECTORS,
        trainer_options=CLIPPED,
    ),
    "clipping of groups": Fit(
        module_class=GroupsModule, module_options={"depth": 8}, data=VECTORS, trainer_options=CLIPPED
    ),
    "clipping in bf16-true": Fit(
        module_class=MlpModule,
        module_options={"depth": 8, "optimizer": "adamw"},
        data=VECTORS,
        trainer_options={**CLIPPED, "precision": "bf16-true"},
    ),
    "clipping in a hook, without foreach": Fit(
        module_class=ForeachOffModule, module_options={"depth": 8}, data=VECTORS, trainer_options={"max_epochs": 2}
    ),
    "accumulation": Fit(
        module_class=MlpModule,
        module_options={"optimizer": "adamw"},
        data=VECTORS,
        trainer_options={"accumulate_grad_batches": 4, "max_epochs": 4, **CLIPPED},
    ),
    "tied weights": Fit(
        module_class=LanguageModule,
        module_options={"optimizer": "adamw", "lr": 0.01},
        data=partial(InOrder, token_data(32), batch_size=8),
        trainer_options=CLIPPED,
    ),
    "a language model of transformers": Fit(
        module_class=Gpt2Module,
        module_options={"optimizer": "adamw", "lr": 0.01},
        data=partial(InOrder, token_data(24), batch_size=8),
        trainer_options=CLIPPED,
    ),
}


@pytest.fixture(scope="module", params=[2, 3], ids=["2 stages", "3 stages"])
def ranks(request: Any) -> Any:
    once = {
        name: replace(fit, strategy_options={"num_microbatches": 1, "schedule": "gpipe"}) for name, fit in FITS.items()
    }
    return fit_in_processes(once, num_stages=request.param)


@pytest.mark.parametrize("name", list(FITS))
def test_equals_the_plain_module_bit_for_bit(name: str, ranks: Any) -> None:
    assert_same_result(fit_plain(FITS[name]), ranks[name], tolerance=0.0)
