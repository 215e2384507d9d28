"""The statistics of attention, against a computation by hand, and that looking at it leaves no trace."""

import copy
import math
import pickle
import random
from contextlib import nullcontext

import numpy as np
import pytest
from closeness import close
from engines import At

import dualtrain as dt
from dualtrain.errors import ArgumentValueError, RunStateError

INF = math.inf


def by_hand(scores):
    """Return (entropy, maximum, first, distance, per_key) of each head, one row after the other.

    Args:
        scores: What goes into the softmax, of shape (samples, heads, queries, keys); -inf is a mask.
    """
    scores = np.asarray(scores, np.float64)
    samples, heads, queries, keys = scores.shape
    statistics = []
    for head in range(heads):
        rows, probabilities = [], []
        for sample in range(samples):
            real = [key for key in range(keys) if not (scores[sample, :, :, key] == -INF).all()]
            for query in range(queries):
                row = scores[sample, head, query]
                if (row == -INF).all() or (queries == keys and query not in real):
                    continue
                weights = np.exp(row - row.max())
                p = weights / weights.sum()
                entropy = -sum(x * math.log(x) for x in p if x != 0)
                rows.append(
                    [entropy, p.max(), p[real[0]], sum(x * abs(query - key) for key, x in enumerate(p))]
                )
                probabilities.append(p)
        statistics.append((*np.mean(rows, axis=0), np.mean(probabilities, axis=0)))
    return statistics


def agree(layer, scores):
    """Assert that a layer's statistics are those of its scores."""
    scores = np.asarray(scores)
    _, heads, queries, keys = scores.shape
    expected = by_hand(scores)
    assert layer.per_key.shape == (heads, keys)
    assert layer.per_key.dtype == np.float32
    for head, (entropy, maximum, first, distance, per_key) in enumerate(expected):
        assert layer.entropy[head] == close(entropy)
        assert layer.maximum[head] == close(maximum)
        assert layer.first[head] == close(first)
        if queries == keys:
            assert layer.distance[head] == close(distance)
        np.testing.assert_allclose(layer.per_key[head], per_key, atol=1e-6)
    if queries != keys:
        assert layer.distance is None


def same(one, other, rel=1e-6):
    """Assert that two lists of layers say the same."""
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        assert (a.distance is None) == (b.distance is None)
        for field in ("entropy", "maximum", "first", "distance" if a.distance else "first"):
            assert getattr(a, field) == pytest.approx(getattr(b, field), rel=rel, abs=rel)
        np.testing.assert_allclose(a.per_key, b.per_key, atol=rel)


def normal(*shape, seed=0, scale=2.0):
    """Return numbers that make attention neither uniform nor certain."""
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


# PyTorch: what there is to find.


def look(network, *batch, forward=None, samples=None, function=None):
    """Return the layers of a PyTorch network's attention on a batch."""
    from dualtrain.backends.torch.probes import sample_attention

    forward = forward or (lambda net, given: net(*given))
    return sample_attention(network, forward, batch, samples, function)


def plain(tensor):
    return tensor.detach().double().numpy()


