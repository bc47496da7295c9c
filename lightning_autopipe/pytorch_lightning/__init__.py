"""`AutoPipeStrategy` for ``pytorch_lightning.Trainer``, beside `lightning_autopipe.strategy` for ``lightning.pytorch``.

Lightning is published under two names, ``lightning.pytorch`` and ``pytorch_lightning``: the same source, with classes
that know nothing of each other. This package has a module for every one in `lightning_autopipe.strategy`: the same
file, run with its imports renamed (`_renaming`). Only ``pytorch_lightning`` has to be installed.
"""

from __future__ import annotations

import importlib
from typing import Any

from lightning_autopipe.pytorch_lightning import _renaming

__all__ = ["AutoPipeStrategy"]

_renaming.install()

# A type checker cannot follow renamed imports.
AutoPipeStrategy: Any = importlib.import_module(f"{__name__}.autopipe").AutoPipeStrategy
