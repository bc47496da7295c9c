"""The strategy's name reaches Lightning's registries whatever is imported first, and never breaks their import."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from lightning_autopipe import _register

ROOT = Path(__file__).parent.parent

FAKE_REGISTRY = """
class Registry(dict):
    def register(self, name, strategy, description):
        self[name] = strategy

StrategyRegistry = Registry()
"""


@pytest.fixture
def fake_lightning(tmp_path: Path) -> Path:
    """A folder with packages that look like Lightning's two namespaces as far as the registry goes."""
    for package in ("lightning/pytorch", "pytorch_lightning"):
        folder = tmp_path / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "strategies.py").write_text(FAKE_REGISTRY)
    (tmp_path / "lightning" / "__init__.py").write_text("")
    return tmp_path


def run(code: str, *paths: Path) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(path) for path in (*paths, ROOT))}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=environment, cwd=paths[0]
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning_autopipe; import {registry}",
        "import {registry}; import lightning_autopipe",
        "import lightning_autopipe; import lightning_autopipe._register as r; r.install(); import {registry}",
    ],
)
@pytest.mark.parametrize("registry", _register.REGISTRY_MODULES)
def test_the_name_is_registered_in_either_order(fake_lightning: Path, imports: str, registry: str) -> None:
    code = f"{imports.format(registry=registry)}\nimport sys\nprint(*sys.modules[{registry!r}].StrategyRegistry)"
    assert run(code, fake_lightning).split() == ["autopipe_h"]


def test_both_namespaces_are_served_and_one_finder_is_left(fake_lightning: Path) -> None:
    code = """
import sys
import lightning_autopipe
from lightning_autopipe._register import _RegistryFinder, install
install()
import lightning.pytorch.strategies as a
install()
import pytorch_lightning.strategies as b
print(*a.StrategyRegistry, *b.StrategyRegistry, sum(isinstance(f, _RegistryFinder) for f in sys.meta_path))
print("exec_module" in vars(a.__spec__.loader))
"""
    assert run(code, fake_lightning).split() == ["autopipe_h", "autopipe_h", "1", "False"]


def test_a_name_that_is_taken_stays_as_it_is(fake_lightning: Path) -> None:
    (fake_lightning / "lightning" / "pytorch" / "strategies.py").write_text(
        FAKE_REGISTRY + "StrategyRegistry['autopipe_h'] = 'mine'\n"
    )
    code = "import lightning_autopipe, lightning.pytorch.strategies as a; print(a.StrategyRegistry['autopipe_h'])"
    assert run(code, fake_lightning).split() == ["mine"]


@pytest.mark.parametrize(
    "imports", ["lightning_autopipe, lightning.pytorch.strategies", "lightning.pytorch.strategies, lightning_autopipe"]
)
def test_a_registry_that_fails_breaks_no_import(fake_lightning: Path, imports: str) -> None:
    (fake_lightning / "lightning" / "pytorch" / "strategies.py").write_text(
        FAKE_REGISTRY.replace("self[name] = strategy", "raise TypeError('another signature')")
    )
    output = run(f"import {imports}; print('imported')", fake_lightning)
    assert "imported" in output
    assert "could not be registered" in output
    assert "another signature" in output


def test_an_error_in_the_registry_module_itself_is_shown_as_it_is(fake_lightning: Path) -> None:
    (fake_lightning / "lightning" / "pytorch" / "strategies.py").write_text("raise OSError('broken')")
    code = """
import lightning_autopipe
for attempt in range(2):
    try:
        import lightning.pytorch.strategies
    except OSError as error:
        print(error)
"""
    assert run(code, fake_lightning).split() == ["broken", "broken"]


def test_loading_through_torch_never_raises(tmp_path: Path) -> None:
    broken = tmp_path / "lightning_autopipe"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('half installed')")
    output = run("import lightning_autopipe_autoload as a; a.autoload(); print('went on')", tmp_path)
    assert "went on" in output
    assert "half installed" in output


def test_lightning_knows_the_name() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_autopipe import AutoPipeStrategy

    assert "autopipe_h" in StrategyRegistry
    assert isinstance(StrategyRegistry.get("autopipe_h"), AutoPipeStrategy)


@pytest.mark.skipif(
    not any(point.name == "lightning_autopipe" for point in entry_points(group="torch.backends")),
    reason="lightning_autopipe is not installed, only on the path",
)
def test_lightning_knows_the_name_without_an_import_of_this_package(tmp_path: Path) -> None:
    code = "from lightning.pytorch.strategies import StrategyRegistry as r; print('autopipe_h' in r)"
    assert run(code, tmp_path).split()[-1] == "True"
