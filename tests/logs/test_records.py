"""A record is one line of strict JSON, and comes back from it as it was."""

import copy
import json
import math
import pickle
from dataclasses import FrozenInstanceError

import pytest

from dualtrain.errors import ArgumentValueError
from dualtrain.records import Record


def record(step=3, epoch=1, mode="train", time=1700000000.25, **values):
    return Record(step=step, epoch=epoch, mode=mode, time=time, values=values)


def strictly(line):
    """Parse JSON as the standard has it, which knows no NaN and no Infinity."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_a_training_row_has_step_epoch_values_and_timestamp_in_this_order():
    line = record(loss=0.5, lr=0.1).to_json()
    assert line == '{"step": 3, "epoch": 1, "loss": 0.5, "lr": 0.1, "timestamp": 1700000000.25}'


def test_the_mode_is_told_where_it_is_not_training():
    line = record(mode="eval", loss=0.5).to_json()
    assert line == '{"step": 3, "epoch": 1, "mode": "eval", "loss": 0.5, "timestamp": 1700000000.25}'


def test_a_lone_evaluation_has_no_epoch():
    assert strictly(record(epoch=None, mode="eval").to_json())["epoch"] is None


@pytest.mark.parametrize(
    "value", [3e-10, 0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 0.0, 2**53 + 1, 0, -1]
)
def test_numbers_keep_their_full_precision_and_kind(value):
    read = strictly(record(loss=value).to_json())["loss"]
    assert repr(read) == repr(value)


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")], ids=str
)
def test_what_is_not_finite_becomes_null_and_is_named(value, text):
    row = strictly(record(loss=value, lr=0.1).to_json())
    assert row == {
        "step": 3,
        "epoch": 1,
        "loss": None,
        "lr": 0.1,
        "timestamp": 1700000000.25,
        "nonfinite": {"loss": text},
    }


def test_items_of_a_tuple_that_are_not_finite_become_null_and_are_named():
    row = strictly(record(lr=(0.1, math.nan, math.inf), loss=math.nan).to_json())
    assert row["lr"] == [0.1, None, None]
    assert row["loss"] is None
    assert row["nonfinite"] == {"lr.1": "nan", "lr.2": "inf", "loss": "nan"}


def test_a_finite_row_has_no_nonfinite_field():
    assert "nonfinite" not in strictly(record(loss=0.0, lr=(0.1, 0.2), norm=None).to_json())


def test_a_record_is_one_line():
    assert "\n" not in record(**{"two\nlines": 1.0}).to_json()


def test_making_the_line_leaves_the_record_alone():
    made = record(loss=math.nan, lr=(math.inf, 0.1))
    made.to_json()
    assert list(made.values) == ["loss", "lr"]
    assert math.isnan(made.values["loss"])
    assert made.values["lr"] == (math.inf, 0.1)


NESTED = [{"layer": 0, "attention_entropy": math.nan}, {"layer": 1, "attention_entropy": 1.5}]


def test_numbers_inside_lists_of_objects_are_strict_json_too():
    """The attention statistics of a model that has diverged are such a list."""
    row = strictly(record(attention=NESTED).to_json())
    assert row["attention"] == [
        {"layer": 0, "attention_entropy": None},
        {"layer": 1, "attention_entropy": 1.5},
    ]
    assert "nan" in row["nonfinite"].values()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"loss": 0.5},
        {"loss": 0.0, "lr": 1e-6, "updates": 7},
        {"loss": None},
        {"lr": (0.1, 0.01)},
        {"loss": math.nan},
        {"loss": math.inf, "norm": -math.inf},
        {"lr": (math.nan, 0.1, math.inf)},
        {"lr": (0.1, 0.2), "loss": math.nan},
        {"attention.entropy": math.nan},
        {"a.0": math.nan, "a": 1.0},
        {"lr": (0.1, 0.2), "lr.0": math.nan},
        {"损失": 0.5},
        {"note": "text"},
        {"attention": ({"layer": 0, "entropy": 1.5}, {"layer": 1, "entropy": 0.5})},
        {"attention": ({"layer": 0, "entropy": math.nan}, {"layer": 1, "heads": [0.5, math.inf]})},
        {"a.b": ({"c.d": [{"e.0": -math.inf}], "c": 1.0},), "a": ({"b": None},)},
        {"dead_gradients": ("blocks.0.weight", "head.bias"), "parameters": ()},
    ],
    ids=str,
)
@pytest.mark.parametrize(("mode", "epoch"), [("train", 2), ("eval", 2), ("eval", None)], ids=str)
def test_a_record_comes_back_from_its_line(values, mode, epoch):
    made = Record(step=12, epoch=epoch, mode=mode, time=1700000000.25, values=values)
    read = Record.from_json(made.to_json())
    assert (read.step, read.epoch, read.mode, read.time) == (12, epoch, mode, 1700000000.25)
    assert repr(read.values) == repr(values)  # NaN equals nothing, and this also tells 0 from 0.0


def test_a_row_of_another_program_reads_with_defaults():
    read = Record.from_json('{"step": 4, "loss": 0.5}')
    assert read == Record(step=4, epoch=None, mode="train", time=0.0, values={"loss": 0.5})


def test_a_row_in_which_python_wrote_nan_still_reads():
    assert math.isnan(Record.from_json('{"step": 4, "loss": NaN}').values["loss"])


@pytest.mark.parametrize(
    "line", ["", "\n", '{"step": 1, "lo', "step 1", '{"step": 1} {"step": 2}', "{'step': 1}"], ids=repr
)
def test_what_is_not_a_whole_line_of_json_is_refused(line):
    with pytest.raises(ArgumentValueError, match="not a whole line of JSON"):
        Record.from_json(line)


@pytest.mark.parametrize("line", ["{}", '{"loss": 0.5}', "[1, 2]", "3", "null", '"step"'], ids=repr)
def test_json_that_is_no_record_is_refused(line):
    with pytest.raises(ArgumentValueError, match="not a log record"):
        Record.from_json(line)


def test_a_refusal_quotes_the_beginning_of_a_long_line_only():
    with pytest.raises(ArgumentValueError) as caught:
        Record.from_json("x" * 10_000)
    assert "x" * 80 in str(caught.value)
    assert "x" * 81 not in str(caught.value)


def test_a_record_cannot_be_assigned_to():
    made = record(loss=0.5)
    with pytest.raises(FrozenInstanceError):
        made.step = 4


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_records_copy_and_pickle(duplicate):
    made = record(loss=0.5, lr=(0.1, 0.2))
    twin = duplicate(made)
    assert twin == made
    assert twin.values is not made.values


def test_arrays_are_no_part_of_the_line_nor_of_what_makes_records_equal():
    made = Record(1, 1, "train", 0.0, {"loss": 0.5}, {"a": [1, 2]})
    assert made.arrays == {"a": [1, 2]}
    assert made.to_json() == '{"step": 1, "epoch": 1, "loss": 0.5, "timestamp": 0.0}'
    assert made == Record(1, 1, "train", 0.0, {"loss": 0.5})
    assert copy.deepcopy(made).arrays == {"a": [1, 2]}


def test_records_without_values_do_not_share_them():
    one = Record(step=1, epoch=1, mode="train", time=0.0)
    two = Record(step=2, epoch=1, mode="train", time=0.0)
    one.values["loss"] = 0.5
    one.arrays["a"] = [1]
    assert (two.values, two.arrays) == ({}, {})
