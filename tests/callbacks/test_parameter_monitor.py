"""ParameterMonitor: weight norms, gradient norms and update ratios, on values that are known by hand.

A ``plane`` network has weights ``a`` and ``b`` of 1, and its gradients are the two numbers of a batch.
"""

import copy
import json
import math
import weakref
from pathlib import Path

import numpy as np
import pytest
from closeness import close
from engines import At, Seen, Stream, batches, columns

import dualtrain as dt
from dualtrain.backends import find_backend
from dualtrain.callbacks import ParameterMonitor, StepLogger
from dualtrain.errors import ArgumentTypeError, ArgumentValueError, CapabilityError, RunStateError
from dualtrain.logs import read_log
from dualtrain.protocol import Capability
from dualtrain.sinks import MemorySink
from dualtrain.testing import FakeLoop

INF = math.inf


def row(group, weight_norm, grad_norm, change):
    """A group's part of a sample, from what is known by hand."""
    return {
        "group": group,
        "weight_norm": close(weight_norm),
        "grad_norm": close(grad_norm),
        "update_ratio": close(change / weight_norm, rel=1e-5),
    }


def samples_of(monitor):
    """A callback that keeps what the monitor has last, at each step, and its list."""
    seen = Seen(lambda c: monitor.last)
    return seen, seen.values


def watch(
    engine, network, data, *, optimizer=None, interval=1, patterns=None, epochs=1, also=(), **options
):
    """Train and return the samples of each step, None before the first."""
    monitor = ParameterMonitor(interval, patterns)
    seen, samples = samples_of(monitor)
    optimizer = optimizer or engine.sgd(network, 0.1)
    dt.Model(network, engine.loss_fn(), optimizer, **options).train(epochs, data, [monitor, seen, *also])
    return samples


# Values, on every engine.


def test_the_rows_of_plain_gradient_descent(engine):
    """From 1 by .1 * 3 and .1 * 4, twice; then in a second run of the Model, and one without a monitor."""
    network = engine.plane()
    model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.1))
    for a, b in ((1, 1), (0.4, 0.2)):
        model.train(1, columns((3, 4), (3, 4)), ParameterMonitor(1, log_file="parameters.jsonl"))
        log = read_log("parameters.jsonl")
        assert [record.step for record in log.records] == [1, 2]
        assert [record.epoch for record in log.records] == [1, 1]
        assert [record.values for record in log.records] == [
            {
                "global_step": 1,
                "parameters": (row("a", a, 3, 0.3), row("b", b, 4, 0.4)),
                "dead_gradients": (),
            },
            {
                "global_step": 2,
                "parameters": (row("a", a - 0.3, 3, 0.3), row("b", abs(b - 0.4), 4, 0.4)),
                "dead_gradients": (),
            },
        ]
    assert Path("parameters.1.jsonl").exists()
    model.train(1, columns((3, 4)))
    assert engine.pair(network) == close((-0.5, -1.0))


def test_ratios_follow_momentum(engine):
    """The second update moves by lr * (g + .9 g), the third by lr * (0 + .9 * 1.9 g)."""
    network = engine.plane()
    optimizer = engine.sgd(network, 0.1, momentum=0.9)
    samples = watch(engine, network, columns((3, 4), (3, 4), (0, 4)), optimizer=optimizer)
    assert [sample["parameters"] for sample in samples] == [
        [row("a", 1, 3, 0.3), row("b", 1, 4, 0.4)],
        [row("a", 0.7, 3, 0.57), row("b", 0.6, 4, 0.76)],
        [row("a", 0.13, 0, 0.513), row("b", 0.16, 4, 1.084)],
    ]
    assert [sample["dead_gradients"] for sample in samples] == [[], [], ["a"]]


def test_adams_first_update_is_the_rate_whatever_the_gradient_is(engine):
    network = engine.plane()
    [sample] = watch(engine, network, columns((3, 4e-3)), optimizer=engine.adam(network, 0.01))
    norms = [(p["group"], p["weight_norm"], p["grad_norm"]) for p in sample["parameters"]]
    assert norms == [("a", 1, close(3)), ("b", 1, close(4e-3))]
    assert [p["update_ratio"] for p in sample["parameters"]] == [pytest.approx(0.01, rel=1e-4)] * 2


