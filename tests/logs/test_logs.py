"""The reading side of logs: what a file says whatever ended its run, and a picture of it."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from processes import run_python

import dualtrain as dt
from dualtrain.errors import ArgumentValueError
from dualtrain.logs import Log, plot_logs, read_log, read_ranks, reader
from dualtrain.records import Record
from dualtrain.sinks import JsonlSink
from dualtrain.testing import FakeLoop

LOG = Path("log.jsonl")


def write_log(path, *rows, meta=None):
    """Write a log of rows ``(step, values)``; return its path."""
    sink = JsonlSink(path, meta=meta)
    for step, values in rows:
        sink.write(Record(step, 1, "train", 1700000000.0 + step, values))
    sink.close()
    return Path(path)


def curve(path, backend=None, count=20, **more):
    """Write a log with a loss that falls."""
    rows = [(step, {"loss": 1.0 / step, "lr": 0.1, **more}) for step in range(1, count + 1)]
    return write_log(path, *rows, meta=None if backend is None else {"backend": backend})


def evaluated(path=LOG):
    """Write a log of two steps, each with an evaluation whose results are called as values of training."""
    sink = JsonlSink(path)
    for step in (1, 2):
        sink.write(Record(step, step, "train", 1700000000.0, {"loss": 1.0 / step, "lr": 0.1}))
        results = {"loss": 8.0 * step, "eval_loss": 4.0 * step, "acc": 0.25 * step}
        sink.write(Record(step, step, "eval", 1700000000.0, results))
    sink.close()
    return Path(path)


# Reading.


def test_rows_of_evaluations_are_kept_apart_from_those_of_training():
    log = read_log(evaluated())
    assert [(record.step, record.mode) for record in log.records] == [
        (1, "train"),
        (1, "eval"),
        (2, "train"),
        (2, "eval"),
    ]
    assert log.names == log.names_of("train") == ["loss", "lr"]
    assert log.names_of("eval") == ["loss", "eval_loss", "acc"]
    assert log.column("loss") == log.column("loss", "train") == ([1, 2], [1.0, 0.5])
    assert log.column("loss", mode="eval") == ([1, 2], [8.0, 16.0])
    assert log.column("acc", mode="eval") == ([1, 2], [0.25, 0.5])


@pytest.mark.parametrize(
    ("name", "mode", "message"),
    [
        ("acc", "train", "no 'acc'; it has loss, lr; of mode 'eval': loss, eval_loss, acc."),
        ("lr", "eval", "no 'lr' of mode 'eval'; it has loss, eval_loss, acc; of mode 'train': loss, lr."),
        ("x", "test", "no 'x' of mode 'test'; it has no values; of mode 'train': loss, lr; of mode 'eval'"),
    ],
)
def test_a_value_of_the_other_mode_is_an_error_that_names_both(name, mode, message):
    with pytest.raises(ArgumentValueError, match=re.escape(message)):
        read_log(evaluated()).column(name, mode)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_log_reads_back_as_it_was_written(kind):
    rows = [(1, {"loss": 0.1, "lr": (0.1, 0.01)}), (2, {"loss": math.inf, "x": 7})]
    write_log(LOG, *rows, meta={"backend": "torch"})
    log = read_log(kind(LOG))
    assert isinstance(log, Log)
    assert log.path == LOG
    assert log.records == [Record(step, 1, "train", 1700000000.0 + step, values) for step, values in rows]
    assert log.meta == {"schema": 1, "backend": "torch"}
    assert log.torn == []


def test_the_log_of_a_run_reads_back():
    FakeLoop([2.0, 1.0], epochs=2, lr=0.1).run(dt.callbacks.StepLogger(LOG, 1))
    log = read_log(LOG)
    assert log.names == ["global_step", "loss", "lr", "elapsed_sec"]
    assert log.column("loss") == ([1, 2, 3, 4], [2.0, 1.0, 2.0, 1.0])
    assert log.column("lr") == ([1, 2, 3, 4], [0.1] * 4)
    assert [record.epoch for record in log.records] == [1, 1, 2, 2]
    assert (log.meta["backend"], log.meta["epochs"]) == ("fake", 2)


def test_names_come_in_the_order_in_which_they_appear():
    write_log(LOG, (1, {"b": 1.0}), (2, {"a": 2.0, "b": 3.0}), (3, {"c": 4.0, "a": 5.0}))
    assert read_log(LOG).names == ["b", "a", "c"]


def test_a_column_has_the_steps_at_which_it_was_recorded():
    write_log(LOG, (10, {"loss": 1.0}), (20, {"loss": 0.0, "acc": 0.5}), (30, {"loss": None, "acc": None}))
    log = read_log(LOG)
    assert log.column("loss") == ([10, 20, 30], [1.0, 0.0, None])
    assert log.column("acc") == ([20, 30], [0.5, None])


def test_an_unknown_column_is_an_error_that_lists_those_there_are():
    write_log(LOG, (1, {"loss": 1.0, "lr": 0.1}))
    with pytest.raises(ArgumentValueError) as caught:
        read_log(LOG).column("los")
    assert str(caught.value) == "log.jsonl has no 'los'; it has loss, lr."


def test_an_empty_file_is_a_log_without_records():
    LOG.touch()
    log = read_log(LOG)
    assert (log.records, log.names, log.meta, log.torn) == ([], [], {}, [])
    with pytest.raises(ArgumentValueError, match=r"log\.jsonl has no 'loss'; it has no values\."):
        log.column("loss")


def lines_of(count):
    return [Record(step, 1, "train", 0.0, {"loss": 1.0 / step}).to_json() for step in range(1, count + 1)]


def test_torn_lines_are_kept_apart_wherever_they_are():
    first, second, third = lines_of(3)
    LOG.write_text("\n".join([first, '{"step": 2, "ep', "", second, third, '{"step": 4']))
    log = read_log(LOG)
    assert [record.step for record in log.records] == [1, 2, 3]
    assert log.torn == ['{"step": 2, "ep', '{"step": 4']


def test_a_line_torn_anywhere_is_torn():
    whole, other = lines_of(2)
    for length in range(1, len(other)):
        LOG.write_text(f"{whole}\n{other[:length]}")
        log = read_log(LOG)
        assert ([record.step for record in log.records], log.torn) == ([1], [other[:length]])


@pytest.mark.parametrize(
    "spoilt",
    [b"\0\0\0\0", b'{"step": 2, "loss": 1, "name": "\xe8\xae', b"[1, 2]", b"17", b'{"loss": 1.0}', b"null"],
    ids=["zeros", "half a character", "a list", "a number", "no step", "null"],
)
def test_a_line_that_is_no_record_does_not_hide_the_others(spoilt):
    first, second = (line.encode() for line in lines_of(2))
    LOG.write_bytes(b"\n".join([first, spoilt, second, b""]))
    log = read_log(LOG)
    assert [record.step for record in log.records] == [1, 2]
    assert log.torn == [spoilt.decode(errors="replace")]


@pytest.mark.parametrize("content", ["step,loss\n1,0.5\n", '{"a": 1}\n', "\x89PNG\n\n\0\0"])
def test_a_file_that_is_no_log_is_said_to_be_none(content):
    Path("data.csv").write_text(content)
    with pytest.raises(ArgumentValueError, match=r"^data\.csv is no log: none of its [12] lines is a rec"):
        read_log("data.csv")


def test_a_missing_file_is_missing():
    with pytest.raises(FileNotFoundError, match=r"no_such\.jsonl"):
        read_log("no_such.jsonl")


def test_a_log_can_be_read_while_it_is_written():
    sink = JsonlSink(LOG)
    sink.write(Record(1, 1, "train", 0.0, {"loss": 1.0}))
    assert [record.step for record in read_log(LOG).records] == [1]
    sink.close()


@pytest.mark.parametrize("content", ["", '{"schema": 1, "mod'])
def test_run_information_that_a_killed_run_left_torn_does_not_hide_the_log(content):
    write_log(LOG, (1, {"loss": 1.0}))
    Path("log.jsonl.meta.json").write_text(content)
    log = read_log(LOG)
    assert [record.step for record in log.records] == [1]
    assert log.meta == {}


# A log in parts, of several ranks, with arrays.


def test_parts_read_as_one_in_order():
    for name, steps in {"log": (5, 6), "log.part2": (2, 3), "log.part10": (4,), "log.part1": (1,)}.items():
        write_log(f"{name}.jsonl", *[(step, {"loss": 1.0 / step}) for step in steps])
    Path("log.part3.jsonl").write_bytes(b'{"step": 9, "lo')
    Path("log.partial.jsonl").write_text("anything")
    Path("other.part1.jsonl").write_text("anything")
    log = read_log(LOG)
    assert log.column("loss")[0] == [1, 2, 3, 4, 5, 6]
    assert log.torn == ['{"step": 9, "lo']
    assert log.path == LOG


def test_a_file_that_becomes_a_part_while_it_is_read_is_read_once(monkeypatch):
    """The run gives the file that has been opened the name of a part, and begins another two."""
    write_log(LOG, (1, {"loss": 1.0}))
    parts_of = reader.parts_of

    def meanwhile(path):
        content = LOG.rename("log.part1.jsonl").read_text()
        for name in ("log.part2.jsonl", LOG):
            Path(name).write_text(content.replace('"step": 1', '"step": 2'))
        return parts_of(path)

    monkeypatch.setattr(reader, "parts_of", meanwhile)
    assert [record.step for record in read_log(LOG).records] == [1]


def test_a_part_alone_can_be_read():
    write_log(LOG, (2, {"loss": 0.5}))
    write_log("log.part1.jsonl", (1, {"loss": 1.0}))
    assert [record.step for record in read_log("log.part1.jsonl").records] == [1]


def test_the_logs_of_several_ranks_are_read_by_rank():
    for name, loss in {"log": 0.0, "log.rank1": 1.0, "log.rank10": 10.0, "log.rank2": 2.0}.items():
        write_log(f"{name}.jsonl", (1, {"loss": loss}), meta={"rank": int(loss)})
    write_log("log.rank1.part1.jsonl", (0, {"loss": 0.5}))
    for name in ("log.rank.jsonl", "log.rank1.old.jsonl", "other.rank1.jsonl"):
        Path(name).write_text("anything")
    logs = read_ranks(str(LOG))
    assert list(logs) == [0, 1, 2, 10]
    assert {rank: log.column("loss")[1] for rank, log in logs.items()} == {
        0: [0.0],
        1: [0.5, 1.0],
        2: [2.0],
        10: [10.0],
    }
    assert [log.meta["rank"] for log in logs.values()] == [0, 1, 2, 10]


def test_the_logs_of_ranks_are_read_though_that_of_rank_0_is_not_there():
    write_log("log.rank1.jsonl", (1, {"loss": 1.0}))
    assert list(read_ranks(LOG)) == [1]


def test_missing_logs_of_ranks_are_missing():
    with pytest.raises(FileNotFoundError, match=r"log\.jsonl"):
        read_ranks(LOG)


def test_arrays_are_read_by_step_when_they_are_asked_for():
    sink = JsonlSink(LOG)
    for step in (100, 20):
        sink.write(Record(step, 1, "train", 0.0, {}, {"a/b": np.full((2, 2), step), "c": np.float32(0.5)}))
    sink.close()
    Path("log.jsonl.arrays/step-000000007.npz").write_text("torn")
    Path("log.jsonl.arrays/step-000000008.npz.next").write_text("left by a killed run")
    arrays = read_log(LOG).arrays()
    assert list(arrays) == [7, 20, 100]
    assert len(arrays) == 3
    assert {name: array.tolist() for name, array in arrays[20].items()} == {"a/b": [[20, 20]] * 2, "c": 0.5}
    assert 8 not in arrays
    with pytest.raises(KeyError):
        arrays[8]
    assert repr(arrays) == "arrays of steps [7, 20, 100]"


def test_a_log_without_arrays_has_none():
    write_log(LOG, (1, {"loss": 1.0}))
    assert dict(read_log(LOG).arrays()) == {}


# Other programs.


def run_with_nan():
    FakeLoop([0.5, math.nan, 0.1 + 0.2], lr=3e-10).run(dt.callbacks.StepLogger(LOG, 1))


def test_pandas_reads_a_log():
    import pandas as pd

    run_with_nan()
    read = pd.read_json(LOG, lines=True)
    assert read["step"].tolist() == [1, 2, 3]
    assert read["loss"].tolist()[::2] == [0.5, pytest.approx(0.3, rel=1e-14)]
    assert math.isnan(read["loss"][1])
    assert read["lr"].tolist() == [pytest.approx(3e-10, rel=1e-14)] * 3


def test_jq_reads_a_log():
    import jq

    run_with_nan()
    rows = jq.compile("[.step, .loss, .lr, .nonfinite.loss]").input_text(LOG.read_text()).all()
    assert rows == [[1, 0.5, 3e-10, None], [2, None, 3e-10, "nan"], [3, 0.1 + 0.2, 3e-10, None]]


# Drawing.


def assert_png(path):
    """Check that a file is a picture of some size, and return its width and height."""
    data = Path(path).read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[12:16] == b"IHDR"
    assert data.rstrip(b"\0")[-8:-4] == b"IEND"
    assert len(data) > 8000
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def texts_in(path):
    """Return the texts of an SVG picture, which matplotlib notes beside their outlines, without ticks."""
    texts = re.findall(r"<!-- (.+?) -->", Path(path).read_text(encoding="utf-8"))
    return [text for text in texts if not re.fullmatch(r"\W?[\d.]+|\$.*\$", text)]


def test_a_picture_is_a_png_with_a_panel_for_each_value():
    curve(LOG)
    output = plot_logs([LOG], "curve.png")
    assert output == Path("curve.png")
    width, height = assert_png(output)
    assert (width, height) == (2 * 6 * 120, round(3.4 * 120))


def test_a_lone_value_has_a_picture_of_its_own():
    curve(LOG)
    assert assert_png(plot_logs([LOG], "curve.png", names=["loss"])) == (6 * 120, round(3.4 * 120))


def test_folders_for_the_picture_are_made():
    curve(LOG)
    assert_png(plot_logs([LOG], "deep/folder/curve.png"))


def test_counters_clocks_and_lists_are_not_drawn_unless_they_are_asked_for():
    layers = {"parameters": [{"group": "head", "grad_norm": 0.5}], "dead_gradients": ["head.bias"]}
    curve(LOG, global_step=1, elapsed_sec=0.5, acc=0.25, **layers)
    assert texts_in(plot_logs([LOG], "all.svg")) == [
        *("step", "loss", "log"),
        *("step", "lr", "log"),
        *("step", "acc", "log"),
    ]
    assert texts_in(plot_logs([LOG], "one.svg", names=["global_step"])) == ["step", "global_step", "log"]


def test_results_of_evaluations_are_drawn_beside_what_they_are_of():
    a, b = evaluated("a.jsonl"), curve("b.jsonl")
    assert texts_in(plot_logs([a, b], "both.svg")) == [
        *("step", "loss", "a", "b", "a evaluation", "a evaluation"),
        *("step", "lr", "a", "b"),
        *("step", "acc", "a evaluation"),
    ]
    assert texts_in(plot_logs([a], "one.svg", names=["eval_loss"])) == ["step", "eval_loss", "a evaluation"]
    two = texts_in(plot_logs([b, a], "two.svg", names=["acc", "loss"]))
    assert two == [*("step", "acc", "a evaluation"), *("step", "loss", "b", "a", "a evaluation")]


def test_the_points_of_an_evaluation_are_dashed_and_at_the_step_of_training(monkeypatch):
    from matplotlib.axes import Axes

    drawn = []
    plot = Axes.plot

    def noting(axes, x, y, **options):
        drawn.append((x, y, options["ls"], options["label"]))
        return plot(axes, x, y, **options)

    monkeypatch.setattr(Axes, "plot", noting)
    plot_logs([evaluated()], "one.png", names=["loss", "eval_loss"])
    assert drawn == [
        ([1, 2], [1.0, 0.5], "-", "log"),
        ([1, 2], [8.0, 16.0], "--", "log evaluation"),
        ([1, 2], [4.0, 8.0], "--", "log evaluation"),
    ]


def test_logs_of_two_backends_are_told_apart_by_the_backends():
    a, b = curve("a.jsonl", "torch"), curve("b.jsonl", "mindspore")
    assert texts_in(plot_logs([a, b], "both.svg", names=["loss"])) == ["step", "loss", "torch", "mindspore"]
    assert_png(plot_logs([a, b], "both.png"))


def test_logs_of_one_backend_are_told_apart_by_their_files():
    a, b = curve("a.jsonl", "torch"), curve("b.jsonl", "torch")
    assert texts_in(plot_logs([a, b], "both.svg", names=["loss"])) == ["step", "loss", "a", "b"]


def test_labels_can_be_given_and_logs_that_were_read():
    logs = [read_log(curve("a.jsonl", "torch")), curve("b.jsonl", "mindspore"), str(curve("c.jsonl"))]
    texts = texts_in(plot_logs(logs, "three.svg", names=["loss"], labels=["one", "two", "three"]))
    assert texts == ["step", "loss", "one", "two", "three"]


def test_a_value_that_some_logs_lack_is_drawn_for_the_others():
    a, b = curve("a.jsonl", acc=0.5), curve("b.jsonl")
    texts = texts_in(plot_logs([a, b], "both.svg"))
    assert texts == [*("step", "loss", "a", "b"), *("step", "lr", "a", "b"), *("step", "acc", "a")]


def test_rates_of_several_groups_are_a_line_each():
    write_log(LOG, *[(step, {"lr": (0.1 / step, 0.01)}) for step in range(1, 5)])
    assert texts_in(plot_logs([LOG], "groups.svg")) == ["step", "lr", "log group 0", "log group 1"]
    assert_png(plot_logs([LOG], "groups.png"))


def pieces_in(path):
    """Return, for each line drawn in an SVG picture, how many points each unbroken piece of it has."""
    drawing = Path(path).read_text(encoding="utf-8")
    paths = re.findall(r'<path d="([^"]+)" clip-path="[^"]+" style="fill: none; stroke: #(\w+)', drawing)
    return [
        [len(piece.split("L")) for piece in points.split("M")[1:]]
        for points, colour in paths
        if colour != "b0b0b0"  # the grid
    ]


@pytest.mark.parametrize(
    ("values", "pieces"),
    [
        ([1.0, 0.5, None, 0.5, 3.0, 1.0], [[2, 3]]),
        ([None, 1.0, 2.0], [[2]]),
        ([1.0, 2.0, math.nan, 3.0, 1.0, math.inf], [[2, 2]]),
        ([(0.1, 0.2), (0.2, 0.1), None, (0.3, None), (0.1, 0.1)], [[2, 2], [2, 1]]),
        ([0.0, 1.0, 0.0], [[3]]),
    ],
    ids=["null between", "null first", "not finite", "null among groups", "zeros"],
)
def test_values_that_are_no_numbers_are_gaps(values, pieces):
    write_log(LOG, *[(step, {"loss": value}) for step, value in enumerate(values, 1)])
    assert pieces_in(plot_logs([LOG], "gaps.svg")) == pieces


def test_each_log_has_a_line_in_each_panel():
    logs = [curve("a.jsonl", count=40), curve("b.jsonl", count=5)]
    assert [sum(line) for line in pieces_in(plot_logs(logs, "both.svg"))] == [40, 5, 40, 5]


def test_names_in_other_scripts_are_drawn():
    write_log("Größe.jsonl", (1, {"Größe": 1.0}), (2, {"Größe": 2.0}))
    assert texts_in(plot_logs(["Größe.jsonl"], "curve.svg")) == ["step", "Größe", "Größe"]


@pytest.mark.parametrize("make", [lambda: LOG.touch(), lambda: write_log(LOG, (1, {}))])
def test_where_there_is_nothing_to_draw_that_is_said(make):
    make()
    with pytest.raises(ArgumentValueError, match="nothing to draw: the 1 logs have no values"):
        plot_logs([LOG], "curve.png")
    assert not Path("curve.png").exists()


def test_a_name_that_no_log_has_is_an_error_that_lists_those_there_are():
    curve(LOG)
    with pytest.raises(ArgumentValueError, match=r"'los'.*loss, lr"):
        plot_logs([LOG], "curve.png", names=["los"])
    with pytest.raises(ArgumentValueError, match=r"'los'.*loss, lr"):
        plot_logs([LOG], "curve.png", names=["loss", "los"])
    assert not Path("curve.png").exists()


def test_labels_have_to_be_as_many_as_the_logs():
    curve(LOG)
    with pytest.raises(ArgumentValueError, match=r"labels.*2.*1 log"):
        plot_logs([LOG], "curve.png", labels=["one", "two"])


# Apart from the rest.


WITHOUT_MATPLOTLIB = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from dualtrain.logs import plot_logs, read_log
from dualtrain.errors import DualTrainError
assert read_log(sys.argv[1]).column("loss")[0] == [1, 2, 3]
try:
    plot_logs(sys.argv[1:], "curve.png")
except ImportError as error:
    print(type(error).__name__, isinstance(error, DualTrainError), error)
"""


