"""Each private name of PyTorch that is used is taken away: training goes on without its feature."""

from __future__ import annotations

import builtins
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import Seen, batches, ones
from paths import SUPPORT
from sources import private_names

import dualtrain as dt
from dualtrain.errors import RunStateError
from dualtrain.protocol import Capability

pytestmark = pytest.mark.torch

NAMES = [
    "_disabled_torch_function_impl",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_orig_mod",
    "_version",
    "__code__",
    "torch._dynamo",
]
TakeAway = Callable[..., None]


@pytest.fixture
def take_away(monkeypatch: pytest.MonkeyPatch) -> TakeAway:
    """Hide names from us alone: PyTorch itself needs them."""
    import dualtrain.backends.torch.outputs  # noqa: F401 - uses one when it is imported
    from dualtrain.backends.torch import borrowed

    def take(*names: str) -> None:
        def find(owner: Any, name: str, default: Any) -> Any:
            return default if name in names else builtins.getattr(owner, name, default)

        monkeypatch.setattr(borrowed, "getattr", find, raising=False)
        if "torch._dynamo" in names:
            monkeypatch.setattr(borrowed, "sys", SimpleNamespace(modules={}))

    return take


def test_the_names_are_all_there_are_and_are_documented() -> None:
    from dualtrain.backends.torch import borrowed

    assert private_names(Path(borrowed.__file__)) == set(NAMES) - {"__code__"}
    assert [name for name in NAMES if name not in (borrowed.__doc__ or "")] == []


WITHOUT_ANY = """
import builtins, importlib.util, sys, types

sys.path.append(sys.argv[1])
names = sys.argv[2:]
spec = importlib.util.find_spec("dualtrain.backends.torch.borrowed")
module = importlib.util.module_from_spec(spec)
module.getattr = lambda *of: of[2] if of[1] in names else builtins.getattr(*of)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
module.sys = types.SimpleNamespace(modules={})

from engines import ENGINES, Seen, ones
import dualtrain as dt

engine = ENGINES["torch"]()
network = engine.weight()
model = dt.Model(network, engine.loss_fn(), engine.sgd(network, 0.25), clip_norm=2.0)
seen = Seen(lambda c: (c.loss, c.grad_norm, c.grad_norm_clipped, c.outputs.asnumpy().item()))
model.fit(1, ones(2), ones(1), callbacks=seen)
print(seen.values, engine.value(network))
"""


