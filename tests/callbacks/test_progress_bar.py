"""ProgressBar: what it prints to a file and to a terminal, and how often it reads the loss for it."""

import fcntl
import os
import re
import struct
import sys
import termios
import threading

import pytest
from clocks import Clock
from engines import At, ones

import dualtrain as dt
from dualtrain.callbacks import ProgressBar
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, MissingDependencyError
from dualtrain.testing import FakeLoop

EVALUATIONS = [{"acc": 0.5, "confusion": [[1, 2]]}, {"acc": 0.75, "confusion": [[3]]}]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(ProgressBar, "_clock", staticmethod(clock))
    return clock


def second_per_step(clock):
    def tick(run_context):
        clock.now += 1.0

    return At("on_train_step_begin", tick)


def printed_to_file(monkeypatch, run, encoding="utf-8"):
    """Return what a run prints where the output is a file."""
    with open("output.txt", "w", encoding=encoding, newline="") as file:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", file)
            run()
    with open("output.txt", encoding=encoding, newline="") as file:
        return file.read()


def printed_to_terminal(monkeypatch, run, columns=120):
    """Return what a run prints where the output is a terminal, which turns a newline into CR LF."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    read = []

    def drain():
        try:
            while data := os.read(master, 65536):
                read.append(data)
        except OSError:
            pass  # the other end is closed

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        with os.fdopen(slave, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            patch.setenv("TERM", "xterm")
            run()
    finally:
        reader.join()
        os.close(master)
    return b"".join(read).decode()


# A file or a pipe.


def test_a_file_gets_whole_lines_without_control_characters(clock, monkeypatch):
    """Five steps of a second an epoch; a line every two seconds and at the epoch's end."""
    bar = ProgressBar(seconds_per_line=2.0)
    loop = FakeLoop([3.0, 2.5, 2.0, 1.5, 1.0], epochs=2, evaluations=EVALUATIONS)
    text = printed_to_file(monkeypatch, lambda: loop.run([second_per_step(clock), bar]))
    assert text.splitlines() == [
        "epoch 1/2  step 2/5  loss 2.5  lr 0.1  1 steps/s",
        "epoch 1/2  step 4/5  loss 1.5  lr 0.1  1 steps/s",
        "epoch 1/2  step 5/5  loss 1  lr 0.1  acc 0.5  1 steps/s",
        "epoch 2/2  step 2/5  loss 2.5  lr 0.1  acc 0.5  1 steps/s",
        "epoch 2/2  step 4/5  loss 1.5  lr 0.1  acc 0.5  1 steps/s",
        "epoch 2/2  step 5/5  loss 1  lr 0.1  acc 0.75  1 steps/s",
    ]
    assert text.endswith("\n")
    assert [c for c in text if not c.isprintable()] == ["\n"] * 6


def test_no_line_is_printed_twice(clock, monkeypatch):
    """The line of an epoch's last step is that of the epoch's end, if there was no evaluation."""
    loop = FakeLoop([2.0, 1.0], epochs=2)
    bar = ProgressBar(seconds_per_line=2.0)
    text = printed_to_file(monkeypatch, lambda: loop.run([second_per_step(clock), bar]))
    assert text.splitlines() == [
        "epoch 1/2  step 2/2  loss 1  lr 0.1  1 steps/s",
        "epoch 2/2  step 2/2  loss 1  lr 0.1  1 steps/s",
    ]


def test_an_unknown_length_has_no_total_and_a_stop_ends_the_lines(clock, monkeypatch):
    def forget_length(run_context):
        run_context.original_args()["batch_num"] = float("inf")

    stop = At("on_train_step_end", lambda c: c.request_stop(), step=3)
    run = [At("on_train_begin", forget_length), second_per_step(clock), ProgressBar(), stop]
    text = printed_to_file(monkeypatch, lambda: FakeLoop([3.0, 2.0, 1.0, 0.0], epochs=2).run(run))
    assert text == "epoch 1/2  step 3  loss 1  lr 0.1  1 steps/s\n"


def test_what_is_logged_is_shown_and_odd_names_break_nothing(clock, monkeypatch):
    def log(run_context):
        run_context.log("grad_norm", 0.123456)
        run_context.log("güte\n\x1b[2J", float("nan"))

    run = [At("on_train_step_end", log), ProgressBar()]
    text = printed_to_file(monkeypatch, lambda: FakeLoop([1.0]).run(run), encoding="ascii")
    assert text == "epoch 1/1  step 1/1  loss 1  lr 0.1  grad_norm 0.1235  g?te??[2J nan\n"


def test_the_engines_print_the_same(engine, monkeypatch):
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.25), {"loss"})
    text = printed_to_file(monkeypatch, lambda: model.fit(2, ones(2), ones(1), callbacks=ProgressBar()))
    lines = [re.sub(r"  [0-9.e+]+ steps/s$", "", line) for line in text.splitlines()]
    assert lines == [
        "epoch 1/2  step 2/2  loss 0.75  lr 0.25  eval_loss 0.5",
        "epoch 2/2  step 2/2  loss 0.25  lr 0.25  eval_loss 0",
    ]


# A terminal.


