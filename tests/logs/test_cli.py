"""The command line: what it prints, where, and with which exit status."""

import math
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import dualtrain as dt
from dualtrain.cli import main
from dualtrain.records import Record
from dualtrain.sinks import JsonlSink

LOG = Path("log.jsonl")
META = {
    "started": "2024-05-06T07:08:09+00:00",
    "dualtrain": "9.9",
    "python": "3.11.7",
    "backend": "torch",
    "backend_version": "2.13.0",
    "model": None,
}
SUMMARY = """\
log.jsonl: 3 records, steps 10 to 25, epochs 1 to 2
started 2024-05-06T07:08:09+00:00  backend torch  backend_version 2.13.0  dualtrain 9.9  python 3.11.7
value                                first          last           min           max
global_step                             10            25            10            25
loss                                   0.5      0.123457      0.123457             2
lr                                   3e-10             0             0         3e-10
"""


def write_log(path=LOG, *values, meta=None):
    """Write a log with a row for each mapping of values."""
    sink = JsonlSink(path, meta=meta)
    for step, given in enumerate(values, 1):
        sink.write(Record(step, 1, "train", 1700000000.0, given))
    sink.close()


@pytest.fixture
def log():
    sink = JsonlSink(LOG, meta=META)
    rows = [(10, 1, 0.5, 3e-10), (20, 1, 2.0, 3e-10), (25, 2, 0.123456789, 0.0)]
    for step, epoch, loss, rate in rows:
        values = {"global_step": step, "loss": loss, "lr": rate}
        sink.write(Record(step, epoch, "train", 1700000000.0, values))
    sink.close()
    return LOG


def test_show_lists_training_and_evaluations_apart(capsys):
    sink = JsonlSink(LOG)
    for step, loss in ((1, 2.0), (2, 0.5)):
        sink.write(Record(step, step, "train", 0.0, {"loss": loss}))
        sink.write(Record(step, step, "eval", 0.0, {"loss": 3 * loss, "acc": (loss / 4, 1.0)}))
    sink.close()
    assert main(["show", str(LOG)]) == 0
    assert (
        capsys.readouterr().out
        == """\
log.jsonl: 4 records, 2 of them evaluations, steps 1 to 2, epochs 1 to 2
value                                first          last           min           max
loss                                     2           0.5           0.5             2
evaluation                           first          last           min           max
loss                                     6           1.5           1.5             6
acc group 0                            0.5         0.125         0.125           0.5
acc group 1                              1             1             1             1
"""
    )


