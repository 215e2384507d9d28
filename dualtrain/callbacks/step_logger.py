"""Write training steps and evaluations as JSON lines."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dualtrain.arguments import checked_path, checked_rank, checked_sinks, positive_int
from dualtrain.callbacks._log_writing import LogWriting
from dualtrain.context import RESERVED_NAMES, RunContext
from dualtrain.errors import ArgumentTypeError
from dualtrain.records import Record
from dualtrain.sinks.run_log import Later, RunLog
from dualtrain.sinks.sink import Sink
from dualtrain.triggers import Every


class StepLogger(LogWriting):
    """Log every ``log_interval``-th step, the last step and each evaluation to a file and to sinks.

    A row has ``step`` and ``epoch`` (from 1), ``global_step`` (optimizer updates), ``loss``,
    ``lr`` (the rate this step used; a list with several parameter groups), ``elapsed_sec``
    since train begin, the values of ``run_context.log()``, and ``timestamp`` (Unix seconds).
    After each evaluation of the run a row with ``"mode": "eval"`` has its results, with the ``step``
    and ``epoch`` of training; results that are not numbers are left out.
    Numbers keep full precision; NaN and infinities are null, and a ``nonfinite`` object lists them.
    Run information (versions, model, backend, start time) is written to ``<log_file>.meta.json``.

    An existing log of the same name is renamed to ``train_log.1.jsonl`` and so on; a log that another
    run is still writing is refused before the first step. A write error, such as a full disk, does not
    end training: there is one warning, and lost lines are counted.

    Args:
        log_file: Path of the log; read at train begin. Missing folders are created.
        log_interval: Steps between two rows, counted across epochs. At 10 the cost of a device sync
            per row is negligible, and the loss curve keeps its shape.
        rank: ``"main"``: only rank 0 writes. ``"all"``: every rank writes its own file,
            ranks above 0 to ``train_log.rank1.jsonl`` and so on.
        asynchronous: True: write on a thread; each row is in the file about a second later, and all
            rows at the end of the run. On a GPU a row's loss is read when the next step ends, so that
            the GPU is not left idle. False: each row is in the file when its step ends.
        max_bytes: Size at which the file is renamed to ``train_log.part1.jsonl`` and so on, and a
            new file is started. None: no limit.
        sinks: Further sinks for each row, on the ranks that write. They are closed at the end of the
            run: create new ones for each run. A ``MemorySink`` stays readable.

    Raises:
        ArgumentTypeError, ArgumentValueError: An argument is invalid.
        LogInUseError, OSError: At train begin, if the file cannot be opened.

    A row is written when its step ends, except the last one of an epoch, which waits for values logged
    in the evaluation. The row of an evaluation is written at the end of the next step or of the epoch.
    If another callback stops the run after this one has written the last row, values logged after that
    are in a second row of the same step.

    Cost: every ``log_interval`` steps one device sync and about 7 us on the training thread, or 15 us
    without a thread; otherwise a comparison, 2 us. With PyTorch on a GPU, and a thread, no sync.
    Events: train begin, epoch begin, step end, eval end, epoch end, train end, teardown.
    """

    def __init__(
        self,
        log_file: str | os.PathLike[str] = "train_log.jsonl",
        log_interval: int = 10,
        *,
        rank: str = "main",
        asynchronous: bool = True,
        max_bytes: int | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        if not isinstance(asynchronous, bool):
            raise ArgumentTypeError(f"StepLogger(asynchronous=...) is a bool, but got {asynchronous!r}.")
        self.log_file = checked_path("StepLogger", "log_file", log_file)
        self.log_interval = positive_int("StepLogger", "log_interval", log_interval)
        self.rank = checked_rank("StepLogger", rank)
        self.asynchronous = asynchronous
        self.max_bytes = None if max_bytes is None else positive_int("StepLogger", "max_bytes", max_bytes)
        self.sinks = checked_sinks("StepLogger", sinks)
        self._forget_run()

    def _forget_run(self) -> None:
        self._log: RunLog | None = None
        self._held: list[tuple[Record, Later | None]] = []  # pending: a training row, evaluation rows
        self._step = 0
        self._next_row: float = 0
        self._epoch_ends: int | None = None
        self._written_step = 0
        self._last_row = 0  # like _written_step, but of this run only
        self._log_mark = 0

    def on_train_begin(self, run_context: RunContext) -> None:
        resuming, written_step = self._resuming, self._written_step
        self._resuming = False
        self._forget_run()
        if resuming:
            self._written_step = written_step
        self._start = time.monotonic()
        self._every = Every(steps=self.log_interval)
        self._step = run_context.step or 0
        self._every.reset(step=self._step)
        self._next_row = self._every.next_step
        self._log = RunLog.open(
            run_context,
            self.log_file,
            sinks=self.sinks,
            rank=self.rank,
            asynchronous=self.asynchronous,
            append=resuming,
            max_bytes=self.max_bytes,
            meta={"log_interval": self.log_interval},
        )

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        batches = run_context.batches_per_epoch
        self._epoch_ends = None if batches is None else (run_context.step or 0) + batches

    def on_train_step_end(self, run_context: RunContext) -> None:
        if self._log is None:
            return
        if self._held:
            self._write_held()
        self._step = step = run_context.step
        if step < self._next_row and step != self._epoch_ends and not run_context.get_stop_requested():
            return
        due = self._every.due(step=step)
        self._next_row = self._every.next_step
        inside = self._epoch_ends is not None and step < self._epoch_ends
        may_be_last = run_context.get_stop_requested() if inside else _may_be_last_step(run_context)
        if due or may_be_last is True:
            self._held.append(self._row(run_context))
            if may_be_last is False:
                self._write_held()
            # Otherwise keep it until the next step: values logged by an evaluation belong to this row.

    def on_eval_end(self, run_context: RunContext) -> None:
        if self._log is None or run_context.epoch is None:
            return
        results = _numbers_of(run_context.metrics)
        # Held, since the training row of the run's last step may have to be written before it.
        self._held.append((Record(self._step, run_context.epoch, "eval", time.time(), results), None))

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        if not run_context.get_stop_requested() and run_context.epoch != run_context.epochs:
            self._write_held()

    def on_train_end(self, run_context: RunContext) -> None:
        if self._log is None or not run_context.step:
            return
        late = self._logged(run_context)
        holds_row = bool(self._held) and self._held[0][0].mode == "train"
        if not holds_row and (late or self._last_row != run_context.step):
            self._held.insert(0, self._row(run_context))
            holds_row = True
        if holds_row:
            self._held[0][0].values.update(late)

    def _end_log(self) -> None:
        try:
            self._write_held()
        finally:
            log, self._log, self._held = self._log, None, []
            if log is not None:
                log.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, which continues this log."""
        return {"log_file": os.fspath(self.log_file), "written_step": self._written_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the log in the next run instead of starting a new one."""
        self._written_step = state["written_step"]
        self._resuming = self._written_step > 0

    def _row(self, run_context: RunContext) -> tuple[Record, Later | None]:
        loss_later = run_context.loss_later() if self.asynchronous else None
        values = {
            "global_step": run_context.global_step,
            "loss": run_context.loss if loss_later is None else None,  # until it is read
            "lr": run_context.lr,
            "elapsed_sec": round(time.monotonic() - self._start, 6),
            **self._logged(run_context),
        }
        record = Record(self._step, run_context.epoch, "train", time.time(), values)
        return record, None if loss_later is None else lambda: {"loss": loss_later()}

    def _logged(self, run_context: RunContext) -> dict[str, float]:
        self._log_mark, logged = run_context.logged_since(self._log_mark)
        return logged

    def _write_held(self) -> None:
        rows, self._held = self._held, []
        for record, later in rows:
            if self._log is not None:
                self._log.write(record, later=later)
                if record.mode == "train":
                    self._written_step = self._last_row = record.step


def _may_be_last_step(run_context: RunContext) -> bool | None:
    """Return whether this is the run's last step, or None if that is not known yet."""
    if run_context.get_stop_requested():
        return True
    if run_context.batches_per_epoch is None:
        return None
    if run_context.step_in_epoch != run_context.batches_per_epoch:
        return False
    return True if run_context.epoch == run_context.epochs else None


def _numbers_of(results: Mapping[str, Any]) -> dict[str, float | tuple[float, ...]]:
    """Return the results of an evaluation that are numbers or one-dimensional arrays of numbers."""
    numbers: dict[str, float | tuple[float, ...]] = {}
    for name, value in results.items():
        if isinstance(value, (str, bytes)):
            continue
        own_name = f"eval_{name}" if name in RESERVED_NAMES else name
        try:
            numbers[own_name] = tuple(map(float, value)) if getattr(value, "ndim", 0) == 1 else float(value)
        except (TypeError, ValueError):
            continue  # for example a confusion matrix, a text or None
    return numbers
