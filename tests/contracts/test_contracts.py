"""What every built-in callback keeps: its settings, its copies, its state, its second run, its company.

A new callback is held against this as soon as it is public, and needs a line in ``SETTINGS``.
"""

import copy
import inspect
import json
import operator
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from engines import ProbabilitiesOf
from paths import SUPPORT
from shown_sinks import ShownSink
from trials import ShownTrial

import dualtrain as dt
from dualtrain import callbacks
from dualtrain.events import Event
from dualtrain.protocol import Capability
from dualtrain.testing import FakeLoop

# FakeLoop has no network, so TransformerMonitor says that it found no attention.
pytestmark = pytest.mark.filterwarnings("ignore:TransformerMonitor found no attention:UserWarning")

SETTINGS = {
    # Two instances that may stand in one list, the first with settings other than the defaults.
    "EarlyStopping": (
        {"monitor": "acc", "patience": 9, "mode": "max", "min_delta": 0.1, "restore_best_weights": True},
        {
            "monitor": "val_acc",
            "patience": 8,
            "mode": "min",
            "min_delta": 0.2,
            "restore_best_weights": True,
        },
    ),
    "GradientAccumulationScheduler": ({"scheduling": {0: 2, 1: 4}}, {"scheduling": {1: 3}}),
    "LabelSmoothing": ({"scheduling": {0: 0.0, 1: 0.25}}, {"scheduling": {1: 0.5}}),
    "LearningRateWarmup": ({"steps": 4, "start_factor": 0.5}, {"steps": 2, "start_factor": 0.25}),
    "LrCheck": ({"expected": [0.1, 0.1, 0.3], "rtol": 0.001}, {"expected": [0.1] * 9, "rtol": 0.1}),
    "MetricHistory": ({}, {}),
    "NanGuard": ({"action": "skip"}, {"action": "skip"}),
    "OptunaCallback": (
        {"trial": ShownTrial({}), "metric_name": "acc"},
        {"trial": ShownTrial({}), "metric_name": "eval_loss"},
    ),
    "ParameterMonitor": (
        {
            "interval": 2,
            "patterns": {"all": "weight"},
            "log_file": "parameters.jsonl",
            "sinks": (ShownSink("a"),),
        },
        {"interval": 3, "patterns": ["w"], "log_file": "more.jsonl", "sinks": ()},
    ),
    "ProgressBar": (
        {"refreshes_per_sec": 2, "seconds_per_line": 5000},
        {"refreshes_per_sec": 1, "seconds_per_line": 9000},
    ),
    "SmartTrainer": (
        {
            "patience": 2,
            "min_lr": 1e-5,
            "loss_plateau_threshold": 1e-3,
            "factor": 0.25,
            "smoothing": 0.5,
            "cooldown": 1,
        },
        {
            "patience": 50,
            "min_lr": 0.0,
            "loss_plateau_threshold": 1e-4,
            "factor": 0.5,
            "smoothing": 0.0,
            "cooldown": 0,
        },
    ),
    "StepLogger": (
        {
            "log_file": "one.jsonl",
            "log_interval": 2,
            "rank": "all",
            "asynchronous": False,
            "max_bytes": 600,
            "sinks": (ShownSink("b"), ShownSink("c")),
        },
        {
            "log_file": "two.jsonl",
            "log_interval": 3,
            "rank": "main",
            "asynchronous": True,
            "max_bytes": 10**6,
            "sinks": (),
        },
    ),
    "TransformerMonitor": (
        {
            "monitor_layers": [0, 2],
            "grad_norm_threshold": 1e-4,
            "log_file": "monitor.jsonl",
            "grad_interval": 2,
            "attention_interval": 3,
            "explosion_threshold": 10.0,
            "attention_samples": 4,
            "attention_fn": ProbabilitiesOf(),
            "rank": "all",
            "sinks": (ShownSink("d"),),
        },
        {
            "monitor_layers": None,
            "grad_norm_threshold": 0.0,
            "log_file": "other.jsonl",
            "grad_interval": 1,
            "attention_interval": 2,
            "explosion_threshold": 5.0,
            "attention_samples": None,
            "attention_fn": None,
            "rank": "main",
            "sinks": (),
        },
    ),
    "Throughput": (
        {"interval": 2, "tokens": operator.methodcaller("is_integer")},
        {"interval": 3, "tokens": None},
    ),
}
TIMES = ("timestamp", "elapsed_sec", "started")
"""What differs from run to run."""

DUPLICATES = {"deepcopy": copy.deepcopy, "pickle": lambda callback: pickle.loads(pickle.dumps(callback))}

each = pytest.mark.parametrize("name", SETTINGS)
duplicating = pytest.mark.parametrize("duplicate", DUPLICATES.values(), ids=DUPLICATES)


