"""Whether the recipes learn along the same curve as in one process, with everything switched on that users switch on.

bf16-mixed, clipping, accumulation of 2 batches, warm-up, an exponential moving average of the weights, dropout; 100
optimizer steps as 2 stages, of which the last 60 are also resumed from a checkpoint as 3 stages. Each logged training
loss is compared with that of one process with the same micro-batches.

ResNet's losses are the same bits. The text models tie weights, whose gradients two stages add in another order than one
process: bf16 makes such roundings larger from step to step, the more the larger the learning rate, so GPT-2 has half of
the recipe's here.

Run: python benchmarks/recipe_curves.py [--check] [--json FILE] [--only gpt2|bert|resnet]   (5 minutes on two cores)

--check fails where a loss differs by more than 1 %.
"""

# ruff: noqa: E402
from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # Python puts this file's folder there

from benchmarks.reporting import at_most, environment, finish, parser

STEPS_PER_EPOCH = 20
NUM_EPOCHS = 5
NUM_BEFORE = 2
"""Epochs before the checkpoint that is resumed from: Lightning begins an epoch's data anew in its middle."""
ACCUMULATION = 2
MAX_DIFFERENCE = 0.01
"""Relative, of any step's loss."""
LIMIT_S = 600.0

SMALL_TEXT = ("model=tiny", "data.vocab_size=257", "data.block_size=32", "data.batch_size=8", "model.hidden_size=64")
RECIPES = {
    "gpt2": ("recipe=gpt2", "model.num_layers=3", "model.learning_rate=5e-4", *SMALL_TEXT),
    "bert": ("recipe=bert", "model.num_layers=3", *SMALL_TEXT),
    "resnet": ("recipe=resnet", "data=digits", "model=resnet_mini", "data.batch_size=32"),
}
EVERYTHING = (
    "trainer=cpu",
    "trainer.precision=bf16-mixed",
    "trainer.gradient_clip_val=1.0",
    f"trainer.accumulate_grad_batches={ACCUMULATION}",
    f"trainer.limit_train_batches={STEPS_PER_EPOCH * ACCUMULATION}",
    f"trainer.max_epochs={NUM_EPOCHS}",
    "trainer.limit_val_batches=2",
    "trainer.log_every_n_steps=1",
    "model.warmup_steps=20",
    "strategy.num_microbatches=4",
    "+callbacks.average._target_=lightning.pytorch.callbacks.EMAWeightAveraging",
    "+callbacks.average.decay=0.99",
    "+callbacks.model_checkpoint.save_top_k=-1",
    "callbacks.model_checkpoint.filename='{epoch}'",
    "callbacks.progress_bar=null",
    "callbacks.model_summary=null",
    "+trainer.enable_progress_bar=false",
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run's training losses, by optimizer step."""

    title: str
    seconds: float
    losses: dict[int, float]


def run(recipe: str, num_stages: int, folder: Path, *, resumed_from: Path | None = None) -> tuple[Curve, Path]:
    """One run by its own command, and the checkpoint in its middle."""
    title = f"{recipe}, {num_stages} stages" + (", resumed" if resumed_from else "")
    out = folder / title.replace(", ", "_").replace(" ", "_")
    command = [sys.executable, "-m", "recipes.train", *RECIPES[recipe], *EVERYTHING]
    command += [f"strategy.num_stages={num_stages}", f"trainer.devices={num_stages}", f"hydra.run.dir={out}"]
    command += [f"paths.cache_dir={folder / 'cache'}"]
    if resumed_from is not None:
        command.append(f"ckpt_path={resumed_from}")
    began_s = time.monotonic()
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"{title} ended with status {ended.returncode}:\n{(ended.stdout + ended.stderr)[-4000:]}")
    with (out / "csv" / "version_0" / "metrics.csv").open(encoding="utf-8") as file:
        losses = {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]}
    middle = out / "checkpoints" / f"{NUM_BEFORE - 1}.ckpt"
    return Curve(title=title, seconds=time.monotonic() - began_s, losses=losses), middle


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--only", choices=sorted(RECIPES), help="one recipe")
    options = made.parse_args(arguments)
    found: list[str] = []
    rows = []
    with tempfile.TemporaryDirectory(prefix="autopipe-curves-") as name:
        folder = Path(name)
        for recipe in [options.only] if options.only else RECIPES:
            alone, _ = run(recipe, 1, folder)
            staged, middle = run(recipe, 2, folder)
            resumed, _ = run(recipe, 3, folder, resumed_from=middle)
            num_steps = STEPS_PER_EPOCH * NUM_EPOCHS
            for curve, wanted in (
                (alone, num_steps),
                (staged, num_steps),
                (resumed, num_steps - NUM_BEFORE * STEPS_PER_EPOCH),
            ):
                assert len(curve.losses) == wanted, f"{curve.title} logged {len(curve.losses)} steps, not {wanted}"
            for curve in (staged, resumed):
                differences = [abs(loss / alone.losses[step] - 1) for step, loss in curve.losses.items()]
                first, last = (alone.losses[step] for step in (min(alone.losses), max(alone.losses)))
                print(
                    f"{curve.title}: {len(differences)} steps, losses within {max(differences):.2%} of one process's, "
                    f"which fell from {first:.3f} to {last:.3f} ({curve.seconds:.0f} s)",
                    flush=True,
                )
                rows.append({"title": curve.title, "losses": curve.losses, "largest_difference": max(differences)})
                found += at_most(f"{curve.title}: largest difference of a loss", max(differences), MAX_DIFFERENCE)
            rows.append({"title": alone.title, "losses": alone.losses})
    return finish(options, {**environment(), "rows": rows}, found)


if __name__ == "__main__":
    sys.exit(main())