def scores_of_module(module, query, key, attn_mask=None, key_padding_mask=None):
    """Return the scores of an nn.MultiheadAttention, from its projections on, in numpy.

    Args:
        attn_mask: Of shape (queries, keys) or (samples * heads, queries, keys), a number for each score.
        key_padding_mask: Of shape (samples, keys), a number for each key.
    """
    from torch.nn.functional import linear

    heads, width = module.num_heads, module.head_dim
    dim = heads * width
    if query.ndim == 2:
        query, key = query[:, None], key[:, None]
    elif module.batch_first:  # half precision rounds as the module does only in its own layout
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    bias = module.in_proj_bias
    if module.in_proj_weight is not None:
        if key.data_ptr() == query.data_ptr():
            q, k, _ = linear(query, module.in_proj_weight, bias).chunk(3, -1)
        else:
            q = linear(query, module.in_proj_weight[:dim], bias[:dim])
            k = linear(key, module.in_proj_weight[dim : 2 * dim], bias[dim : 2 * dim])
    else:
        q = linear(query, module.q_proj_weight, bias[:dim])
        k = linear(key, module.k_proj_weight, bias[dim : 2 * dim])
    q, k = plain(q).swapaxes(0, 1), plain(k).swapaxes(0, 1)
    samples = len(q)
    more = 0
    if module.bias_k is not None:
        k = np.concatenate([k, np.tile(plain(module.bias_k), (samples, 1, 1))], 1)
        more += 1
    if module.add_zero_attn:
        k = np.concatenate([k, np.zeros((samples, 1, dim))], 1)
        more += 1
    q, k = (x.reshape(samples, -1, heads, width).transpose(0, 2, 1, 3) for x in (q, k))
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(width)
    keys = scores.shape[-1] - more
    if attn_mask is not None:
        attn_mask = attn_mask.reshape(-1, heads if attn_mask.ndim == 3 else 1, *attn_mask.shape[-2:])
        scores[..., :keys] += attn_mask
    if key_padding_mask is not None:
        scores[..., :keys] += key_padding_mask[:, None, None, :]
    return scores


CAUSAL = np.triu(np.full((5, 5), -INF), 1)
RIGHT = np.array([[0, 0, 0, 0, 0], [0, 0, 0, -INF, -INF], [0, -INF, -INF, -INF, -INF]])
LEFT = RIGHT[:, ::-1].copy()


@pytest.mark.torch
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("options", "masks"),
    [
        ({}, {}),
        ({"batch_first": True}, {}),
        ({"add_bias_kv": True}, {}),
        ({"add_zero_attn": True}, {"attn_mask": CAUSAL}),
        ({"bias": False}, {}),
        ({"batch_first": True}, {"attn_mask": CAUSAL}),
        ({"batch_first": True}, {"attn_mask": CAUSAL, "is_causal": True}),
        ({"batch_first": True}, {"attn_mask": CAUSAL + CAUSAL.T}),  # each query sees itself alone
        ({"batch_first": True}, {"attn_mask": normal(12, 5, 5)}),
        ({"batch_first": True}, {"key_padding_mask": RIGHT}),
        ({"batch_first": True}, {"key_padding_mask": LEFT}),
        ({"batch_first": True}, {"attn_mask": CAUSAL, "key_padding_mask": LEFT}),  # some rows see nothing
        ({"add_bias_kv": True, "add_zero_attn": True}, {"key_padding_mask": RIGHT}),
    ],
    ids=lambda value: ",".join(value) or "-",
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_multi_head_attention(options, masks, need_weights, dtype):
    import torch

    dtype = getattr(torch, dtype)
    bias = options.get("bias", True)
    module = torch.nn.MultiheadAttention(16, 4, dropout=0.1, **options).to(dtype)
    with torch.no_grad():
        module.in_proj_weight.mul_(2)
        if bias:
            module.in_proj_bias.normal_()
    x = torch.from_numpy(normal(3, 5, 16)).to(dtype)
    x = x if options.get("batch_first") else x.transpose(0, 1)
    native = {
        name: mask if isinstance(mask, bool) else torch.from_numpy(mask).to(dtype)
        for name, mask in masks.items()
    }
    [layer] = look(module, x, forward=lambda net, b: net(*b * 3, need_weights=need_weights, **native))
    assert (layer.layer, layer.name) == (0, "")
    if not bias:
        module.in_proj_bias = torch.nn.Parameter(torch.zeros(48, dtype=dtype))
    by_name = {name: mask for name, mask in masks.items() if name != "is_causal"}
    if "attn_mask" in by_name and dtype is torch.bfloat16:
        by_name["attn_mask"] = plain(native["attn_mask"])
    agree(layer, scores_of_module(module, x, x, **by_name))
    boolean = {
        name: mask if isinstance(mask, bool) else mask == -INF
        for name, mask in native.items()
        if isinstance(mask, bool) or set(mask.flatten().tolist()) <= {0, -INF}
    }
    if len(boolean) == len(native):
        again = look(module, x, forward=lambda net, b: net(*b * 3, need_weights=need_weights, **boolean))
        same([layer], again)