def test_a_window_is_sampled_at_its_end_with_norms_from_before_clipping(engine):
    """A window of 3 with mean (3, 4), one of 2 with mean (6, 8), each clipped to 2.5, that is (1.5, 2)."""
    data = columns((9, 0), (0, 6), (0, 6), (12, 0), (0, 16))
    network = engine.plane()
    first = [row("a", 1, 3, 0.15), row("b", 1, 4, 0.2)]
    second = [row("a", 0.85, 6, 0.15), row("b", 0.8, 8, 0.2)]
    samples = watch(engine, network, Stream(data), accumulate_steps=3, clip_norm=2.5)
    assert [s and (s["step"], s["global_step"], s["parameters"]) for s in samples] == [
        None,
        None,
        (3, 1, first),
        (3, 1, first),
        (5, 2, second),
    ]


def test_gradients_that_are_zero_or_missing_are_named(engine):
    network = engine.idle()
    if engine.framework == "torch":
        import torch

        optimizer = torch.optim.SGD(network.parameters(), 0.1)  # it has the frozen weight too
    else:
        optimizer = engine.sgd(network, 0.1)
    [sample] = watch(engine, network, batches((5, 0)), optimizer=optimizer)
    assert sample["parameters"] == [
        row("used", 1, 5, 0.5),
        row("times_zero", 2, 0, 0),
        row("unused", 3, 0, 0),
    ]
    assert sample["dead_gradients"] == ["times_zero", "unused"]


def test_a_weight_that_two_layers_share_counts_once(engine):
    """w * w * 3 at w = 2 has the gradient 12."""
    [sample] = watch(engine, engine.tied(), [(np.array([[3]], np.float32), np.zeros((1, 1), np.float32))])
    assert sample["parameters"] == [row("first", 2, 12, 1.2)]


def test_a_parameter_that_the_optimizer_does_not_have_is_left_out(engine):
    network = engine.plane()
    if engine.framework == "torch":
        import torch

        optimizer = torch.optim.SGD([network.b], 0.1)
    else:
        import mindspore

        optimizer = mindspore.nn.SGD([network.b], 0.1)
    names = Seen(lambda c: list(c.trained_parameters))
    [sample] = watch(engine, network, columns((3, 4)), optimizer=optimizer, also=[names])
    assert sample["parameters"] == [row("b", 1, 4, 0.4)]
    assert names.values == [["b"]]


def test_an_update_that_overflowed_is_not_sampled_but_the_next_one_is(engine):
    """Three windows, of which the first has an infinity."""
    network = engine.plane()
    data = columns((1, 1), (INF, 1), (3, 4), (3, 4), (3, 4), (3, 4))
    samples = watch(engine, network, data, interval=100, amp="fp16", accumulate_steps=2)
    assert samples[:3] == [None] * 3
    [sample] = [s for s in samples[3:] if s is not samples[3]] or samples[3:4]
    assert (sample["step"], sample["global_step"]) == (4, 1)
    a, b = sample["parameters"]
    assert (a["weight_norm"], b["weight_norm"]) == (1, 1)
    assert (a["grad_norm"], b["grad_norm"]) == pytest.approx((3, 4), rel=1e-3)
    assert (a["update_ratio"], b["update_ratio"]) == pytest.approx((0.3, 0.4), rel=1e-3)


def test_tiny_gradients_are_not_dead(engine):
    """The square of 1e-25 is zero in float32."""
    [sample] = watch(engine, engine.plane(), columns((1e-25, 4)))
    assert sample["dead_gradients"] == []
    assert sample["parameters"][0]["grad_norm"] == pytest.approx(1e-25, rel=1e-6, abs=0)