def test_a_terminal_gets_a_bar_for_each_epoch(clock, monkeypatch):
    threads = set()
    watch = At("on_train_step_end", lambda c: threads.update(threading.enumerate()))
    before = threading.active_count()
    loop = FakeLoop([3.0, 2.0, 1.0, 0.5], epochs=2, evaluations=EVALUATIONS)
    run = [second_per_step(clock), ProgressBar(), watch]
    text = printed_to_terminal(monkeypatch, lambda: loop.run(run))
    *lines, end = text.split("\r\n")
    assert end == ""
    assert len(lines) == 2  # each is drawn over and over, and stays
    states = [[without_times(state) for state in line.split("\r")] for line in lines]
    bars = ["   0%|                | 0/4", "  25%|████            | 1/4", "  50%|████████        | 2/4"]
    for number, epoch in enumerate(states, 1):
        past = "" if number == 1 else ", acc 0.5"
        assert epoch[1] == f"epoch {number}/2{bars[0]}"
        assert epoch[2] == f"epoch {number}/2{bars[1]}, loss 3, lr 0.1{past}"
        assert epoch[3] == f"epoch {number}/2{bars[2]}, loss 2, lr 0.1{past}"
        assert f"epoch {number}/2 100%|{'█' * 16}| 4/4, evaluating" in epoch
        assert (
            epoch[-1] == f"epoch {number}/2 100%|{'█' * 16}| 4/4, loss 0.5, lr 0.1, acc {0.25 + number / 4}"
        )
    assert len(threads) == before + 1  # the one of this test


def without_times(state):
    return re.sub(r" \[[^\[]*steps?/s\] *$", "", state)


def test_a_terminal_without_a_size_and_data_without_a_length(clock, monkeypatch):
    def forget_length(run_context):
        run_context.original_args()["batch_num"] = float("inf")

    run = [At("on_train_begin", forget_length), second_per_step(clock), ProgressBar()]
    text = printed_to_terminal(monkeypatch, lambda: FakeLoop([2.0, 1.0]).run(run), columns=0)
    states = [without_times(state) for state in text.replace("\n", "").split("\r")]
    assert "epoch 1/1 2, loss 1, lr 0.1" in states


def test_an_error_leaves_a_whole_line_behind(clock, monkeypatch):
    def fail(run_context):
        raise ZeroDivisionError

    run = [second_per_step(clock), ProgressBar(), At("on_train_step_end", fail, 2)]

    def failing():
        with pytest.raises(ZeroDivisionError):
            FakeLoop([2.0, 1.0, 0.0]).run(run)

    text = printed_to_terminal(monkeypatch, failing)
    assert text.endswith("\r\n")
    assert "2/3, loss 1, lr 0.1" in text.split("\r")[-2]


def test_a_dumb_terminal_gets_lines(clock, monkeypatch):
    def run():
        os.environ["TERM"] = "dumb"  # set back by the fixture
        FakeLoop([2.0, 1.0]).run([second_per_step(clock), ProgressBar()])

    text = printed_to_terminal(monkeypatch, run)
    assert text == "epoch 1/1  step 2/2  loss 1  lr 0.1  1 steps/s\r\n"


# What it costs.


class Loss:
    """A loss that notes when it is read."""

    reads = 0

    def __float__(self):
        Loss.reads += 1
        return 1.0


@pytest.mark.parametrize(("seconds", "reads"), [(0.0, 1), (0.0625, 7), (1.0, 28)])
@pytest.mark.parametrize("printed_to", [printed_to_terminal, printed_to_file])
def test_the_loss_is_read_when_it_is_shown_and_at_no_other_step(
    seconds, reads, printed_to, clock, monkeypatch
):
    """28 steps; a quarter of a second from one redrawing to the next, or one at the end."""
    Loss.reads = 0

    def tick(run_context):
        clock.now += seconds

    bar = ProgressBar(seconds_per_line=0.25)
    run = [At("on_train_step_begin", tick), bar]
    printed_to(monkeypatch, lambda: FakeLoop([Loss() for _ in range(28)]).run(run))
    assert Loss.reads == reads


# Where it prints nothing.


def test_other_ranks_print_nothing(clock, monkeypatch):
    monkeypatch.setattr(dt.RunContext, "is_main", False)
    run = [second_per_step(clock), ProgressBar()]
    loop = FakeLoop([1.0] * 40, evaluations=[{"acc": 1.0}])
    assert printed_to_file(monkeypatch, lambda: loop.run(run)) == ""


def test_output_that_fails_costs_nothing(clock, monkeypatch, caplog):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", pipe)
            context = FakeLoop([1.0] * 40).run([second_per_step(clock), ProgressBar()])
        with pytest.raises(BrokenPipeError):
            pipe.flush()
        os.dup2(os.open("rest.txt", os.O_CREAT | os.O_WRONLY), write)  # so that closing it works
    assert context.step == 40
    [record] = caplog.records
    assert record.getMessage().startswith("ProgressBar continues without output: BrokenPipeError")


def test_an_evaluation_alone_prints_nothing(capsys):
    context = dt.RunContext({"mode": "eval", "cur_step_num": 0})
    bar = ProgressBar()
    bar.on_eval_begin(context)
    bar.on_teardown(context)
    assert capsys.readouterr() == ("", "")


# Its arguments.


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"refreshes_per_sec": 0}, ArgumentValueError),
        ({"refreshes_per_sec": float("inf")}, ArgumentValueError),
        ({"refreshes_per_sec": True}, ArgumentTypeError),
        ({"seconds_per_line": "2"}, ArgumentTypeError),
        ({"seconds_per_line": float("nan")}, ArgumentValueError),
    ],
)
def test_what_cannot_be_used_is_refused(arguments, error):
    [name] = arguments
    with pytest.raises(error, match=rf"^ProgressBar\({name}=...\)"):
        ProgressBar(**arguments)


def test_a_missing_extra_is_explained_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(MissingDependencyError, match=r"tqdm .* pip install 'dualtrain\[progress\]'"):
        ProgressBar()
