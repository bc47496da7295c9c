"""Pipeline parallelism for an ordinary LightningModule: ``Trainer(strategy="autopipe_h")``.

Importing this package imports neither torch nor Lightning: public names load on first use, and the strategy's name is
registered as soon as Lightning itself has been imported.

`AutoPipeStrategy` is the one of `lightning_autopipe.strategy`, for ``lightning.pytorch``; where only
``pytorch_lightning`` has been imported, or is installed, it is that of `lightning_autopipe.pytorch_lightning`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_autopipe import _register

if TYPE_CHECKING:
    from lightning_autopipe.core.errors import (
        AutoPipeError,
        BatchError,
        CaptureError,
        CheckpointError,
        ConfigurationError,
        PipelineRuntimeError,
        PlanError,
    )
    from lightning_autopipe.core.plan import PipelinePlan
    from lightning_autopipe.strategy import AutoPipeStrategy

__version__ = "0.1.0"

__all__ = [
    "AutoPipeError",
    "AutoPipeStrategy",
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "ConfigurationError",
    "PipelinePlan",
    "PipelineRuntimeError",
    "PlanError",
    "__version__",
]

_MODULE_OF_NAME = {
    "AutoPipeError": "lightning_autopipe.core.errors",
    "BatchError": "lightning_autopipe.core.errors",
    "CaptureError": "lightning_autopipe.core.errors",
    "CheckpointError": "lightning_autopipe.core.errors",
    "ConfigurationError": "lightning_autopipe.core.errors",
    "PipelinePlan": "lightning_autopipe.core.plan",
    "PipelineRuntimeError": "lightning_autopipe.core.errors",
    "PlanError": "lightning_autopipe.core.errors",
}


def __getattr__(name: str) -> Any:
    module_name = _register.strategy_module_in_use() if name == "AutoPipeStrategy" else _MODULE_OF_NAME.get(name)
    if module_name is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module_name), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_register.install()
