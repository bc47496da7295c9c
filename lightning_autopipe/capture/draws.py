"""Random draws that do not depend on how a step is cut."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawKey:
    """What the draws of one micro-batch, or of one slice of it, are keyed by."""

    seed: int
    step: int
    replica_index: int
    microbatch_index: int
    slice_index: int | None = None

    def derive(self, *place: int | str) -> int:
        """Give a 63-bit seed for one place (a layer, a draw) of this micro-batch."""
        unit = f"{self.microbatch_index}" if self.slice_index is None else f"{self.microbatch_index}.{self.slice_index}"
        text = f"{self.seed}/{self.step}/{self.replica_index}/{unit}/{'/'.join(map(str, place))}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def layer_seed(microbatch_seed: int, layer_index: int) -> int:
    """Give a layer's 63-bit seed from its micro-batch's (one round of SplitMix64: it runs once a layer and step)."""
    mixed = (microbatch_seed + (layer_index + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) >> 1


def seed_torch(seed: int, device: torch.device) -> None:
    """Set torch's generators of the CPU and of `device`, without a read of their state."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def seed_python(seed: int) -> None:
    """Set Python's and NumPy's global generators."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def kept_generators(module: nn.Module) -> list[tuple[str, Any]]:
    """Find the generators (torch's, Python's, NumPy's) that submodules keep as attributes, with their places."""
    numpy = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random, *((numpy.random.Generator,) if numpy is not None else ()))
    return [
        (f"{path}.{name}", value)
        for path, sub in module.named_modules()
        for name, value in vars(sub).items()
        if isinstance(value, kinds)
    ]


def generator_state(generator: Any) -> Any:
    """Give a generator's state, for :func:`set_generator_state`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def set_generator_state(generator: Any, state: Any) -> None:
    """Put back what :func:`generator_state` gave."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


def seed_generator(generator: Any, seed: int) -> None:
    """Have a generator begin anew."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(seed).state


class PlacedDraws:
    """Draws of one micro-batch that belong to no layer, on all stages alike: keyed by their place in the step.

    Args:
        key: The micro-batch's.
        device: Where tensors are drawn.
        functions: Those that draw without an activation among their arguments.
    """

    def __init__(self, key: DrawKey, device: torch.device, functions: Collection[Any]) -> None:
        self._key = key
        self.device = device
        self._functions = functions
        self._last = (-1, 0)

    def begin(self, generators: Iterable[tuple[str, Any]]) -> None:
        """Set Python's and NumPy's generators and those that the module keeps, at the step's beginning."""
        seed_python(self._key.derive("python"))
        for place, generator in generators:
            seed_generator(generator, self._key.derive("generator", place))

    def run(
        self, position: int, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]
    ) -> Any:
        """Run a function that takes no activation, at this position of the step."""
        if function not in self._functions:
            return run(*args, **kwargs)
        seed = self.seed(position)
        if kwargs.get("generator") is not None:
            seed_generator(kwargs["generator"], seed)
        with seeded(seed, self.device):
            return run(*args, **kwargs)

    def seed(self, position: int) -> int:
        """Give a seed for a draw at this place: the position, and the how manieth draw there."""
        place, count = self._last
        count = count + 1 if place == position else 0
        self._last = (position, count)
        return self._key.derive("draw", position, count)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from generators set to `seed`; afterwards they go on as if nothing had been drawn."""
    cpu_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    seed_torch(seed, device)
    try:
        yield
    finally:
        torch.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)
