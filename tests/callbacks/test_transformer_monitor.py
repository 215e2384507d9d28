"""TransformerMonitor: what it records, and that training with it is training without it."""

import copy
import gc
import json
import logging
import math
import pickle
import random
import warnings

import numpy as np
import pytest
from closeness import close
from engines import At, Seen, Stream, columns, ones, sequences
from log_files import rows_of
from paths import SUPPORT
from processes import run_two_ranks

import dualtrain as dt
from dualtrain.callbacks import SmartTrainer, StepLogger, TransformerMonitor
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, RunStateError
from dualtrain.logs import read_log
from dualtrain.sinks import MemorySink
from dualtrain.testing import FakeLoop

NONE_FOUND = "found no attention"


def state_of(engine, network):
    """Return all numbers that a network holds, as they are."""
    if engine.framework == "torch":
        return {name: value.detach().numpy().copy() for name, value in network.state_dict().items()}
    return {p.name: p.asnumpy().copy() for p in network.get_parameters()}


def seed(engine):
    random.seed(0)
    np.random.seed(0)
    if engine.framework == "torch":
        import torch

        torch.manual_seed(0)
    else:
        import mindspore

        mindspore.set_seed(0)


def equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


# Training with it is training without it.


@pytest.fixture
def trained(engine):
    """Return a function that trains a network from a seed and gives the network and its numbers."""

    def train(callbacks, data, wrap=lambda network: network, **options):
        seed(engine)
        network = engine.attending()
        wrapped = wrap(network)
        model = dt.Model(wrapped, engine.squared_error(), engine.adam(network, 0.01), **options)
        model.train(1, data, callbacks)
        return network, state_of(engine, network)

    return train


def test_weights_are_bit_equal_after_fifty_steps(engine, trained):
    """With dropout, a batch norm and, on MindSpore, a count that goes on in evaluation too."""
    data = sequences(50)
    grad_norm = Seen(lambda context: context.grad_norm, needs=TransformerMonitor.needs)
    _, off = trained(grad_norm, data)
    monitor = TransformerMonitor(log_file="attention.jsonl", attention_interval=3, attention_samples=4)
    network, on = trained([monitor, grad_norm], data)
    equal(off, on)
    rows = rows_of("attention.jsonl")
    assert [row["step"] for row in rows if "attention" in row] == list(range(1, 51, 3))
    assert grad_norm.values[:50] == grad_norm.values[50:]
    assert [row["grad_norm"] for row in rows] == grad_norm.values[:50]
    # The weights of a sample are those that its step is about to use.
    assert len({row["attention"][0]["attention_entropy"] for row in rows if "attention" in row}) == 17
    assert [(row["layer"], row["head"]) for row in rows[0]["attention"]] == [(0, 0), (0, 1)]
    if engine.framework == "torch":
        copy.deepcopy(network)
        pickle.dumps(network)


@pytest.mark.torch
def test_a_compiled_network_is_not_compiled_again(torch_engine):
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    data = sequences(20)
    outcomes = []
    for callbacks in ([], [TransformerMonitor(attention_interval=3, attention_samples=4)]):
        torch._dynamo.reset()
        seed(torch_engine)
        counter = CompileCounterWithBackend("aot_eager")
        network = torch_engine.attending()
        compiled = torch.compile(network, backend=counter)
        model = dt.Model(compiled, torch.nn.MSELoss(), torch.optim.AdamW(network.parameters(), 0.01))
        model.train(1, data, callbacks)
        outcomes.append((state_of(torch_engine, network), counter.frame_count, torch.get_rng_state()))
        torch._dynamo.reset()
    (off, frames, state), (on, frames_with, state_with) = outcomes
    equal(off, on)
    assert frames == frames_with > 0
    assert torch.equal(state, state_with)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:BatchNorm")