def trained(engine, callbacks):
    """Train a network with batch norm and dropout for 20 steps; return its losses and weights."""
    random = np.random.default_rng(0)
    data = [
        (random.normal(size=(8, 4)).astype(np.float32), random.normal(size=(8, 1)).astype(np.float32))
        for _ in range(20)
    ]
    if engine.framework == "torch":
        import torch

        torch.manual_seed(1)
    else:
        import mindspore

        mindspore.set_seed(1)  # of the dropout, when it is made
        mindspore.manual_seed(1)
    network = engine.perceptron()
    backend = find_backend(network)
    initial = {
        name: random.uniform(0.1, 0.5, tuple(tensor.shape)).astype(np.float32)
        for name, tensor in backend.weights(network).items()
    }
    backend.assign_weights(network, initial)
    losses = Seen(lambda c: c.loss)
    optimizer = engine.sgd(network, 0.05, momentum=0.9)
    dt.Model(network, engine.squared_error(), optimizer).train(1, data, [*callbacks, losses])
    weights = {name: backend.to_numpy(tensor) for name, tensor in backend.weights(network).items()}
    return losses.values, weights


def test_training_is_bit_equal_with_and_without(engine):
    monitor = ParameterMonitor(3)
    seen, samples = samples_of(monitor)
    losses, weights = trained(engine, [monitor, seen])
    expected_losses, expected_weights = trained(engine, [])
    assert losses == expected_losses
    assert len(set(losses)) > 10
    for name, values in expected_weights.items():
        assert np.array_equal(weights[name], values), name
    steps = dict.fromkeys(sample["step"] for sample in samples)
    assert list(steps) == [1, 4, 7, 10, 13, 16, 19]
    assert [p["group"] for p in monitor.last["parameters"]] == ["hidden", "norm", "out"]


# Which parameters, which steps, and where to: without a framework.

LAYERS = {
    "embed": [2.0],
    "blocks.0.qkv.weight": [3.0, 0.0],
    "blocks.0.qkv.bias": [4.0],
    "head.weight": [0.0],
}


def sample_of(patterns=None, **options):
    monitor = ParameterMonitor(1, patterns)
    FakeLoop([1.0], **{"parameters": LAYERS, **options}).run(monitor)
    return monitor.last


def test_weight_and_bias_of_a_module_are_a_group():
    """The gradients are 1 each and the rate .1."""
    first, second, third = sample_of()["parameters"]
    assert first == row("embed", 2, 1, 0.1)
    assert second == row("blocks.0.qkv", 5, math.sqrt(3), 0.1 * math.sqrt(3))
    assert (third["group"], third["weight_norm"], third["update_ratio"]) == ("head", 0.0, INF)


def test_weights_of_zero_that_stand_still_have_a_ratio_of_zero():
    sample = sample_of(gradients={"head.weight": [0.0]})
    assert sample["parameters"][2] == {
        "group": "head",
        "weight_norm": 0,
        "grad_norm": 0,
        "update_ratio": 0,
    }
    assert sample["dead_gradients"] == ["head.weight"]


def test_groups_by_pattern_may_overlap_and_leave_parameters_out():
    sample = sample_of({"bias": "bias$", "attention": r"^blocks\.\d+\.qkv"}, gradients={"embed": [0.0]})
    assert sample["parameters"] == [
        row("bias", 4, 1, 0.1),
        row("attention", 5, math.sqrt(3), 0.1 * math.sqrt(3)),
    ]
    assert sample["dead_gradients"] == []  # embed is dead, and not watched


def test_expressions_in_a_sequence_name_their_groups():
    assert [p["group"] for p in sample_of((r"weight", r"^embed"))["parameters"]] == ["weight", "^embed"]


