"""Regions of a step that must stay whole, told by the Python that is running."""

from __future__ import annotations

import sys
from types import FrameType

_TORCH_CHECKPOINT = "torch/utils/checkpoint.py"
_TORCH_MODULE = "torch/nn/modules/module.py"


class Regions:
    """Numbers the regions without cuts: checkpointed calls, and calls of modules with full backward hooks.

    The latter tie a module's ends together. Of nested regions the outermost one counts.
    """

    def __init__(self) -> None:
        self._regions: list[FrameType] = []

    def current(self) -> int | None:
        """Give the number of the region that the running code lies in."""
        frame: FrameType | None = sys._getframe(1)
        outermost = None
        while frame is not None:
            code = frame.f_code
            if code.co_name == "checkpoint" and code.co_filename.endswith(_TORCH_CHECKPOINT):
                outermost = frame
            elif code.co_name == "inner" and code.co_filename.endswith(_TORCH_MODULE):
                if frame.f_locals.get("bw_hook") is not None:
                    outermost = frame
            frame = frame.f_back
        if outermost is None:
            return None
        if not self._regions or self._regions[-1] is not outermost:
            self._regions.append(outermost)
        return len(self._regions) - 1