def make(name, which=0):
    return getattr(callbacks, name)(**SETTINGS[name][which])


class Surroundings(dt.Callback):
    """What callbacks may act on, and what it is at each step."""

    def __init__(self):
        self.loss_fn = SimpleNamespace(label_smoothing=0.125)
        self.seen = []
        self.logged = set()

    def on_train_begin(self, run_context):
        run_context.original_args()["loss_fn"] = self.loss_fn

    def on_train_step_end(self, run_context):
        now = (run_context.step, run_context.lr, run_context.accumulate_steps, self.loss_fn.label_smoothing)
        self.seen.append(now)
        names = run_context.logged_since(0)[1]
        self.logged.update(
            name for name in names if not name.startswith("callback_sec/")
        )  # who is slow varies


@pytest.fixture
def outcomes(tmp_path, monkeypatch, capsys):
    """A function that runs callbacks in a folder of their own and returns what the run leaves.

    That is, for each callback, what is public of it and its state; the files, apart from times; and
    what was seen around the callbacks at each step and afterwards, names of logged values among it, and
    what was printed, apart from the speed.
    """

    def run(*given):
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        evaluations = [{"acc": 0.5, "eval_loss": 2.0}, {"acc": 0.25, "eval_loss": 3.0}]
        loop = FakeLoop([3.0, 0.0, float("nan"), 1.5, 0.5], epochs=2, lr=0.1, evaluations=evaluations)
        around = Surroundings()
        capsys.readouterr()  # what a run that failed has left
        loop.run([around, *given])
        files = {path.name: timeless(path) for path in sorted(folder.iterdir())}
        printed = re.sub(r"\S+ steps/s", "", capsys.readouterr().out)
        effects = [
            around.seen,
            loop.learning_rates,
            around.loss_fn.label_smoothing,
            sorted(around.logged),
            printed,
        ]
        return [(public(one), json.dumps(one.state_dict())) for one in given], files, effects

    return run


def public(callback):
    """Return what is public of a callback, as text: NaN equals itself there."""
    return {name: repr(value) for name, value in vars(callback).items() if not name.startswith("_")}


