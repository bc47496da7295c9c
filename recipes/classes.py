"""The classes that a checkpoint was trained with, recorded in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from hydra.utils import get_class
from lightning.pytorch.callbacks import Callback

MODEL, DATA = "model", "data"


class RecordClasses(Callback):
    """Writes the names of the module's and the data module's classes into checkpoints.

    `recipes.evaluate` then needs no more than the checkpoint's path.
    """

    def __init__(self, module: pl.LightningModule, data: pl.LightningDataModule) -> None:
        self.names = {MODEL: _name(module), DATA: _name(data)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.names)


def recorded_class(checkpoint: Mapping[str, Any], kind: str, base: type) -> Any:
    """Give the class that a checkpoint records, a subclass of ``base``; ``kind`` is ``"model"`` or ``"data"``.

    Raises:
        ValueError: It records none, or one of another kind.
    """
    name = checkpoint.get("callbacks", {}).get(RecordClasses.__qualname__, {}).get(kind)
    if name is None:
        raise ValueError(
            f"The checkpoint does not say which class it belongs to: recipes.train did not write it. Set "
            f"{kind}._target_, as in {kind}._target_={EXAMPLES[kind]}."
        )
    found = get_class(name)
    if not issubclass(found, base):
        raise ValueError(f"The checkpoint says that its {kind} is a {name}, which is no {base.__name__}.")
    return found


EXAMPLES = {MODEL: "recipes.gpt2.GPT2Module", DATA: "recipes.text.TextDataModule"}


def _name(instance: object) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"