@pytest.mark.parametrize("patterns", [{"norms": "norm"}, ["embed", "norm"]], ids=str)
def test_a_pattern_that_matches_nothing_is_an_error_at_train_begin(patterns):
    Path("parameters.jsonl").write_text('{"step": 1}\n')
    monitor = ParameterMonitor(1, patterns, "parameters.jsonl")
    loop = FakeLoop([1.0], parameters={**LAYERS, "a": [1.0], "b": [1.0]})
    with pytest.raises(ArgumentValueError, match="'norm'") as caught:
        loop.run(monitor)
    message = str(caught.value)
    assert "embed, blocks.0.qkv.weight, blocks.0.qkv.bias, head.weight, a and 1 more" in message
    assert ("'norms'" in message) == isinstance(patterns, dict)
    assert loop.global_step == 0
    assert sorted(path.name for path in Path().iterdir()) == ["parameters.jsonl"]  # the log is untouched


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"interval": 0}, "interval"),
        ({"interval": 1.5}, "interval"),
        ({"patterns": "weight"}, "'weight'"),
        ({"patterns": 3}, "patterns"),
        ({"patterns": {}}, "empty"),
        ({"patterns": []}, "empty"),
        ({"patterns": [3]}, "3"),
        ({"patterns": {"a": None}}, "None"),
        ({"patterns": {1: "a"}}, "1"),
        ({"patterns": ["weight", "(bias"]}, r"\(bias"),
        ({"patterns": {"a": "*"}}, r"\*"),
        ({"log_file": 3}, "log_file"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_when_constructed(settings, words):
    with pytest.raises((ArgumentTypeError, ArgumentValueError), match=f"ParameterMonitor.*{words}"):
        ParameterMonitor(**settings)


def test_the_patterns_that_were_given_may_change_afterwards():
    patterns = {"all": "."}
    monitor = ParameterMonitor(patterns=patterns)
    patterns["none"] = "nothing"
    assert monitor.patterns == {"all": "."}


def steps_sampled(interval, losses, accumulate_steps=1, **options):
    monitor = ParameterMonitor(interval)
    seen, samples = samples_of(monitor)
    window = At("on_train_begin", lambda c: setattr(c, "accumulate_steps", accumulate_steps))
    FakeLoop(losses, **options).run([window, monitor, seen])
    return list(dict.fromkeys(sample["step"] for sample in samples if sample))


def test_the_first_update_is_sampled_and_then_every_interval_steps():
    assert steps_sampled(4, [1.0] * 5, epochs=3) == [1, 5, 9, 13]
    assert steps_sampled(50, [1.0] * 5) == [1]
    assert steps_sampled(1, [1.0] * 3) == [1, 2, 3]


def test_under_accumulation_the_update_that_follows_is_sampled():
    """Windows end at 3, 6, 7, 10, 13, 14; a sample is due at 1, 6 and 11."""
    assert steps_sampled(5, [1.0] * 7, accumulate_steps=3, epochs=2) == [3, 6, 13]


def test_without_a_file_a_logger_behind_it_has_the_numbers_in_its_row():
    FakeLoop([1.0, 1.0, 1.0, 1.0], parameters={"a.w": [2.0], "b.w": [4.0]}, gradients={"b.w": [0.0]}).run(
        [ParameterMonitor(3), StepLogger("log.jsonl", 1)]
    )
    log = read_log("log.jsonl")
    assert log.column("update_ratio/a") == ([1, 4], close([0.05, 0.1 / 1.7]))
    assert log.column("weight_norm/a") == ([1, 4], close([2, 1.7]))
    assert log.column("grad_norm/a") == ([1, 4], [1, 1])
    assert log.column("update_ratio/b") == ([1, 4], [0, 0])
    assert {name.partition("/")[2] for name in log.names if "/" in name} == {"a", "b"}


def test_with_a_file_the_log_of_another_has_none_of_them():
    FakeLoop([1.0]).run([ParameterMonitor(1, log_file="parameters.jsonl"), StepLogger("log.jsonl", 1)])
    [line] = Path("log.jsonl").read_text().splitlines()
    assert not [name for name in json.loads(line) if "/" in name]
    [line] = Path("parameters.jsonl").read_text().splitlines()
    assert list(json.loads(line)) == [
        "step",
        "epoch",
        "global_step",
        "parameters",
        "dead_gradients",
        "timestamp",
    ]


def test_a_row_with_infinities_reads_back():
    loop = FakeLoop([1.0], parameters={"a": [0.0], "b": [math.nan]})
    loop.run(ParameterMonitor(1, log_file="parameters.jsonl"))
    [record] = read_log("parameters.jsonl").records
    a, b = record.values["parameters"]
    assert (a["update_ratio"], a["weight_norm"]) == (INF, 0.0)
    assert math.isnan(b["update_ratio"])
    assert math.isnan(b["weight_norm"])


def test_a_resumed_run_continues_the_log():
    first = ParameterMonitor(1, log_file="parameters.jsonl")
    FakeLoop([1.0, 1.0]).run(first)
    second = ParameterMonitor(1, log_file="parameters.jsonl")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.last == first.last
    FakeLoop([1.0]).run(second)
    assert [record.step for record in read_log("parameters.jsonl").records] == [1, 2, 1]


def test_a_run_after_one_that_failed_starts_clean():
    monitor = ParameterMonitor(1, log_file="parameters.jsonl")
    with pytest.raises(ZeroDivisionError):
        FakeLoop([1.0] * 3).run([monitor, At("on_train_step_begin", lambda c: 1 / 0, step=3)])
    assert len(read_log("parameters.jsonl").records) == 2
    FakeLoop([1.0]).run(monitor)
    assert monitor.last["step"] == 1
    assert len(read_log("parameters.jsonl").records) == 1


def test_a_copy_in_mid_window_holds_no_weights():
    twins = []
    monitor = ParameterMonitor(1)
    FakeLoop([1.0]).run(
        [monitor, At("on_train_step_begin", lambda c: twins.append(copy.deepcopy(monitor)))]
    )
    assert not [name for name, value in vars(twins[0]).items() if value and name.startswith("_")]


def test_an_engine_without_the_norms_refuses_it():
    from third_backend import ArrayBackend

    with pytest.raises(CapabilityError, match="ParameterMonitor needs parameter_grad_norms"):
        dt.bus.EventBus(ParameterMonitor()).check_needs(
            ArrayBackend().capabilities() - {Capability.PARAMETER_GRAD_NORMS}, "arrays"
        )


# The copy of the weights: made for samples alone, and gone afterwards.


@pytest.fixture
def copies(monkeypatch):
    """Keep weak references to every copy of a weight that PyTorch's backend makes."""
    from dualtrain.backends.torch.backend import TorchBackend

    made, copy_parameters = [], TorchBackend.copy_parameters

    def noting(self, parameters):
        copied = copy_parameters(self, parameters)
        made.append({name: weakref.ref(tensor) for name, tensor in copied.items()})
        return copied

    monkeypatch.setattr(TorchBackend, "copy_parameters", noting)
    return made


def alive(copies):
    return sum(reference() is not None for references in copies for reference in references.values())


def test_weights_are_copied_once_a_sample_and_released_at_its_end(torch_engine, copies):
    """Windows of 2 over 5 batches; samples are due at 1 and 4: one copy of ``a`` each."""
    network = torch_engine.plane()
    monitor = ParameterMonitor(3, ["a"])
    counts = [
        Seen(lambda c: alive(copies), event) for event in ("on_train_step_begin", "on_train_step_end")
    ]
    model = dt.Model(network, torch_engine.loss_fn(), torch_engine.sgd(network), accumulate_steps=2)
    model.train(1, columns(*[(3, 4)] * 5), [monitor, *counts])
    assert [list(references) for references in copies] == [["a"], ["a"]]
    assert [count.values for count in counts] == [[1, 1, 0, 1, 0], [1, 0, 0, 0, 0]]


@pytest.mark.parametrize("event", ["on_train_step_begin", "on_after_backward", "on_train_step_end"])
def test_weights_are_released_after_an_error(torch_engine, copies, event):
    network = torch_engine.plane()
    model = dt.Model(network, torch_engine.loss_fn(), torch_engine.sgd(network), accumulate_steps=2)
    monitor = ParameterMonitor(1)
    with pytest.raises(ZeroDivisionError):
        model.train(1, columns((3, 4)), [monitor, At(event, lambda c: 1 / 0)])
    assert copies
    assert alive(copies) == 0


def test_gradients_are_measured_for_samples_alone(torch_engine, monkeypatch):
    from dualtrain.backends.torch.norms import Norms

    measured, norms = [], Norms.__init__

    def counting(self, tensors, **options):
        measured.append(len(tensors))
        norms(self, tensors, **options)

    monkeypatch.setattr(Norms, "__init__", counting)
    watch(torch_engine, torch_engine.plane(), columns(*[(3, 4)] * 5), interval=4)
    assert measured == [2, 2, 2] * 2  # gradients, weights, changes


# PyTorch.


def test_an_optimizer_that_overwrites_gradients_does_not_change_their_norms(torch_engine):
    import torch

    network = torch_engine.plane()
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, nesterov=True, foreach=True)
    [first, second] = watch(torch_engine, network, columns((3, 4), (3, 4)), optimizer=optimizer)
    assert first["parameters"] == [row("a", 1, 3, 0.57), row("b", 1, 4, 0.76)]
    assert second["parameters"][0] == row("a", 0.43, 3, 0.1 * (3 + 0.9 * 5.7))