def timeless(path):
    """Return the rows of a log or of its run information without their times."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def parameters_of(name):
    parameters = dict(inspect.signature(getattr(callbacks, name).__init__).parameters)
    del parameters["self"]
    return parameters


def test_every_public_callback_is_held_against_the_contract():
    assert set(SETTINGS) == set(callbacks.__all__)


@each
def test_the_settings_here_are_all_there_are_and_none_is_the_default(name):
    """Otherwise the tests below would not see a setting that is lost."""
    for name_of, parameter in parameters_of(name).items():
        assert SETTINGS[name][0][name_of] != parameter.default


@each
def test_the_arguments_are_stored_under_their_names(name):
    for which in (0, 1):
        callback = make(name, which)
        assert {argument: getattr(callback, argument) for argument in parameters_of(name)} == SETTINGS[
            name
        ][which]


@each
def test_its_repr_shows_its_settings_and_makes_it_again(name):
    callback = make(name)
    text = repr(callback)
    shown = ", ".join(f"{argument}={value!r}" for argument, value in SETTINGS[name][0].items())
    assert text == f"{name}({shown})"
    again = eval(text, {name: getattr(callbacks, name), "operator": operator})
    assert repr(again) == text
    assert public(again) == public(callback)


@each
def test_making_it_does_nothing_else(name):
    make(name)
    assert os.listdir() == []


@each
def test_its_events_are_events(name):
    hooks = {hook for hook in dir(getattr(callbacks, name)) if hook.startswith("on_")}
    assert hooks == {event.value for event in Event}  # those that it inherits do nothing
    overridden = {
        hook for hook in hooks if getattr(dt.Callback, hook) is not getattr(make(name), hook).__func__
    }
    assert overridden


@each
def test_what_it_needs_are_capabilities(name):
    for asked in (make(name).needs, make(name).wants):
        assert isinstance(asked, frozenset)
        assert all(isinstance(need, Capability) for need in asked)


@each
def test_a_run_leaves_something(name, outcomes):
    """Otherwise the comparisons of outcomes below would compare nothing."""
    new = make(name)
    before = public(new), json.dumps(new.state_dict())
    [after], files, effects = outcomes(make(name))
    _, none, without = outcomes(dt.Callback())
    assert none == {}
    assert after != before or files or effects != without


@each
def test_it_serves_a_second_run_as_a_new_one_would(name, outcomes):
    callback, expected = make(name), outcomes(make(name))
    assert outcomes(callback) == expected
    assert outcomes(callback) == expected
    assert repr(callback) == repr(make(name))


@each
def test_it_serves_a_run_after_one_that_failed(name, outcomes):
    class Failing(dt.Callback):
        def on_train_step_end(self, run_context):
            if run_context.step == 7:
                raise ValueError("odd")

    callback, expected = make(name), outcomes(make(name))
    with pytest.raises(ValueError, match="odd"):
        outcomes(callback, Failing())
    assert outcomes(callback) == expected


@each
def test_it_serves_a_run_that_was_stopped_as_often_as_wanted(name, outcomes):
    class Stopping(dt.Callback):
        def on_train_step_end(self, run_context):
            if run_context.step == 3:
                run_context.request_stop("enough")

    callback = make(name)
    stopped = outcomes(callback, Stopping())
    assert outcomes(callback, Stopping()) == stopped
    assert outcomes(callback) == outcomes(make(name)) != stopped


@each
@duplicating
def test_a_copy_of_a_new_one_is_as_good(name, duplicate, outcomes):
    callback = make(name)
    twin = duplicate(callback)
    assert type(twin) is type(callback)
    assert (repr(twin), public(twin)) == (repr(callback), public(callback))
    assert outcomes(twin) == outcomes(callback)


@each
@duplicating
def test_a_copy_of_a_used_one_is_as_good_and_apart(name, duplicate, outcomes):
    callback = make(name)
    outcomes(callback)
    left = public(callback)
    twin = duplicate(callback)
    assert (repr(twin), public(twin)) == (repr(callback), left)
    assert outcomes(twin) == outcomes(make(name))
    outcomes(twin)
    assert public(callback) == left


@each
@duplicating
def test_a_copy_can_be_made_while_it_runs(name, duplicate, outcomes):
    class Copying(dt.Callback):
        def on_train_step_end(self, run_context):
            if run_context.step == 4:
                twins.append(duplicate(callback))

    twins, callback = [], make(name)
    expected = outcomes(make(name), dt.Callback())
    assert outcomes(callback, Copying()) == expected
    assert outcomes(twins[0], dt.Callback()) == expected


@each
def test_its_state_passes_through_json(name, outcomes):
    callback = make(name)
    for _ in range(2):
        state = callback.state_dict()
        text = json.dumps(state)
        through = json.loads(text)
        assert repr(through) == repr(state)
        other = make(name)
        other.load_state_dict(through)
        assert json.dumps(other.state_dict()) == text
        assert json.dumps(through) == text  # taking it has not changed it
        outcomes(callback)


@each
def test_taking_up_a_state_leaves_the_settings(name, outcomes):
    first = make(name)
    outcomes(first)
    second = make(name, 1)
    second.load_state_dict(first.state_dict())
    assert {argument: getattr(second, argument) for argument in parameters_of(name)} == SETTINGS[name][1]


@each
def test_two_of_a_class_in_one_list_do_what_each_does_alone(name, outcomes):
    alone = [outcomes(make(name, which)) for which in (0, 1)]
    together = outcomes(make(name, 0), make(name, 1))
    assert together[0] == [alone[0][0][0], alone[1][0][0]]
    assert together[1] == {**alone[0][1], **alone[1][1]}


IMPORTED_ALONE = """
import importlib, json, operator, sys

sys.path[:0] = sys.argv[4:]
module, name, settings = sys.argv[1], sys.argv[2], eval(sys.argv[3])

class Guard:
    tried = []

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "mindspore"):
            self.tried.append(name)

sys.meta_path.insert(0, Guard())
callback = getattr(importlib.import_module(module), name)(**settings)
repr(callback), callback.state_dict()
backends = {m for m in sys.modules if m.startswith("dualtrain.backends")}
assert not backends, backends

from test_contracts import FakeLoop, Surroundings

FakeLoop([1.0], evaluations=[{"acc": 0.5}]).run([Surroundings(), callback])
assert not Guard.tried, Guard.tried
assert not {"torch", "mindspore"} & set(sys.modules)
"""


@each
def test_its_module_and_a_run_of_it_import_no_framework(name):
    module = getattr(callbacks, name).__module__
    arguments = [module, name, repr(SETTINGS[name][0]), str(Path(__file__).parent), str(SUPPORT)]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_ALONE, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@each
def test_it_has_a_file_of_its_own_and_says_what_it_costs(name):
    kind = getattr(callbacks, name)
    public_classes = [
        other
        for other in vars(sys.modules[kind.__module__]).values()
        if isinstance(other, type) and other.__module__ == kind.__module__ and other.__name__[0] != "_"
    ]
    assert public_classes == [kind]
    assert Path(inspect.getfile(kind)).parent == Path(callbacks.__file__).parent
    assert "Cost: " in kind.__doc__
    assert "Events: " in kind.__doc__
