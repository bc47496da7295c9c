"""Every exception that this package raises on purpose.

::

    Exception
    └── AutoPipeError                 catch this one to catch them all
        ├── ConfigurationError        a value that the user set is wrong (also a ValueError)
        ├── CaptureError              the user's step cannot be traced or cut
        ├── PlanError                 a plan, schedule or partition is invalid or does not fit
        ├── BatchError                a batch cannot be split into micro-batches
        ├── CheckpointError           a checkpoint cannot be written, read or matched
        └── PipelineRuntimeError      a stage failed while the pipeline ran

A message says what is wrong, the value against what is allowed, where (stage, rank, micro-batch, module path), and
which setting to change.
"""

from __future__ import annotations

__all__ = [
    "AutoPipeError",
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "ConfigurationError",
    "PipelineRuntimeError",
    "PlanError",
]


class AutoPipeError(Exception):
    """Base of all errors of this package."""


class ConfigurationError(AutoPipeError, ValueError):
    """A value that the user set is out of range, of the wrong type, or contradicts another one."""


class CaptureError(AutoPipeError):
    """The user's step cannot be traced or cut; names the module path and the source line."""


class PlanError(AutoPipeError):
    """A plan, a partition or a schedule is invalid, or belongs to another module or world size."""


class BatchError(AutoPipeError):
    """A batch cannot be split into micro-batches without changing its meaning."""


class CheckpointError(AutoPipeError):
    """A checkpoint cannot be written, read, or matched with the module and the optimizers."""


class PipelineRuntimeError(AutoPipeError):
    """A stage failed while the pipeline ran; names stage, rank and micro-batch."""
