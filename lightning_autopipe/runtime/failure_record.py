"""The first failure of a run, as all ranks see it."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from lightning_autopipe.runtime.errors import CommunicationError
from lightning_autopipe.runtime.units import unit_name

_BROKEN_CONNECTION = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|timed out waiting|broken pipe|socket", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Who failed, where, and why."""

    global_rank: int
    stage_index: int | None
    microbatch_index: int | None = None
    slice_index: int | None = None
    direction: str | None = None
    message: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, *, global_rank: int, stage_index: int | None) -> Failure:
        """A failure from an exception; what it or its causes know of stage, micro-batch and direction is kept."""
        own_stage_index = _known(error, "stage_index")
        return cls(
            global_rank=global_rank,
            stage_index=stage_index if own_stage_index is None else own_stage_index,
            microbatch_index=_known(error, "microbatch_index"),
            slice_index=_known(error, "slice_index"),
            direction=_known(error, "direction"),
            message=f"{type(error).__name__}: {error}",
            traceback="".join(traceback.format_exception(type(error), error, error.__traceback__)),
        )

    def to_json(self) -> str:
        """As text for a store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        """What `to_json` wrote."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        where = f"global rank {self.global_rank}"
        if self.stage_index is not None:
            where += f", stage {self.stage_index}"
        if self.microbatch_index is not None:
            where += f", {unit_name((self.microbatch_index, self.slice_index))}"
        if self.direction is not None:
            where += f", {self.direction}"
        return f"{where}: {self.message}"


def is_consequence(error: BaseException) -> bool:
    """Whether an error looks like what a failure elsewhere does to this process: a connection broke, a limit passed."""
    for cause in _chain(error):
        if isinstance(cause, (CommunicationError, dist.DistError)):
            return True
        if type(cause) is RuntimeError and _BROKEN_CONNECTION.search(str(cause)):
            return True
    return False


def _known(error: BaseException, name: str) -> Any:
    return next((value for cause in _chain(error) if (value := getattr(cause, name, None)) is not None), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