@pytest.mark.parametrize(
    "options", [{"amp": "bf16"}, {"amp": "fp16"}, {"accumulate_steps": 3, "clip_norm": 0.5}], ids=str
)
def test_states_of_random_numbers_and_layers_stay(options, torch_engine):
    import torch

    outcomes = []
    for callbacks in ([], TransformerMonitor(attention_interval=2, attention_samples=2)):
        seed(torch_engine)
        network = torch_engine.attending()
        model = dt.Model(network, torch.nn.MSELoss(), torch.optim.SGD(network.parameters(), 0.1), **options)

        def freeze(context, network=network):
            network.norm.eval()
            network.attention.eval()

        frozen = At("on_train_begin", freeze)
        model.train(1, sequences(7), [frozen, *([callbacks] if callbacks else [])])
        hooks = [
            value
            for module in network.modules()
            for name, value in vars(module).items()
            if "_hooks" in name and value
        ]
        modes = [module.training for module in network.modules()]
        random_states = repr(random.getstate()), repr(np.random.get_state()), torch.get_rng_state().tolist()
        outcomes.append((modes, hooks, random_states))
        weights = state_of(torch_engine, network)
        outcomes[-1] += ({name: value.tolist() for name, value in weights.items()},)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0].count(False) == 3
    assert outcomes[0][1] == []


@pytest.mark.torch
def test_live_tensors_do_not_grow(torch_engine):
    """Case H41: 90 steps with a logger, a trainer and a monitor."""
    import torch

    live = {}

    def count(context):
        if context.step in (10, 90):
            gc.collect()
            tensors = [held for held in gc.get_objects() if issubclass(type(held), torch.Tensor)]
            live[context.step] = sum(t.grad_fn is not None for t in tensors), len(tensors)

    network = torch_engine.attending()
    model = dt.Model(network, torch.nn.MSELoss(), torch_engine.adam(network, 0.001))
    callbacks = [
        StepLogger(log_interval=100),
        SmartTrainer(patience=100),
        TransformerMonitor(log_file="attention.jsonl", attention_interval=3),
        At("on_train_step_end", count),
    ]
    model.train(1, sequences(90), callbacks)
    # Growth alone: what other tests have left may go meanwhile.
    assert live[90][0] - live[10][0] <= 2
    assert live[90][1] - live[10][1] <= 2


RANKS = """
import sys
sys.path.insert(0, {support!r})
import torch
import torch.distributed as dist
from engines import ENGINES, sequences
from dualtrain.callbacks import TransformerMonitor
import dualtrain as dt

dist.init_process_group("gloo")
outcomes = []
for rank in (None, "main", "all"):
    torch.manual_seed(0)
    network = ENGINES["torch"]().attending()
    wrapped = torch.nn.parallel.DistributedDataParallel(network)
    model = dt.Model(wrapped, torch.nn.MSELoss(), torch.optim.SGD(network.parameters(), 0.1))
    monitor = rank and TransformerMonitor(
        log_file=f"{{rank}}.jsonl", attention_interval=2, attention_samples=2, rank=rank
    )
    model.train(1, sequences(7)[dist.get_rank():][:5], monitor)
    outcomes.append({{name: value.tolist() for name, value in network.state_dict().items()}})
assert outcomes[0] == outcomes[1] == outcomes[2]
open(f"rank{{dist.get_rank()}}.txt", "w").write("equal")
dist.destroy_process_group()
"""


@pytest.mark.torch
def test_two_processes_sample_together(tmp_path):
    folder = run_two_ranks(RANKS.format(support=str(SUPPORT)), tmp_path)
    assert [(folder / f"rank{i}.txt").read_text() for i in (0, 1)] == ["equal"] * 2
    logs = sorted(p.name for p in folder.glob("*.jsonl"))
    assert logs == ["all.jsonl", "all.rank1.jsonl", "main.jsonl"]
    for log in logs:
        assert [row["step"] for row in rows_of(folder / log)] == [1, 2, 3, 4, 5]
        assert [row["step"] for row in rows_of(folder / log) if "attention" in row] == [1, 3, 5]


# What it records.