def manual(torch_engine, train_step, data, **options):
    import torch

    network = torch_engine.plane()
    optimizers = {"of_a": torch.optim.SGD([network.a], 0.1), "of_b": torch.optim.SGD([network.b], 0.1)}
    monitor = ParameterMonitor(1)
    seen, samples = samples_of(monitor)
    model = dt.Model(
        network, None, optimizers, train_step=train_step, automatic_optimization=False, **options
    )
    model.train(1, data, [monitor, seen])
    return samples


def test_several_updates_in_a_batch_are_measured_over_the_batch(torch_engine):
    """``a`` is updated twice, by .3 and .6, of which the last one's gradient is shown; ``b`` natively."""

    def train_step(network, batch, run_context):
        for factor in (1, 2):
            run_context.zero_grad("of_a")
            loss = network(batch[0]).sum() * factor
            run_context.backward(loss)
            run_context.optimizer_step("of_a")
        optimizer = run_context.original_args()["optimizer"]["of_b"]
        optimizer.step()  # with gradients of 4 and of 8, added up
        optimizer.zero_grad()
        run_context.zero_grad("of_a")
        return loss

    [sample] = manual(torch_engine, train_step, columns((3, 4)))
    assert sample["parameters"] == [row("a", 1, 6, 0.9), row("b", 1, 12, 1.2)]
    assert sample["dead_gradients"] == []


