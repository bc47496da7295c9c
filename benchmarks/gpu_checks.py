"""What only a GPU can show: two ranks that share one train with the gradients of one, and layer times that add up.

* Parity: the GPT-2 recipe as two stages on one device (gloo carries what crosses), against the plain module alone on
  it. In each of some steps the gradients of all parameters are compared: the norm of their difference over the norm of
  the plain module's, at most 1e-5 in float32 and 2e-2 under bf16-mixed. Dropout is off: a pipeline draws by layer.
* Profile: the layer times of GPT-2 medium and BERT large, added up, against the unsplit step: at most 5 % apart.

Without a GPU all runs on the CPU, with small models: the figures are then no measurement of a GPU, and say so.

Run: python benchmarks/gpu_checks.py [--check] [--json FILE] [--device auto|cpu|cuda] [--small]
"""

# ruff: noqa: E402
from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # Python puts this file's folder there, which has a module named like the recipes' package

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.reporting import environment, finish, parser
from lightning_autopipe import AutoPipeStrategy
from lightning_autopipe.capture import tree
from lightning_autopipe.core import ParallelLayout
from lightning_autopipe.profiling import align_layers, measure_layers
from lightning_autopipe.runtime.pipeline import Pipeline
from lightning_autopipe.schedules import get_schedule
from recipes.bert import BertModule
from recipes.gpt2 import GPT2Module
from tests.harness import run_processes

MAX_DIFFERENCE = {"32-true": 1e-5, "bf16-mixed": 2e-2}
MAX_TIME_ERROR = 0.05
NUM_STAGES = 2
NUM_MICROBATCHES = 4
NUM_STEPS = 3
LIMIT_S = 400.0
STEP = "training_step"

_SMALL = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "vocab_size": 2000, "block_size": 64, "dropout": 0.0}
_GPT2 = {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "vocab_size": 50_257, "block_size": 512, "dropout": 0.0}
_LARGE = {"num_layers": 24, "hidden_size": 1024, "num_heads": 16, "vocab_size": 50_257, "block_size": 512}
_BERT_LARGE = {**_LARGE, "vocab_size": 30_522}


def _gpt2(size: Mapping[str, Any]) -> pl.LightningModule:
    return GPT2Module(**size, warmup_steps=1)


def _bert(size: Mapping[str, Any]) -> pl.LightningModule:
    return BertModule(**size)


Gradients = dict[str, Tensor]
"""By name of the parameter, on the host."""


# Parity ----------------------------------------------------------------------------------------------


class _KeepGradients(Callback):
    """Keeps the gradients that each optimizer step sees; of this rank's own parameters, in a pipeline."""

    def __init__(self) -> None:
        self.steps: list[Gradients] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.steps.append(
            {
                name: parameter.grad.detach().float().cpu().clone()
                for name, parameter in pl_module.named_parameters()
                if parameter.grad is not None
            }
        )


def gradients_of_fit(
    size: Mapping[str, Any], batch_size: int, precision: Any, device: str, is_cut: bool
) -> list[Gradients]:
    """Trains the GPT-2 recipe for a few steps; gives the gradients of each."""
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
    pl.seed_everything(1, verbose=False)
    module = _gpt2(size)
    ids = torch.randint(0, size["vocab_size"], (NUM_STEPS * batch_size, size["block_size"] + 1))
    data = [{"input_ids": row[:-1].clone(), "labels": row[1:].clone()} for row in ids]
    strategy: Any = "auto"
    if is_cut:
        strategy = AutoPipeStrategy(
            num_stages=NUM_STAGES,
            num_microbatches=NUM_MICROBATCHES,
            parallel_devices=[torch.device(device, 0) if device == "cuda" else torch.device(device)] * NUM_STAGES,
            process_group_backend="gloo",
            timeout=120,
        )
    watch = _KeepGradients()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="gpu" if device == "cuda" else device,
        devices="auto" if is_cut else 1,
        precision=precision,
        max_steps=NUM_STEPS,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=batch_size))  # type: ignore[arg-type]
    return watch.steps


def parity_row(precision: str, device: str, is_small: bool) -> dict[str, Any]:
    """How far the gradients of two stages are from those of the plain module."""
    size, batch_size = (_SMALL, 8) if is_small else (_GPT2, 16)
    plain, *_ = run_processes(
        1,
        gradients_of_fit,
        size,
        batch_size,
        precision,
        device,
        False,
        timeout_s=LIMIT_S,
        initialize_process_group=False,
    )
    stages = run_processes(
        NUM_STAGES,
        gradients_of_fit,
        size,
        batch_size,
        precision,
        device,
        True,
        timeout_s=LIMIT_S,
        initialize_process_group=False,
    )
    differences = []
    for step, expected in enumerate(plain):
        found: Gradients = {}
        for of_rank in stages:
            found.update(of_rank[step])
        if found.keys() != expected.keys():
            raise AssertionError(f"step {step}: gradients of other parameters: {found.keys() ^ expected.keys()}")
        difference = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
        norm = sum(float(expected[name].double().square().sum()) for name in expected)
        differences.append((difference / norm) ** 0.5)
    return {"case": f"parity, {precision}", "precision": precision, "differences": differences}


