"""Each private name of MindSpore that is used is taken away: training goes on without its feature."""

from __future__ import annotations

import importlib
import signal
from typing import Any

import numpy as np
import pytest
from engines import At, Seen, ones

import dualtrain as dt
from dualtrain.errors import ArgumentValueError, CapabilityError
from dualtrain.protocol import Capability

pytestmark = pytest.mark.mindspore

MODULES = [
    "mindspore.train.model",
    "mindspore.common",
    "mindspore.common.hook_handle",
    "mindspore.ops.function.nn_func",
    "_signal",
]


@pytest.fixture
def engine(mindspore_engine: Any) -> Any:
    return mindspore_engine


def make(engine: Any, **options: Any) -> tuple[Any, Any]:
    network = engine.weight()
    return network, dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.1), **options)


def take_away(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Hide names of modules from us alone: MindSpore itself needs most of them."""
    from dualtrain.backends.mindspore import borrowed

    def find(name: str) -> Any:
        return None if name in modules else importlib.import_module(name)

    monkeypatch.setattr(borrowed, "_module", find)


@pytest.mark.parametrize("module", MODULES)
def test_training_needs_none_of_the_modules(
    engine: Any, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_away(monkeypatch, module)
    before = signal.getsignal(signal.SIGINT)
    network, model = make(engine, clip_norm=0.5)
    model.train(1, ones(2))
    assert engine.value(network) == pytest.approx(0.9, abs=1e-5)
    with pytest.raises(ZeroDivisionError):
        model.train(1, ones(2), At("on_train_step_end", lambda c: 1 / 0))
    model.train(1, ones(1))
    assert engine.value(network) == pytest.approx(0.8, abs=1e-5)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("module", MODULES)
def test_attention_is_found_without_them(engine: Any, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for ``ops.softmax``, which is then no more watched; ``ops.Softmax`` still is."""
    import mindspore
    from networks_mindspore import Softmax

    scores = np.zeros((2, 1, 3, 4), np.float32)

    def look(kind: str) -> list[float]:
        from dualtrain.backends.mindspore.probes import sample_attention

        batch = (mindspore.Tensor(scores),)
        network = Softmax(kind)
        layers = sample_attention(network, lambda columns: network(*columns), batch, None, None)
        return [layer.entropy[0] for layer in layers]

    known = {kind: look(kind) for kind in ("function", "operator")}
    take_away(monkeypatch, module)
    assert known == {"function": pytest.approx([np.log(4)]), "operator": pytest.approx([np.log(4)])}
    assert look("operator") == known["operator"]
    assert look("function") == ([] if module.endswith("nn_func") else known["function"])


def test_softmax_is_replaced_during_a_probe_alone(engine: Any) -> None:
    from mindspore import ops
    from mindspore.ops.function import nn_func

    before = nn_func.softmax_impl, ops.Softmax.__call__
    _, model = make(engine)
    seen = Seen(lambda c: (c.attention(), (nn_func.softmax_impl, ops.Softmax.__call__))[1])
    model.train(1, ones(2), seen)
    assert seen.values == [before] * 2


def test_without_the_train_network_its_capabilities_are_absent(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dualtrain.backends.mindspore import borrowed

    monkeypatch.setattr(borrowed, "_TRAIN_NETWORK", "absent")
    network, model = make(engine)
    model.fit(1, ones(2), ones(1), callbacks=Seen(lambda c: (c.loss, c.lr)))
    assert engine.value(network) == pytest.approx(0.8)
    with pytest.raises(CapabilityError, match="needs grad_norm"):
        model.train(1, ones(1), Seen(lambda c: c.grad_norm, needs={Capability.GRAD_NORM}))
    with pytest.raises(ArgumentValueError, match="clip_norm"):
        make(engine, clip_norm=1.0)


@pytest.mark.parametrize("name", ["_network", "_build_train_network"])
def test_without_a_way_to_replace_the_network_train_step_is_refused(
    engine: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dualtrain.backends.mindspore import borrowed
    from dualtrain.backends.mindspore.model import MindSporeModel

    if name == "_network":
        monkeypatch.setattr(borrowed, "_NETWORK", "absent")
    else:
        monkeypatch.delattr(MindSporeModel, name)
    network, model = make(engine)
    model.train(1, ones(2))
    assert engine.value(network) == pytest.approx(0.8)
    with pytest.raises(ArgumentValueError, match="pass loss_fn instead"):
        dt.Model(network, optimizer=engine.sgd(network), train_step=engine.step_function("ok"))


def test_without_the_update_of_metrics_networks_with_a_loss_function_are_evaluated(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dualtrain.backends.mindspore.model import MindSporeModel

    monkeypatch.delattr(MindSporeModel, "_update_metrics")
    network, model = make(engine)
    assert model.eval(ones(1)) == {"eval_loss": 1.0}
    other = dt.Model(network, optimizer=engine.sgd(network), train_step=engine.step_function("ok"))
    with pytest.raises(ValueError, match="outputs"):
        other.eval(ones(1))