def test_without_matplotlib_the_command_that_installs_it_is_told():
    curve(LOG, count=3)
    done = run_python(WITHOUT_MATPLOTLIB, LOG)
    assert done.returncode == 0, done.stderr
    kind, ours, message = done.stdout.strip().split(" ", 2)
    assert (kind, ours) == ("MissingDependencyError", "True")
    assert message.startswith("matplotlib")
    assert message.endswith("is not installed: pip install 'dualtrain[plot]'")
    assert not Path("curve.png").exists()


WHAT_IS_LOADED = """
import json, sys
import dualtrain as dt
log = dt.logs.read_log(sys.argv[1])
reading = sorted(name for name in sys.modules if name.startswith("dualtrain."))
assert "numpy" not in sys.modules
assert "matplotlib" not in sys.modules
dt.logs.plot_logs([log], "curve.png")
drawing = sorted(name for name in sys.modules if name.startswith("dualtrain."))
frameworks = {name.partition(".")[0] for name in sys.modules} & {"torch", "mindspore"}
print(json.dumps([reading, drawing, sorted(frameworks), "matplotlib.pyplot" in sys.modules]))
"""


def test_reading_and_drawing_load_no_other_room_of_the_package():
    curve(LOG)
    done = run_python(WHAT_IS_LOADED, LOG)
    assert done.returncode == 0, done.stderr
    reading, drawing, frameworks, pyplot = json.loads(done.stdout)
    rooms = ["_lazy", "_version", "errors", "logs", "logs._figure", "logs.plot", "logs.reader", "records"]
    assert set(reading) <= {f"dualtrain.{room}" for room in rooms}
    assert set(drawing) <= {f"dualtrain.{room}" for room in rooms}
    assert "dualtrain.logs.reader" in reading
    assert "dualtrain.logs.plot" in drawing
    assert frameworks == []
    assert not pyplot  # it would look for a display