def test_uniform_attention_and_a_layer_that_is_not_there(engine):
    """Case H39: four positions that are alike. What is refused is refused before the weights move."""
    network = engine.attending()
    data = [(np.tile(np.float32([1, -1, 2, 0, 1, 3, -2, 1]), (6, 4, 1)), np.ones(6, np.float32))] * 4
    monitor = TransformerMonitor(log_file="attention.jsonl")
    model = dt.Model(network, engine.squared_error(), engine.sgd(network, 0.01))
    before = state_of(engine, network)
    expected = r"names layer 99, but the network has 1 attention layers: 0 \(attention\)"
    with pytest.raises(ArgumentValueError, match=expected):
        model.train(1, data, TransformerMonitor([0, 99]))
    equal(before, state_of(engine, network))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.train(1, data, monitor)
    rows = rows_of("attention.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["grad_norm"] > 0 and row["grad_norm_clipped"] == row["grad_norm"] for row in rows)
    fields = ["step", "epoch", "global_step", "grad_norm", "grad_norm_clipped"]
    assert [list(row) for row in rows[1:]] == [[*fields, "timestamp"]] * 3
    assert list(rows[0]) == [*fields, "attention", "timestamp"]
    assert rows[0]["attention"] == [
        {
            "layer": 0,
            "head": head,
            "attention_entropy": close(math.log(4)),
            "attention_max": close(0.25),
            "attention_first": close(0.25),
            "attention_distance": close((0 + 1 + 2 + 3 + 1 + 0 + 1 + 2) / 8),
        }
        for head in (0, 1)
    ]
    [layer] = monitor.attention
    assert (layer.layer, layer.name) == (0, "attention")
    arrays = read_log("attention.jsonl").arrays()
    assert list(arrays) == [1]
    assert list(arrays[1]) == ["layer0"]
    np.testing.assert_allclose(arrays[1]["layer0"], np.full((2, 4), 0.25), atol=1e-6)

    plane = engine.plane()
    model = dt.Model(plane, engine.loss_fn(), engine.sgd(plane, 0.1))
    with pytest.warns(UserWarning, match=NONE_FOUND) as caught:
        model.train(
            1, columns((3, 4), (6, 8)), TransformerMonitor(log_file="none.jsonl", attention_interval=1)
        )
    assert len([w for w in caught if NONE_FOUND in str(w.message)]) == 1
    rows = rows_of("none.jsonl")
    assert [(row["step"], row["global_step"], row["grad_norm"]) for row in rows] == [
        (1, 1, close(5)),
        (2, 2, close(10)),
    ]
    assert not any("attention" in row for row in rows)


class Uniform:
    """An ``attention_fn``: one layer of one head, uniform over so many keys; keeps what it was given."""

    def __init__(self, engine, keys=4):
        self.p = engine.as_tensor(np.full((1, 1, keys, keys), 1 / keys, np.float32))
        self.given = []

    def __call__(self, network, batch):
        parts = batch.items() if hasattr(batch, "items") else enumerate(batch)
        self.given.append({key: tuple(part.shape) for key, part in parts})
        return [self.p]


def train_plane(engine, monitor, *pairs, others=(), **options):
    """Train a network whose gradients are the pairs."""
    network = engine.plane()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.1), **options)
    model.train(1, Stream(columns(*pairs)), [monitor, *others])
    return network


def test_updates_and_samples_in_windows_that_are_clipped(engine):
    """Windows of two batches with means (3, 4) and (6, 8), and a last one of one; a sample every three."""
    monitor = TransformerMonitor(
        log_file="log.jsonl", attention_interval=3, attention_fn=Uniform(engine), attention_samples=None
    )
    pairs = (6, 0), (0, 8), (12, 0), (0, 16), (0.3, 0.4)
    train_plane(engine, monitor, *pairs, accumulate_steps=2, clip_norm=2.5)
    rows = rows_of("log.jsonl")
    assert [
        (row["step"], row["global_step"], row["grad_norm"], row["grad_norm_clipped"], "attention" in row)
        for row in rows
    ] == [
        (1, 0, None, None, True),
        (2, 1, close(5), close(2.5), False),
        (4, 2, close(10), close(2.5), True),
        (5, 3, close(0.5), close(0.5), False),
    ]
    assert list(read_log("log.jsonl").arrays()) == [1, 4]


def test_grad_interval_counts_updates(engine):
    monitor = TransformerMonitor(
        [0], log_file="log.jsonl", grad_interval=2, attention_interval=100, attention_fn=Uniform(engine)
    )
    train_plane(engine, monitor, *[(3, 4)] * 9, accumulate_steps=2)
    assert [(row["step"], row["grad_norm"]) for row in rows_of("log.jsonl")] == [
        (1, None),
        (2, close(5)),
        (6, close(5)),
        (9, close(5)),
    ]


