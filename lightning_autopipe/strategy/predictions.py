"""Prediction writers, which would otherwise write once for each stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.callbacks import BasePredictionWriter, Callback

_WRITES = ("write_on_batch_end", "write_on_epoch_end")


def silence_writers(callbacks: Iterable[Callback]) -> None:
    """Makes prediction writers write nothing on this rank, until `unsilence_writers`."""
    for callback in callbacks:
        if isinstance(callback, BasePredictionWriter):
            for name in _WRITES:
                callback.__dict__[name] = _write_nothing


def unsilence_writers(callbacks: Iterable[Callback]) -> None:
    """Undoes `silence_writers`."""
    for callback in callbacks:
        for name in _WRITES:
            if callback.__dict__.get(name) is _write_nothing:
                del callback.__dict__[name]


def _write_nothing(*_: Any, **__: Any) -> None:
    pass
