"""Process groups that are kept from run to run, and closed once they are no longer needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

_MAX_PURPOSES = 4
"""A search runs under one layout, and what it has found under another one; a Trainer before them may still be used."""


class GroupCache:
    """The groups made for one purpose (a layout with its limits), and what consists of them.

    Every rank asks for the same things in one order: making a group is collective.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self._groups: list[dist.ProcessGroup] = []

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was made under a key, or is made now."""
        if key not in self._made:
            self._made[key] = make()
        value: T = self._made[key]
        return value

    def new_group(self, ranks: Iterable[int], *, timeout_s: float, backend: str | None, what: str) -> dist.ProcessGroup:
        """A group, which ends with this cache."""
        group: Any = dist.new_group(
            sorted(ranks), timeout=timedelta(seconds=timeout_s), backend=backend, group_desc=f"autopipe {what}"
        )
        if isinstance(group, dist.ProcessGroup):  # else this rank is no member
            self._groups.append(group)
        return group  # type: ignore[no-any-return]

    def close(self) -> None:
        """Closes all connections."""
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups.clear()
        self._made.clear()


_latest: tuple[dist.ProcessGroup, OrderedDict[Hashable, GroupCache]] | None = None
"""The default group and the caches made for it; with another default group the ranks have met anew."""


def groups_for(purpose: Hashable) -> GroupCache:
    """The groups of a purpose; those of the last few purposes are kept."""
    global _latest
    world = dist.group.WORLD
    assert world is not None, "init_process_group comes first"
    if _latest is None or _latest[0] is not world:
        _latest = (world, OrderedDict())
    caches = _latest[1]
    caches.setdefault(purpose, GroupCache())
    caches.move_to_end(purpose)
    return caches[purpose]


def close_older_groups() -> None:
    """Closes what was made for purposes of long ago.

    Called when a new group has been made: then all ranks are here, and none is still in a collective of an earlier run.
    """
    assert _latest is not None
    while len(_latest[1]) > _MAX_PURPOSES:
        _latest[1].popitem(last=False)[1].close()