def test_warnings_once_an_episode(engine, caplog):
    pairs = (3, 4), (3e-5, 4e-5), (3e-6, 0), (3, 4), (3e4, 0), (4e5, 0), (math.nan, 1), (3, 4), (0, 0)
    monitor = TransformerMonitor(log_file="log.jsonl", attention_fn=Uniform(engine))
    with caplog.at_level(logging.WARNING, "dualtrain"):
        train_plane(engine, monitor, *pairs)
    said = [record.getMessage() for record in caplog.records if "gradient norm" in record.getMessage()]
    assert [(message.split(":")[0], message.split(" is ")[1].split(":")[0]) for message in said] == [
        ("step 2", "vanishing"),
        ("step 5", "exploding"),
        ("step 7", "not finite."),
        ("step 9", "vanishing"),
    ]
    row = rows_of("log.jsonl")[6]
    assert (row["grad_norm"], row["nonfinite"]["grad_norm"]) == (None, "nan")


def test_an_overflow_of_half_precision_is_a_row_and_no_alarm(engine, caplog):
    monitor = TransformerMonitor(log_file="log.jsonl", attention_fn=Uniform(engine))
    with caplog.at_level(logging.WARNING, "dualtrain"):
        train_plane(engine, monitor, (0.03, 0.04), (math.inf, 1), (0.06, 0.08), amp="fp16")
    rows = rows_of("log.jsonl")
    assert [(row["global_step"], row["grad_norm"]) for row in rows] == [
        (1, close(0.05, rel=1e-3)),
        (1, None),
        (2, close(0.1, rel=1e-3)),
    ]
    assert "grad_norm" in rows[1]["nonfinite"]
    assert not [record for record in caplog.records if "gradient norm" in record.getMessage()]


def test_without_a_log_numbers_reach_the_rows_of_a_logger(engine):
    monitor = TransformerMonitor(attention_interval=2, attention_fn=Uniform(engine))
    train_plane(engine, monitor, *[(3, 4)] * 3, others=[StepLogger("log.jsonl", 1)])
    rows = rows_of("log.jsonl")
    assert [(row["grad_norm"], row["grad_norm_clipped"]) for row in rows] == [(close(5), close(5))] * 3
    assert [row.get("attention_entropy/0") for row in rows] == [
        close(math.log(4)),
        None,
        close(math.log(4)),
    ]
    assert [row.get("attention_max/0") for row in rows] == [close(0.25), None, close(0.25)]


class Failure(Exception):
    pass


def fail(context):
    raise Failure


@pytest.mark.torch
def test_runs_one_after_another(torch_engine):
    engine = torch_engine
    monitor = TransformerMonitor(log_file="log.jsonl", attention_interval=2, attention_fn=Uniform(engine))
    copies = []

    def copy_it(context):
        for twin in (copy.deepcopy(monitor), copy.copy(monitor)):
            assert (twin.attention, twin.state_dict()) == ([], {"rows": 0})
            copies.append(twin)

    train_plane(engine, monitor, (3, 4), (3, 4), (3, 4), others=[At("on_train_step_end", copy_it, 2)])
    assert [row["step"] for row in rows_of("log.jsonl")] == [1, 2, 3]
    state = json.loads(json.dumps(monitor.state_dict()))
    assert state == {"rows": 3}
    with pytest.raises(Failure):
        train_plane(engine, monitor, (3, 4), (3, 4), (3, 4), others=[At("on_train_step_end", fail, 2)])
    assert [row["step"] for row in rows_of("log.1.jsonl")] == [1, 2, 3]
    assert [row["step"] for row in rows_of("log.jsonl")] == [1, 2]
    resumed = copies[0]
    resumed.load_state_dict(state)
    train_plane(engine, resumed, (3, 4))
    assert [row["step"] for row in rows_of("log.jsonl")] == [1, 2, 1]
    train_plane(engine, resumed, (3, 4))  # not resumed: a log of its own
    assert [row["step"] for row in rows_of("log.jsonl")] == [1]
    assert [row["step"] for row in rows_of("log.2.jsonl")] == [1, 2, 1]
    assert ["attention" in row for row in rows_of("log.jsonl")] == [True]


