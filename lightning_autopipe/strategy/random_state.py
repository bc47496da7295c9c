"""The random state of a fit in its checkpoints: a resumed run draws what the uninterrupted one would have drawn.

Draws of the step are keyed by a seed. What else is drawn (the order of samples, their augmentation) comes from the
global generators of the process that reads the data, the first stage's of each replica.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from lightning_autopipe.strategy.communicator import Communicator

RANDOM_STATE = "autopipe_random_state"
"""The entry of a checkpoint."""


def default_sampler_seed() -> int:
    """What Lightning seeds the samplers with that it injects."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def gather_random_state(communicator: Communicator, *, seed: int, sampler_seed: int) -> dict[str, Any]:
    """What a checkpoint holds: tensors and plain values, so that it loads with `weights_only`. Collective.

    Args:
        communicator: This rank's groups.
        seed: Of the keyed draws.
        sampler_seed: Of samplers that Lightning injects.
    """
    of_reader = communicator.gather_in_pipeline(_generator_states(communicator.device))[0]
    readers = communicator.gather_over_replicas(of_reader)
    return {"seed": seed, "sampler_seed": sampler_seed, "replicas": readers}


def resume_generators(state: Mapping[str, Any], communicator: Communicator) -> None:
    """Sets this process's global generators to what its replica's reader had."""
    replicas = state["replicas"]
    _set_generator_states(replicas[communicator.replica_index % len(replicas)], communicator.device)


def _generator_states(device: torch.device) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, gauss = numpy.random.get_state()
        if name == "MT19937":
            words = torch.tensor(keys.tolist())
            states["numpy"] = {"words": words, "position": position, "has_gauss": has_gauss, "gauss": gauss}
    return states


def _set_generator_states(states: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"].cpu())
    python = states["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
    if "numpy" in states:
        import numpy as np

        of_numpy = states["numpy"]
        keys = np.array(of_numpy["words"].tolist(), dtype=np.uint32)
        np.random.set_state(("MT19937", keys, of_numpy["position"], of_numpy["has_gauss"], of_numpy["gauss"]))
