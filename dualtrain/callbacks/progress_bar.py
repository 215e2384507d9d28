"""Show the progress of a run on the console."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from dualtrain._lazy import require
from dualtrain.callback import Callback
from dualtrain.context import RunContext
from dualtrain.errors import ArgumentTypeError, ArgumentValueError
from dualtrain.triggers import Every

logger = logging.getLogger(__name__)

_BAR = (
    "{desc} {percentage:3.0f}%|{bar:16}| {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}, {rate_fmt}]"
)
_BAR_WITHOUT_TOTAL = "{desc} {n_fmt}{postfix} [{elapsed}, {rate_fmt}]"


class ProgressBar(Callback):
    """Print a bar for each epoch: step, loss, learning rate, the last evaluation's metrics, steps/s.

    It prints to the ``sys.stdout`` of train begin, on rank 0 only. On a terminal, and in a notebook with
    ipywidgets, the bar is redrawn in place. Output of other callbacks within an epoch breaks its line, so
    place it in the list before callbacks that print at an epoch's end. To a file or a pipe it prints
    lines without control characters: one at each epoch's end and one every ``seconds_per_line`` within an
    epoch. Values of ``run_context.log`` are shown too. If the output fails, the run continues without it.

    Args:
        refreshes_per_sec: Maximum redraws of a bar per second; 4 look smooth at a negligible cost.
        seconds_per_line: Seconds between two lines within an epoch, without a bar.

    Raises:
        ArgumentTypeError, ArgumentValueError: An argument is invalid.
        MissingDependencyError: tqdm is not installed.

    Cost: one read of the clock per step; a device sync for the loss at each redraw or line and at each
    epoch's end.
    Events: train begin, train epoch begin and end, train step end, eval begin and end, teardown.
    """

    _clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, *, refreshes_per_sec: float = 4.0, seconds_per_line: float = 30.0) -> None:
        self.refreshes_per_sec = _positive("refreshes_per_sec", refreshes_per_sec)
        self.seconds_per_line = _positive("seconds_per_line", seconds_per_line)
        require("tqdm", extra="progress")
        self._forget_run()

    def _forget_run(self) -> None:
        self._stream: Any = None
        self._bar_class: Any = None
        self._bar: Any = None
        self._every: Every | None = None
        self._logged: dict[str, float] = {}
        self._log_mark = 0
        self._last_line: tuple[Any, ...] | None = None

    def on_train_begin(self, run_context: RunContext) -> None:
        self._forget_run()
        if not run_context.is_main:
            return
        self._stream = sys.stdout
        self._bar_class = _bar_class(self._stream)
        seconds = self.seconds_per_line if self._bar_class is None else 1 / self.refreshes_per_sec
        self._every = Every(seconds=seconds, clock=self._clock)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        if self._every is None:
            return
        self._every.reset()
        self._epoch_began = self._clock()
        self._steps = 0
        if self._bar_class is not None:
            self._print(self._open_bar, run_context)

    def on_train_step_end(self, run_context: RunContext) -> None:
        if self._every is not None:
            self._steps = run_context.step_in_epoch or 0
            if self._every.due():
                self._print(self._show, run_context)

    def on_eval_begin(self, run_context: RunContext) -> None:
        if self._bar is not None:
            self._print(self._redraw, "evaluating")

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        if self._every is not None:
            self._print(self._show, run_context)
            self._print(self._close_bar)

    def on_teardown(self, run_context: RunContext) -> None:
        self._print(self._close_bar)
        self._forget_run()

    def __getstate__(self) -> dict[str, Any]:
        # A copy has the settings, but not the open bar.
        return {"refreshes_per_sec": self.refreshes_per_sec, "seconds_per_line": self.seconds_per_line}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_run()

    def _print(self, action: Callable[..., None], *args: Any) -> None:
        """Print, and continue the run without output if the terminal or pipe is closed."""
        try:
            action(*args)
        except (OSError, ValueError) as error:
            self._forget_run()
            logger.warning("ProgressBar continues without output: %s: %s", type(error).__name__, error)

    def _open_bar(self, run_context: RunContext) -> None:
        total = run_context.batches_per_epoch
        self._bar = self._bar_class(
            total=total,
            desc=_epoch(run_context),
            unit=" steps",
            file=self._stream,
            **({"dynamic_ncols": True} if _has_size(self._stream) else {"ncols": 80, "nrows": 24}),
            bar_format=_BAR_WITHOUT_TOTAL if total is None else _BAR,
        )

    def _close_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    def _redraw(self, values: str) -> None:
        self._bar.n = self._steps
        self._bar.set_postfix_str(values, refresh=False)
        self._bar.refresh()

    def _show(self, run_context: RunContext) -> None:
        self._log_mark, news = run_context.logged_since(self._log_mark)
        self._logged.update(news)
        known: dict[str, Any] = {"loss": run_context.loss, "lr": run_context.lr}
        for others in (run_context.metrics, self._logged):
            for name, value in others.items():
                known.setdefault(name, value)  # a metric named loss is also present as eval_loss
        shown = {name: text for name, value in known.items() if (text := _number(value)) is not None}
        values = [f"{_printable(name)} {text}" for name, text in shown.items()]
        if self._bar is not None:
            self._redraw(", ".join(values))
        else:
            self._print_line(run_context, values)

    def _print_line(self, run_context: RunContext, values: list[str]) -> None:
        step = self._steps
        if self._last_line == (run_context.epoch, step, values):
            return
        self._last_line = (run_context.epoch, step, values)
        batches = run_context.batches_per_epoch
        seconds = self._clock() - self._epoch_began
        speed = [f"{step / seconds:.4g} steps/s"] if seconds > 0 else []
        at = f"step {step}" if batches is None else f"step {step}/{batches}"
        line = "  ".join([_epoch(run_context), at, *values, *speed])
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        print(line.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(f"ProgressBar({name}=...) takes a number, but got {value!r}.")
    if not 0 < value < float("inf"):
        raise ArgumentValueError(f"ProgressBar({name}=...) has to be positive and finite, but got {value}.")
    return value


def _bar_class(stream: Any) -> Any:
    """Return the class of bars for a stream, or None if it supports only lines."""
    from tqdm.auto import tqdm

    in_notebook = any(cls.__module__ == "tqdm.notebook" for cls in tqdm.__mro__)
    terminal = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    if not (in_notebook or terminal):
        return None
    # tqdm's monitor thread is for bars that are redrawn by counting; these are redrawn explicitly.
    return type("Bar", (tqdm,), {"monitor_interval": 0})


def _has_size(stream: Any) -> bool:
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError, AttributeError):
        return False


def _epoch(run_context: RunContext) -> str:
    return f"epoch {run_context.epoch}/{run_context.epochs}"


def _number(value: Any) -> str | None:
    """Return a number, or several learning rates, with four digits; None for other values."""
    if isinstance(value, tuple):
        return "/".join(map(str, map(_number, value)))
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError, RuntimeError):
        return None


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in str(name))
