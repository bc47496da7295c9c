"""The strategy's name reaches Lightning's registries whatever is imported first, and never breaks their import."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
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


@pytest.mark.parametrize("line", ["", "importlib.reload(register); register.install()"])
def test_reloading_registers_once_more(fake_lightning: Path, line: str) -> None:
    code = f"""
import importlib, sys
import lightning_autopipe, lightning_autopipe._register as register
{line}
import lightning.pytorch.strategies as a
first = a.StrategyRegistry
importlib.reload(a)
print(*first, *a.StrategyRegistry, first is a.StrategyRegistry)
print(sum(type(finder).__name__ == "_RegistryFinder" for finder in sys.meta_path))
"""
    assert run(code, fake_lightning).split() == ["autopipe_h", "autopipe_h", "False", "1"]


def test_another_finder_may_ask_all_finders_as_well(fake_lightning: Path) -> None:
    code = """
import sys
import lightning_autopipe
class Curious:
    def find_spec(self, name, path=None, target=None):
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        return next((spec for spec in specs if spec is not None), None)
sys.meta_path.insert(0, Curious())
sys.meta_path.append(Curious())
import lightning.pytorch.strategies as a
print(*a.StrategyRegistry)
"""
    assert run(code, fake_lightning).split() == ["autopipe_h"]


def test_a_loader_that_serves_several_questions_stays_as_it_is(fake_lightning: Path) -> None:
    code = """
import importlib.util, sys
import lightning_autopipe
from importlib.machinery import ModuleSpec
class Both:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == "pytorch_lightning.strategies" else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        class Registry(dict):
            register = lambda self, name, strategy, description: self.update({name: strategy})
        module.StrategyRegistry = Registry()
both = Both()
sys.meta_path.insert(1, both)
for _ in range(2):
    importlib.util.find_spec("pytorch_lightning.strategies")
import pytorch_lightning.strategies as a
print(*a.StrategyRegistry, vars(both))
"""
    assert run(code, fake_lightning).split() == ["autopipe_h", "{}"]


def test_a_finder_that_raises_is_heard_as_without_this_package(fake_lightning: Path) -> None:
    code = """
import sys
import lightning_autopipe
class Raising:
    def find_spec(self, name, path=None, target=None):
        if name == "lightning.pytorch.strategies":
            raise ImportError("not today")
for index in (0, 1):  # before ours, then after it
    sys.meta_path.insert(index, Raising())
    try:
        import lightning.pytorch.strategies
    except ImportError as error:
        print(error)
    del sys.meta_path[index]
import lightning.pytorch.strategies as a
print(*a.StrategyRegistry)
"""
    assert run(code, fake_lightning).split() == ["not", "today", "not", "today", "autopipe_h"]


BROKEN = {
    "an error": {"__init__.py": "raise RuntimeError('half installed')"},
    "no python": {"__init__.py": "half installed"},
    "a lost module": {"__init__.py": "from lightning_autopipe import _register  # half installed"},
    "another _register": {"__init__.py": "", "_register.py": "half = 'half installed'"},
    "a lost __init__": {"config.py": ""},
    "all lost": {},
}


@pytest.mark.parametrize("files", BROKEN.values(), ids=BROKEN)
def test_loading_through_torch_never_raises(tmp_path: Path, files: dict[str, str]) -> None:
    shutil.copy(ROOT / "lightning_autopipe_autoload.py", tmp_path)
    for name, source in files.items():
        (tmp_path / "lightning_autopipe").mkdir(exist_ok=True)
        (tmp_path / "lightning_autopipe" / name).write_text(source)
    code = "import lightning_autopipe_autoload as a; a.autoload(); print('went on')"
    # Without site-packages, where the package itself may be installed.
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path, env={}
    )
    assert (result.returncode, result.stdout.strip()) == (0, "went on"), result.stderr
    assert "could not be loaded" in result.stderr
    assert "LIGHTNING_AUTOPIPE_AUTOLOAD=0" in result.stderr


def test_a_finder_that_raises_does_not_stop_torch(tmp_path: Path) -> None:
    code = """
import sys
class Raising:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "lightning_autopipe":
            raise RuntimeError("no such luck")
sys.meta_path.insert(0, Raising())
import lightning_autopipe_autoload
lightning_autopipe_autoload.autoload()
print("went on")
"""
    output = run(code, tmp_path)
    assert "went on" in output
    assert "no such luck" in output


@pytest.mark.parametrize(
    ("value", "is_on"), [(None, True), ("1", True), ("", True), ("0", False), ("False", False), ("off ", False)]
)
def test_a_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch, value: str | None, is_on: bool) -> None:
    import lightning_autopipe_autoload

    calls = []
    monkeypatch.setattr(_register, "install", lambda: calls.append("install"))
    if value is None:
        monkeypatch.delenv("LIGHTNING_AUTOPIPE_AUTOLOAD", raising=False)
    else:
        monkeypatch.setenv("LIGHTNING_AUTOPIPE_AUTOLOAD", value)
    lightning_autopipe_autoload.autoload()
    assert calls == (["install"] if is_on else [])


@pytest.mark.parametrize(
    ("imported", "installed", "expected"),
    [
        ((), ("lightning",), "lightning_autopipe.strategy"),
        ((), (), "lightning_autopipe.pytorch_lightning"),
        (("lightning.pytorch",), ("lightning",), "lightning_autopipe.strategy"),
        (("pytorch_lightning",), ("lightning",), "lightning_autopipe.pytorch_lightning"),
        (("pytorch_lightning", "lightning.pytorch"), ("lightning",), "lightning_autopipe.strategy"),
    ],
)
def test_which_strategy_the_package_gives(
    monkeypatch: pytest.MonkeyPatch, imported: tuple[str, ...], installed: tuple[str, ...], expected: str
) -> None:
    others = {name: module for name, module in sys.modules.items() if name not in _register.STRATEGY_MODULES}
    monkeypatch.setattr(sys, "modules", others | dict.fromkeys(imported, sys))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: sys if name in installed else None)
    assert _register.strategy_module_in_use() == expected


def test_lightning_knows_the_name() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_autopipe import AutoPipeStrategy

    assert "autopipe_h" in StrategyRegistry
    assert isinstance(StrategyRegistry.get("autopipe_h"), AutoPipeStrategy)