@pytest.mark.torch
def test_multi_head_attention_over_other_keys_and_without_a_batch():
    import torch

    module = torch.nn.MultiheadAttention(16, 4, kdim=6, vdim=7, batch_first=True)
    query, key, value = (torch.from_numpy(normal(*shape)) for shape in ((3, 5, 16), (3, 8, 6), (3, 8, 7)))
    [layer] = look(module, query, key, value)
    agree(layer, scores_of_module(module, query, key))
    [layer] = look(module, query[1], key[1], value[1])
    agree(layer, scores_of_module(module, query[1], key[1]))
    [layer] = look(module, query[1][:1], key[1][:1], value[1][:1])
    assert (layer.entropy, layer.maximum, layer.distance) == ((0,) * 4, (1,) * 4, (0,) * 4)


@pytest.mark.torch
def test_a_hint_that_attention_is_causal_does_not_replace_a_mask():
    import torch

    module = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.from_numpy(normal(3, 5, 16))
    masks = {"attn_mask": torch.from_numpy(CAUSAL.T.copy()).float(), "is_causal": True}
    [layer] = look(module, x, x, x, forward=lambda net, b: net(*b, need_weights=True, **masks))
    agree(layer, scores_of_module(module, x, x, attn_mask=CAUSAL.T))


def calls_of_attention(network, *batch, **masks):
    """Run a network natively, and return (name, scores) of each nn.MultiheadAttention in it."""
    import torch

    calls = []

    def hook(name):
        def before(module, args, kwargs):
            query, key, _ = args
            given = {
                mask: plain(kwargs[mask])
                for mask in ("attn_mask", "key_padding_mask")
                if kwargs.get(mask) is not None
            }
            calls.append((name, scores_of_module(module, query, key, **given)))

        return before

    handles = [
        module.register_forward_pre_hook(hook(name), with_kwargs=True)
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.MultiheadAttention)
    ]
    network.eval()(*batch, **masks)
    for handle in handles:
        handle.remove()
    return calls


@pytest.mark.torch
def test_the_layers_of_an_encoder_and_a_decoder():
    import torch

    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 3)
    decoder = torch.nn.TransformerDecoderLayer(16, 4, 32, batch_first=True)
    x, memory = torch.from_numpy(normal(3, 5, 16)), torch.from_numpy(normal(3, 7, 16, seed=1))
    for network, batch, masks in (
        (encoder, (x,), {}),
        (encoder, (x,), {"src_key_padding_mask": torch.from_numpy(RIGHT == -INF)}),
        (encoder, (x,), {"mask": torch.from_numpy(CAUSAL).float(), "is_causal": True}),
        (layer, (x,), {"src_key_padding_mask": torch.from_numpy(RIGHT == -INF)}),
        (decoder, (x, memory), {"tgt_mask": torch.from_numpy(CAUSAL).float()}),
    ):
        found = look(network, *batch, forward=lambda net, b, masks=masks: net(*b, **masks))
        expected = calls_of_attention(network, *batch, **masks)
        assert [one.name for one in found] == [name for name, _ in expected]
        assert [one.layer for one in found] == list(range(len(expected)))
        for one, (_, scores) in zip(found, expected, strict=True):
            agree(one, scores)
    assert [one.name for one in found] == ["self_attn", "multihead_attn"]
    assert found[1].distance is None


