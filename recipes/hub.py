"""Hugging Face data sets, for those who have ``datasets`` installed."""

from __future__ import annotations

import importlib
from typing import Any


class MissingDatasetsError(ImportError):
    """The package ``datasets`` is not installed."""


def load_hub_dataset(path: str, *, name: str | None, split: str, setting: str) -> Any:
    """Give one split of a Hugging Face data set: rows that are dicts, by index, with ``column_names``.

    Args:
        path: A name on the hub, such as ``wikitext``, a local folder, or a format such as ``json``.
        name: Which of the data set's configurations; None takes its only one.
        split: Such as ``train`` or ``train[:10%]``.
        setting: Where the path was set, for the error.

    Raises:
        MissingDatasetsError: ``datasets`` is not installed.
    """
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise MissingDatasetsError(
            f"{setting}={path} is a Hugging Face data set, and the package that reads them is not installed. "
            "Run: pip install datasets"
        ) from error
    return datasets.load_dataset(path, name, split=split)


def require_columns(rows: Any, columns: dict[str, str], path: str) -> None:
    """Refuse a data set that lacks one of ``columns``, which maps settings to the columns' names.

    Raises:
        ValueError: There is no such column.
    """
    for setting, column in columns.items():
        if column not in rows.column_names:
            raise ValueError(
                f"The data set {path!r} has no column {column!r} ({setting}); it has {', '.join(rows.column_names)}."
            )
