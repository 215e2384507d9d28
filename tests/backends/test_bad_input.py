"""Bad input is refused in one sentence that says what was expected and what came, and nothing has moved.

What can be known before the first step is refused before any event; what only the first step
shows is refused before it has changed a weight.
"""

import re

import numpy as np
import pytest
from engines import ENGINES, At, Recorder, ones

import dualtrain as dt
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, CapabilityError, UnknownEventError
from dualtrain.protocol import Capability

ENGINES_WITH_OTHER = [
    pytest.param(name, marks=[pytest.mark.torch, pytest.mark.mindspore], id=name) for name in ENGINES
]
"""The engines, where both frameworks are installed."""


def one_sentence(error):
    """Return the message of an error, checked to be one sentence."""
    message = str(error.value)
    assert "\n" not in message
    assert re.search(r"[.?)]$", message), message
    assert not re.search(r"[.!?] +[A-Z]", message), message
    return message


class Refusal:
    """The weight, the model and the watcher of a run that is to be refused."""

    def __init__(self, engine, **options):
        self.engine = engine
        self.network = engine.weight()
        self.watcher = Recorder()
        if "train_step" not in options:
            options["loss_fn"] = engine.loss_fn()
        options.setdefault("optimizer", engine.sgd(self.network))
        self.model = dt.Model(self.network, **options)

    def message(self, kind, call):
        """Make the call with the model and the watcher; return the message with which it is refused."""
        with pytest.raises(kind) as error:
            call(self.model, self.watcher)
        assert self.engine.value(self.network) == 1.0
        return one_sentence(error)

    def message_at_once(self, kind, call):
        """As ``message``, and nobody has heard of the run."""
        message = self.message(kind, call)
        assert self.watcher.calls == []
        return message


# The network.


def a_function(x):
    return x


@pytest.mark.parametrize(
    ("network", "came"),
    [
        (lambda engine: "resnet50", "str 'resnet50'"),
        (lambda engine: engine.framework, "str '"),
        (lambda engine: None, "None"),
        (lambda engine: type(engine.weight()), "the class Weight"),
        (lambda engine: a_function, "function"),
        (lambda engine: np.ones(3), "ndarray"),
        (lambda engine: [engine.weight()], "list"),
    ],
    ids=["string", "framework's name", "none", "class", "function", "array", "list"],
)
def test_what_is_no_network_is_refused(engine, network, came):
    engine.weight()  # its framework has been imported
    with pytest.raises(ArgumentTypeError) as error:
        dt.Model(network(engine), engine.loss_fn())
    message = one_sentence(error)
    assert "torch.nn.Module" in message
    assert "mindspore.nn.Cell" in message
    assert f"but got {came}" in message


@pytest.mark.parametrize("name", ENGINES_WITH_OTHER)
def test_a_backend_that_is_insisted_on_has_to_be_the_networks(name):
    engine = ENGINES[name]()
    with pytest.raises(ArgumentTypeError) as error:
        dt.Model(engine.weight(), backend=engine.other_framework)
    message = one_sentence(error)
    assert f"backend='{engine.other_framework}'" in message
    assert f"Weight is a network of {engine.framework}" in message


def test_a_backend_that_is_the_networks_may_be_insisted_on(engine):
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network), backend=engine.framework)
    model.train(1, ones(2))
    assert engine.value(network) == pytest.approx(0.8)


def test_an_unknown_backend_is_refused_with_the_names_there_are(engine):
    with pytest.raises(ArgumentValueError) as error:
        dt.Model(engine.weight(), backend="tensorflow")
    message = one_sentence(error)
    assert "'tensorflow'" in message
    assert "torch, mindspore" in message


def test_model_cannot_be_subclassed_and_says_what_to_use_instead():
    with pytest.raises(ArgumentTypeError) as error:
        type("MyModel", (dt.Model,), {})
    message = one_sentence(error)
    assert "MyModel" in message
    assert "train_step" in message


# The optimizer.


@pytest.mark.parametrize("name", ENGINES_WITH_OTHER)
def test_an_optimizer_of_the_other_framework_is_refused(name):
    other = ENGINES["mindspore-pynative" if name == "torch" else "torch"]()
    foreign = other.sgd(other.weight())
    engine = ENGINES[name]()
    with pytest.raises(ArgumentTypeError) as error:
        dt.Model(engine.weight(), engine.loss_fn(), foreign)
    message = one_sentence(error)
    assert engine.framework in message
    assert f"of {other.framework}" in message


@pytest.mark.parametrize(
    ("optimizer", "came"),
    [
        (lambda engine: 0.1, "float"),
        (lambda engine: "sgd", "str"),
        (lambda engine: type(engine.sgd(engine.weight())), "SGD"),
        (lambda engine: engine.weight(), "Weight"),
    ],
    ids=["number", "name", "class", "network"],
)
def test_what_is_no_optimizer_is_refused(engine, optimizer, came):
    with pytest.raises(ArgumentTypeError) as error:
        dt.Model(engine.weight(), engine.loss_fn(), optimizer(engine))
    message = one_sentence(error)
    assert "optimizer" in message
    assert came in message


def test_an_optimizer_without_this_networks_parameters_is_refused(engine):
    with pytest.raises(ArgumentValueError) as error:
        dt.Model(engine.weight(), engine.loss_fn(), engine.sgd(engine.weight()))
    message = one_sentence(error)
    assert "none of the parameters of Weight" in message
    assert "make it from this network" in message


def test_training_without_an_optimizer_is_refused(engine):
    refusal = Refusal(engine, optimizer=None)
    for call in (
        lambda model, watcher: model.train(1, ones(2), watcher),
        lambda model, watcher: model.fit(1, ones(2), callbacks=watcher),
    ):
        assert "optimizer=..." in refusal.message_at_once(ArgumentValueError, call)


# The metrics.


@pytest.mark.parametrize("metrics", [{"acuracy"}, ["loss", "acuracy"], ("acuracy",)], ids=type)
def test_an_unknown_metric_is_refused_with_the_names_there_are(engine, metrics):
    with pytest.raises(ArgumentValueError) as error:
        dt.Model(engine.weight(), engine.loss_fn(), metrics=metrics)
    message = one_sentence(error)
    assert "'acuracy'" in message
    names = {"acc", "accuracy", "f1", "loss", "mae", "mse", "precision", "recall", "top_1_accuracy"}
    assert {*names, "top_5_accuracy"} <= set(re.findall(r"\w+", message))


class NoMetric:
    def clear(self):
        pass


@pytest.mark.parametrize(
    ("metrics", "came"),
    [
        ("acc", "str 'acc'"),
        (3, "int 3"),
        ([3], "3"),
        ({"mine": 3}, "metrics['mine'] has to be"),
        ({"mine": "acc"}, "got str"),
        ({"mine": NoMetric()}, "got NoMetric"),
        ({"mine": NoMetric}, "metrics['mine'] is a class"),
    ],
    ids=["string", "number", "list", "object", "alias", "half a metric", "class"],
)
def test_metrics_of_the_wrong_kind_are_refused(engine, metrics, came):
    with pytest.raises(ArgumentTypeError) as error:
        dt.Model(engine.weight(), engine.loss_fn(), metrics=metrics)
    message = one_sentence(error)
    assert "metrics" in message
    assert came in message


# The data.


def a_generator():
    yield from ones(2)


WRONG_DATA = {
    "int": lambda engine: 3,
    "str": lambda engine: "train.csv",
    "bytes": lambda engine: b"train",
    "dict": lambda engine: {"x": np.ones(3), "y": np.ones(3)},
    "ndarray": lambda engine: np.ones((4, 2), np.float32),
    "Tensor": lambda engine: engine.as_tensor(np.ones((4, 2), np.float32)),
    "function": lambda engine: a_generator,
    "object": lambda engine: object(),
}


@pytest.mark.parametrize("kind", WRONG_DATA)
def test_a_dataset_of_the_wrong_kind_is_refused(engine, kind):
    dataset = WRONG_DATA[kind](engine)
    refusal = Refusal(engine)
    for role, call in {
        "train_dataset": lambda model, watcher: model.train(1, dataset, watcher),
        "train_dataset ": lambda model, watcher: model.fit(1, dataset, callbacks=watcher),
        "valid_dataset": lambda model, watcher: model.fit(1, ones(2), dataset, callbacks=watcher),
        "valid_dataset ": lambda model, watcher: model.eval(dataset, watcher),
    }.items():
        message = refusal.message_at_once(ArgumentTypeError, call)
        assert message.startswith(f"{role.strip()} has to be an iterable of batches")
        assert message.endswith(f"but got {kind}.")


def test_no_train_dataset_at_all_is_refused(engine):
    message = Refusal(engine).message_at_once(ArgumentTypeError, lambda m, w: m.train(1, None, w))
    assert "train_dataset" in message
    assert "NoneType" in message


@pytest.mark.torch
@pytest.mark.parametrize("role", ["train_dataset", "valid_dataset"])
def test_a_torch_dataset_of_single_samples_is_refused_and_points_at_the_loader(role):
    import torch

    samples = torch.utils.data.TensorDataset(torch.ones(4), torch.zeros(4))
    calls = {
        "train_dataset": lambda model, watcher: model.train(1, samples, watcher),
        "valid_dataset": lambda model, watcher: model.fit(1, ones(2), samples, callbacks=watcher),
    }
    message = Refusal(ENGINES["torch"]()).message_at_once(ArgumentTypeError, calls[role])
    assert role in message
    assert "TensorDataset" in message
    assert "DataLoader" in message


@pytest.mark.torch
@pytest.mark.mindspore
@pytest.mark.parametrize("role", ["train_dataset", "valid_dataset"])
def test_a_mindspore_dataset_is_refused_for_a_torch_network(role):
    from mindspore.dataset import NumpySlicesDataset

    columns = (np.ones((4, 1), np.float32), np.zeros((4, 1), np.float32))
    dataset = NumpySlicesDataset(columns, ["x", "y"], shuffle=False).batch(2)
    calls = {
        "train_dataset": lambda model, watcher: model.train(1, dataset, watcher),
        "valid_dataset": lambda model, watcher: model.fit(1, ones(2), dataset, callbacks=watcher),
    }
    message = Refusal(ENGINES["torch"]()).message_at_once(ArgumentTypeError, calls[role])
    assert role in message
    assert "mindspore.dataset" in message
    assert "torch.nn.Module" in message


@pytest.mark.torch
@pytest.mark.mindspore
@pytest.mark.parametrize("name", ["mindspore-pynative", "mindspore-graph"])
def test_a_torch_dataset_of_single_samples_is_refused_for_a_mindspore_network(name):
    import torch

    samples = torch.utils.data.TensorDataset(torch.ones(4), torch.zeros(4))
    refusal = Refusal(ENGINES[name]())
    message = refusal.message_at_once(ArgumentTypeError, lambda m, w: m.train(1, samples, w))
    assert "train_dataset" in message
    assert "TensorDataset" in message


EMPTY = {
    "list": lambda: [],
    "tuple": lambda: (),
    "generator": lambda: (batch for batch in []),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_an_empty_dataset_is_refused(engine, kind):
    refusal = Refusal(engine)
    for role, call in {
        "train_dataset": lambda model, watcher: model.train(1, EMPTY[kind](), watcher),
        "train_dataset ": lambda model, watcher: model.fit(1, EMPTY[kind](), callbacks=watcher),
        "valid_dataset": lambda model, watcher: model.fit(1, ones(2), EMPTY[kind](), callbacks=watcher),
        "valid_dataset ": lambda model, watcher: model.eval(EMPTY[kind](), watcher),
    }.items():
        message = refusal.message_at_once(ArgumentValueError, call)
        assert message == f"{role.strip()} is empty: expected at least one batch."


@pytest.mark.mindspore
def test_an_empty_mindspore_dataset_is_refused():
    from mindspore.dataset import NumpySlicesDataset

    columns = (np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32))
    dataset = NumpySlicesDataset(columns, ["x", "y"], shuffle=False).batch(2, drop_remainder=True)
    refusal = Refusal(ENGINES["mindspore-pynative"]())
    message = refusal.message_at_once(ArgumentValueError, lambda m, w: m.train(1, dataset, w))
    assert message == "train_dataset is empty: expected at least one batch."


@pytest.mark.parametrize("one_shot", [lambda: iter(ones(2)), a_generator], ids=["iterator", "generator"])
def test_a_one_shot_iterator_cannot_serve_several_epochs(engine, one_shot):
    refusal = Refusal(engine)
    for role, call in {
        "train_dataset": lambda model, watcher: model.train(2, one_shot(), watcher),
        "train_dataset ": lambda model, watcher: model.fit(
            3, one_shot(), callbacks=watcher, initial_epoch=1
        ),
        "valid_dataset": lambda model, watcher: model.fit(2, ones(2), one_shot(), callbacks=watcher),
    }.items():
        message = refusal.message_at_once(ArgumentValueError, call)
        assert message.startswith(f"{role.strip()} is a one-shot iterator")
        assert type(one_shot()).__name__ in message
        assert "2 passes" in message


def test_a_one_shot_iterator_can_serve_one_epoch(engine):
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    watcher = Recorder()
    model.fit(1, iter(ones(3)), iter(ones(2)), callbacks=watcher)
    assert engine.value(network) == pytest.approx(0.7)
    assert watcher.calls.count("on_train_step_end") == 3
    assert watcher.calls.count("on_eval_step_end") == 2


def test_a_one_shot_iterator_can_serve_the_last_epoch_of_a_run(engine):
    network = engine.weight()
    dt.Model(network, engine.loss_fn(), engine.sgd(network)).train(4, a_generator(), initial_epoch=3)
    assert engine.value(network) == pytest.approx(0.8)


def test_a_one_shot_iterator_can_be_evaluated_alone(engine):
    assert dt.Model(engine.weight(3.0), engine.loss_fn()).eval(a_generator()) == {"eval_loss": 3.0}


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("end", ["error", "stop", "error in the first step"])
def test_a_pass_that_ends_early_is_closed_though_its_error_is_kept(engine, sized, end):
    """A loader's files and workers do not outlive the run."""
    open_passes = []

    class Loader:
        def __iter__(self):
            open_passes.append(self)
            try:
                yield from ones(4)
            finally:
                open_passes.remove(self)

    class Sized(Loader):
        def __len__(self):
            return 4

    data = Sized() if sized else Loader()
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))

    def end_it(run_context):
        if end == "stop":
            run_context.request_stop()
        else:
            raise ZeroDivisionError

    step = 1 if end == "error in the first step" else 2
    kept = None
    try:
        model.fit(2, data, data, callbacks=At("on_train_step_end", end_it, step=step))
    except ZeroDivisionError as error:
        kept = error
    assert (kept is None) == (end == "stop")
    assert not open_passes


# The callbacks.


class Silent(dt.Callback):
    pass


class Misspelt(dt.Callback):
    def on_trian_step_end(self, run_context):
        pass


class MisspeltPlain:
    def on_trian_step_end(self, run_context):
        pass


class Argumentless(dt.Callback):
    def on_train_step_end(self):
        pass


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "in the list"])
def test_a_callback_that_is_a_class_is_refused(engine, alone):
    message = Refusal(engine).message_at_once(
        ArgumentTypeError, lambda m, w: m.fit(1, ones(2), callbacks=Silent if alone else [w, Silent])
    )
    assert message == "Silent in callbacks is a class, not an instance: pass Silent(...)."


@pytest.mark.parametrize("stranger", [3, "logger", None, object(), a_function], ids=type)
def test_what_is_no_callback_is_refused(engine, stranger):
    for call in (
        lambda model, watcher: model.train(1, ones(2), [watcher, stranger]),
        lambda model, watcher: model.fit(1, ones(2), ones(1), callbacks=(watcher, stranger)),
        lambda model, watcher: model.eval(ones(2), [watcher, stranger]),
    ):
        message = Refusal(engine).message_at_once(ArgumentTypeError, call)
        assert f"{stranger!r} in callbacks is not a callback" in message
        assert type(stranger).__name__ in message
        assert "on_train_step_end(run_context)" in message


@pytest.mark.parametrize("callback", [Misspelt(), MisspeltPlain()], ids=["subclass", "plain object"])
def test_a_misspelt_event_is_refused_with_the_event_that_was_meant(engine, callback):
    for call in (
        lambda model, watcher: model.train(1, ones(2), [watcher, callback]),
        lambda model, watcher: model.eval(ones(2), [watcher, callback]),
    ):
        message = Refusal(engine).message_at_once(UnknownEventError, call)
        assert f"{type(callback).__name__}.on_trian_step_end" in message
        assert "on_train_step_end" in message


def test_an_event_method_that_cannot_be_called_is_refused(engine):
    message = Refusal(engine).message_at_once(
        ArgumentTypeError, lambda m, w: m.train(1, ones(2), [w, Argumentless()])
    )
    assert "Argumentless.on_train_step_end has to take (run_context)" in message


class Needy(dt.Callback):
    needs = frozenset({Capability.MANUAL_OPTIMIZATION})


def test_a_callback_that_needs_what_the_engine_lacks_is_refused(engine):
    mode = {
        "torch": "PyTorch",
        "mindspore-pynative": "MindSpore PYNATIVE mode",
        "mindspore-graph": "MindSpore GRAPH mode",
    }[engine.name]
    for call in (
        lambda model, watcher: model.train(1, ones(2), [watcher, Needy()]),
        lambda model, watcher: model.fit(1, ones(2), ones(1), callbacks=[Needy(), watcher]),
    ):
        message = Refusal(engine).message_at_once(CapabilityError, call)
        assert f"Needy needs manual_optimization, which {mode} does not have" in message
        assert "remove the callback" in message


# The numbers.


@pytest.mark.parametrize(
    ("epoch", "kind"),
    [
        (0, ArgumentValueError),
        (-1, ArgumentValueError),
        (True, ArgumentTypeError),
        (2.0, ArgumentTypeError),
        ("2", ArgumentTypeError),
        (None, ArgumentTypeError),
    ],
)
def test_the_number_of_epochs_is_a_positive_integer(engine, epoch, kind):
    refusal = Refusal(engine)
    for call in (
        lambda model, watcher: model.train(epoch, ones(2), watcher),
        lambda model, watcher: model.fit(epoch, ones(2), ones(1), callbacks=watcher),
    ):
        message = refusal.message_at_once(kind, call)
        assert "epoch=..." in message
        assert ("at least 1" if kind is ArgumentValueError else "an integer") in message
        assert f"but got {epoch!r}." in message


@pytest.mark.parametrize(
    ("initial_epoch", "kind"),
    [
        (2, ArgumentValueError),
        (3, ArgumentValueError),
        (-1, ArgumentValueError),
        (True, ArgumentTypeError),
        (1.0, ArgumentTypeError),
        (None, ArgumentTypeError),
    ],
)
def test_the_initial_epoch_is_an_integer_below_the_last(engine, initial_epoch, kind):
    refusal = Refusal(engine)
    for call in (
        lambda model, watcher: model.train(2, ones(2), watcher, initial_epoch=initial_epoch),
        lambda model, watcher: model.fit(2, ones(2), callbacks=watcher, initial_epoch=initial_epoch),
    ):
        message = refusal.message_at_once(kind, call)
        assert message.startswith("initial_epoch")
        assert ("less than epoch=2" if kind is ArgumentValueError else "an integer") in message
        assert f"but got {initial_epoch!r}." in message


@pytest.mark.parametrize(
    ("valid_frequency", "kind", "came"),
    [
        (0, ArgumentValueError, "0"),
        (-2, ArgumentValueError, "-2"),
        ([2, 0], ArgumentValueError, "0"),
        (True, ArgumentTypeError, "True"),
        (1.5, ArgumentTypeError, "1.5"),
        ([1, "2"], ArgumentTypeError, "'2'"),
        (None, ArgumentTypeError, "None"),
    ],
    ids=str,
)
def test_the_valid_frequency_is_positive_integers(engine, valid_frequency, kind, came):
    message = Refusal(engine).message_at_once(
        kind, lambda m, w: m.fit(2, ones(2), ones(1), valid_frequency, w)
    )
    assert "valid_frequency=..." in message
    assert ("at least 1" if kind is ArgumentValueError else "an integer") in message
    assert f"but got {came}." in message


# What train_step gives.


@pytest.mark.parametrize(
    ("step", "kind", "words"),
    [
        ("item", ArgumentTypeError, ["scalar loss tensor", ".item()"]),
        ("numpy", ArgumentTypeError, ["scalar loss tensor"]),
        ("detached", ArgumentValueError, ["a loss without a gradient", "nothing to train"]),
        ("vector", ArgumentValueError, ["has to give a scalar loss", "tensor", "reduce it"]),
        ("without_loss", ArgumentValueError, ["mapping", "'loss'"]),
    ],
)
def test_a_train_step_without_a_trainable_loss_is_refused_before_a_weight_moves(engine, step, kind, words):
    refusal = Refusal(engine, train_step=engine.step_function(step))
    message = refusal.message(kind, lambda model, watcher: model.train(1, ones(2), watcher))
    assert message.startswith("train_step ")
    for word in words:
        assert word in message
    assert refusal.watcher.calls == [
        "on_train_begin",
        "on_train_epoch_begin",
        "on_train_step_begin",
        "on_exception",
        "on_teardown",
    ]


def test_weight_decay_does_not_hide_that_the_loss_has_no_gradient(engine):
    """A decayed weight moves without any gradient, so that it moves says nothing."""
    network = engine.weight()
    optimizer = engine.sgd(network, weight_decay=0.5)
    model = dt.Model(network, optimizer=optimizer, train_step=engine.step_function("detached"))
    with pytest.raises(ArgumentValueError) as error:
        model.train(1, ones(2))
    assert "a loss without a gradient" in one_sentence(error)
    assert engine.value(network) == 1.0


def test_a_gradient_that_is_zero_by_chance_is_no_missing_gradient(engine):
    network = engine.weight()
    model = dt.Model(network, optimizer=engine.sgd(network), train_step=engine.step_function("ok"))
    zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    model.train(1, [(zero, one), (one, one)])
    assert engine.value(network) == pytest.approx(0.9)


def test_a_train_step_and_a_loss_function_together_are_refused(engine):
    with pytest.raises(ArgumentValueError) as error:
        dt.Model(engine.weight(), engine.loss_fn(), train_step=engine.step_function("ok"))
    message = one_sentence(error)
    assert "train_step" in message
    assert "loss_fn" in message


@pytest.mark.parametrize("argument", ["loss_fn", "train_step"])
@pytest.mark.parametrize("value", [3, "mse", Silent], ids=["number", "name", "class"])
def test_a_loss_that_cannot_be_called_is_refused(engine, argument, value):
    with pytest.raises(ArgumentTypeError) as error:
        dt.Model(engine.weight(), **{argument: value})
    message = one_sentence(error)
    assert message.startswith(f"{argument} has to be callable")
    assert f"{value!r}"[:20] in message


class GivesOnce:
    """Looks as if it could be iterated again, and gives its batches once only."""

    def __init__(self, data):
        self.batches = iter(data)

    def __iter__(self):
        return self.batches


@pytest.mark.parametrize("steps", [1, 2])
def test_data_that_gives_nothing_in_a_later_pass_is_an_error_and_no_silence(engine, steps):
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    with pytest.raises(ArgumentValueError, match="train_dataset gave no batches in a later pass"):
        model.train(2, GivesOnce(ones(steps)))
    assert engine.value(network) == pytest.approx(1.0 - 0.1 * steps)


def test_a_validation_set_is_gone_through_as_often_as_there_are_evaluations(engine):
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    model.fit(2, ones(1), iter(ones(1)), 2)
    with pytest.raises(ArgumentValueError, match="valid_dataset is a one-shot iterator"):
        model.fit(4, ones(1), iter(ones(1)), 2)
