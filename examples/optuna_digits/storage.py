"""Open the storage of a study, and requeue the trials of killed workers."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import optuna
from optuna.storages import JournalStorage, RDBStorage, fail_stale_trials
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

try:
    from optuna.storages import RetryHeartbeatStaleTrialCallback
except ImportError:  # its name in Optuna 4.0
    from optuna.storages import RetryFailedTrialCallback as RetryHeartbeatStaleTrialCallback

SQLITE = "sqlite:///"


def open_storage(where: str, heartbeat: int) -> optuna.storages.BaseStorage:
    """Open ``sqlite:///FILE``, or any other name as a journal file.

    Args:
        where: The storage.
        heartbeat: With SQLite, seconds between two heartbeats of a running trial. After ten missing
            heartbeats Optuna marks the trial as failed and queues it again.
    """
    Path(where.removeprefix(SQLITE)).parent.mkdir(parents=True, exist_ok=True)
    if not where.startswith(SQLITE):
        return JournalStorage(JournalFileBackend(where))
    with sqlite3.connect(where.removeprefix(SQLITE), timeout=60) as connection:
        connection.execute("PRAGMA journal_mode=WAL")  # readers do not wait for the writer
    return RDBStorage(
        where,
        engine_kwargs={"connect_args": {"timeout": 60}},
        heartbeat_interval=heartbeat,
        grace_period=10 * heartbeat,
        heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=1),
    )


def sign(trial: Trial) -> None:
    """Record the process of a trial; a requeued trial inherits the attributes of the original."""
    trial.set_user_attr("worker", [os.getpid(), trial.number])


def worker_of(trial: FrozenTrial) -> int | None:
    """Return the process that runs a trial; None if it is not recorded yet."""
    pid, number = trial.user_attrs.get("worker", (None, None))
    return pid if number == trial.number else None


def ended(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the finished trials, without those that were queued again."""
    again = {number for trial in trials for number in trial.system_attrs.get("retry_history", ())}
    return [trial for trial in trials if trial.state.is_finished() and trial.number not in again]


def recover(study: optuna.Study, where: str, heartbeat: int) -> None:
    """Mark the trials of ended workers on this machine as failed, and queue each again.

    With SQLite Optuna uses the heartbeats. A journal has no heartbeats, and the recorded process is used.
    Neither exists yet if a worker ends immediately after it has received its trial.
    """
    fail_stale_trials(study)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        pid = worker_of(trial)
        patience = 20 * heartbeat if pid is None or where.startswith(SQLITE) else 0
        assert trial.datetime_start is not None
        age = (datetime.now() - trial.datetime_start).total_seconds()
        if age > patience and (pid is None or not _is_alive(pid)):
            try:
                failed = study.tell(trial.number, state=TrialState.FAIL)
            except ValueError:  # it has ended meanwhile
                continue
            RetryHeartbeatStaleTrialCallback(max_retry=1)(study, failed)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
