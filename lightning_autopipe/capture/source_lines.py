"""Where in the user's files something happened."""

from __future__ import annotations

import inspect
import linecache
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

_NOT_THE_USERS = ("lightning_autopipe/", "torch/", "lightning/pytorch/", "pytorch_lightning/", "torchmetrics/")


def line_of_error(error: BaseException) -> str:
    """Give the innermost line of the user's (or of a model library's) that an error passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if _is_the_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"


def line_of_caller() -> str:
    """Give the innermost line of the user's (or of a model library's) that is running; "" where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if _is_the_users(name):
            return f"{name}:{frame.f_lineno}: {linecache.getline(name, frame.f_lineno).strip()}"
        frame = frame.f_back
    return ""


def line_of_function(function: Callable[..., Any]) -> str:
    """Give where a function begins, as `file:line`; its name where that is not known."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    if code is None:
        return str(getattr(function, "__qualname__", function))
    return f"{code.co_filename}:{code.co_firstlineno}"


def _is_the_users(filename: str) -> bool:
    return not any(part in filename for part in _NOT_THE_USERS)
