"""Modules of all kinds: how they are built, what is in them, and what draws or counts in their steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn

from tests.conformance.items import Item, check_item, make_test, run_items
from tests.conformance.models import (
    DropoutModule,
    LazyModule,
    NormalizedModule,
    RecomputedModule,
    StatisticsModule,
    buffers,
)
from tests.strategy.anyones_modules import (
    CausalModule,
    CustomFunctionModule,
    InPlaceModule,
    RecurrentModule,
    WeightNormModule,
)
from tests.strategy.compiled_modules import (
    CompiledBlocksModule,
    CompiledModule,
    WhollyCompiledModule,
    has_compiled,
)
from tests.strategy.configured_modules import ConfiguredCausalModule, ConfiguredLanguageModule, ConfiguredModule
from tests.strategy.modules import InOrder, largest_difference, regression_data, token_data
from tests.strategy.runs import Fit, Report, fit_in_processes

VECTORS = partial(InOrder, regression_data(16), regression_data(8, seed=1), batch_size=8)
UNVALIDATED = partial(InOrder, regression_data(16), batch_size=8)
SEQUENCES = partial(InOrder, token_data(16), batch_size=8)
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble")
WITH_DROPOUT = {
    "dropout": Fit(module_class=DropoutModule, data=VECTORS),
    "dropout, recomputed": Fit(module_class=DropoutModule, module_options={"recomputed": False}, data=VECTORS),
    "dropout, recomputed re-entrantly": Fit(
        module_class=DropoutModule, module_options={"recomputed": True}, data=VECTORS
    ),
    "dropout in a transformer that checkpoints its blocks": Fit(
        module_class=CausalModule, module_options={"dropout": 0.5, "recompute": True}, data=SEQUENCES
    ),
}


@functools.cache
def on_one_stage(num_replicas: int) -> dict[str, Report]:
    """Rank 0's reports of the fits that draw, in processes that have the seeds of the others."""
    found = fit_in_processes(WITH_DROPOUT, num_stages=1, num_replicas=num_replicas, timeout_s=300)
    return {name: reports[0] for name, reports in found.items()}


def draws_as_one_stage(name: str) -> Callable[[Report, list[Report]], None]:
    """The check that draws depend on neither the number of stages nor the schedule."""

    def check(plain: Report, ranks: list[Report]) -> None:
        expected = on_one_stage(2 if len(ranks) in (2, 4, 6) and _has_replicas(ranks) else 1)[name]
        assert largest_difference(expected.values, ranks[0].values) < 1e-12
        assert largest_difference(plain.values, ranks[0].values) > 1e-6, "nothing is drawn"

    return check


def _has_replicas(ranks: list[Report]) -> bool:
    """Whether two ranks have the same stage."""
    stages = [frozenset(rank.gradients[0]) for rank in ranks]
    return len(set(stages)) < len(stages)


def counts_as_one_batch(plain: Report, ranks: list[Report]) -> None:
    """Running statistics, and what an evaluation computes with them, are those of whole batches."""
    assert set(ranks[0].after) == set(plain.after)
    for name, values in plain.after.items():
        assert ranks[0].after[name] == pytest.approx(values, rel=1e-10), name
    for rank in ranks:
        assert rank.metrics["val_loss"] == pytest.approx(plain.metrics["val_loss"], rel=1e-9)


def statistics(schedule: str) -> Fit:
    return Fit(
        module_class=StatisticsModule,
        data=VECTORS,
        strategy_options={"deferred_batch_norm": True, "schedule": schedule},
        trainer_options={"max_epochs": 2},
        after=buffers,
    )


def synchronized(norm: type[nn.Module], **trainer_options: Any) -> Fit:
    """With one micro-batch, that of all replicas is the whole batch."""
    return Fit(
        module_class=NormalizedModule,
        module_options={"norm": norm},
        data=VECTORS,
        strategy_options={"num_microbatches": 1},
        trainer_options={"max_epochs": 2, **trainer_options},
        after=buffers,
    )


def with_schedule(fit: Fit, schedule: str) -> Fit:
    return Fit(
        module_class=fit.module_class,
        module_options=fit.module_options,
        data=fit.data,
        strategy_options={"schedule": schedule},
        after=fit.after,
    )


def fit(module_class: Any, data: Any = VECTORS, **options: Any) -> Fit:
    strategy_options = options.pop("strategy_options", {})
    return Fit(module_class=module_class, module_options=options, data=data, strategy_options=strategy_options)


def compiled(module_class: Any, data: Any = VECTORS, **options: Any) -> Fit:
    """A fit in which every rank has to compile something of its own, as one device does."""
    return Fit(module_class=module_class, module_options=options, data=data, after=has_compiled)


def compiles_on_every_rank(plain: Report, ranks: list[Report]) -> None:
    assert all(rank.after for rank in ranks)


