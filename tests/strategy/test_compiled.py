"""A LightningModule that is given to `torch.compile`; parts of one are in the conformance tests of models."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

from lightning_autopipe.strategy import AutoPipeStrategy
from tests.strategy.modules import (
    InOrder,
    MlpModule,
    largest_difference,
    quiet_trainer,
    regression_data,
    seeded,
    values,
)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_module_runs_as_before_with_one_warning() -> None:
    data = InOrder(regression_data(16), batch_size=8)
    plain, module = seeded(MlpModule), seeded(MlpModule)
    quiet_trainer().fit(plain, datamodule=data)
    trainer = quiet_trainer(AutoPipeStrategy(num_microbatches=4, profile="flops", verify=False))
    with pytest.warns(UserWarning, match="MlpModule is compiled with torch.compile.*runs uncompiled"):
        trainer.fit(torch.compile(module, backend="aot_eager"), datamodule=data)
    assert largest_difference(values(plain), values(module)) < 1e-12
    assert module._compiler_ctx is None
    counter = torch._dynamo.testing.CompileCounter()
    torch.compile(lambda x: x + 1, backend=counter)(torch.ones(2))
    assert counter.frame_count == 1, "what is compiled later is compiled"