# Profile ---------------------------------------------------------------------------------------------


def profile_row(
    name: str, make: Callable[[Mapping[str, Any]], pl.LightningModule], size: Mapping[str, Any], device: str
) -> dict[str, Any]:
    """The layers' seconds against the unsplit step's, in turns."""
    torch.manual_seed(0)
    target = torch.device(device)
    module = make(size).to(target).train()
    ids = torch.randint(0, size["vocab_size"], (4 * NUM_MICROBATCHES, size["block_size"]), device=target)
    args = ({"input_ids": ids, "labels": ids.clone()}, 0)
    pipeline = Pipeline(
        module,
        layout=ParallelLayout(num_stages=NUM_STAGES),
        global_rank=0,
        transport=None,
        num_microbatches=NUM_MICROBATCHES,
        make_schedule=get_schedule,
        device=target,
    )
    pipeline.profile(STEP, args, {})
    capture = pipeline.planned_step.capture_microbatch(STEP, args, {}, NUM_MICROBATCHES)
    capture.trace.layers = align_layers(capture.trace, capture.table, capture.layer_keys)
    step_s, layers_s, ratios = [], [], []
    for _ in range(5):
        before = _unsplit_step_s(module, capture.args, target)
        measured = measure_layers(
            capture.trace,
            capture.table,
            module,
            module.training_step,
            capture.args,
            capture.kwargs,
            device=target,
        )
        after = _unsplit_step_s(module, capture.args, target)
        step_s.append(statistics.median([*before, *after]))
        layers_s.append(sum(layer.forward_s + layer.backward_s for layer in measured))
        ratios.append(layers_s[-1] / step_s[-1])
    return {
        "case": f"profile, {name}",
        "num_layers": len(measured),
        "step_s": statistics.median(step_s),
        "layers_s": statistics.median(layers_s),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def _unsplit_step_s(module: pl.LightningModule, args: Any, device: torch.device) -> list[float]:
    """Forward and backward of one micro-batch, gradients accumulated, as from the second one on."""
    seconds = []
    for repeat in range(8):
        batch = tree.map_tensors(Tensor.clone, args)
        _synchronize(device)
        begin = time.perf_counter()
        module.training_step(*batch).backward()
        _synchronize(device)
        if repeat >= 3:
            seconds.append(time.perf_counter() - begin)
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# The script ------------------------------------------------------------------------------------------


def shortfalls(rows: list[dict[str, Any]]) -> list[str]:
    """Names each figure that misses its bound."""
    missed = []
    for row in rows:
        if "differences" in row:
            allowed = MAX_DIFFERENCE[row["precision"]]
            missed += [
                f"{row['case']}: gradients of step {step} differ by {value:.2e}, allowed are {allowed:g}"
                for step, value in enumerate(row["differences"])
                if not value <= allowed
            ]
        elif abs(row["ratio"] - 1) > MAX_TIME_ERROR:
            missed.append(f"{row['case']}: the layers' time is {row['ratio']:.3f} of the unsplit step's")
    return missed


def _told(row: dict[str, Any]) -> str:
    if "differences" in row:
        return f"{row['case']}: relative L2 difference " + ", ".join(f"{value:.1e}" for value in row["differences"])
    return (
        f"{row['case']}: {row['num_layers']} layers {row['layers_s'] * 1e3:.1f} ms, unsplit step "
        f"{row['step_s'] * 1e3:.1f} ms, ratio {row['ratio']:.3f} ({min(row['ratios']):.3f} to {max(row['ratios']):.3f})"
    )


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    made.add_argument("--small", action="store_true", help="small models; always so on the CPU")
    options = made.parse_args()
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    is_small = options.small or device == "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU, small models: no figures of a GPU"
    print(f"device: {name}")
    warnings.filterwarnings("ignore", message=".*`self.trainer` reference is not registered.*")
    if device == "cpu":
        torch.set_num_threads(1)
    gpt2_size, bert_size = (_SMALL, _SMALL) if is_small else (_LARGE, _BERT_LARGE)
    rows = []
    for precision in MAX_DIFFERENCE:
        rows.append(parity_row(precision, device, is_small))
        print(_told(rows[-1]), flush=True)
    for title, make, size in (("GPT-2 medium", _gpt2, gpt2_size), ("BERT large", _bert, bert_size)):
        rows.append(profile_row(title, make, size, device))
        print(_told(rows[-1]), flush=True)
    return finish(options, {**environment(), "device": name, "rows": rows}, shortfalls(rows))


if __name__ == "__main__":
    sys.exit(main())