def visible(*shape, share=0.6):
    """Return which scores are not masked: some of each row."""
    some = np.random.default_rng(3).random(shape) < share
    some[..., 0] = True
    return some


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [1, 37, 1 << 22])
@pytest.mark.parametrize(
    ("query", "key", "options"),
    [
        ((3, 4, 5, 8), (3, 4, 5, 8), {}),
        ((3, 4, 5, 8), (3, 4, 7, 8), {"scale": 0.5}),
        ((3, 4, 5, 8), (3, 4, 5, 8), {"is_causal": True}),
        ((3, 4, 7, 8), (3, 4, 5, 8), {"is_causal": True}),
        ((3, 4, 5, 8), (3, 2, 5, 8), {"enable_gqa": True}),
        ((3, 5, 8), (3, 5, 8), {}),
        ((3, 5, 8), (3, 5, 8), {"attn_mask": visible(3, 5, 5)}),
        ((2, 3, 4, 5, 8), (2, 3, 4, 5, 8), {"attn_mask": visible(2, 1, 1, 5, 5)}),
        ((3, 4, 5, 8), (3, 4, 5, 8), {"attn_mask": visible(5, 5)}),
        ((3, 4, 5, 8), (3, 4, 5, 8), {"attn_mask": visible(4, 5, 5)}),  # a mask for each head
        ((3, 4, 5, 8), (3, 4, 5, 8), {"attn_mask": visible(3, 1, 1, 5)}),
        ((3, 4, 5, 8), (3, 4, 5, 8), {"attn_mask": visible(3, 1, 5, 1)}),
        ((3, 4, 5, 8), (3, 4, 5, 8), {"attn_mask": RIGHT[:, None, None] == 0}),
        ((3, 4, 5, 8), (3, 4, 6, 8), {"attn_mask": normal(3, 4, 5, 6)}),
        ((3, 4, 1, 8), (3, 4, 1, 8), {}),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else str(len(value)),
)
def test_callers_of_fused_attention(query, key, options, chunk, dtype, monkeypatch):
    import torch
    from networks_torch import Calling

    from dualtrain.backends.torch import attention

    monkeypatch.setattr(attention, "_CHUNK", chunk)
    dtype = getattr(torch, dtype)
    q, k = torch.from_numpy(normal(*query)).to(dtype), torch.from_numpy(normal(*key, seed=1)).to(dtype)
    native, mask = dict(options), options.get("attn_mask")
    if mask is not None:
        native["attn_mask"] = torch.from_numpy(np.array(mask))
        if mask.dtype != bool:
            native["attn_mask"] = native["attn_mask"].to(dtype)
            mask = plain(native["attn_mask"])

    def attend(q, k):
        return torch.nn.functional.scaled_dot_product_attention(q, k, k, **native)

    [layer] = look(Calling(attend), q, k)
    attend(q, k)  # nothing is left in the way
    keys = plain(k)
    if options.get("enable_gqa"):
        keys = np.repeat(keys, query[1] // key[1], axis=1)
    scores = plain(q) @ keys.swapaxes(-1, -2) * options.get("scale", query[-1] ** -0.5)
    if mask is not None:
        scores = np.where(mask, scores, -INF) if mask.dtype == bool else scores + mask
    if options.get("is_causal"):
        later = np.arange(scores.shape[-1]) > np.arange(scores.shape[-2])[:, None]
        scores = np.where(later, -INF, scores)
    if scores.ndim == 3:
        scores = scores[:, None]
    agree(layer, scores.reshape(-1, *scores.shape[-3:]))


@pytest.mark.torch
@pytest.mark.parametrize("mask", [-INF, -1e4, -1e9, float(np.finfo(np.float32).min)])
def test_a_softmax_along_the_last_of_four_dimensions(mask):
    import torch
    from networks_torch import Calling

    scores = torch.from_numpy(normal(3, 4, 5, 5))
    masked = scores + torch.where(torch.from_numpy(RIGHT == 0)[:, None, None], 0.0, mask)
    expected = np.where((RIGHT == 0)[:, None, None], plain(scores), -INF)
    for softmax in (
        lambda x: torch.nn.functional.softmax(x, -1),
        lambda x: torch.nn.functional.softmax(input=x, dim=3, dtype=torch.float64),
        lambda x: torch.softmax(x, -1),
        lambda x: torch.softmax(input=x, dim=-1),
        lambda x: x.softmax(dim=3),
        lambda x: torch.special.softmax(x, -1),
        torch.nn.Softmax(-1),
    ):
        [layer] = look(Calling(softmax), masked)
        agree(layer, expected)
        assert layer.name == ("function" if isinstance(softmax, torch.nn.Module) else "")
    for other in (
        lambda x: torch.softmax(x, 1),
        lambda x: torch.softmax(x[0], -1),
        lambda x: torch.sigmoid(x),
        torch.nn.Softmax2d(),
    ):
        assert look(Calling(other), scores) == []


@pytest.mark.torch
def test_attention_that_has_diverged_is_not_a_number():
    import torch
    from networks_torch import Calling

    scores = torch.from_numpy(normal(2, 2, 3, 3))
    scores[1, 0, 1] = math.nan
    masked = scores.masked_fill(torch.tensor([True, False, False]), -INF)
    for given in (scores, masked):
        [layer] = look(Calling(lambda x: x.softmax(-1)), given)
        assert [math.isnan(value) for value in layer.entropy] == [True, False]
        assert [math.isnan(value) for value in layer.maximum] == [True, False]
    [layer] = look(torch.nn.Identity(), scores, function=lambda net, b: [b[0].softmax(-1)])
    assert [math.isnan(value) for value in layer.entropy] == [True, False]
    nothing = torch.full((2, 2, 3, 3), -INF)
    [layer] = look(Calling(lambda x: x.softmax(-1)), nothing)
    assert all(map(math.isnan, (*layer.entropy, *layer.first, *layer.distance)))
    assert look(Calling(lambda x: x.softmax(-1)), torch.zeros(0, 2, 3, 3)) == []


@pytest.mark.torch
def test_half_precision_by_autocast_is_described_from_its_queries_and_keys():
    import torch

    module = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    x = normal(3, 5, 16)
    seen = []

    def loss(network, batch):
        return network(*batch * 3, need_weights=False)[0].float().square().mean()

    model = dt.Model(module, None, torch.optim.SGD(module.parameters(), 0.0), train_step=loss, amp="bf16")
    look_on = At("on_train_step_begin", lambda context: seen.extend(context.attention(None)))
    model.train(1, [(x,)], look_on)
    with torch.autocast("cpu", torch.bfloat16):
        scores = scores_of_module(module, *[torch.from_numpy(x)] * 2)
    agree(seen[0], scores)


@pytest.mark.torch
def test_a_function_of_the_users():
    import torch

    p = torch.from_numpy(normal(3, 4, 5, 5)).softmax(-1)
    p[0, :, :, 4] = 0
    p[0, :, 4] = 0
    p[0, :, :4] /= p[0, :, :4].sum(-1, keepdim=True)
    seen = []

    def function(network, batch):
        seen.append((network.training, torch.is_grad_enabled(), len(batch[0])))
        return [p, p[:, :1, :2]]

    network = torch.nn.Linear(2, 2)
    layers = look(network, torch.zeros(6, 2), samples=3, function=function)
    assert seen == [(False, False, 3)]
    with np.errstate(divide="ignore"):
        agree(layers[0], np.log(plain(p)))
        agree(layers[1], np.log(plain(p[:, :1, :2])))
    assert [layer.layer for layer in layers] == [0, 1]


@pytest.mark.torch
@pytest.mark.parametrize(
    "given",
    [
        lambda p: [p[0]],
        lambda p: p,
        lambda p: [p.numpy()],
        lambda p: [p, 2 * p],
        lambda p: [p - 0.1],
        lambda p: [p.log()],
        lambda p: [None],
    ],
)
def test_what_is_no_attention_is_refused(given):
    import torch

    p = torch.full((2, 2, 4, 4), 0.25)
    match = "attention_fn has to return a tensor of probabilities for each layer"
    with pytest.raises(ArgumentValueError, match=match):
        look(torch.nn.Identity(), p, function=lambda net, b: given(p))
    p[..., 0], p[..., 1] = -0.25, 0.75  # the rows still sum to 1
    with pytest.raises(ArgumentValueError, match=match):
        look(torch.nn.Identity(), p, function=lambda net, b: [p])


@pytest.mark.torch
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_transformers_models_by_either_implementation(family):
    import torch
    from transformers import (
        BertConfig,
        BertModel,
        GPT2Config,
        GPT2Model,
        LlamaConfig,
        LlamaModel,
    )

    small = {"vocab_size": 19, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    of_gpt2 = {"vocab_size": 19, "n_embd": 16, "n_layer": 2, "n_head": 4, "initializer_range": 0.5}
    rest = {"intermediate_size": 32, "initializer_range": 0.5}
    kind, config = {
        "bert": (BertModel, BertConfig(**small, **rest)),
        "gpt2": (GPT2Model, GPT2Config(**of_gpt2)),
        "llama": (LlamaModel, LlamaConfig(**small, **rest, num_key_value_heads=2)),
    }[family]
    ids = torch.randint(19, (3, 5))
    by_implementation = []
    for implementation in ("sdpa", "eager"):
        torch.manual_seed(0)
        config._attn_implementation = implementation
        model = kind(config)
        model.train()
        assert model.config._attn_implementation == implementation
        found = []
        for mask in (RIGHT == 0, LEFT == 0, RIGHT == RIGHT):
            batch = {"input_ids": ids, "attention_mask": torch.from_numpy(mask).long()}
            layers = look(model, batch, forward=lambda net, b: net(**b[0]), samples=8)
            assert len(layers) == 2
            assert all("attn" in layer.name or "attention" in layer.name for layer in layers)
            if family == "bert":
                output = model.eval()(**batch, output_attentions=implementation == "eager")
                if implementation == "eager":
                    p = [plain(p) for p in output.attentions]
                    with np.errstate(divide="ignore"):
                        agree(layers[0], np.log(p[0]))
                model.train()
            found += layers
        by_implementation.append(found)
    same(*by_implementation, rel=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("batch", "samples", "taken"),
    [
        (((6, 2), (6,)), 4, (4, 4)),
        (((6, 2), (6,)), None, (6, 6)),
        (((3, 2), (3,)), 4, (3, 3)),
        (((5, 6, 2), (6, 5)), 4, (5, 6)),  # the sequence comes first in one of them
        (((6, 2), ()), 4, (4, None)),
    ],
)
def test_the_first_samples_of_a_batch(batch, samples, taken):
    import torch

    from dualtrain.backends.torch.probes import first_samples

    tensors = [torch.zeros(shape) for shape in batch]
    for given, back in (
        (tuple(tensors), lambda cut: cut),
        ([tensors[0], {"label": tensors[1]}], lambda cut: (cut[0], cut[1]["label"])),
        ({"x": tensors[0], "y": (tensors[1], "name")}, lambda cut: (cut["x"], cut["y"][0])),
    ):
        cut = back(first_samples(given, samples))
        assert tuple(len(t) if t.ndim else None for t in cut) == taken


# PyTorch: no trace.


def state_of(network):
    """Return what a forward pass could have changed."""
    import torch

    own = {name: repr(value) for name, value in vars(network).items() if not name.startswith("_")}
    tensors = {
        name: value.tolist() for name, value in (*network.named_parameters(), *network.named_buffers())
    }
    modes = [module.training for module in network.modules()]
    hooks = [
        len(value)
        for module in network.modules()
        for name, value in vars(module).items()
        if "_hooks" in name and value is not None
    ]
    states = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
    names = [name for name, _ in network.named_modules()]
    return own, tensors, modes, hooks, states, names, repr(network._buffers), torch.is_grad_enabled()


@pytest.mark.torch
@pytest.mark.parametrize("fails", [False, True])
def test_a_network_that_changes_itself_is_put_back(fails):
    import torch
    from networks_torch import Changing

    network = Changing()
    x = torch.randn(3, 4, 8)
    network(x).backward()
    network.fails = fails
    before = state_of(network)
    parts = network.history, network.count, network.replaced, network.state
    if fails:
        with pytest.raises(RuntimeError, match="this network fails"):
            look(network, x, samples=2)
    else:
        assert [layer.name for layer in look(network, x, samples=2)] == ["attention"]
    with pytest.raises(RuntimeError if fails else ArgumentValueError):
        look(network, x, function=lambda net, b: [net(*b)])
    assert state_of(network) == before
    now = network.history, network.count, network.replaced, network.state
    assert all(a is b for a, b in zip(parts, now, strict=True))
    twin, again = copy.deepcopy(network.attention), pickle.loads(pickle.dumps(network.attention))
    same(look(twin, x, x, x), look(again, x, x, x))
    network.fails = False
    network(x).backward()
    assert (network.calls, len(network.history)) == (2, 2)


@pytest.mark.torch
def test_gradients_and_a_frozen_network_stay():
    import torch
    from networks_torch import Attending

    network = Attending()
    network.norm.eval()
    network.dropout.eval()
    network(torch.randn(3, 4, 8)).sum().backward()
    gradients = [parameter.grad.clone() for parameter in network.parameters()]
    loss = network(torch.randn(3, 4, 8)).sum()  # its graph is alive while another look is taken
    look(network, torch.randn(3, 4, 8))
    assert [m.training for m in network.modules()] == [
        name not in ("norm", "dropout") for name, _ in network.named_modules()
    ]
    assert all(torch.equal(p.grad, g) for p, g in zip(network.parameters(), gradients, strict=True))
    loss.backward()


@pytest.mark.torch
def test_wrappers_checkpointing_and_lazy_layers():
    import torch
    from networks_torch import Attending, Calling
    from torch.utils.checkpoint import checkpoint

    network = Attending()
    x = torch.randn(3, 4, 8)
    expected = look(network, x)
    counter = []
    compiled = torch.compile(network, backend=lambda graph, inputs: counter.append(1) or graph.forward)
    same(look(compiled, x), expected)
    same(look(Calling(lambda x: compiled(x)), x), expected)
    inside = torch.nn.Sequential(compiled)
    [layer] = look(inside, x)
    assert layer.name == "0._orig_mod.attention"
    assert counter == []
    for reentrant in (True, False):
        outer = Calling(lambda x, r=reentrant: checkpoint(network, x, use_reentrant=r))
        with pytest.warns(UserWarning, match="requires_grad") if reentrant else nullcontext():
            same(look(outer, x), expected)
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3))
    with pytest.raises(RunStateError, match="lazy layers"):
        look(lazy, x)
    assert torch.nn.parameter.is_lazy(lazy[0].weight)


# MindSpore.


def look_on_mindspore(network, *batch, forward=None, samples=None, function=None):
    """Return the layers of a MindSpore network's attention on a batch of arrays."""
    from mindspore import Tensor

    from dualtrain.backends.mindspore.probes import sample_attention

    forward = forward or (lambda columns: network(*columns))
    batch = tuple(Tensor(column) if isinstance(column, np.ndarray) else column for column in batch)
    return sample_attention(network, forward, batch, samples, function)


def scores_of_cell(cell, x, attn_mask=None, key_padding_mask=None):
    """Return the scores of a mindspore.nn.MultiheadAttention over itself, batch first, in numpy."""
    heads, width = cell.num_heads, cell.head_dim
    weight, bias = (p.asnumpy().astype(np.float64) for p in (cell.in_proj_weight, cell.in_proj_bias))
    q, k, _ = np.split(x.astype(np.float64) @ weight.T + bias, 3, -1)
    q, k = (t.reshape(len(x), -1, heads, width).transpose(0, 2, 1, 3) for t in (q, k))
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(width)
    if attn_mask is not None:
        scores += attn_mask
    if key_padding_mask is not None:
        scores += key_padding_mask[:, None, None, :]
    return scores


@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"attn_mask": CAUSAL},
        {"key_padding_mask": RIGHT},
        {"key_padding_mask": LEFT},
        {"attn_mask": CAUSAL, "key_padding_mask": LEFT},
    ],
    ids=lambda value: ",".join(value) or "-",
)
def test_multi_head_attention_on_mindspore(masks, mindspore_engine):
    from mindspore import Tensor, nn

    x = normal(3, 5, 16, scale=1)
    arrays = {name: Tensor(mask == -INF) for name, mask in masks.items()}
    first = nn.MultiheadAttention(16, 4, batch_first=True)
    encoder = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    names = {"attn_mask": "src_mask", "key_padding_mask": "src_key_padding_mask"}
    for network, cell, given, name in (
        (first, first, arrays, ""),
        (encoder, encoder.self_attn, {names[k]: v for k, v in arrays.items()}, "self_attn"),
    ):
        cell.in_proj_bias.set_data(Tensor(normal(48, seed=2, scale=1)))
        batch = (Tensor(x),) * (3 if network is first else 1)
        [layer] = look_on_mindspore(
            network, *batch, forward=lambda columns, net=network, given=given: net(*columns, **given)
        )
        assert layer.name == name
        agree(layer, scores_of_cell(cell, x, **masks))


