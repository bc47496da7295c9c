"""What replay costs: a stage's forward and backward by replay, against the same step with the other blocks left out.

Every case is measured against its peer in the same run, interleaved, by medians of the thread's CPU time:

* the last half of a 24-layer GPT-2, and a middle stage of a U-Net: replay against the same step in which the blocks of
  other stages are identities. At 100 ms a stage and more the ratio may be 1.03. For tiny stages the cost of a skipped
  module call is what one more of them adds: the case is measured with few and with many skipped blocks, each against
  its peer, and may be 30 microseconds. What a stage costs however many are skipped (draws keyed anew in each layer, the
  step's own operations) is shown as the fixed cost;
* a flat forward of 100 operations, 90 of them skipped: replay against calling the last 10, at most 30 microseconds a
  skipped operation.

Run: python benchmarks/replay_overhead.py [--check] [--json FILE] [--repeats N]
"""

# ruff: noqa: E402
from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # Python puts this file's folder there

from benchmarks.reporting import environment, finish, parser
from lightning_autopipe.capture.cuts import CutTable, find_layers
from lightning_autopipe.capture.draws import DrawKey
from lightning_autopipe.capture.program import StageProgram
from lightning_autopipe.capture.proof import proven_program
from lightning_autopipe.capture.trace import trace_step

KEY = DrawKey(seed=0, step=0, replica_index=0, microbatch_index=0)
MAX_RATIO = 1.03
MAX_MICROSECONDS = 30.0


def capture(module: nn.Module, step: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, CutTable]:
    trace = trace_step(module, step, args, {}, step_name="step")
    table = CutTable(trace)
    trace.layers = find_layers(trace, table)
    return trace, table


def program(trace: Any, table: CutTable, module: nn.Module, step: Any, args: Any, start: int, stop: int | None) -> Any:
    return proven_program(trace, table, module, step, args, {}, start=start, stop=stop, device=torch.device("cpu"))


def received_for(trace: Any, stage: StageProgram) -> tuple[Tensor, ...]:
    values = [trace.values[index].absent for index in stage.received_values]
    return tuple(torch.randn(v.shape, dtype=v.dtype).requires_grad_(v.requires_grad) for v in values)


def replayed(stage: StageProgram, step: Any, args: Any, received: tuple[Tensor, ...]) -> Callable[[], None]:
    def run() -> None:
        result = stage.run(step, args, {}, received, KEY)
        if stage.is_last:
            result.result.backward()
        else:
            roots = [t for t in result.sent if t.requires_grad and t.grad_fn is not None]
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])

    return run


