"""Measure the number of epochs until a search reaches a grid's best accuracy, and print Markdown tables.

The Vision Transformer of examples/digits_vit is trained on scikit-learn's digits with PyTorch. Its learning
rate, weight decay and depth are searched by a grid, and with the same number of epochs by Optuna's TPE
sampler, with and without pruning by OptunaCallback. The seed determines initial weights, shuffling, the
order of the grid and the sampler.

    python benchmarks/search_quality.py
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path

# The network is small: a second thread for one operator costs more than it saves.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "digits_vit"))

import numpy as np
import optuna
from data import Batches, load_batches
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import GridSampler, TPESampler
from optuna.trial import TrialState
from vit_torch import build

import dualtrain as dt

EPOCHS = 8  # of a trial that is not pruned
VALID_SIZE = 360
LR, WEIGHT_DECAY, DEPTH = (1e-4, 3e-2), (1e-5, 1e-3), (1, 2)
GRID = {"lr": np.geomspace(*LR, 6).tolist(), "weight_decay": list(WEIGHT_DECAY), "depth": list(DEPTH)}
BUDGET = EPOCHS * int(np.prod([len(values) for values in GRID.values()]))


def grid(seed: int) -> optuna.Study:
    """Return a study of the grid, in the seed's order."""
    return optuna.create_study(
        direction="maximize", sampler=GridSampler(GRID, seed=seed), pruner=NopPruner()
    )


def tpe(seed: int, pruner: Callable[[], optuna.pruners.BasePruner]) -> optuna.Study:
    """Return a study with TPE, whose first six trials are random."""
    sampler = TPESampler(seed=seed, n_startup_trials=6, multivariate=True)
    return optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner())


SEARCHES: dict[str, Callable[[int], optuna.Study]] = {
    "grid": grid,
    "TPE": partial(tpe, pruner=NopPruner),
    "TPE with pruning": partial(tpe, pruner=lambda: MedianPruner(n_startup_trials=4, n_warmup_steps=2)),
}


def objective(trial: optuna.Trial, seed: int) -> float:
    """Train once and return the best validation accuracy."""
    network, loss_fn, optimizer = build(
        seed,
        trial.suggest_float("lr", *LR, log=True),
        layers=trial.suggest_int("depth", *DEPTH),
        weight_decay=trial.suggest_float("weight_decay", *WEIGHT_DECAY, log=True),
    )
    images, _ = load_batches(seed)
    valid = Batches(images.images[:VALID_SIZE], images.labels[:VALID_SIZE], 120)
    train = Batches(images.images[VALID_SIZE:], images.labels[VALID_SIZE:], 64, seed)
    reporting = dt.callbacks.OptunaCallback(trial, "val_acc")
    dt.Model(network, loss_fn, optimizer, {"acc"}).fit(EPOCHS, train, valid, callbacks=reporting)
    assert reporting.best_metric is not None
    return reporting.best_metric


def accuracies(study: optuna.Study) -> list[float]:
    """Return the accuracy of every epoch of a study, trial by trial, within the budget."""
    return [value for trial in study.trials for _, value in sorted(trial.intermediate_values.items())][
        :BUDGET
    ]


def run(search: Callable[[int], optuna.Study], seed: int) -> optuna.Study:
    """Search until the budget of epochs is used up."""
    study = search(seed)
    while len(accuracies(study)) < BUDGET:
        study.optimize(partial(objective, seed=seed), n_trials=1)
    return study


def reached(study: optuna.Study, target: float) -> int | None:
    """Return the number of epochs until a study reached an accuracy; None: not within the budget."""
    best = accumulate(accuracies(study), max)
    return next((epoch for epoch, value in enumerate(best, 1) if value >= target), None)


def spread(values: Sequence[float], form: str) -> str:
    """Return median, minimum and maximum."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def tables(studies: dict[str, list[optuna.Study]]) -> Iterator[str]:
    """Yield the lines of both tables."""
    targets = [max(accuracies(study)) for study in studies["grid"]]
    yield f"Budget: {BUDGET} epochs for each search. Epochs to the grid's best accuracy:"
    yield ""
    yield row("seed", "grid's best", *studies)
    yield "|---" * (2 + len(studies)) + "|"
    for seed, target in enumerate(targets):
        needed = [reached(found[seed], target) or "not reached" for found in studies.values()]
        yield row(seed, f"{target:.2%}", *needed)
    yield ""
    yield row("search", "epochs to the grid's best", "accuracy at the end", "trials", "of them pruned")
    yield "|---" * 5 + "|"
    for name, found in studies.items():
        # If it is not reached, it counts as one more than the budget.
        epochs = [reached(s, target) or BUDGET + 1 for s, target in zip(found, targets, strict=True)]
        missed = sum(number > BUDGET for number in epochs)
        yield row(
            name,
            spread(epochs, ".0f") + f", not reached {missed} times" * bool(missed),
            spread([max(accuracies(study)) for study in found], ".2%"),
            spread([len(study.trials) for study in found], ".0f"),
            spread([len(study.get_trials(states=(TrialState.PRUNED,))) for study in found], ".0f"),
        )
    yield ""
    versions = ", ".join(f"{name} {version(name)}" for name in ("optuna", "torch", "numpy"))
    yield f"{versions}, Python {platform.python_version()}"


def row(*cells: object) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of the sampler's multivariate
    studies = {name: [run(search, seed) for seed in seeds] for name, search in SEARCHES.items()}
    for line in tables(studies):
        print(line)


if __name__ == "__main__":
    main()
