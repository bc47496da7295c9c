"""What a Lightning user does, as items that are tried on every layout against the plain module in one process.

A module of this folder lists its items and makes its test of them::

    ITEMS = {"precision: 64-true": Item(fit=Fit(...)), ...}
    test_item = make_test(ITEMS)

All items of a module run one after the other in the same processes, once for each layout: starting processes costs
more than an item. `--layouts all` tries all six layouts; by default it is `USUAL_LAYOUTS`. `--conformance-report FILE`
writes the table of what was tried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from tests.harness import ProcessesFailedError
from tests.strategy.runs import Fit, Report, assert_same_result, fit_in_processes, fit_plain

Layout = tuple[int, int]
"""Stages, replicas."""

ALL_LAYOUTS: tuple[Layout, ...] = ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 2))
USUAL_LAYOUTS: tuple[Layout, ...] = ((3, 1), (2, 2))
TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Item:
    """One thing that users do."""

    fit: Fit
    """What ``after`` gives on rank 0 (and on all ranks, where it is not None) is compared with the plain fit's."""
    tolerance: float = 1e-10
    """Relative, of every value, gradient and metric."""
    refused: str | None = None
    """The fit ends with an error that this regular expression finds, on every rank; None: it works."""
    check: Callable[[Report, list[Report]], None] | None = None
    """What else to assert, given the plain report and those of the ranks."""
    is_same: bool = True
    """Whether values, gradients and metrics are those of the plain fit."""


Reports = Mapping[str, "list[Report] | str"]
"""By item the reports of all ranks, or why there are none."""


def run_items(items: Mapping[str, Item], layout: Layout) -> Reports:
    """Run items on a layout; each alone where they do not all end well."""
    working = {name: item.fit for name, item in items.items() if item.refused is None}
    found: dict[str, list[Report] | str] = {}
    try:
        found.update(_run(working, layout))
    except ProcessesFailedError:
        for name, fit in working.items():
            found[name] = _run_alone(name, fit, layout)
    for name, item in items.items():
        if item.refused is not None:
            found[name] = _run_alone(name, item.fit, layout)
    return found


def _run(fits: Mapping[str, Fit], layout: Layout) -> Mapping[str, list[Report]]:
    num_stages, num_replicas = layout
    if not fits:
        return {}
    return fit_in_processes(dict(fits), num_stages=num_stages, num_replicas=num_replicas, timeout_s=TIMEOUT_S)


def _run_alone(name: str, fit: Fit, layout: Layout) -> list[Report] | str:
    try:
        return _run({name: fit}, layout)[name]
    except ProcessesFailedError as error:
        return str(error)


def check_item(item: Item, plain: Report | None, ranks: list[Report] | str) -> None:
    """Assert that an item does what it is to do."""
    if item.refused is not None:
        assert isinstance(ranks, str), "it was not refused"
        assert re.search(item.refused, ranks), ranks
        return
    assert not isinstance(ranks, str), ranks
    assert plain is not None
    if item.is_same:
        assert_same_result(plain, ranks, tolerance=item.tolerance)
        for global_rank, rank in enumerate(ranks):
            if global_rank == 0 or rank.after is not None:
                assert rank.after == _approx(plain.after, item.tolerance), f"on rank {global_rank}"
    if item.check is not None:
        item.check(plain, ranks)


def _approx(value: object, tolerance: float) -> object:
    """Numbers at any depth of mappings and sequences, within a tolerance."""
    if isinstance(value, Mapping):
        return {key: _approx(entry, tolerance) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_approx(entry, tolerance) for entry in value])
    if isinstance(value, float):
        return pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True)
    return value


def make_test(items: Mapping[str, Item]) -> Callable[..., None]:
    """Make the test of a module's items; each of them on each layout."""
    plain: dict[str, Report] = {}
    ranks: dict[Layout, Reports] = {}

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("name", list(items))
    def test_item(name: str, layout: Layout, record_property: Callable[[str, object], None]) -> None:
        item = items[name]
        record_property("item", name)
        record_property("layout", f"{layout[0]}x{layout[1]}")
        record_property("refused", "passed" if item.refused is None else "refused")
        if item.refused is None and name not in plain:
            plain[name] = fit_plain(item.fit)
        if layout not in ranks:
            ranks[layout] = run_items(items, layout)
        check_item(item, plain.get(name), ranks[layout][name])

    return test_item