def interleaved(ours: Callable[[], None], peer: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Median CPU seconds of this thread for both, measured in turns (other processes disturb wall time more)."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 2):
        order = (0, 1) if repeat % 2 else (1, 0)
        for which in order:
            begin = time.thread_time()
            (ours, peer)[which]()
            if repeat >= 2:  # the first two warm up
                times[which].append(time.thread_time() - begin)
    return statistics.median(times[0]), statistics.median(times[1])


class Identity(nn.Module):
    """In the place of a block of another stage."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


def gpt2_case(hidden: int, batch: int, length: int, repeats: int, num_skipped: int = 12) -> dict[str, Any]:
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        n_layer=num_skipped + 12,
        n_embd=hidden,
        n_head=4,
        vocab_size=512,
        n_positions=length,
        bos_token_id=0,
        eos_token_id=0,
    )
    config.use_cache = False
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, 512, (batch, length))
    blocks = model.transformer.h

    def step(ids: Tensor) -> Tensor:
        logits = model(input_ids=ids).logits
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    trace, table = capture(model, step, (ids,))
    start = next(call.start for call in trace.calls if call.module_path == f"transformer.h.{num_skipped}")
    stage = program(trace, table, model, step, (ids,), start, None)
    received = received_for(trace, stage)
    own = list(blocks)

    def peer() -> None:
        # The other half's blocks are identities and the embeddings give the received tensor.
        for index in range(num_skipped):
            blocks[index] = identity
        drop = model.transformer.drop
        model.transformer.drop = Constant(received[0])
        try:
            step(ids).backward()
        finally:
            model.transformer.drop = drop
            for index in range(num_skipped):
                blocks[index] = own[index]

    identity = Identity()
    ours_s, peer_s = interleaved(replayed(stage, step, (ids,), received), peer, repeats)
    name = f"gpt2 hidden {hidden}, last 12 of {num_skipped + 12} layers"
    return _result(name, ours_s, peer_s, num_skipped + 3, "module call")  # and the two embeddings with their dropout


class Constant(nn.Module):
    """Gives one tensor, whatever comes in."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, *_: Any) -> Tensor:
        return self.value


class UNet(nn.Module):
    """Three levels down and up with skips, several blocks a level."""

    def __init__(self, width: int, num_outer_blocks: int) -> None:
        super().__init__()

        def level(inputs: int, num_blocks: int) -> nn.ModuleList:
            return nn.ModuleList([_unet_block(inputs if index == 0 else width, width) for index in range(num_blocks)])

        self.stem = nn.Conv2d(3, width, 1)
        self.down = nn.ModuleList([level(width, n) for n in (num_outer_blocks, 4, 4)])
        self.up = nn.ModuleList([level(2 * width, n) for n in (4, num_outer_blocks)])

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.stem(hidden)
        skips = []
        for index, blocks in enumerate(self.down):
            hidden = hidden if index == 0 else F.max_pool2d(hidden, 2)
            for block in blocks:
                hidden = block(hidden)
            skips.append(hidden)
        for blocks, skip in zip(self.up, reversed(skips[:-1]), strict=True):
            hidden = torch.cat([F.interpolate(hidden, scale_factor=2.0), skip], 1)
            for block in blocks:
                hidden = block(hidden)
        return hidden


def _unet_block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU())


def unet_case(width: int, size: int, repeats: int, num_outer_blocks: int = 4) -> dict[str, Any]:
    model = UNet(width, num_outer_blocks)
    images = torch.randn(4, 3, size, size)

    def step(images: Tensor) -> Tensor:
        return model(images).pow(2).mean()

    trace, table = capture(model, step, (images,))
    start = next(call.start for call in trace.calls if call.module_path == "down.1.0")
    stop = next(call.start for call in trace.calls if call.module_path == "up.1.0") - 2  # before interpolate and cat
    stage = program(trace, table, model, step, (images,), start, stop)
    received = received_for(trace, stage)
    pooled = min(received, key=Tensor.numel)
    others = [(blocks, index) for blocks in (model.down[0], model.up[1]) for index in range(num_outer_blocks)]

    def peer() -> None:
        # The other stages' blocks are identities; the stem gives the skip's shape, pooling the received tensor.
        own = [blocks[index] for blocks, index in others]
        stem, pool = model.stem, F.max_pool2d
        sent: list[Tensor] = []

        def first_pool(hidden: Tensor, kernel: int) -> Tensor:
            sent.append(hidden)
            return pooled if hidden.shape[-1] == size else pool(hidden, kernel)

        model.stem = Constant(skip)
        F.max_pool2d = first_pool
        for blocks, index in others:
            blocks[index] = identity
        try:
            up = model.up[0][3].register_forward_hook(lambda *call: sent.append(call[2]))
            model(images)
            up.remove()
        finally:
            model.stem, F.max_pool2d = stem, pool
            for (blocks, index), block in zip(others, own, strict=True):
                blocks[index] = block
        roots = [sent[1], sent[2]]  # the skip of the own level, and what the own part gives
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])

    identity = Identity()
    skip = max(received, key=Tensor.numel)
    ours_s, peer_s = interleaved(replayed(stage, step, (images,), received), peer, repeats)
    name = f"u-net width {width}, middle stage, {len(others)} other blocks"
    # Replay leaves at the stage's end: only the blocks before it are skipped one by one.
    return _result(name, ours_s, peer_s, num_outer_blocks + 1, "module call")