def test_what_was_not_updated_in_a_batch_is_not_in_its_sample(torch_engine):
    """Otherwise a generator would seem dead where the discriminator alone is trained."""

    def train_step(network, batch, run_context):
        run_context.zero_grad("of_a")
        run_context.zero_grad("of_b")
        loss = network(batch[0]).sum()
        run_context.backward(loss)
        if run_context.step > 1:
            run_context.optimizer_step("of_b")
        return loss

    first, second = manual(torch_engine, train_step, columns((3, 4), (3, 4)), clip_norm=2.0)
    assert first is None
    assert second["step"] == 2
    assert second["parameters"] == [row("b", 1, 4, 0.2)]


def test_names_under_compile_are_those_of_the_network(torch_engine):
    import torch

    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    network[1] = torch.compile(network[1], backend="eager")
    compiled = torch.compile(network, backend="eager")
    [sample] = watch(torch_engine, compiled, [(torch.ones(1, 2), torch.zeros(1, 2))])
    assert [p["group"] for p in sample["parameters"]] == ["0", "1"]


@pytest.mark.parametrize(("dtype", "start"), [("bfloat16", 2**-9), ("float16", 2**-12)])
def test_norms_in_half_precision_are_reckoned_in_float32(torch_engine, dtype, start):
    """4113 gradients of 1, whose norm no half precision has; weights move to -1, by what it has not."""
    import torch

    network = torch.nn.Linear(4113, 1, bias=False).to(getattr(torch, dtype))
    torch.nn.init.constant_(network.weight, start)
    monitor = ParameterMonitor(1)
    model = dt.Model(network, lambda out, label: out.sum(), torch.optim.SGD(network.parameters(), 1.0))
    model.train(1, [(torch.ones(1, 4113, dtype=network.weight.dtype), torch.zeros(1))], monitor)
    assert torch.equal(network.weight, torch.full_like(network.weight, -1))
    norm = math.sqrt(4113)
    assert monitor.last["parameters"] == [row("weight", norm * start, norm, norm * (1 + start))]


def test_norms_of_large_tensors_are_exact(torch_engine):
    """torch's own norm is off by 2.6e-5 at two million numbers on a CPU, and by 2.3e-3 at 40 million."""
    import torch

    from dualtrain.backends.torch.norms import Norms

    tensors = [
        torch.randn(2_000_000),
        torch.randn(3, 1000).T,
        torch.zeros(0),
        None,
        torch.randn(2).double(),
    ]
    tiny = Norms([torch.full((3,), 1e-25)], exact_zeros=True)
    values, [largest] = Norms.read(Norms(tensors), tiny)
    assert largest == pytest.approx(1e-25, rel=1e-6, abs=0)
    wanted = [0.0 if t is None else float(torch.linalg.vector_norm(t.double())) for t in tensors]
    assert values == pytest.approx(wanted, rel=1e-6)


