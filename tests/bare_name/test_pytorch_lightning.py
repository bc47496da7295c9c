"""The same strategy under Lightning's other name, and what happens where the two are mixed."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision

import lightning_autopipe.pytorch_lightning
import lightning_autopipe.strategy
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.pytorch_lightning import _renaming

STRATEGY_FOLDER = Path(lightning_autopipe.strategy.__file__).parent
STRATEGIES = {
    lightning.pytorch: lightning_autopipe.strategy.AutoPipeStrategy,
    pytorch_lightning: lightning_autopipe.pytorch_lightning.AutoPipeStrategy,
}
MIXES = [(lightning.pytorch, pytorch_lightning), (pytorch_lightning, lightning.pytorch)]
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def module_of(namespace: Any) -> Any:
    class Module(namespace.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)

    return Module()


# One file, two modules -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(STRATEGY_FOLDER.rglob("*.py")), ids=lambda path: path.stem)
def test_every_file_of_the_strategy_can_be_renamed(path: Path) -> None:
    tree = _renaming.rename_imports(path.read_bytes(), str(path))
    statements = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [statement for statement in statements if "lightning." in statement.replace("_lightning.", "")] == []


@pytest.mark.parametrize(
    ("source", "renamed"),
    [
        ("import lightning.pytorch as pl", "import pytorch_lightning as pl"),
        ("import os, lightning.fabric.plugins as p", "import os, lightning_fabric.plugins as p"),
        ("from lightning.pytorch import Trainer", "from pytorch_lightning import Trainer"),
        ("from lightning.fabric.a.b import c as d", "from lightning_fabric.a.b import c as d"),
        ("from lightning_autopipe.strategy.a import b", "from lightning_autopipe.pytorch_lightning.a import b"),
        ("from lightning_autopipe.strategy import a", "from lightning_autopipe.pytorch_lightning import a"),
        ("from lightning_autopipe.core import errors", "from lightning_autopipe.core import errors"),
        ("from lightning_utilities.core import a", "from lightning_utilities.core import a"),
        ("from . import a", "from . import a"),
        ("def f():\n    from lightning.pytorch import a", "def f():\n    from pytorch_lightning import a"),
        ("a = 'lightning.pytorch'", "a = 'lightning.pytorch'"),
    ],
)
def test_imports_are_renamed_and_nothing_else(source: str, renamed: str) -> None:
    assert ast.unparse(_renaming.rename_imports(source, "file.py")) == renamed


@pytest.mark.parametrize(
    "statement",
    [
        "import lightning",
        "import lightning.pytorch",
        "import lightning.data as d",
        "import lightning_autopipe.strategy",
        "from lightning import pytorch",
        "from lightning import Trainer",
        "from lightning_autopipe import strategy",
    ],
)
def test_an_import_that_cannot_be_renamed_is_refused(statement: str) -> None:
    with pytest.raises(ImportError, match=f"file.py:3: '{statement}' cannot be renamed"):
        _renaming.rename_imports(f"\n\n{statement}", "file.py")


def test_both_have_the_same_names() -> None:
    assert lightning_autopipe.pytorch_lightning.__all__ == lightning_autopipe.strategy.__all__
    first, second = (set(dir(strategy)) for strategy in STRATEGIES.values())
    assert first == second


def test_neither_knows_the_other() -> None:
    for strategy, foreign in zip(STRATEGIES.values(), reversed([*STRATEGIES]), strict=True):
        assert not issubclass(strategy, foreign.strategies.Strategy)
        package = strategy.__module__.rpartition(".")[0]
        modules = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
        assert len(modules) > 20
        for module in modules:
            for value in vars(module).values():
                assert not str(getattr(value, "__module__", "")).startswith(f"{foreign.__name__}."), module


def test_tracebacks_and_sources_are_those_of_the_file() -> None:
    original, twin = STRATEGIES.values()
    assert inspect.getsource(twin) == inspect.getsource(original)
    with pytest.raises(ConfigurationError) as error:
        twin(num_stages=0)
    last = traceback.extract_tb(error.value.__traceback__)[-1]
    assert Path(last.filename) == STRATEGY_FOLDER / "options.py"
    assert last.line == Path(last.filename).read_text().splitlines()[(last.lineno or 0) - 1].strip()


def test_a_module_that_is_not_there_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"lightning_autopipe\.pytorch_lightning\.nothing"):
        importlib.import_module("lightning_autopipe.pytorch_lightning.nothing")


def test_installing_twice_leaves_one_finder() -> None:
    before = list(sys.meta_path)
    try:
        importlib.reload(_renaming).install()
        assert sys.meta_path == before
    finally:
        sys.meta_path[:] = before


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=lambda strategy: strategy.__module__)
def test_objects_are_pickled_and_copied_as_their_own_kind(strategy: Any) -> None:
    made = strategy(num_stages=2, split_batch={"weights": None})
    for copied in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert type(copied) is strategy
        assert copied.options == made.options


# Mixes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("trainer", "other"), MIXES)
def test_a_strategy_for_the_other_trainer(trainer: Any, other: Any) -> None:
    with pytest.raises(ValueError, match=f"<AutoPipeStrategy for {other.__name__}.Trainer") as error:
        trainer.Trainer(strategy=STRATEGIES[other](), **QUIET)
    assert f"from {STRATEGIES[trainer].__module__.rpartition('.')[0]} for {trainer.__name__}" in str(error.value)


@pytest.mark.parametrize(("trainer", "other"), MIXES)
def test_a_module_for_the_other_trainer(trainer: Any, other: Any) -> None:
    # Lightning's own words: no strategy is asked before.
    with pytest.raises(TypeError, match="`model` must be a `LightningModule`"):
        trainer.Trainer(strategy="autopipe_h", **QUIET).fit(module_of(other))


@pytest.mark.parametrize(("trainer", "other"), MIXES)
@pytest.mark.filterwarnings("ignore")
def test_a_callback_for_the_other_trainer(trainer: Any, other: Any) -> None:
    own = trainer.Trainer(
        strategy="autopipe_h", callbacks=[other.callbacks.LearningRateMonitor()], **{**QUIET, "logger": True}
    )
    with pytest.raises(ConfigurationError, match=f"LearningRateMonitor is a {other.__name__}.*for {trainer.__name__}"):
        own.fit(module_of(trainer))


@pytest.mark.parametrize(
    "component",
    [
        {"checkpoint_io": TorchCheckpointIO()},
        {"cluster_environment": LightningEnvironment()},
        {"precision_plugin": MixedPrecision("bf16-mixed", "cpu")},
        {"accelerator": lightning.pytorch.accelerators.CPUAccelerator()},
    ],
    ids=lambda component: next(iter(component)),
)
def test_a_component_of_the_other_name(component: dict[str, Any]) -> None:
    STRATEGIES[lightning.pytorch](**component)
    name = next(iter(component))
    with pytest.raises(ConfigurationError, match=rf"^{name} is a lightning\..* this strategy is for pytorch_lightning"):
        STRATEGIES[pytorch_lightning](**component)