class Flat(nn.Module):
    """100 operations in one forward, without submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(16) for _ in range(100)])

    def forward(self, hidden: Tensor) -> Tensor:
        for weight in list(self.weights):
            hidden = torch.mul(hidden, weight)
        return hidden


def flat_case(repeats: int) -> dict[str, Any]:
    model = Flat()
    inputs = torch.randn(4, 16)

    def step(inputs: Tensor) -> Tensor:
        return model(inputs)

    trace, table = capture(model, step, (inputs,))
    stage = program(trace, table, model, step, (inputs,), 90, None)
    received = received_for(trace, stage)
    own = list(model.weights)[90:]

    def ours() -> None:
        stage.run(step, (inputs,), {}, received, KEY)

    def peer() -> None:
        hidden = received[0]
        for weight in own:
            hidden = torch.mul(hidden, weight)

    ours_s, peer_s = interleaved(ours, peer, repeats * 10)
    return _result("flat forward of 100 operations, last 10", ours_s, peer_s, 90, "operation")


def _result(name: str, ours_s: float, peer_s: float, num_skipped: int, unit: str) -> dict[str, Any]:
    return {
        "case": name,
        "replay_s": ours_s,
        "peer_s": peer_s,
        "ratio": ours_s / peer_s,
        "num_skipped": num_skipped,
        "skipped_unit": unit,
        "microseconds_per_skipped": (ours_s - peer_s) / num_skipped * 1e6,
    }


def with_marginal_cost(few: dict[str, Any], many: dict[str, Any]) -> dict[str, Any]:
    """The case with many skipped calls, where a skipped one costs what it adds to the case with few."""
    costs = [case["replay_s"] - case["peer_s"] for case in (few, many)]
    marginal_s = (costs[1] - costs[0]) / (many["num_skipped"] - few["num_skipped"])
    return {
        **many,
        "microseconds_per_skipped": marginal_s * 1e6,
        "fixed_microseconds": (costs[0] - marginal_s * few["num_skipped"]) * 1e6,
    }


def shortfalls(results: list[dict[str, Any]]) -> list[str]:
    """Name each figure that misses its bound."""
    missed = []
    for result in results:
        if result["peer_s"] >= 0.1 and result["ratio"] > MAX_RATIO:
            missed.append(f"{result['case']}: ratio {result['ratio']:.3f} is above {MAX_RATIO}")
        if result["peer_s"] < 0.1 and result["microseconds_per_skipped"] > MAX_MICROSECONDS:
            missed.append(
                f"{result['case']}: {result['microseconds_per_skipped']:.1f} us a skipped {result['skipped_unit']} is "
                f"above {MAX_MICROSECONDS:.0f}"
            )
    return missed


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=15)
    options = made.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    small = options.repeats * 4
    results = [
        gpt2_case(hidden=256, batch=4, length=64, repeats=options.repeats),
        with_marginal_cost(*(gpt2_case(16, 1, 8, small, num_skipped=count) for count in (4, 12))),
        unet_case(width=64, size=64, repeats=options.repeats),
        with_marginal_cost(*(unet_case(4, 16, small, num_outer_blocks=count) for count in (4, 16))),
        flat_case(options.repeats),
    ]
    for result in results:
        fixed = f", {result['fixed_microseconds']:.0f} us fixed" if "fixed_microseconds" in result else ""
        print(
            f"{result['case']:45s} replay {result['replay_s'] * 1e3:7.2f} ms  peer {result['peer_s'] * 1e3:7.2f} ms  "
            f"ratio {result['ratio']:.3f}  {result['microseconds_per_skipped']:.1f} us a skipped "
            f"{result['skipped_unit']} ({result['num_skipped']}){fixed}"
        )
    return finish(options, {**environment(), "results": results}, shortfalls(results))


if __name__ == "__main__":
    sys.exit(main())