def command(*arguments):
    """Run ``python -m dualtrain``; return its exit status, output and error output."""
    done = subprocess.run(
        [sys.executable, "-m", "dualtrain", *map(str, arguments)],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def assert_a_sentence(errors, *words):
    """Check that an error output is one line from dualtrain, with these words in it."""
    assert errors.startswith("dualtrain: ")
    assert errors.endswith("\n")
    assert errors.count("\n") == 1
    for word in words:
        assert word in errors


def lines_of(capsys):
    """Return the lines that were printed, split into words."""
    captured = capsys.readouterr()
    assert captured.err == ""
    return [line.split() for line in captured.out.splitlines()]


# As a command.


def test_show_summarises_a_log(log):
    assert command("show", log) == (0, SUMMARY, "")


def test_plot_draws_logs_and_says_where(log):
    write_log("other.jsonl", {"loss": 1.0}, {"loss": 2.0})
    assert command("plot", log, "other.jsonl", "-o", "deep/curve.png") == (0, "deep/curve.png\n", "")
    assert Path("deep/curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("start", [[sys.executable, "-m", "dualtrain"], ["dualtrain"]])
def test_the_version_is_told(start):
    program = shutil.which(start[0], path=sysconfig.get_path("scripts")) or start[0]
    done = subprocess.run([program, *start[1:], "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"dualtrain {dt.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["shwo", "log.jsonl"], "invalid choice: 'shwo'"),
        ([], "the following arguments are required: command"),
        (["show"], "the following arguments are required: LOG"),
        (["plot"], "the following arguments are required: LOG"),
        (["show", "a.jsonl", "b.jsonl"], "unrecognized arguments: b.jsonl"),
        (["plot", "a.jsonl", "-o"], "-o/--output: expected one argument"),
    ],
)
def test_wrong_usage_has_status_2_and_says_what_is_wrong(arguments, words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    captured = capsys.readouterr()
    assert caught.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("usage: dualtrain")
    assert words in captured.err


def test_a_wrong_command_has_status_2_for_the_shell():
    status, output, errors = command("shwo", "log.jsonl")
    assert (status, output) == (2, "")
    assert "Traceback" not in errors


@pytest.mark.parametrize("arguments", [["show", "no_such.jsonl"], ["plot", "no_such.jsonl"]])
def test_a_missing_log_has_status_1_and_one_sentence(arguments):
    status, output, errors = command(*arguments)
    assert (status, output) == (1, "")
    assert_a_sentence(errors, "No such file", "'no_such.jsonl'")
    assert os.listdir() == []


WITHOUT_FRAMEWORKS = """
import sys

class Guard:
    tried = []

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "mindspore"):
            self.tried.append(name)

sys.meta_path.insert(0, Guard())
from dualtrain.cli import main

assert main(["show", sys.argv[1]]) == 0
assert not {"matplotlib", "numpy", "dualtrain.backends"} & set(sys.modules)
assert main(["plot", sys.argv[1]]) == 0
assert not Guard.tried, Guard.tried
assert not {"torch", "mindspore", "dualtrain.backends", "dualtrain.context"} & set(sys.modules)
"""


def test_no_command_imports_a_framework(log):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FRAMEWORKS, str(log)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == SUMMARY + "dualtrain.png\n"


WITHOUT_MATPLOTLIB = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from dualtrain.cli import main
sys.exit(main(["plot", sys.argv[1]]))
"""


def test_without_matplotlib_plot_says_what_to_install(log):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MATPLOTLIB, str(log)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("dualtrain: matplotlib")
    assert done.stderr.endswith("is not installed: pip install 'dualtrain[plot]'\n")
    assert not Path("dualtrain.png").exists()


# show.


def test_a_log_of_a_run_is_shown(capsys):
    dt.testing.FakeLoop([2.0, 1.0], epochs=2, lr=0.25).run(dt.callbacks.StepLogger(LOG, 1))
    assert main(["show", str(LOG)]) == 0
    lines = lines_of(capsys)
    assert " ".join(lines[0]) == "log.jsonl: 4 records, steps 1 to 4, epochs 1 to 2"
    assert lines[1][2:6] == ["backend", "fake", "backend_version", "0"]
    assert [line for line in lines if line[0] in ("global_step", "loss", "lr")] == [
        ["global_step", "1", "4", "1", "4"],
        ["loss", "2", "1", "1", "2"],
        ["lr", "0.25", "0.25", "0.25", "0.25"],
    ]


def test_an_empty_log_is_shown(capsys):
    LOG.touch()
    assert main(["show", str(LOG)]) == 0
    assert capsys.readouterr() == ("log.jsonl: 0 records\n", "")


def test_a_log_without_run_information_is_shown(capsys):
    write_log(LOG, {"loss": 1.5})
    assert main(["show", str(LOG)]) == 0
    lines = lines_of(capsys)
    assert [line[0] for line in lines] == ["log.jsonl:", "value", "loss"]
    assert lines[2] == ["loss", "1.5", "1.5", "1.5", "1.5"]


def test_torn_lines_are_counted(log, capsys):
    with log.open("a") as file:
        file.write('{"step": 30, "ep\n{"st\n')
    assert main(["show", str(log)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "log.jsonl: 3 records, steps 10 to 25, epochs 1 to 2"
    assert lines[1] == "2 torn lines left out"


def test_a_value_that_is_missing_or_null_in_some_rows_is_summarised_over_the_others(capsys):
    write_log(LOG, {"loss": None}, {"loss": 3.0, "acc": 0.5}, {"loss": 1.0}, {"acc": 0.25, "loss": None})
    assert main(["show", str(LOG)]) == 0
    assert lines_of(capsys)[2:] == [["loss", "3", "1", "1", "3"], ["acc", "0.5", "0.25", "0.25", "0.5"]]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_least_and_the_greatest_are_those_of_the_numbers(place, capsys):
    losses = [2.0, 1.0]
    losses.insert(place, math.nan)
    write_log(LOG, *[{"loss": loss} for loss in losses])
    assert main(["show", str(LOG)]) == 0
    assert lines_of(capsys)[2][3:] == ["1", "2"]


def test_rates_of_several_groups_are_shown(capsys):
    write_log(LOG, {"lr": (0.5, 0.01)}, {"lr": (0.25, 0.125)})
    assert main(["show", str(LOG)]) == 0
    rates = [line for line in lines_of(capsys) if line[0].startswith("lr")]
    shown = " ".join(word for line in rates for word in line)
    assert all(rate in shown for rate in ("0.5", "0.01", "0.25", "0.125"))


def test_a_file_that_is_no_log_has_status_1_and_a_sentence(capsys):
    Path("data.csv").write_text("step,loss\n1,0.5\n")
    assert main(["show", "data.csv"]) == 1
    assert capsys.readouterr() == ("", "dualtrain: data.csv is no log: none of its 2 lines is a record.\n")


def test_a_folder_has_status_1_and_a_sentence(capsys):
    Path("folder").mkdir()
    assert main(["show", "folder"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert_a_sentence(captured.err, "'folder'")


# plot.


def test_the_picture_has_a_name_by_default(log, capsys):
    assert main(["plot", str(log)]) == 0
    assert capsys.readouterr() == ("dualtrain.png\n", "")
    assert Path("dualtrain.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_ending_decides_the_format(log, capsys):
    assert main(["plot", str(log), "--output", "curve.svg"]) == 0
    assert capsys.readouterr() == ("curve.svg\n", "")
    assert "<svg" in Path("curve.svg").read_text(encoding="utf-8")


def test_one_missing_log_among_several_leaves_no_picture(log, capsys):
    assert main(["plot", str(log), "no_such.jsonl", "-o", "curve.png"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert_a_sentence(captured.err, "No such file", "'no_such.jsonl'")
    assert not Path("curve.png").exists()


def test_a_log_without_values_has_status_1_and_a_sentence(capsys):
    LOG.touch()
    assert main(["plot", str(LOG)]) == 1
    assert capsys.readouterr() == ("", "dualtrain: nothing to draw: the 1 logs have no values.\n")


def test_an_ending_that_is_no_format_has_status_1_and_a_sentence(log, capsys):
    assert main(["plot", str(log), "-o", "curve.xyz"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert_a_sentence(captured.err, "xyz")
