"""What a step costs, counted instead of timed: the figures are the same on every machine, however busy.

A run's own data set marks the steps between which things are counted, since every loop has to ask it
for the next batch. The bare loop that dualtrain is compared with goes through the same data set.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dualtrain as dt
from dualtrain.events import LIFECYCLE
from dualtrain.testing import FakeLoop

PACKAGE = str(Path(dt.__file__).parent)
IO = Path("/proc/self/io")


class Marked:
    """The same batch ``length`` times; ``marks[n]`` is called when batch n, from 0, is asked for."""

    def __init__(self, batch: Any, length: int, marks: dict[int, Callable[[], None]]) -> None:
        self._batch = batch
        self._length = length
        self._marks = marks

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        for number in range(self._length):
            if number in self._marks:
                self._marks[number]()
            yield self._batch


class Calls:
    """Count the calls that this thread makes in ``steps`` steps after ``warm`` others.

    Attributes:
        python: Calls of Python functions, a generator's resumptions among them.
        own: Those of them that are dualtrain's functions.
        c: Calls of C functions, by name.
    """

    STEPS = 10

    def __init__(self) -> None:
        self.python = self.own = 0
        self.c: Counter[str] = Counter()

    def marks(self, *, warm: int = 5) -> dict[int, Callable[[], None]]:
        """Return the marks that begin and end the count."""
        return {warm: self._start, warm + self.STEPS: self._stop}

    def _start(self) -> None:
        gc.collect()
        gc.disable()  # what it calls when is nobody's cost
        sys.setprofile(self._count)

    def _stop(self) -> None:
        sys.setprofile(None)
        gc.enable()

    def _count(self, frame: Any, kind: str, function: Any) -> None:
        if kind == "call":
            self.python += 1
            self.own += frame.f_code.co_filename.startswith(PACKAGE)
        elif kind == "c_call":
            self.c[function.__name__] += 1


class Does(dt.Callback):
    """Call ``action(run_context)`` at the end of each step and keep nothing."""

    def __init__(self, action: Callable[[Any], None]) -> None:
        self.action = action

    def on_train_step_end(self, run_context: Any) -> None:
        self.action(run_context)


class Listener(dt.Callback):
    """Override every lifecycle event and do nothing."""


for _event in LIFECYCLE:
    setattr(Listener, _event.value, lambda self, run_context: None)


def one_batch(engine: Any) -> tuple[Any, Any]:
    """Return a batch of native tensors, which no engine has to convert."""
    return engine.as_tensor(np.ones(1, np.float32)), engine.as_tensor(np.zeros(1, np.float32))


def train(engine: Any, data: Any, callbacks: Any = None, *, lr: float = 1e-3) -> None:
    """Train a network of one weight: a step that is nearly nothing but overhead."""
    network = engine.weight()
    dt.Model(network, engine.loss_fn(), engine.sgd(network, lr)).train(1, data, callbacks)


def calls_of(engine: Any, run: Callable[..., None], *args: Any) -> Calls:
    """Return the calls of ten steps of ``run(engine, data, *args)``."""
    calls = Calls()
    run(engine, Marked(one_batch(engine), 20, calls.marks()), *args)
    assert calls.python > 0
    return calls


def bare_loop(engine: Any, data: Any) -> None:
    """Train on PyTorch as one would by hand."""
    network, loss_fn = engine.weight(), engine.loss_fn()
    optimizer = engine.sgd(network)
    for x, y in data:
        optimizer.zero_grad()
        loss = loss_fn(network(x), y)
        loss.backward()
        optimizer.step()


class NativeDataset:
    """What MindSpore's Model asks of a ``mindspore.dataset``, without a pipeline."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def get_dataset_size(self) -> int:
        return len(self._data)

    def create_tuple_iterator(self, num_epochs: int = -1, do_copy: bool = False) -> Any:
        return iter(self._data)

    def reset(self) -> None:
        """Do nothing: there is one epoch."""


def native_model(engine: Any, data: Any) -> None:
    """Train with MindSpore's own Model."""
    from mindspore import train

    network = engine.weight()
    model = train.Model(network, engine.loss_fn(), engine.sgd(network))
    model.train(1, NativeDataset(data), dataset_sink_mode=False)


@pytest.mark.torch
def test_a_step_makes_eight_calls_more_than_a_bare_loop() -> None:
    """They are dualtrain's own: PyTorch's functions are called as often as by hand."""
    from engines import TorchEngine

    engine = TorchEngine()
    ours = calls_of(engine, train)
    assert ours.own == 8 * Calls.STEPS
    assert ours.python - ours.own == calls_of(engine, bare_loop).python


@pytest.mark.mindspore
def test_a_step_makes_at_most_ten_calls_more_than_mindspores_own_model() -> None:
    from engines import ENGINES

    engine = ENGINES["mindspore-graph"]()
    more = calls_of(engine, train).python - calls_of(engine, native_model).python
    assert 0 < more <= 10 * Calls.STEPS


def test_callbacks_that_do_not_listen_to_steps_cost_nothing(engine: Any) -> None:
    class Idle(dt.Callback):
        def on_train_epoch_end(self, run_context: Any) -> None:
            pass

    none = calls_of(engine, train)
    idle = calls_of(engine, train, [dt.Callback() for _ in range(5)] + [Idle() for _ in range(5)])
    assert idle.python == none.python
    assert idle.c == none.c


