"""Example files of clusters, installed with the package."""

from __future__ import annotations

from pathlib import Path

from lightning_autopipe.core.errors import ConfigurationError

_FOLDER = Path(__file__).parent


def example_names() -> tuple[str, ...]:
    """Names of the examples."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def find_cluster_file(name: str) -> Path:
    """The file of that name, else the example of that name.

    Raises:
        ConfigurationError: there is neither.
    """
    path = Path(name)
    if path.exists() or name not in example_names():
        if not path.exists():
            raise ConfigurationError(f"{name}: no such file, and no example; examples are {', '.join(example_names())}")
        return path
    return _FOLDER / f"{name}.yaml"