@pytest.mark.torch
def test_pickling_while_running(torch_engine):
    """Case H34: the copy has the settings, and the running log is unharmed."""
    monitor = TransformerMonitor([0], 1e-4, log_file="log.jsonl", attention_interval=2)
    twins = []

    def pickle_it(context):
        twins.append(pickle.loads(pickle.dumps(monitor)))

    network = torch_engine.attending()
    model = dt.Model(network, torch_engine.squared_error(), torch_engine.sgd(network, 0.1))
    model.train(1, sequences(3), [monitor, At("on_train_step_end", pickle_it, 2)])
    assert repr(twins) == repr([monitor])
    assert [row["step"] for row in rows_of("log.jsonl")] == [1, 2, 3]
    model.train(1, sequences(2), twins)
    assert [row["step"] for row in rows_of("log.jsonl")] == [1, 2]


# Nonsense, and batches of all kinds.


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"monitor_layers": [-1]}, ArgumentValueError),
        ({"monitor_layers": [1, 1]}, ArgumentValueError),
        ({"monitor_layers": []}, ArgumentValueError),
        ({"monitor_layers": ["0"]}, ArgumentTypeError),
        ({"monitor_layers": "0"}, ArgumentTypeError),
        ({"monitor_layers": 0}, ArgumentTypeError),
        ({"monitor_layers": [True]}, ArgumentTypeError),
        ({"grad_norm_threshold": -1}, ArgumentValueError),
        ({"grad_norm_threshold": 2e3}, ArgumentValueError),
        ({"grad_norm_threshold": math.nan}, ArgumentValueError),
        ({"explosion_threshold": 1e-4}, ArgumentValueError),
        ({"grad_interval": 0}, ArgumentValueError),
        ({"attention_interval": 1.5}, ArgumentTypeError),
        ({"attention_samples": 0}, ArgumentValueError),
        ({"attention_fn": 3}, ArgumentTypeError),
        ({"log_file": 3}, ArgumentTypeError),
        ({"rank": "each"}, ArgumentValueError),
    ],
    ids=str,
)
def test_arguments_are_checked(arguments, error):
    with pytest.raises(error, match="TransformerMonitor"):
        TransformerMonitor(**arguments)


def test_a_function_that_gives_nonsense_is_refused_before_the_weights_move(engine):
    network = engine.weight()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network))
    for shape, value in (((4, 4), 0.25), ((1, 1, 4, 4), 0.5), ((1, 1, 4, 4), -0.25)):
        wrong = engine.as_tensor(np.full(shape, value, np.float32))
        monitor = TransformerMonitor(attention_fn=lambda network, batch, wrong=wrong: [wrong])
        with pytest.raises(ArgumentValueError, match="attention_fn has to return"):
            model.train(1, ones(2), monitor)
    assert engine.value(network) == 1
    good = engine.as_tensor(np.full((1, 1, 4, 4), 0.25, np.float32))
    later = iter([[good], [engine.as_tensor(np.float32([1]))]])
    monitor = TransformerMonitor(attention_interval=1, attention_fn=lambda network, batch: next(later))
    with pytest.warns(UserWarning, match="could not look at attention"):  # too late to end the run for it
        model.train(1, ones(3), monitor)
    assert engine.value(network) == close(0.7)


def test_a_step_that_cannot_take_a_part_of_a_batch(engine):
    """A function as train_step that wants six samples: it gets whole batches, or there are no samples."""
    network = engine.attending()
    step = engine.step_function("of_six")
    model = dt.Model(network, None, engine.sgd(network, 0.1), train_step=step)
    for samples, said in ((None, 0), (2, 1)):
        before = state_of(engine, network)
        file = f"{samples}.jsonl"
        monitor = TransformerMonitor(log_file=file, attention_interval=1, attention_samples=samples)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.train(1, sequences(3), monitor)
        assert len([w for w in caught if "could not look at attention" in str(w.message)]) == said
        assert ["attention" in row for row in rows_of(file)] == [said == 0] * 3
        assert all(row["grad_norm"] > 0 for row in rows_of(file))
        assert not np.array_equal(before["out.weight"], state_of(engine, network)["out.weight"])


