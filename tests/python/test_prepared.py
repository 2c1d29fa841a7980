# SPDX-License-Identifier: Apache-2.0
"""NormLinear keeps what forward makes of its weight, in eval mode on the CPU: the same bits, never an old weight."""

import copy
import gc
import pickle

import pytest
import torch
from conftest import devices

import heddle
from heddle import _nn_prepared

OPTIONS = [("layer", None), ("rms", "gelu"), ("none", None), ("layer", "swiglu")]


def layer_of(norm="layer", activation=None, dtype=torch.float32, k=40, n=48):
    torch.manual_seed(1)
    layer = heddle.nn.NormLinear(k, n, norm=norm, activation=activation, dtype=dtype).eval()
    layer.keep_prepared = True
    return layer


def kept(layer):
    known = _nn_prepared._kept.get(layer)
    return None if known is None else known[1]


def plain(layer, x, residual=None):
    """Without what is kept."""
    layer = copy.deepcopy(layer)
    layer.keep_prepared = False
    with torch.no_grad():
        made = layer(x, residual)
    assert kept(layer) is None
    return made


@pytest.mark.parametrize("norm,activation", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_bits(norm, activation, dtype):
    layer = layer_of(norm, activation, dtype)
    with torch.no_grad():
        for m in (1, 8, 9, 40, 300):
            x, residual = torch.randn(m, 40).to(dtype), torch.randn(m, 48).to(dtype)
            for given in (None, residual):
                assert torch.equal(layer(x, given), plain(layer, x, given))
            assert (kept(layer) is not None) == (m > 8)
        first = kept(layer)
        layer(torch.randn(2, 50, 40).to(dtype))
        assert kept(layer) is first


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("norm,activation", OPTIONS)
def test_the_operator(norm, activation, device):
    layer = layer_of(norm, activation).to(device)
    x, act = torch.randn(300, 40, device=device), 6 if activation == "swiglu" else 1 if activation else 0
    given = layer.weight.detach(), layer.bias.detach()
    scales = tuple(None if t is None else t.detach() for t in (layer.gamma, layer.beta))
    norm, eps = ("layer", "rms", "none").index(norm), 0.0 if norm == "none" else 1e-5
    prepared = heddle.ops.norm_linear_prepare(*given, *scales, norm, False, act)
    assert prepared.dtype == torch.uint8 and prepared.numel() > 0 and prepared.device == x.device
    args = (x, *given, *scales, eps, norm, False, act, False, None, False)
    assert torch.equal(heddle.ops.norm_linear(*args, prepared)[0], heddle.ops.norm_linear(*args)[0])
    for wrong in (prepared[:-1], prepared.float(), prepared[None]):
        with pytest.raises((RuntimeError, ValueError, TypeError), match="prepared"):
            heddle.ops.norm_linear(*args, wrong)
    if device == "cpu":
        with pytest.raises(RuntimeError, match="prepared is of another weight"):
            heddle.ops.norm_linear(x, 2 * given[0], *args[2:], prepared)


def changes():
    def in_place(layer):
        with torch.no_grad():
            layer.weight[3].mul_(2)

    def step(layer):
        layer.weight.grad = torch.ones_like(layer.weight)
        torch.optim.SGD(layer.parameters(), lr=0.1).step()

    def adam(layer):
        layer.weight.grad = torch.ones_like(layer.weight)
        torch.optim.AdamW(layer.parameters(), lr=0.1).step()

    def data(layer):
        layer.weight.data = layer.weight.data.neg()

    def through_data(layer):
        layer.weight.data.mul_(0.5)

    def copied(layer):
        layer.weight.data.copy_(torch.randn_like(layer.weight))

    def numpy(layer):
        layer.weight.detach().numpy()[:] *= 3

    def parameter(layer):
        layer.weight = torch.nn.Parameter(-layer.weight.detach())

    def load(layer):
        layer.load_state_dict({name: -t for name, t in layer.state_dict().items()})

    def assigned(layer):
        layer.load_state_dict({name: -t for name, t in layer.state_dict().items()}, assign=True)

    def options(layer):
        layer.norm, layer.activation = "rms", "silu"
        layer.beta = None

    def reset(layer):
        layer.reset_parameters()

    def vectors(layer):
        with torch.no_grad():
            layer.gamma.mul_(2)
            layer.beta.add_(1)
            layer.bias.data.neg_()

    def trained(layer):
        layer.train()
        x = torch.randn(20, 40)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        with torch.enable_grad():
            layer(x).square().sum().backward()
        optimizer.step()
        layer.eval()

    return list(locals().values())


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
def test_never_an_old_weight(change):
    layer, x = layer_of(), torch.randn(30, 40)
    with torch.no_grad():
        before = layer(x)
        assert kept(layer) is not None
    change(layer)
    with torch.no_grad():
        for _ in range(3):
            made = layer(x)
            assert torch.equal(made, plain(layer, x)) and not torch.equal(made, before)
        assert kept(layer) is not None


def test_dtypes():
    layer, x = layer_of(), torch.randn(30, 40)
    with torch.no_grad():
        layer(x)
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
            layer.to(dtype)
            assert torch.equal(layer(x.to(dtype)), plain(layer, x.to(dtype)))
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        with pytest.raises(TypeError):
            layer(x.bfloat16())


def test_where_it_is_not_kept():
    layer, x = layer_of(), torch.randn(30, 40)
    layer(x)
    assert kept(layer) is None  # a gradient is wanted
    with torch.no_grad():
        layer.train()
        layer(x)
        layer.eval().keep_prepared = False
        layer(x)
        assert kept(layer) is None
        layer.keep_prepared = True
        whole = heddle.nn.NormLinear(40, 48, return_norm=True).eval()
        whole.keep_prepared = True
        whole(x)
        assert kept(whole) is None
        unasked = heddle.nn.NormLinear(40, 48).eval()
        unasked(x)
        assert kept(unasked) is None
        torch.vmap(layer)(x[None].expand(2, 30, 40))
    with torch.inference_mode():
        made = heddle.nn.NormLinear(40, 48).eval()
        made.keep_prepared = True
        made(x)
        assert kept(made) is None  # nobody counts what is done to its weight
        layer(x)
        assert kept(layer) is not None


def test_copies_do_not_carry_it():
    layer, x = layer_of(), torch.randn(30, 40)
    state = set(layer.state_dict())
    with torch.no_grad():
        size = len(pickle.dumps(layer))
        made = layer(x)
        assert kept(layer) is not None
        assert set(layer.state_dict()) == state and len(pickle.dumps(layer)) == size
        for other in copy.deepcopy(layer), copy.copy(layer), pickle.loads(pickle.dumps(layer)):
            assert kept(other) is None
            assert torch.equal(other(x), made)
    count = len(_nn_prepared._kept)
    del other, layer
    gc.collect()
    assert len(_nn_prepared._kept) < count


def test_compiled():
    layer, x = layer_of(), torch.randn(30, 40)
    compiled = torch.compile(layer, fullgraph=True)
    with torch.no_grad():
        want = layer(x)
        assert torch.equal(compiled(x), want)
        layer.weight.data.mul_(2)
        assert torch.equal(compiled(x), layer(x)) and not torch.equal(layer(x), want)