def test_the_backend_is_imported_and_trains_without_any() -> None:
    command = [sys.executable, "-c", WITHOUT_ANY, str(SUPPORT), *NAMES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[(1.0, 1.0, 1.0, 1.0), (0.75, 1.0, 1.0, 0.75)] 0.5\n"


@pytest.mark.parametrize("name", NAMES)
def test_training_and_norms_need_none_of_them(torch_engine: Any, name: str, take_away: TakeAway) -> None:
    take_away(name)
    network = torch_engine.weight()
    model = dt.Model(network, torch_engine.loss_fn(), torch_engine.sgd(network, 0.5), clip_norm=2.0)
    seen = Seen(lambda c: (c.loss, c.grad_norm, c.grad_norm_clipped, c.attention()))
    model.train(1, batches((4.0, 0.0), (1.0, 0.0)), seen)
    assert seen.values == [(4.0, 4.0, pytest.approx(2.0), []), (pytest.approx(0.0, abs=1e-5), 1.0, 1.0, [])]
    assert torch_engine.value(network) == pytest.approx(-0.5, abs=1e-5)


def test_without_the_plain_results_those_of_outputs_keep_their_class(take_away: TakeAway) -> None:
    import torch

    from dualtrain.backends.torch.borrowed import plain_results
    from dualtrain.backends.torch.outputs import OutputTensor, as_outputs

    assert type(as_outputs(torch.ones(1)) * 2) is torch.Tensor
    take_away("_disabled_torch_function_impl")
    kept = plain_results(type("Kept", (torch.Tensor,), {"asnumpy": OutputTensor.asnumpy}))
    doubled = torch.ones(1).as_subclass(kept) * 2
    assert type(doubled) is kept
    assert doubled.asnumpy().tolist() == [2.0]


@pytest.mark.parametrize("name", ["_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"])
def test_without_the_hooks_a_needed_norm_is_computed_before_the_update(
    torch_engine: Any, name: str, take_away: TakeAway
) -> None:
    from dualtrain.backends.torch.gradients import change_in_step

    def overwrite(optimizer: Any, *args: Any) -> None:
        network.w.grad.fill_(9.0)

    network = torch_engine.weight()
    optimizer = torch_engine.sgd(network, 0.5)
    assert not change_in_step(optimizer)
    take_away(name)
    assert change_in_step(optimizer)
    optimizer.register_step_post_hook(overwrite)
    seen = Seen(lambda c: c.grad_norm, needs={Capability.GRAD_NORM})
    dt.Model(network, torch_engine.loss_fn(), optimizer).train(1, batches((4.0, 0.0)), seen)
    assert seen.values == [4.0]


def test_without_the_network_inside_a_compiled_one_that_is_called(take_away: TakeAway) -> None:
    import torch
    from networks_torch import Attending

    from dualtrain.backends.torch.out_of_band import unwrapped

    network = Attending()
    compiled = torch.compile(network, backend="eager")
    assert unwrapped(compiled) is network
    known = look(compiled)
    take_away("_orig_mod")
    assert unwrapped(compiled) is compiled
    [(name, entropy)] = known
    assert look(compiled) == [(f"_orig_mod.{name}", entropy)]


def test_without_the_prefix_of_compiled_networks_names_keep_it(
    torch_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from dualtrain.backends.torch import gradients

    def trained() -> list[str]:
        seen = Seen(lambda c: list(c.trained_parameters))
        network = torch.compile(torch_engine.weight(), backend="eager")
        dt.Model(network, torch_engine.loss_fn(), torch_engine.sgd(network)).train(1, ones(1), seen)
        return seen.values

    assert trained() == [["w"]]
    monkeypatch.setattr(gradients, "COMPILED_PREFIX", "absent.")
    assert trained() == [["_orig_mod.w"]]


def test_without_the_versions_a_norm_is_computed_at_each_update(
    torch_engine: Any, take_away: TakeAway
) -> None:
    network = torch_engine.weight()
    optimizer = torch_engine.sgd(network, 0.5)

    def train(callback: Any) -> None:
        with dt.Run([callback], network=network, optimizer=optimizer, epochs=1) as run:
            for _ in run.epochs():
                for x, label in run.batches(batches((4.0, 0.0))):
                    loss = torch_engine.loss_fn()(network(torch.from_numpy(x)), torch.from_numpy(label))
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
                    run.outputs = loss

    import torch

    with pytest.raises(RunStateError, match="gradients have changed"):
        train(Seen(lambda c: c.grad_norm))
    take_away("_version")
    seen = Seen(lambda c: c.grad_norm)
    train(seen)
    assert seen.values == [4.0]


def look(network: Any) -> list[tuple[str, Any]]:
    """Return the name and the entropy of each layer of attention."""
    import torch

    from dualtrain.backends.torch.probes import sample_attention

    batch = torch.linspace(-1, 1, 96).view(3, 4, 8)
    layers = sample_attention(network, lambda net, given: net(given), batch, None, None)
    return [(layer.name, layer.entropy) for layer in layers]


def test_without_its_code_the_attention_of_a_module_is_not_found(take_away: TakeAway) -> None:
    import torch
    from networks_torch import Attending, Calling

    network, function = Attending().eval(), Calling(lambda x: x[None].softmax(-1))
    known = look(network), look(function)
    assert [len(layers) for layers in known] == [1, 1]
    x = torch.ones(3, 4, 8)
    output = network(x)
    take_away("__code__")
    assert (look(network), look(function)) == ([], known[1])
    assert torch.equal(network(x), output)


def test_without_dynamo_compiled_functions_stay_compiled_in_a_probe(take_away: TakeAway) -> None:
    import torch
    from networks_torch import Calling

    from dualtrain.backends.torch.out_of_band import out_of_band

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def probe() -> None:
        with out_of_band(network):
            network(torch.ones(2))

    compiled: list[Any] = []
    network = Calling(torch.compile(lambda x: x + 1, backend=backend))
    probe()
    assert compiled == []
    take_away("torch._dynamo")
    probe()
    assert len(compiled) == 1