ITEMS = {
    "models: built in configure_model": Item(fit=fit(ConfiguredModule, optimizer="adamw")),
    "models: built in configure_model, measured": Item(
        fit=fit(ConfiguredModule, strategy_options={"profile": "measured", "verify": "auto"})
    ),
    "models: built in configure_model, an optimizer with state from the start": Item(
        fit=fit(ConfiguredModule, stateful=True, lr=0.01)
    ),
    "models: built in configure_model at every call": Item(fit=fit(ConfiguredModule, is_guarded=False)),
    "models: built in configure_model: LSTM, ties, weight norm, attention": Item(
        fit=fit(ConfiguredLanguageModule, SEQUENCES, strategy_options={"profile": "measured"})
    ),
    "models: built in configure_model by transformers' from_config": Item(fit=fit(ConfiguredCausalModule, SEQUENCES)),
    "models: self.net = torch.compile(net)": Item(fit=compiled(CompiledModule, how="net", depth=8)),
    "models: block.compile()": Item(fit=compiled(CompiledBlocksModule, depth=8)),
    "models: block.compile() of a container": Item(fit=fit(CompiledModule, how="blocks")),
    **{
        f"models: block.compile() under {schedule}": Item(
            fit=with_schedule(compiled(CompiledBlocksModule, depth=8), schedule)
        )
        for schedule in SCHEDULES[1:]
    },
    "models: block.compile() with dropout": Item(
        fit=compiled(CompiledBlocksModule, depth=8, between=nn.Dropout), is_same=False, check=compiles_on_every_rank
    ),
    "models: block.compile() with recomputation": Item(fit=fit(CompiledBlocksModule, recomputed=True)),
    "models: torch.compile(module)": Item(fit=compiled(WhollyCompiledModule, data=UNVALIDATED)),
    "models: a compiled function": Item(fit=fit(CompiledModule, how="function")),
    "models: torch.utils.checkpoint": Item(fit=fit(RecomputedModule, reentrant=False)),
    "models: torch.utils.checkpoint, re-entrant": Item(fit=fit(RecomputedModule, reentrant=True)),
    "models: gradient_checkpointing_enable()": Item(fit=fit(CausalModule, SEQUENCES, recompute=True)),
    **{
        f"models: {name}": Item(fit=with_schedule(drawing, "1f1b"), is_same=False, check=draws_as_one_stage(name))
        for name, drawing in WITH_DROPOUT.items()
    },
    **{
        f"models: dropout under {schedule}": Item(
            fit=with_schedule(WITH_DROPOUT["dropout"], schedule), is_same=False, check=draws_as_one_stage("dropout")
        )
        for schedule in SCHEDULES[1:]
    },
    **{
        f"models: deferred_batch_norm under {schedule}, evaluation after": Item(
            fit=statistics(schedule), is_same=False, check=counts_as_one_batch
        )
        for schedule in SCHEDULES
    },
    "models: SyncBatchNorm": Item(fit=synchronized(nn.SyncBatchNorm)),
    "models: Trainer(sync_batchnorm=True)": Item(fit=synchronized(nn.BatchNorm1d, sync_batchnorm=True)),
    "models: lazy layers that have seen an input": Item(fit=fit(LazyModule, ready=True)),
    "models: lazy layers that have not": Item(fit=fit(LazyModule, ready=False), refused="has no values yet"),
    "models: LSTM": Item(fit=fit(RecurrentModule, SEQUENCES)),
    "models: weight norm": Item(fit=fit(WeightNormModule)),
    "models: custom autograd functions at cuts": Item(fit=fit(CustomFunctionModule)),
    "models: in-place operations at cuts": Item(fit=fit(InPlaceModule)),
}

test_item = make_test(ITEMS)


def test_statistics_of_the_batch_are_refused_where_micro_batches_run_in_halves() -> None:
    halved = Item(fit=statistics("sliced_1f1b"), refused=r"halves.*statistics|slice.*batch norm|batch norm.*slice")
    check_item(halved, None, run_items({"halved": halved}, (2, 1))["halved"])


def test_halves_draw_alike_on_two_stages_and_on_three() -> None:
    """Their draws are keyed by the half: one stage slices nothing, and two and three stages slice the same."""
    fits = {"fit": fit(DropoutModule, strategy_options={"schedule": "sliced_1f1b", "num_microbatches": 2})}
    two, three = (fit_in_processes(fits, num_stages=num_stages)["fit"][0] for num_stages in (2, 3))
    whole = fit_in_processes({"fit": with_schedule(fits["fit"], "1f1b")}, num_stages=2)["fit"][0]
    assert largest_difference(two.values, three.values) < 1e-12
    assert largest_difference(two.values, whole.values) > 1e-6, "nothing is sliced"