@pytest.mark.parametrize("mask", [-INF, -1e4, -1e9])
def test_a_softmax_on_mindspore(mask, mindspore_engine):
    from networks_mindspore import Softmax

    scores = normal(3, 4, 5, 5)
    seen = (RIGHT == 0)[:, None, None]
    masked = np.where(seen, scores, scores + np.float32(mask))
    for kind in ("function", "cell", "operator", "mint", "method"):
        for axis in (-1, 3):
            [layer] = look_on_mindspore(Softmax(kind, axis), masked)
            agree(layer, np.where(seen, scores, -INF))
    assert look_on_mindspore(Softmax("function", 1), scores) == []
    assert look_on_mindspore(Softmax("function"), scores[0]) == []
    wide = normal(3, 4, 5, 7)
    [layer] = look_on_mindspore(Softmax("cell"), wide)
    agree(layer, wide)
    [layer] = look_on_mindspore(Softmax("cell"), wide[:, :, :1, :1])
    assert (layer.entropy, layer.maximum) == ((0,) * 4, (1,) * 4)
    scores[1, 0, 1] = math.nan
    [layer] = look_on_mindspore(Softmax("cell"), scores)
    assert [math.isnan(value) for value in layer.entropy] == [True, False, False, False]
    assert [math.isnan(value) for value in layer.maximum] == [True, False, False, False]