@pytest.mark.parametrize(
    ("size", "samples", "taken"), [(6, 2, 2), (6, None, 6), (6, 8, 6), (1, 8, 1)], ids=str
)
def test_how_many_samples_are_taken(size, samples, taken, engine):
    uniform = Uniform(engine)
    network = engine.plane()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.1))
    monitor = TransformerMonitor(attention_samples=samples, attention_fn=uniform, attention_interval=2)
    model.train(1, [(np.ones((size, 2), np.float32), np.zeros(size, np.float32))] * 3, monitor)
    assert uniform.given == [{0: (taken, 2), 1: (taken,)}] * 2


def test_batches_that_are_mappings(engine):
    uniform = Uniform(engine)
    network = engine.weight()
    model = dt.Model(network, None, engine.sgd(network), train_step=engine.step_function("named"))
    batch = {"x": np.ones(3, np.float32), "label": np.zeros(3, np.float32)}
    model.train(1, [batch] * 2, TransformerMonitor(attention_samples=2, attention_fn=uniform))
    assert uniform.given == [{"x": (2,), "label": (2,)}]


@pytest.mark.torch
def test_sequences_that_come_first(torch_engine):
    """Their length is not the number of samples, so the whole batch is taken."""
    import torch

    network = torch.nn.MultiheadAttention(8, 2)

    def step(network, batch):
        x, label = batch
        return ((network(x, x, x)[0].mean((0, 2)) - label) ** 2).mean()

    shapes = []
    monitor = TransformerMonitor(attention_samples=2)
    keep = At("on_train_step_end", lambda context: shapes.append(monitor.attention[0].per_key.shape))
    model = dt.Model(network, None, torch_engine.sgd(network), train_step=step)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.train(1, [(x.swapaxes(0, 1), label) for x, label in sequences(1)], [monitor, keep])
    assert shapes == [(2, 4)]


@pytest.mark.torch
def test_manual_optimisation_needs_a_function(torch_engine):
    network = torch_engine.plane()

    def step(network, batch, run_context):
        loss = torch_engine.loss_fn()(network(batch[0]), batch[1])
        run_context.zero_grad()
        run_context.backward(loss)
        run_context.optimizer_step()
        return loss

    optimizer = torch_engine.sgd(network, 0.1)
    model = dt.Model(network, None, optimizer, train_step=step, automatic_optimization=False)
    with pytest.raises(RunStateError, match="pass a function"):
        model.train(1, columns((3, 4)), TransformerMonitor())
    assert torch_engine.pair(network) == (1, 1)
    uniform = Uniform(torch_engine)
    monitor = TransformerMonitor(log_file="log.jsonl", attention_fn=uniform)
    model.train(1, columns((3, 4)), monitor)
    assert [(row["grad_norm"], "attention" in row) for row in rows_of("log.jsonl")] == [(close(5), True)]
    assert len(uniform.given) == 1


def test_a_resumed_run_that_ends_before_its_first_row_still_leaves_a_log_to_continue():
    monitor = TransformerMonitor(log_file="monitor.jsonl")
    with pytest.warns(UserWarning, match=NONE_FOUND):
        FakeLoop([1.0]).run(monitor)
    again = TransformerMonitor(log_file="monitor.jsonl")
    again.load_state_dict(monitor.state_dict())
    states = []
    keep = At("on_train_step_begin", lambda context: states.append(again.state_dict()))
    with pytest.warns(UserWarning, match=NONE_FOUND):
        FakeLoop([1.0]).run([again, keep])
    assert states == [monitor.state_dict()]
    assert len(read_log("monitor.jsonl").records) == 2


@pytest.mark.parametrize("log_file", [None, "log.jsonl"])
def test_rows_go_to_sinks_and_an_evaluation_adds_none(log_file):
    memory, logged = MemorySink(), []
    monitor = TransformerMonitor(log_file=log_file, grad_interval=2, sinks=[memory])
    watch = At("on_train_step_end", lambda c: logged.append(c.logged_since(0)[1]))
    loop = FakeLoop([1.0, 2.0], epochs=2, gradients={"weight": [3.0]}, evaluations=[{"acc": 1.0}] * 2)
    with pytest.warns(UserWarning, match="no attention"):
        loop.run([monitor, watch])
    assert [(one.step, one.mode, one.values["grad_norm"]) for one in memory.records] == [
        (1, "train", 3.0),
        (3, "train", 3.0),
    ]
    assert logged == [{}] * 4
    if log_file is not None:
        assert [one.step for one in read_log(log_file).records] == [1, 3]
