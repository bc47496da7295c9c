"""Modules that are given to `torch.compile`, as a part or as a whole, in one process."""

from __future__ import annotations

import pickle
import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from lightning.pytorch.utilities.compile import from_compiled
from torch import nn

from lightning_autopipe.strategy import AutoPipeStrategy
from tests.strategy.compiled_modules import CompiledBlocksModule, CompiledModule, counting, num_graphs
from tests.strategy.modules import (
    WIDTH,
    InOrder,
    MlpModule,
    largest_difference,
    quiet_trainer,
    regression_data,
    seeded,
    values,
)

TOLD = "run uncompiled by the pipeline"
FAST: dict[str, Any] = {"num_microbatches": 4, "profile": "flops", "verify": False}


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()
    num_graphs()


def data(num_samples: int = 16) -> InOrder:
    return InOrder(regression_data(num_samples), regression_data(8, seed=1), batch_size=8)


def fitted(module: Any, compiled: Any = None, *, num_samples: int = 16, **options: Any) -> Any:
    """Give the trainer of a fit of a module (or of what `torch.compile` made of it), and the warnings that tell."""
    trainer = quiet_trainer(AutoPipeStrategy(**{**FAST, **options}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module if compiled is None else compiled, datamodule=data(num_samples))
    return trainer, [str(warning.message) for warning in caught if TOLD in str(warning.message)]


def plain_values(module: Any, num_samples: int = 16) -> Any:
    quiet_trainer().fit(module, datamodule=data(num_samples))
    return values(module)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_module_is_compiled_by_calls_and_is_an_ordinary_one_afterwards() -> None:
    module = seeded(MlpModule)
    _, told = fitted(module, torch.compile(module, backend=counting))
    assert num_graphs() > 0
    assert not told
    assert largest_difference(plain_values(seeded(MlpModule)), values(module)) < 1e-12
    assert module._compiler_ctx is None
    counter = torch._dynamo.testing.CompileCounter()
    torch.compile(lambda x: x + 1, backend=counter)(torch.ones(2))
    assert counter.frame_count == 1, "what is compiled later is compiled"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["blocks", "net"])
def test_compiled_parts_are_compiled_for_few_sizes_with_the_options_that_the_user_gave(how: str) -> None:
    # Micro-batches of 2 samples, and of 1 and 2 in the last batch; equal blocks share what is compiled.
    plain = plain_values(seeded(CompiledModule, how=how, compile_options={"backend": "eager"}), 22)
    module = seeded(CompiledModule, how=how, compile_options={"fullgraph": True})
    _, told = fitted(module, num_samples=22)
    assert not told
    assert largest_difference(plain, values(module)) < 1e-12
    assert 0 < num_graphs() <= 6, "three sizes, with a gradient for the input and without"


@pytest.mark.filterwarnings("ignore")
def test_keys_of_checkpoints_are_those_of_lightning(tmp_path: Path) -> None:
    module = seeded(CompiledModule, how="net")
    trainer, _ = fitted(module)
    trainer.save_checkpoint(tmp_path / "pipeline.ckpt")
    saved = torch.load(tmp_path / "pipeline.ckpt", weights_only=False)["state_dict"]
    plain = seeded(CompiledModule, how="net")
    assert list(saved) == list(plain.state_dict())
    assert any("._orig_mod." in name for name in saved)
    plain.load_state_dict(saved)


@pytest.mark.filterwarnings("ignore")
def test_an_evaluation_is_compiled_and_gives_the_numbers_of_one_device() -> None:
    expected = quiet_trainer().validate(seeded(CompiledBlocksModule, backend=None), datamodule=data())
    found = quiet_trainer(AutoPipeStrategy(**FAST)).validate(seeded(CompiledBlocksModule), datamodule=data())
    assert num_graphs() > 0
    assert found[0]["val_loss"] == pytest.approx(expected[0]["val_loss"], rel=1e-12)


class Breaking(nn.Module):
    """Is no one graph."""

    def forward(self, x: Any) -> Any:
        torch._dynamo.graph_break()
        return x


class Reading(nn.Module):
    """Draws from Python's generator."""

    def forward(self, x: Any) -> Any:
        return x * (1.0 + random.random() * 0.0)


NORM = {"between": nn.BatchNorm1d, "between_options": {"num_features": WIDTH}}
UNCOMPILED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "recomputation": ({"recomputed": True}, {}, r"torch\.utils\.checkpoint"),
    "broken": ({"between": Breaking, "fullgraph": True}, {}, "fullgraph=True wants"),
    "random": ({"between": Reading}, {}, "Python's or NumPy's"),
    "synchronized": ({**NORM, "between": nn.SyncBatchNorm}, {}, "SyncBatchNorm"),
    "deferred": (NORM, {"deferred_batch_norm": True}, "deferred_batch_norm=True"),
    "cumulative": (
        {**NORM, "between_options": {"num_features": WIDTH, "momentum": None}},
        {},
        "momentum=None",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNCOMPILED)
def test_what_cannot_be_compiled_runs_as_it_is_with_one_warning(name: str) -> None:
    module_options, options, reason = UNCOMPILED[name]
    plain, module = (seeded(CompiledBlocksModule, **module_options, backend=b) for b in (None, counting))
    fitted(plain, **options)
    _, told = fitted(module, **options)
    assert num_graphs() == 0
    assert largest_difference(values(plain), values(module)) == 0.0
    (message,) = told
    assert re.search(rf"^blocks\.0\b.*: .*{reason}", message), message


@pytest.mark.filterwarnings("ignore")
def test_batch_normalization_counts_what_its_micro_batches_hold() -> None:
    plain, module = (seeded(CompiledBlocksModule, **NORM, backend=b) for b in (None, counting))
    fitted(plain)
    _, told = fitted(module)
    assert num_graphs() > 0
    assert not told
    for (name, expected), (_, found) in zip(plain.named_buffers(), module.named_buffers(), strict=True):
        assert torch.allclose(expected, found, rtol=1e-12), name
    assert int(module.blocks[0].between.num_batches_tracked) == 8


@pytest.mark.filterwarnings("ignore")
def test_the_users_stance_is_obeyed_and_comes_back() -> None:
    with torch.compiler.set_stance("force_eager"):
        fitted(seeded(CompiledBlocksModule))
        assert num_graphs() == 0
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_a_strategy_that_knows_a_compiled_module_can_be_sent_to_a_process() -> None:
    strategy = AutoPipeStrategy()
    strategy._lightning_module = from_compiled(torch.compile(seeded(MlpModule), backend="eager"))  # type: ignore[arg-type]
    strategy._module = None  # it is no part of this
    assert strategy._compiler is not None
    assert pickle.loads(pickle.dumps(strategy))._compiler is None