def test_a_function_of_the_users_on_mindspore(mindspore_engine):
    import mindspore
    from mindspore import Tensor, nn

    scores = normal(3, 4, 5, 5)
    weights = np.exp(scores)
    p = weights / weights.sum(-1, keepdims=True)
    network = nn.Dense(2, 2).set_train()
    seen = []

    def function(columns):
        seen.append((network.training, len(columns[0]), mindspore.get_context("mode")))
        return [Tensor(p)]

    [layer] = look_on_mindspore(network, np.zeros((6, 2), np.float32), samples=3, function=function)
    assert seen == [(False, 3, mindspore.PYNATIVE_MODE)]
    assert network.training
    agree(layer, np.log(p))
    for wrong in (p[0], 2 * p, p - 0.1):
        with pytest.raises(ArgumentValueError, match="attention_fn has to return"):
            look_on_mindspore(network, p, function=lambda columns, wrong=wrong: [Tensor(wrong)])
    with pytest.raises(ArgumentValueError, match="item 0 is ndarray"):
        look_on_mindspore(network, p, function=lambda columns: [p])


@pytest.mark.parametrize("fails", [False, True])
def test_a_cell_that_changes_itself_is_put_back(fails, mindspore_engine):
    import mindspore
    from networks_mindspore import Changing

    network = Changing().set_train()
    network.still.set_train(False)
    x = normal(3, 4, 8)

    def state():
        own = repr((network.calls, network.last, network.history, network.by_call))
        tensors = {p.name: p.asnumpy().tolist() for p in network.get_parameters()}
        modes = [cell.training for _, cell in network.cells_and_names()]
        states = random.getstate(), repr(np.random.get_state()), repr(mindspore.get_rng_state())
        return own, tensors, modes, states, mindspore.get_context("mode")

    network.fails = fails
    before = state()
    if fails:
        with pytest.raises(RuntimeError, match="this network fails"):
            look_on_mindspore(network, x, samples=2)
    else:
        assert [layer.name for layer in look_on_mindspore(network, x, samples=2)] == ["attention"]
    assert state() == before
    scores = normal(2, 2, 3, 3)
    softmax = mindspore.ops.function.nn_func.softmax_impl
    assert softmax.__module__.startswith("mindspore")
    agree(look_on_mindspore(mindspore.nn.Softmax(), scores)[0], scores)
