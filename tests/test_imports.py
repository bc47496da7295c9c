"""Imports go one way between the layers of the package, and the light parts stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "lightning_autopipe"
ROOT = Path(__file__).parent.parent / PACKAGE

LOWER_LAYERS = (
    "core",
    "schedules",
    "planner",
    "cluster",
    "profile_files",
    "capture",
    "profiling",
    "runtime",
    "visualization",
    "checkpoints",
)
EVERYTHING = (*LOWER_LAYERS, "strategy", "pytorch_lightning", "config", "cli", "_register")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "core": (),
    "schedules": ("core",),
    "planner": ("core", "schedules"),
    "cluster": ("core",),
    "profile_files": ("core",),
    "capture": ("core",),
    "profiling": ("core", "capture", "runtime"),
    "runtime": ("core", "schedules", "capture"),
    "visualization": ("core",),
    "checkpoints": ("core",),
    "strategy": LOWER_LAYERS,
    # Runs the files of strategy under another name.
    "pytorch_lightning": (),
    "config": EVERYTHING,
    "cli": EVERYTHING,
    # Only on use: _register loads them when a Trainer asks for the strategy.
    "_register": ("core", "strategy"),
    "__init__": ("_register", "core", "strategy"),
}
WITHOUT_TORCH = ("core", "schedules", "planner", "cluster", "profile_files", "visualization", "_register", "__init__")
# Files of those layers that need torch all the same, and that no other file of those layers imports.
WITH_TORCH_ALL_THE_SAME = ("cluster/measure.py",)
HEAVY_FILES = [[PACKAGE, *file.removesuffix(".py").split("/")] for file in WITH_TORCH_ALL_THE_SAME]
HEAVY = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "transformers", "hydra")


def layer_of(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py") if parts else "__init__"


def imported_modules(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """Line and full name of every module that a file imports, wherever in the file, type checking included."""
    is_package = path.name == "__init__.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package and node.level == 1 else -node.level + is_package]
                base = ".".join([*parents, *([base] if base else [])])
            yield node.lineno, base
            # `from lightning_autopipe import planner` names the layer in the second half.
            # And `from lightning_autopipe.cluster import measure` a file.
            is_ours = base.split(".")[0] == PACKAGE
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names if is_ours)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            if isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)


def heavy_file(parts: list[str]) -> bool:
    """Whether a full name is that of one of our files that need torch, or of something in it."""
    return any(parts[: len(heavy)] == heavy for heavy in HEAVY_FILES)


def violations(root: Path) -> list[str]:
    found = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        layer = layer_of(relative.parts)
        module = ".".join((PACKAGE, *relative.with_suffix("").parts)).removesuffix(".__init__")
        if layer not in MAY_IMPORT:
            found.append(f"{relative}: layer {layer!r} is not in the table of this test")
            continue
        for line, name in imported_modules(path, module):
            parts = name.split(".")
            is_heavy = parts[0] in HEAVY or heavy_file(parts)
            if is_heavy and layer in WITHOUT_TORCH and relative.as_posix() not in WITH_TORCH_ALL_THE_SAME:
                found.append(f"{relative}:{line}: {layer} imports {name}, but it must do without")
            if parts[0] != PACKAGE or len(parts) == 1:
                continue
            target = parts[1]
            if target in MAY_IMPORT and target != layer and target not in MAY_IMPORT[layer]:
                found.append(f"{relative}:{line}: {layer} imports {name}, allowed are {MAY_IMPORT[layer] or 'none'}")
    return found


def test_no_import_goes_the_wrong_way() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("core/a.py", "from lightning_autopipe.schedules import lower", "core imports lightning_autopipe.schedules"),
        ("schedules/a.py", "from lightning_autopipe import planner", "schedules imports lightning_autopipe.planner"),
        ("planner/a.py", "from ..runtime.executor import x", "planner imports lightning_autopipe.runtime.executor"),
        ("planner/__init__.py", "from ..runtime import x", "planner imports lightning_autopipe.runtime"),
        ("runtime/a.py", "def f():\n    import lightning_autopipe.planner.plan", "runtime imports"),
        ("planner/a.py", "import torch.nn", "planner imports torch.nn, but it must do without"),
        ("cluster/a.py", "import torch", "cluster imports torch, but it must do without"),
        ("cluster/a.py", "from lightning_autopipe.cluster import measure", "cluster imports"),
        ("cluster/__init__.py", "def f():\n    from .measure import measure_links", "cluster imports"),
        ("core/a.py", "import importlib\nimportlib.import_module('lightning_autopipe.strategy')", "core imports"),
        ("news/a.py", "", "layer 'news' is not in the table"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, source: str, expected: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert expected in "\n".join(violations(tmp_path))


@pytest.mark.parametrize("source", ["from . import a", "from .b import c", "from ..core import d", "import json"])
def test_right_imports_pass(tmp_path: Path, source: str) -> None:
    path = tmp_path / "schedules" / "a.py"
    path.parent.mkdir()
    path.write_text(source)
    assert violations(tmp_path) == []


@pytest.mark.parametrize(
    "statement",
    [
        f"import {PACKAGE}",
        f"from {PACKAGE} import PipelinePlan, ConfigurationError",
        f"import {PACKAGE}.core, {PACKAGE}.schedules, {PACKAGE}.planner",
        f"import {PACKAGE}.visualization, {PACKAGE}.cluster, {PACKAGE}.profile_files",
        f"import {PACKAGE}.cli, {PACKAGE}.cli.cluster",
    ],
)
def test_the_light_parts_load_neither_torch_nor_lightning(statement: str) -> None:
    check = f"import sys; {statement}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, cwd=ROOT.parent)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr
