"""A context is MindSpore's RunContext, with typed properties beside it that need no engine."""

import copy
import math
import pickle
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from contexts import context_of

from dualtrain.context import CallbackParams, RunContext, RunState
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, DualTrainError, RunStateError
from dualtrain.protocol import Capability


class Tensor:
    """A value that only its backend can read; each read counts as a device sync."""

    def __init__(self, value):
        self.value = value


class LearningRate:
    def __init__(self, rate):
        self.rate = rate

    def read(self):
        return self.rate

    def write(self, rate):
        self.rate = rate

    def scale(self, factor, min_lr=0.0):
        self.rate = max(self.rate * factor, min_lr)
        return self.rate


class Optimizer:
    def __init__(self, rate):
        self.handle = LearningRate(rate)


class CountingBackend:
    """The part of the Backend protocol that a context uses."""

    name = "counting"

    def __init__(self, rank=0, world_size=1):
        self.syncs = 0
        self._rank, self._world_size = rank, world_size

    def __str__(self):
        return self.name

    def owns(self, obj):
        return isinstance(obj, (Tensor, Optimizer))

    def capabilities(self):
        return frozenset({Capability.STEP_EVENTS})

    def to_float(self, value):
        self.syncs += 1
        return float(value.value)

    def learning_rate(self, optimizer):
        return optimizer.handle

    def rank(self):
        return self._rank

    def world_size(self):
        return self._world_size


# The parameters.


def test_params_are_a_dict_whose_items_are_attributes():
    params = CallbackParams(mode="train", cur_step_num=0)
    assert params == {"mode": "train", "cur_step_num": 0}
    assert isinstance(params, dict)
    assert (params.mode, params["mode"], params.get("mode")) == ("train", "train", "train")


def test_params_writes_show_in_both_forms():
    params = CallbackParams()
    params.by_attribute = 1
    params["by_item"] = 2
    params.update(by_update=3)
    assert params == {"by_attribute": 1, "by_item": 2, "by_update": 3}
    assert (params.by_attribute, params.by_item, params.by_update) == (1, 2, 3)
    del params.by_item
    assert "by_item" not in params
    params.pop("by_update")
    assert not hasattr(params, "by_update")


def test_a_missing_parameter_is_an_attribute_error():
    params = CallbackParams(present=None)
    with pytest.raises(AttributeError, match="absent"):
        _ = params.absent
    assert not hasattr(params, "absent")
    assert getattr(params, "absent", "default") == "default"
    assert hasattr(params, "present")
    assert params.get("absent") is None
    with pytest.raises(KeyError):
        params["absent"]


def test_params_deepcopy_is_independent():
    params = CallbackParams(results={"loss": [1.0]}, step=3)
    twin = copy.deepcopy(params)
    twin.results["loss"].append(2.0)
    twin.step = 4
    assert type(twin) is CallbackParams
    assert params == {"results": {"loss": [1.0]}, "step": 3}
    assert twin == {"results": {"loss": [1.0, 2.0]}, "step": 4}


def test_params_deepcopy_shares_what_cannot_be_copied():
    lock, batches = threading.Lock(), (n for n in range(3))
    params = CallbackParams(lock=lock, batches=batches, values=[1])
    twin = copy.deepcopy(params)
    assert twin.lock is lock
    assert twin.batches is batches
    assert twin.values == [1]
    assert twin.values is not params.values


def test_params_deepcopy_keeps_references_among_its_items():
    shared = [1]
    params = CallbackParams(one=shared, two=shared)
    params.itself = params
    twin = copy.deepcopy(params)
    assert twin.one is twin.two
    assert twin.one is not shared
    assert twin.itself is twin


@pytest.mark.parametrize("duplicate", [copy.copy, lambda p: pickle.loads(pickle.dumps(p))])
def test_params_copy_and_pickle_as_what_they_are(duplicate):
    params = CallbackParams(mode="train", values=(1, 2))
    twin = duplicate(params)
    assert type(twin) is CallbackParams
    assert twin == params
    twin.mode = "eval"
    assert (twin["mode"], params["mode"]) == ("eval", "train")


# MindSpore's own names.


@pytest.mark.parametrize("make", [CallbackParams, dict], ids=["params", "plain dict"])
def test_the_mapping_is_kept_by_reference(make):
    args = make(cur_step_num=1)
    context = RunContext(args)
    args["cur_step_num"] = 2
    assert context.original_args() is args
    assert context.step == 2


@pytest.mark.parametrize("args", [None, [("mode", "train")], SimpleNamespace(mode="train"), "train"])
def test_anything_but_a_mapping_is_refused(args):
    with pytest.raises(ArgumentTypeError, match=type(args).__name__):
        RunContext(args)


def test_no_stop_is_requested_at_first():
    context = RunContext({})
    assert context.get_stop_requested() is False
    assert context.stop_reason is None


def test_a_requested_stop_stays_requested():
    context = RunContext({})
    context.request_stop()
    assert context.get_stop_requested() is True
    assert context.stop_reason is None
    context.request_stop()
    assert context.get_stop_requested() is True


def test_the_first_reason_is_kept():
    context = RunContext({})
    context.request_stop()
    context.request_stop("loss is NaN")
    context.request_stop("patience ran out")
    assert context.stop_reason == "loss is NaN"


@pytest.mark.parametrize("wrong", [ValueError, "pruned", 1])
def test_raise_after_takes_an_exception_instance(wrong):
    context = RunContext({})
    with pytest.raises(ArgumentTypeError, match="raise_after"):
        context.request_stop(raise_after=wrong)
    assert context.get_stop_requested() is False


# Without an engine.


@pytest.mark.parametrize(
    "name",
    [
        "mode",
        "step",
        "global_step",
        "epoch",
        "epochs",
        "batches_per_epoch",
        "step_in_epoch",
        "backend",
        "loss",
        "lr",
        "outputs",
        "event",
        "stop_reason",
    ],
)
def test_what_is_unknown_reads_none(name):
    assert getattr(RunContext({}), name) is None


def test_one_process_without_metrics_is_what_an_empty_context_describes():
    context = RunContext({})
    assert (context.rank, context.world_size, context.is_main) == (0, 1, True)
    assert context.metrics == {}
    assert context.capabilities == frozenset()


def test_a_learning_rate_that_is_not_there_cannot_be_set():
    context = RunContext({})
    with pytest.raises(RunStateError, match="no optimizer"):
        context.lr = 0.1
    with pytest.raises(RunStateError, match="no optimizer"):
        context.scale_lr(0.5)


def test_where_the_run_is_reads_from_mindspores_keys():
    context = RunContext(
        {"mode": "train", "cur_step_num": 8, "cur_epoch_num": 2, "epoch_num": 3, "batch_num": 5}
    )
    assert context.mode == "train"
    assert context.step == 8
    assert context.epoch == 2
    assert context.epochs == 3
    assert context.batches_per_epoch == 5
    assert context.step_in_epoch == 3


@pytest.mark.parametrize(("step", "in_epoch"), [(0, 0), (1, 1), (5, 5), (6, 1), (10, 5), (11, 1)])
def test_the_step_in_the_epoch_counts_from_one(step, in_epoch):
    assert RunContext({"mode": "train", "cur_step_num": step, "batch_num": 5}).step_in_epoch == in_epoch


def test_in_evaluation_steps_are_the_evaluations():
    context = RunContext({"mode": "eval", "cur_step_num": 7, "batch_num": 2, "cur_epoch_num": 1})
    assert (context.step, context.step_in_epoch) == (7, 7)


def test_epochs_are_absolute_while_epoch_num_is_what_remains():
    context = context_of({"epoch_num": 2, "cur_epoch_num": 3}, initial_epoch=2)
    assert (context.epoch, context.epochs) == (3, 4)


def test_batches_of_unknown_number_read_none():
    context = RunContext({"mode": "train", "cur_step_num": 3, "batch_num": math.inf})
    assert context.batches_per_epoch is None


def test_steps_in_an_epoch_of_unknown_length_restart_with_the_epoch():
    step = SimpleNamespace(global_step=0, learning_rate=None)
    args = {"mode": "train", "cur_step_num": 7, "batch_num": math.inf}
    state = RunState(args, step=step)
    state.epoch_start = 7
    args["cur_step_num"] = 9
    assert RunContext(state).step_in_epoch == 2


def test_updates_are_counted_by_the_step():
    step = SimpleNamespace(global_step=3, learning_rate=None)
    context = context_of({"cur_step_num": 12}, step=step)
    assert context.global_step == 3
    step.global_step += 1
    assert context.global_step == 4


# The loss.


@pytest.mark.parametrize(
    ("outputs", "loss"),
    [
        (0.0, 0.0),
        (2, 2.0),
        (1.5, 1.5),
        (math.inf, math.inf),
        (np.float32(0.25), 0.25),
        (np.array(0.5), 0.5),
        (np.array([1.0, 2.0, 6.0]), 3.0),
        (np.array([[1, 2], [3, 4]]), 2.5),
        ((0.0, "logits"), 0.0),
        ([4.0, 5.0], 4.0),
        ((np.array([1.0, 3.0]), "logits"), 2.0),
        ({"accuracy": 0.5, "loss": 0.0}, 0.0),
        ({"loss": np.array([1.0, 2.0])}, 1.5),
        ({"accuracy": 0.5}, None),
        ((), None),
        ([], None),
        (None, None),
    ],
    ids=repr,
)
def test_the_loss_reads_as_one_float(outputs, loss):
    read = RunContext({"net_outputs": outputs}).loss
    assert read == loss
    assert type(read) is type(loss)


def test_a_loss_that_is_not_a_number_is_not_missing():
    loss = RunContext({"net_outputs": math.nan}).loss
    assert type(loss) is float
    assert math.isnan(loss)


def test_outputs_are_the_native_value_itself():
    native = Tensor(1.0)
    assert RunContext({"net_outputs": native}).outputs is native


def test_an_unread_loss_costs_no_sync_and_a_read_one_costs_one():
    backend = CountingBackend()
    args = CallbackParams(cur_step_num=1, net_outputs=Tensor(2.0))
    context = context_of(args, backend=backend)
    assert backend.syncs == 0
    assert [context.loss, context.loss, context.loss] == [2.0, 2.0, 2.0]
    assert backend.syncs == 1


def test_the_remembered_loss_is_the_one_of_the_first_read():
    """A framework overwrites values in place; what was read for a step does not change within it."""
    tensor = Tensor(2.0)
    context = context_of(CallbackParams(cur_step_num=1, net_outputs=tensor), backend=CountingBackend())
    assert context.loss == 2.0
    tensor.value = 3.0
    assert context.loss == 2.0


def test_a_new_step_is_read_anew_although_the_object_is_the_same():
    backend, tensor = CountingBackend(), Tensor(2.0)
    args = CallbackParams(cur_step_num=1, net_outputs=tensor)
    context = context_of(args, backend=backend)
    assert context.loss == 2.0
    tensor.value = 3.0
    args.cur_step_num = 2
    assert context.loss == 3.0
    assert backend.syncs == 2


def test_new_outputs_are_read_anew_although_the_step_number_is_the_same():
    """Evaluation restarts the counter: its first step has the number of training's first."""
    args = CallbackParams(mode="train", cur_step_num=1, net_outputs=Tensor(2.0))
    context = context_of(args, backend=CountingBackend())
    assert context.loss == 2.0
    args.update(mode="eval", net_outputs=Tensor(5.0))
    assert context.loss == 5.0


def test_a_remembered_loss_of_zero_is_not_read_again():
    backend = CountingBackend()
    context = context_of(CallbackParams(cur_step_num=1, net_outputs=Tensor(0.0)), backend=backend)
    assert (context.loss, context.loss) == (0.0, 0.0)
    assert backend.syncs == 1


# The backend and the learning rate.


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A backend from outside, announced under the entry point group that dualtrain reads."""
    (tmp_path / "outside_backend.py").write_text(
        "class Native: pass\n"
        "class Optimizer(Native): pass\n"
        "class Rate:\n"
        "    def read(self): return 0.25\n"
        "class Backend:\n"
        "    name = 'outside'\n"
        "    def __str__(self): return self.name\n"
        "    def owns(self, obj): return isinstance(obj, Native)\n"
        "    def capabilities(self): return frozenset()\n"
        "    def to_float(self, value): return 7.0\n"
        "    def learning_rate(self, optimizer): return Rate()\n"
        "    def rank(self): return 1\n"
        "    def world_size(self): return 4\n"
        "BACKEND = Backend()\n"
    )
    info = tmp_path / "outside_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dualtrain.backends]\noutside = outside_backend:BACKEND\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import outside_backend

    yield outside_backend
    monkeypatch.delitem(sys.modules, "outside_backend")


@pytest.mark.parametrize("key", ["optimizer", "network", "train_network", "net_outputs"])
def test_the_backend_is_found_from_the_objects_of_the_run(plugin, key):
    context = RunContext({key: plugin.Optimizer()})
    assert context.backend is plugin.BACKEND
    assert str(context.backend) == "outside"
    assert (context.rank, context.world_size, context.is_main) == (1, 4, False)


def test_the_found_backend_reads_loss_and_learning_rate(plugin):
    context = RunContext({"optimizer": plugin.Optimizer(), "net_outputs": plugin.Native()})
    assert context.loss == 7.0
    assert context.lr == 0.25


def test_an_optimizer_of_no_known_framework_has_no_backend(plugin):
    context = RunContext({"optimizer": object(), "network": object()})
    assert context.backend is None
    assert context.lr is None


def test_the_engine_says_what_it_can_do_in_this_run():
    backend = CountingBackend()
    assert context_of({}, backend=backend).capabilities == {Capability.STEP_EVENTS}
    assert context_of({}, backend=backend, capabilities=frozenset()).capabilities == frozenset()


@pytest.mark.parametrize(("rank", "is_main"), [(0, True), (1, False)])
def test_rank_zero_is_the_main_one(rank, is_main):
    context = context_of({}, backend=CountingBackend(rank=rank, world_size=2))
    assert (context.rank, context.world_size, context.is_main) == (rank, 2, is_main)


@pytest.mark.parametrize("rate", [0.1, 0.0, (0.1, 0.01)])
def test_the_learning_rate_reads_as_the_optimizers(rate):
    assert context_of({"optimizer": Optimizer(rate)}, backend=CountingBackend()).lr == rate


def test_the_learning_rate_of_the_step_goes_before_the_optimizers():
    """At step end an optimizer may show the next step's rate already; the step knows the one it used."""
    step = SimpleNamespace(global_step=1, learning_rate=LearningRate(0.1))
    context = context_of({"optimizer": Optimizer(0.2)}, backend=CountingBackend(), step=step)
    assert context.lr == 0.1


def test_the_learning_rate_is_settable():
    optimizer = Optimizer(0.1)
    context = context_of({"optimizer": optimizer}, backend=CountingBackend())
    context.lr = 0.05
    assert (context.lr, optimizer.handle.rate) == (0.05, 0.05)


def test_scaling_the_learning_rate_returns_the_new_one_and_keeps_the_floor():
    context = context_of({"optimizer": Optimizer(0.5)}, backend=CountingBackend())
    assert context.scale_lr(0.5) == 0.25
    assert context.lr == 0.25
    assert context.scale_lr(0.5, min_lr=0.2) == 0.2
    assert context.lr == 0.2


@pytest.mark.parametrize("factor", [0.0, -0.5, math.inf, math.nan])
def test_a_factor_that_would_ruin_the_learning_rate_is_refused(factor):
    context = context_of({"optimizer": Optimizer(0.5)}, backend=CountingBackend())
    with pytest.raises(ArgumentValueError, match="factor"):
        context.scale_lr(factor)
    assert context.lr == 0.5


@pytest.mark.parametrize("min_lr", [-1e-9, math.nan])
def test_a_floor_that_is_none_is_refused(min_lr):
    context = context_of({"optimizer": Optimizer(0.5)}, backend=CountingBackend())
    with pytest.raises(ArgumentValueError, match="min_lr"):
        context.scale_lr(0.5, min_lr=min_lr)
    assert context.lr == 0.5


# The metrics.


def test_metrics_are_those_of_the_last_evaluation():
    args = CallbackParams()
    context = RunContext(args)
    assert context.metrics == {}
    args.metrics = {"acc": 0.0}
    assert context.metrics == {"acc": 0.0}
    args.metrics = {"acc": 0.5}
    assert context.metrics == {"acc": 0.5}


def test_within_fit_metrics_have_the_evaluation_loss():
    args = CallbackParams(metrics={"acc": 0.5}, eval_results={"acc": 0.5, "eval_loss": 1.25})
    assert RunContext(args).metrics == {"acc": 0.5, "eval_loss": 1.25}


def test_metrics_stay_readable_after_the_parameters_lost_them():
    args = CallbackParams(eval_results={"eval_loss": 1.25})
    state = RunState(args)
    state.remember_metrics()
    del args.eval_results
    assert RunContext(state).metrics == {"eval_loss": 1.25}


# What callbacks log.


def test_logged_values_are_handed_out_once_to_each_reader():
    context = RunContext({})
    assert context.logged_since(0) == (0, {})
    context.log("norm", 1.0)
    context.log("ratio", 0.0)
    mark, news = context.logged_since(0)
    assert news == {"norm": 1.0, "ratio": 0.0}
    assert context.logged_since(mark) == (mark, {})
    context.log("norm", 2.0)
    assert context.logged_since(mark)[1] == {"norm": 2.0}
    assert context.logged_since(0)[1] == {"norm": 2.0, "ratio": 0.0}


def test_the_last_value_of_a_name_wins():
    context = RunContext({})
    context.log("norm", 1.0)
    context.log("norm", 2.0)
    assert context.logged_since(0)[1] == {"norm": 2.0}


@pytest.mark.parametrize("value", [3, np.float32(3.0), np.array(3.0)], ids=repr)
def test_a_logged_value_becomes_a_float_at_once(value):
    context = RunContext({})
    context.log("norm", value)
    logged = context.logged_since(0)[1]["norm"]
    assert (logged, type(logged)) == (3.0, float)


def test_a_logged_array_may_change_afterwards():
    context, value = RunContext({}), np.array(3.0)
    context.log("norm", value)
    value[...] = 4.0
    assert context.logged_since(0)[1] == {"norm": 3.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_can_be_logged(value):
    context = RunContext({})
    context.log("norm", value)
    assert str(context.logged_since(0)[1]["norm"]) == str(value)


@pytest.mark.parametrize(
    "name", ["step", "epoch", "global_step", "mode", "elapsed_sec", "timestamp", "nonfinite", None, 3]
)
def test_names_that_a_row_has_already_cannot_be_logged(name):
    context = RunContext({})
    with pytest.raises(ArgumentValueError, match=repr(name)):
        context.log(name, 1.0)
    assert context.logged_since(0) == (0, {})


class SeveralElements:
    """Refuses to be a float with a RuntimeError, as a torch tensor of several elements does."""

    def __float__(self):
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")


@pytest.mark.parametrize(
    "value",
    [None, "high", [1.0], np.array([1.0, 2.0]), 10**400, SeveralElements()],
    ids=["None", "word", "list", "vector", "huge", "tensor"],
)
def test_what_is_not_one_number_cannot_be_logged(value):
    context = RunContext({})
    with pytest.raises(DualTrainError, match=rf"log\('norm', \.\.\.\).*{type(value).__name__}"):
        context.log("norm", value)
    assert context.logged_since(0) == (0, {})
