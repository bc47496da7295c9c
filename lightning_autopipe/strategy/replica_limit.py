"""Into how many shares the training data of a fit can be divided, and whether these may be unlike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.data_connector import _get_distributed_sampler, _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import DataLoader, DistributedSampler

from lightning_autopipe.strategy.replica_shares import why_not_dealt


def shareable_counts(trainer: pl.Trainer, loaders: CombinedLoader, *, may_inject: bool) -> tuple[int, ...]:
    """The numbers of replicas that can have shares of the training data: divisors of the number of processes.

    One can always. More cannot where Lightning is not to inject samplers, or cannot, since each replica would read all
    data; nor where a share has no batch, or too few for ``limit_train_batches`` and ``val_check_interval``.

    Args:
        trainer: Of the fit.
        loaders: As they are for one replica.
        may_inject: What ``use_distributed_sampler`` allows.
    """
    counts = (count for count in range(2, trainer.world_size + 1) if trainer.world_size % count == 0)
    return (1, *(count for count in counts if _can_share(trainer, loaders, count, may_inject=may_inject)))


def can_be_dealt(loaders: CombinedLoader, num_replicas: Iterable[int], *, may_inject: bool) -> bool:
    """Whether global batches can be dealt to replicas in unlike shares, for each of some numbers of replicas.

    Args:
        loaders: As they are for one replica, or for the only number.
        num_replicas: The numbers.
        may_inject: What ``use_distributed_sampler`` allows.
    """
    several = [number for number in num_replicas if number > 1]
    try:
        return not any(
            why_not_dealt(_share(getattr(loader, "loader", loader), number, may_inject=may_inject), num_replicas=number)
            for loader in loaders.flattened
            for number in several
        )
    except Exception:  # as below
        return False


def _can_share(trainer: pl.Trainer, loaders: CombinedLoader, num_replicas: int, *, may_inject: bool) -> bool:
    try:
        lengths = [
            _parse_num_batches(
                RunningStage.TRAINING,
                len(_share(getattr(loader, "loader", loader), num_replicas, may_inject=may_inject)),
                trainer.limit_train_batches or 1,
            )
            for loader in loaders.flattened
        ]
    except Exception:  # of loaders and samplers of the user's, or Lightning's, which says so where that was asked for
        return False
    fewest = min(lengths)
    num_batches = fewest if loaders._mode == "min_size" else max(lengths)
    return fewest > 0 and num_batches >= _batches_to_validation(trainer)


def _share(loader: Any, num_replicas: int, *, may_inject: bool) -> DataLoader[Any]:
    """The loader as Lightning makes it for one of several replicas.

    Raises:
        ValueError: it would not give a replica batches of its own.
    """
    if isinstance(loader, DataLoader) and isinstance(loader.sampler, DistributedSampler):
        if loader.sampler.num_replicas == num_replicas:
            return loader
    elif isinstance(loader, DataLoader) and may_inject:
        sampler = _get_distributed_sampler(loader, False, 0, num_replicas=num_replicas, rank=0)
        share: DataLoader[Any] = _update_dataloader(loader, sampler)
        if (share.batch_sampler is None) == (loader.batch_sampler is None):  # Lightning loses some
            return share
    raise ValueError("no share")


def _batches_to_validation(trainer: pl.Trainer) -> int:
    """What ``val_check_interval`` needs an epoch to have."""
    interval = trainer.val_check_interval
    is_of_epoch = trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches
    return interval if isinstance(interval, int) and not isinstance(interval, bool) and is_of_epoch else 1
