"""Search learning rate, weight decay, depth and backend of the Vision Transformer of ../digits_vit.

The study is kept in a storage and can be continued. Several worker processes may share it; the trial of
a killed worker is run again.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

# The networks are small: a second thread for one operator costs more than it saves.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOG_v", "3")  # MindSpore's log level: only errors
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "digits_vit"))

import optuna
from data import Batches, load_batches
from history import draw
from optuna.trial import TrialState
from storage import ended, open_storage, recover, sign, worker_of
from workers import Workers

import dualtrain as dt

ENGINES = ("torch", "mindspore")
STUDY = "digits"
VALID_SIZE = 360  # of the 1437 images for training; those for testing take no part in the search


@dataclass(frozen=True)
class Settings:
    """The settings of the workers."""

    storage: str
    heartbeat: int
    engines: tuple[str, ...]
    epochs: int
    seed: int
    out: Path
    kill: int | None

    def study(self, worker: int = 0) -> optuna.Study:
        """Load or create the study, with a separate sampler for each worker."""
        study = optuna.create_study(
            study_name=STUDY,
            storage=open_storage(self.storage, self.heartbeat),
            direction="maximize",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=2),
        )
        # With one seed all workers, and a continued study, would draw the same numbers.
        seed = self.seed + 1000 * len(study.get_trials(deepcopy=False)) + worker
        study.sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        return study


class KillWorker:
    """Kill this process at the end of its first evaluation, as the system may do if memory is short."""

    def on_eval_end(self, run_context: dt.RunContext) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def objective(trial: optuna.Trial, settings: Settings) -> float:
    """Train once and return the best accuracy."""
    sign(trial)
    engine = trial.suggest_categorical("backend", settings.engines)
    network, loss_fn, optimizer = import_module(f"vit_{engine}").build(
        settings.seed,
        trial.suggest_float("lr", 1e-4, 1e-2, log=True),
        layers=trial.suggest_int("depth", 1, 4),
        weight_decay=trial.suggest_float("weight_decay", 1e-6, 1e-2, log=True),
    )
    images, _ = load_batches(settings.seed)
    valid = Batches(images.images[:VALID_SIZE], images.labels[:VALID_SIZE], 120)
    train = Batches(images.images[VALID_SIZE:], images.labels[VALID_SIZE:], 64, settings.seed)
    reporting = dt.callbacks.OptunaCallback(trial, "val_acc")
    log = dt.callbacks.StepLogger(settings.out / f"trial{trial.number}.jsonl", log_interval=1)
    killing = [KillWorker()] if trial.number == settings.kill else []
    model = dt.Model(network, loss_fn, optimizer, {"acc"})
    model.fit(settings.epochs, train, valid, callbacks=[reporting, log, *killing])
    assert reporting.best_metric is not None
    return reporting.best_metric


def work(worker: int, connection: Connection, settings: Settings) -> None:
    """Run one trial for each message, until the connection is closed."""
    quiet()
    study = settings.study(worker)
    while True:
        try:
            connection.recv()
        except EOFError:
            return
        study.optimize(partial(objective, settings=settings), n_trials=1)
        connection.send(None)


def search(settings: Settings, trials: int, workers: int) -> optuna.Study:
    """Run trials until the requested number of the study's trials have ended."""
    study = settings.study()
    if not study.get_trials(deepcopy=False):
        for engine in settings.engines:
            study.enqueue_trial({"backend": engine})  # each of them at least once
    with Workers(partial(work, settings=settings)) as pool:
        while True:
            recover(study, settings.storage, settings.heartbeat)
            found = study.get_trials(deepcopy=False)
            # A trial that a worker of ours has not signed yet counts twice, for a moment.
            others = [t for t in found if t.state is TrialState.RUNNING and worker_of(t) not in pool.busy]
            left = trials - len(ended(found)) - len(others)
            if left <= 0 and not others and not pool.busy:
                return study
            pool.hand_out(min(left, workers) - len(pool.busy))
            pool.wait(seconds=1)


def quiet() -> None:
    """Hide the warnings that heartbeats and some options of the sampler are experimental."""
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20, help="of the whole study, earlier runs included")
    parser.add_argument("--epochs", type=int, default=8, help="of a trial that is not pruned")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes; default: 1")
    parser.add_argument("--engine", choices=(*ENGINES, "both"), default="both")
    parser.add_argument("--storage", help="sqlite:///FILE, or FILE for a journal; default: in --out")
    parser.add_argument("--seed", type=int, default=0, help="of weights, shuffling and sampler")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="default: out")
    parser.add_argument("--heartbeat", type=int, default=5, metavar="SECONDS", help="with SQLite")
    parser.add_argument("--kill", type=int, metavar="TRIAL", help="kill the worker that runs this trial")
    arguments = parser.parse_args()
    quiet()

    engines = ENGINES if arguments.engine == "both" else (arguments.engine,)
    settings = Settings(
        storage=arguments.storage or f"sqlite:///{arguments.out / 'study.db'}",
        heartbeat=arguments.heartbeat,
        engines=engines,
        epochs=arguments.epochs,
        seed=arguments.seed,
        out=arguments.out,
        kill=arguments.kill,
    )
    study = search(settings, arguments.trials, arguments.workers)

    counts = Counter(trial.state.name for trial in study.trials)
    print("\n" + ", ".join(f"{count} {state}" for state, count in sorted(counts.items())))
    print(f"best: trial {study.best_trial.number}, validation accuracy {study.best_value:.2%}")
    for name, value in study.best_params.items():
        print(f"  {name:<14}{value if isinstance(value, (str, int)) else f'{value:.3g}'}")
    print(draw(study, arguments.out / "study.png"))
    print(f"to look at it: optuna-dashboard {settings.storage}")


if __name__ == "__main__":
    main()