def test_each_listener_costs_its_own_call_and_no_more(engine: Any) -> None:
    """Ten callbacks for every lifecycle event add ten calls to each of a step's two."""

    def calls(count: int) -> int:
        return calls_of(engine, train, [Listener() for _ in range(count)]).python

    none, first, eleven, many = calls(0), calls(1), calls(11), calls(111)
    assert eleven - first == 2 * 10 * Calls.STEPS
    assert many - eleven == 2 * 100 * Calls.STEPS
    # The first one's two calls, and what hands events on at all.
    assert first - none <= 6 * Calls.STEPS


def reads_on_mindspore(calls: Calls) -> int:
    """Return how many values were read on the host: ``item()`` is a tenth of an ``asnumpy()``."""
    return calls.c["asnumpy"] + calls.c["_item"]


def reads_by_step(engine: Any, callbacks: Any, steps: int = 30) -> list[int]:
    """Return how often each step reads a tensor's value on the host, for which it waits for the device."""
    counts: list[int] = []
    calls = Calls()
    if engine.framework == "torch":
        from host_reads import HostReads

        with HostReads() as reads:
            marks = dict.fromkeys(range(steps), lambda: counts.append(reads.count))
            train(engine, Marked(one_batch(engine), steps, marks), callbacks)
            counts.append(reads.count)
    else:
        marks = dict.fromkeys(range(steps), lambda: counts.append(reads_on_mindspore(calls)))
        sys.setprofile(calls._count)
        try:
            train(engine, Marked(one_batch(engine), steps, marks), callbacks)
        finally:
            sys.setprofile(None)
        counts.append(reads_on_mindspore(calls))
    return [after - before for before, after in pairwise(counts)]


def test_steps_that_are_not_logged_never_wait_for_the_device(engine: Any) -> None:
    """And a logged one reads the loss once, however many look at it; on MindSpore the rate too.

    The first step, in which MindSpore compiles, is left out.
    """
    logged = 1 if engine.framework == "torch" else 2
    callbacks = [Listener(), dt.callbacks.StepLogger("a.jsonl", 10), Does(lambda c: c.step % 10 or c.loss)]
    assert reads_by_step(engine, callbacks)[1:] == [0] * 8 + [logged] + ([0] * 9 + [logged]) * 2


@pytest.mark.torch
def test_the_gradient_norm_is_one_more_read_however_many_look_at_it() -> None:
    from engines import TorchEngine

    def read(run_context: Any) -> None:
        if run_context.step % 10 == 0:
            run_context.log("grad_norm", run_context.grad_norm)

    callbacks = [Does(read), Does(read), dt.callbacks.StepLogger("a.jsonl", 10)]
    assert reads_by_step(TorchEngine(), callbacks) == ([0] * 9 + [2]) * 3


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("torch", marks=pytest.mark.torch),
        pytest.param("mindspore-graph", marks=pytest.mark.mindspore),
    ],
)
def test_memory_stays_the_same_over_two_thousand_steps(name: str) -> None:
    from engines import ENGINES

    engine = ENGINES[name]()
    blocks: list[int] = []
    # Python keeps up to 2000 freed tuples of a length for later; by step 2100 it has them.
    marks = dict.fromkeys((2100, 4100), lambda: blocks.append(sys.getallocatedblocks()))
    last: dict[str, Any] = {}

    def read(run_context: Any) -> None:
        last.update(loss=run_context.loss, lr=run_context.lr, update=run_context.global_step)
        run_context.log("loss again", run_context.loss)

    gc.collect()
    gc.disable()  # what only the garbage collector can free counts as growth
    try:
        train(engine, Marked(one_batch(engine), 4101, marks), [Listener(), Does(read)])
    finally:
        gc.enable()
    assert blocks[1] - blocks[0] < 100


@pytest.mark.skipif(not IO.exists(), reason="only Linux counts a process's writes")
def test_a_row_is_at_most_one_write_and_other_steps_write_nothing() -> None:
    """Over a whole run, since a thread may write later than the step that logs."""

    def writes(callbacks: Any) -> int:
        before = _system_calls_that_write()
        FakeLoop([1.0] * 1000).run(callbacks)
        return _system_calls_that_write() - before

    assert writes([Listener()]) == 0
    around = writes([dt.callbacks.StepLogger("never.jsonl", 5000)])
    assert 0 < around <= 5
    assert 0 < writes([dt.callbacks.StepLogger("log.jsonl", 10)]) <= 100 + around


def _system_calls_that_write() -> int:
    counters = dict(line.split(": ") for line in IO.read_text().splitlines())
    return int(counters["syscw"])


def test_the_hundred_thousandth_step_costs_what_the_tenth_does() -> None:
    early, late = Calls(), Calls()
    marks = {**early.marks(warm=10), **late.marks(warm=99_980)}
    callbacks = [
        *[Listener() for _ in range(3)],
        dt.callbacks.StepLogger("log.jsonl", 10),
        dt.callbacks.SmartTrainer(patience=50_000),
        Does(lambda run_context: run_context.log("step again", run_context.step)),
    ]
    FakeLoop(Marked(1.0, 100_000, marks)).run(callbacks)
    assert late.python == early.python > 0
    assert late.c == early.c
