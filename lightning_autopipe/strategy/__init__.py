"""`AutoPipeStrategy`: everything that touches Lightning.

Read in this order: `autopipe` (what Lightning calls), `process_strategy` (processes and collectives), `session` (one
module as a pipeline), `planning`; then what a step needs: `loader`, `step_exchange`, `step_log`, `metrics`, `outputs`,
`gradients`, `clipping`; then `optimizers` and `checkpoint`.
"""

from __future__ import annotations

from lightning_autopipe.strategy.autopipe import AutoPipeStrategy

__all__ = ["AutoPipeStrategy"]
