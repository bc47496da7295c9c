"""Runs the files of `lightning_autopipe.strategy` a second time, under another name and with other imports.

Tracebacks, debuggers and `inspect` show the one file there is, since names change in import statements only and every
line stays where it is.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

ORIGINAL = "lightning_autopipe.strategy"
TWIN = "lightning_autopipe.pytorch_lightning"
RENAMED = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric", ORIGINAL: TWIN}

_ORIGINAL_FOLDER = str(Path(__file__).parents[1] / "strategy")
_FORM = "`from lightning.pytorch... import name` or `import lightning.pytorch... as name`"


def install() -> None:
    """Makes the twins importable; calling it again changes nothing."""
    # By name: this module may have been reloaded.
    if not any(type(finder).__qualname__ == _TwinFinder.__qualname__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _TwinFinder())


def rename_imports(source: str | bytes, path: str) -> ast.Module:
    """The syntax tree of a file with the modules of `RENAMED` replaced where they are imported.

    Raises:
        ImportError: an import binds the name ``lightning`` or one of its parts, which cannot be renamed.
    """
    return _Renaming(path).visit(ast.parse(source, path))  # type: ignore[no-any-return]


class _Renaming(ast.NodeTransformer):
    def __init__(self, path: str) -> None:
        self._path = path

    def visit_Import(self, node: ast.Import) -> ast.Import:
        for alias in node.names:
            name = self._renamed(alias.name, node)
            if name != alias.name and alias.asname is None:
                raise self._refused(node)
            alias.name = name
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if node.level or node.module is None:
            return node
        if any(f"{node.module}.{alias.name}" in RENAMED for alias in node.names):
            raise self._refused(node)
        node.module = self._renamed(node.module, node)
        return node

    def _renamed(self, name: str, node: ast.stmt) -> str:
        for old, new in RENAMED.items():
            if name == old or name.startswith(f"{old}."):
                return new + name.removeprefix(old)
        if name.partition(".")[0] == "lightning":
            raise self._refused(node)
        return name

    def _refused(self, node: ast.stmt) -> ImportError:
        return ImportError(
            f"{self._path}:{node.lineno}: {ast.unparse(node)!r} cannot be renamed for pytorch_lightning; write {_FORM}"
        )


class _TwinLoader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        # Not from the file's bytecode cache, which holds the code of the original.
        path = self.get_filename(fullname)
        return compile(rename_imports(self.get_data(path), path), path, "exec", dont_inherit=True)


class _TwinFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent = fullname.rpartition(".")[0]
        if parent != TWIN and not parent.startswith(f"{TWIN}."):
            return None
        spec = PathFinder.find_spec(fullname, [_ORIGINAL_FOLDER] if parent == TWIN else path)
        if spec is None or spec.origin is None:
            return None
        spec.loader = _TwinLoader(fullname, spec.origin)
        return spec
