"""What the recipes reach as pipelines, and whether it is what one process reaches.

Runs the experiments `digits` and `bert_demo` by their own command, each as one process, as 2 stages, and as 2 stages x
2 replicas, and compares:

* accuracy on the digits: above 90 % in every run;
* masked-LM validation loss: at least 0.3 nats below the unigram entropy in every run;
* training loss, step by step: 2 stages against one process, with dropout on, and 2 stages x 2 replicas against one
  process that reads what the two replicas read (without dropout, whose draws differ between replicas).

The comparisons are in double precision: rounding differs between one process and several, and training magnifies it, in
single precision to some thousandths within 20 steps.

Run: python benchmarks/recipes.py [--check] [--json FILE] [--only digits|bert]   (a few minutes a recipe on two cores)
"""

# ruff: noqa: E402
from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # Python puts this file's folder there, where `import recipes` would find this file

from benchmarks.reporting import environment, finish, parser

MIN_ACCURACY = 0.9
MIN_BELOW_ENTROPY = 0.3
MAX_LOSS_DIFFERENCE = 1e-9
QUIET = (
    "callbacks.progress_bar=null",
    "callbacks.model_summary=null",
    "+trainer.enable_progress_bar=false",
    "trainer.log_every_n_steps=1",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of one recipe; batch size and micro-batches are those of all replicas together."""

    experiment: str
    num_stages: int
    num_replicas: int = 1
    replica_order: bool = False
    """One process that reads what two replicas read."""
    exact: bool = False
    """Fewer steps in double precision, to compare with another run."""
    dropout: bool = True

    @property
    def name(self) -> str:
        how = f"{self.num_stages} x {self.num_replicas}" + (", replicas' order" if self.replica_order else "")
        how += ", double precision" if self.exact else ""
        return f"{self.experiment} {how}" + ("" if self.dropout else ", no dropout")

    def overrides(self) -> list[str]:
        batch_size, data = {
            "digits": (64, "benchmarks.replica_order.DigitsInReplicaOrder"),
            "bert_demo": (32, "benchmarks.replica_order.MaskedTextInReplicaOrder"),
        }[self.experiment]
        settings = [
            f"experiment={self.experiment}",
            f"strategy.num_stages={self.num_stages}",
            f"strategy.num_replicas={self.num_replicas}",
            f"trainer.devices={self.num_stages * self.num_replicas}",
            f"strategy.num_microbatches={4 // self.num_replicas}",
            f"data.batch_size={batch_size // (2 if self.replica_order else self.num_replicas)}",
        ]
        if self.replica_order:
            settings += [f"data._target_={data}", "+trainer.use_distributed_sampler=false"]
        if self.exact:
            settings += ["trainer.precision=64-true", "trainer.max_epochs=2", "trainer.limit_train_batches=40"]
        if not self.dropout:
            settings += ["model.dropout=0.0", "data.dynamic_masking=false"]
        return settings


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one run reached."""

    name: str
    seconds: float
    losses: list[float]
    """In training, of each step."""
    val_loss: float
    val_accuracy: float
    unigram_entropy: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs that must be equal but for rounding."""

    first: str
    second: str
    num_steps: int
    max_loss_difference: float
    val_loss_difference: float


def run_case(case: Case, folder: Path, timeout_s: float) -> Result:
    out = folder / case.name.replace(" ", "_").replace(",", "").replace("'", "")
    command = [sys.executable, "-m", "recipes.train", *QUIET, *case.overrides(), f"hydra.run.dir={out}"]
    command.append(f"paths.cache_dir={folder / 'cache'}")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode != 0:
        raise RuntimeError(f"{case.name} ended with status {process.returncode}:\n{output[-4000:]}")
    return read_result(case, out, time.monotonic() - start)


def read_result(case: Case, out: Path, seconds: float) -> Result:
    with (out / "csv" / "version_0" / "metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    best = min((row for row in rows if row["val/loss"]), key=lambda row: float(row["val/loss"]))
    data = instantiate(OmegaConf.load(out / ".hydra" / "config.yaml").data, _convert_="all")
    entropy = None
    if hasattr(type(data), "held_out_entropy"):
        data.setup("validate")
        entropy = data.held_out_entropy
    return Result(
        name=case.name,
        seconds=seconds,
        losses=[float(row["train/loss"]) for row in rows if row["train/loss"]],
        val_loss=float(best["val/loss"]),
        val_accuracy=float(best["val/accuracy"]),
        unigram_entropy=entropy,
    )


def compare(first: Result, second: Result) -> Comparison:
    if len(first.losses) != len(second.losses):
        raise RuntimeError(f"{first.name} took {len(first.losses)} steps, {second.name} {len(second.losses)}")
    differences = [abs(a - b) for a, b in zip(first.losses, second.losses, strict=True)]
    return Comparison(
        first=first.name,
        second=second.name,
        num_steps=len(differences),
        max_loss_difference=max(differences),
        val_loss_difference=abs(first.val_loss - second.val_loss),
    )


def cases_of(recipe: str) -> tuple[list[Case], list[tuple[Case, Case]]]:
    """The runs that must be good, and the pairs that must be equal."""
    name = {"digits": "digits", "bert": "bert_demo"}[recipe]
    good = [
        Case(experiment=name, num_stages=1),
        Case(experiment=name, num_stages=2),
        Case(experiment=name, num_stages=2, num_replicas=2),
    ]
    single, staged = good[0], good[1]
    # ResNet has no dropout to turn off.
    replicated = replace(good[2], dropout=recipe != "bert", exact=True)
    pairs = [
        (replace(single, exact=True), replace(staged, exact=True)),
        (replace(replicated, num_stages=1, num_replicas=1, replica_order=True), replicated),
    ]
    return good, pairs


def shortfalls_of(good: list[Result], comparisons: list[Comparison]) -> list[str]:
    found = []
    for result in good:
        if result.unigram_entropy is None:
            if not result.val_accuracy > MIN_ACCURACY:
                found.append(f"{result.name}: accuracy {result.val_accuracy:.4f}, not above {MIN_ACCURACY}")
        elif not result.unigram_entropy - result.val_loss >= MIN_BELOW_ENTROPY:
            found.append(
                f"{result.name}: validation loss {result.val_loss:.4f} is "
                f"{result.unigram_entropy - result.val_loss:.4f} below the unigram entropy, not {MIN_BELOW_ENTROPY}"
            )
    for pair in comparisons:
        if not pair.max_loss_difference <= MAX_LOSS_DIFFERENCE:
            found.append(f"{pair.first} and {pair.second}: training losses differ by {pair.max_loss_difference:.1e}")
    return found


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--only", choices=["digits", "bert"], help="only this recipe")
    made.add_argument("--timeout-s", type=float, default=600.0, help="limit of each run")
    options = made.parse_args()

    results: dict[Case, Result] = {}
    good: list[Result] = []
    comparisons: list[Comparison] = []
    with tempfile.TemporaryDirectory() as folder:
        for recipe in [options.only] if options.only else ["digits", "bert"]:
            wanted, pairs = cases_of(recipe)
            for case in dict.fromkeys([*wanted, *(case for pair in pairs for case in pair)]):
                results[case] = result = run_case(case, Path(folder), options.timeout_s)
                below = (
                    ""
                    if result.unigram_entropy is None
                    else (f", {result.unigram_entropy - result.val_loss:.3f} below the unigram entropy")
                )
                print(
                    f"{case.name:<60} {len(result.losses):>5} steps {result.seconds:>6.0f} s   val loss "
                    f"{result.val_loss:.4f}{below}, accuracy {result.val_accuracy:.1%}",
                    flush=True,
                )
            good += [results[case] for case in wanted]
            for first, second in pairs:
                comparisons.append(pair := compare(results[first], results[second]))
                print(
                    f"{pair.first} = {pair.second}: training losses of {pair.num_steps} steps within "
                    f"{pair.max_loss_difference:.1e}, validation loss within {pair.val_loss_difference:.1e}",
                    flush=True,
                )
    figures = {
        **environment(),
        "results": [asdict(result) for result in results.values()],
        "comparisons": [asdict(pair) for pair in comparisons],
    }
    return finish(options, figures, shortfalls_of(good, comparisons))


if __name__ == "__main__":
    sys.exit(main())