def test_sparse_gradients_have_norms(torch_engine):
    """Row 1 is looked up twice, row 0 once: gradients (2, 2) and (1, 1)."""
    import torch

    network = torch.nn.Embedding(3, 2, sparse=True)
    torch.nn.init.ones_(network.weight)
    monitor = ParameterMonitor(1)
    model = dt.Model(network, lambda out, label: out.sum(), torch.optim.SGD(network.parameters(), 0.1))
    model.train(1, [(torch.tensor([1, 1, 0]), torch.zeros(1))], monitor)
    norm = math.sqrt(10)
    assert monitor.last["parameters"] == [row("weight", math.sqrt(6), norm, 0.1 * norm)]


def test_a_parameter_that_is_frozen_in_mid_run_is_left_out_from_then_on(torch_engine):
    network = torch_engine.plane()
    freeze = At("on_train_step_begin", lambda c: network.a.requires_grad_(False), step=2)
    monitor = ParameterMonitor(1)
    seen, samples = samples_of(monitor)
    model = dt.Model(network, torch_engine.loss_fn(), torch_engine.sgd(network))
    model.train(1, columns((3, 4), (3, 4)), [freeze, monitor, seen])
    assert [[p["group"] for p in sample["parameters"]] for sample in samples] == [["a", "b"], ["b"]]


def test_norms_are_there_in_the_step_that_was_asked_for_alone(torch_engine):
    network = torch_engine.plane()
    ask = At("on_train_step_begin", lambda c: c.request_parameter_grad_norms(), step=2)
    seen = Seen(lambda c: c.parameter_grad_norms)
    model = dt.Model(network, torch_engine.loss_fn(), torch_engine.sgd(network))
    model.train(1, columns((3, 4), (6, 8), (3, 4)), [ask, seen])
    assert seen.values == [None, {"a": 6.0, "b": 8.0}, None]


# MindSpore.


def test_norms_that_nobody_needs_are_not_compiled_in(mindspore_engine):
    network = mindspore_engine.plane()
    model = dt.Model(network, mindspore_engine.loss_fn(), mindspore_engine.sgd(network), clip_norm=100.0)
    norms = Seen(lambda c: c.parameter_grad_norms)
    asking = At("on_train_step_end", lambda c: c.request_parameter_grad_norms())
    for _ in range(2):
        with pytest.raises(RunStateError, match=r"Capability\.PARAMETER_GRAD_NORMS"):
            model.train(1, columns((3, 4)), [norms, asking])
        model.train(1, columns((3, 4)), [norms, asking, ParameterMonitor(1)])
    assert norms.values == [None, {"a": 3.0, "b": 4.0}] * 2


# Sinks.


@pytest.mark.parametrize("log_file", [None, "log.jsonl"])
def test_rows_go_to_sinks_and_an_evaluation_adds_none(log_file):
    memory, logged = MemorySink(), []
    monitor = ParameterMonitor(interval=2, log_file=log_file, sinks=[memory])
    watch = At("on_train_step_end", lambda c: logged.append(c.logged_since(0)[1]))
    FakeLoop([1.0, 2.0], epochs=2, evaluations=[{"acc": 1.0}] * 2).run([monitor, watch])
    assert [(one.step, one.mode) for one in memory.records] == [(1, "train"), (3, "train")]
    assert memory.records[-1].values["parameters"] == monitor.last["parameters"]
    assert logged == [{}] * 4
    if log_file is not None:
        assert [one.step for one in read_log(log_file).records] == [1, 3]


def test_a_rank_that_does_not_write_hands_nothing_on(monkeypatch):
    memory, logged = MemorySink(), []

    def leave(run_context):
        monkeypatch.setattr(type(run_context.backend), "rank", lambda self: 1, raising=False)

    watch = At("on_train_step_end", lambda c: logged.append(c.logged_since(0)[1]))
    FakeLoop([1.0, 2.0]).run(
        [At("on_train_begin", leave), ParameterMonitor(interval=1, sinks=[memory]), watch]
    )
    assert (memory.records, logged) == ([], [{}, {}])
