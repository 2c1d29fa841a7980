# SPDX-License-Identifier: Apache-2.0
"""NumPy and JAX arrays through DLPack, against the torch operators."""

from __future__ import annotations

import ctypes

import pytest
import torch

np = pytest.importorskip("numpy")

import heddle  # noqa: E402


def make(shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def qkv(dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s).astype(dtype) for s in ((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 3))]


OPTIONS = [
    {},
    {"causal": "bottom_right", "window": (3, None), "softcap": 2.0, "scale": 0.4},
    {"bias": make((4, 1, 6)), "sinks": make(4)},
    {"mask": make((2, 1, 5, 6)) > -0.5, "alibi_slopes": np.abs(make((2, 4)))},
    {"seqlens_q": np.array([5, 2], np.int32), "seqlens_k": np.array([0, 4], np.int32)},
    {"dropout": 0.4, "rng_state": np.array([3, 4])},
]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o))
def test_numpy_as_torch(options, dtype):
    options = dict(options)
    if "bias" in options:
        options["bias"] = options["bias"].astype(dtype)
    for name in ("sinks", "alibi_slopes"):
        if name in options and dtype == np.float64:
            options[name] = options[name].astype(dtype)
    arrays = qkv(dtype)
    for array in arrays:
        array.flags.writeable = False
    out, lse, weights = heddle.attention(*arrays, **options, return_lse=True, return_weights=True)
    leaves = [torch.tensor(a, requires_grad=True) for a in arrays]
    twins = {n: torch.tensor(o) if isinstance(o, np.ndarray) else o for n, o in options.items()}
    for name in ("bias", "sinks"):
        if name in twins:
            leaves.append(twins[name].requires_grad_())
    wants = heddle.attention(*leaves[:3], **twins, return_lse=True, return_weights=True)
    for got, want in zip((out, lse, weights), wants, strict=True):
        assert isinstance(got, np.ndarray) and np.array_equal(got, want.detach().numpy())
    seeds = [make(t.shape, t.dtype) for t in (out, lse, weights)]
    seeds[1][~np.isfinite(lse)] = 0
    grads = heddle.attention_backward(seeds[0], *arrays, out, lse, dlse=seeds[1], dweights=seeds[2], **options)
    want_grads = torch.autograd.grad(wants, leaves, [torch.tensor(s) for s in seeds])
    assert list(grads) == ["dq", "dk", "dv", *(["dbias", "dsinks"] if "bias" in options else [])]
    for got, want in zip(grads.values(), want_grads, strict=True):
        assert np.array_equal(got, want.numpy())


@pytest.mark.parametrize("rank", [2, 3])
def test_fewer_dimensions(rank):
    q, k, v = (make((3, 5, 8)[-rank:]) for _ in range(3))
    out, lse, weights = heddle.attention(q, k, v, causal=True, return_lse=True, return_weights=True)
    assert out.shape == q.shape and lse.shape == q.shape[:-1] and weights.shape == (*q.shape[:-1], 5)
    assert [g.shape for g in heddle.attention_backward(out, q, k, v, out, lse, causal=True).values()] == [q.shape] * 3


def test_packed():
    cu = np.array([0, 3, 9], np.int32)
    q, k, v = (make((11, 4, 8)) for _ in range(3))
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 6, "max_seqlen_k": 6, "causal": "top_left"}
    out, lse = heddle.attention(q, k, v, **options, return_lse=True)
    twins = {n: torch.tensor(o) if isinstance(o, np.ndarray) else o for n, o in options.items()}
    leaves = [torch.tensor(a, requires_grad=True) for a in (q, k, v)]
    want = heddle.attention(*leaves, **twins)
    assert np.array_equal(out, want.detach().numpy()) and not out[9:].any()
    far = options | {"max_seqlen_q": 2**40, "max_seqlen_k": 2**40}  # costs nothing
    assert np.array_equal(heddle.attention(q, k, v, **far), out)
    expected = torch.autograd.grad(want, leaves, want.detach())
    for limits in (options, far):
        grads = heddle.attention_backward(out, q, k, v, out, lse, **limits)
        assert all(np.array_equal(got, grad.numpy()) for got, grad in zip(grads.values(), expected, strict=True))


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("full", [True, False])
def test_norm_linear(norm, full):
    x, weight = make((2, 3, 20))[..., :8], make((5, 8))
    bias, gamma, beta = (make(5), make(8), make(8)) if full else (None, None, None)
    y = heddle.norm_linear(x, weight, bias, gamma, beta, norm=norm)
    leaves = [torch.tensor(a, requires_grad=True) for a in (x, weight, bias, gamma, beta) if a is not None]
    want = heddle.norm_linear(*leaves, norm=norm)
    assert np.array_equal(y, want.detach().numpy())
    grads = heddle.norm_linear_backward(make(y.shape), x, weight, gamma, beta, norm=norm)
    wants = torch.autograd.grad(want, leaves, torch.tensor(make(y.shape)))
    for got, expected in zip(grads.values(), wants, strict=False):
        assert np.allclose(got, expected.numpy(), atol=1e-5)


def test_no_copies():
    """A write to the input shows in the next result; what is given back is as the library made it."""
    q, k, v = qkv()
    before = heddle.attention(q, k, v)
    v *= 2
    assert np.allclose(heddle.attention(q, k, v), 2 * before, atol=1e-6)
    view = np.ascontiguousarray(q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    assert np.allclose(heddle.attention(view, k, v), 2 * before, atol=1e-6)


def test_jax():
    """On JAX's own device: its GPU where it has one."""
    jax = pytest.importorskip("jax")
    arrays = [jax.numpy.asarray(a) for a in qkv()]
    out, lse = heddle.attention(*arrays, causal="bottom_right", return_lse=True)
    want = heddle.attention(*qkv(), causal="bottom_right")
    assert isinstance(out, jax.Array) and out.devices() == arrays[0].devices()
    assert np.allclose(np.asarray(out), want, atol=1e-5)
    grads = heddle.attention_backward(out, *arrays, out, lse, causal="bottom_right")
    assert all(isinstance(g, jax.Array) for g in grads.values())

    def plain(q, k, v):
        k, v = (jax.numpy.repeat(t, 2, 1) for t in (k, v))
        scores = q @ k.swapaxes(-1, -2) / 8**0.5
        seen = jax.numpy.arange(6)[None, :] <= jax.numpy.arange(5)[:, None] + 1
        return jax.nn.softmax(jax.numpy.where(seen, scores, -jax.numpy.inf), -1) @ v

    with jax.default_matmul_precision("highest"):
        expected_grads = jax.vjp(plain, *arrays)[1](out)
    for got, expected in zip(grads.values(), expected_grads, strict=True):
        assert np.allclose(got, expected, atol=1e-4)
    low = [a.astype(jax.numpy.bfloat16) for a in arrays]
    result = heddle.attention(*low)
    assert result.dtype == jax.numpy.bfloat16
    y = heddle.norm_linear(arrays[0], jax.numpy.ones((3, 8)))
    assert isinstance(y, jax.Array) and y.shape == (2, 4, 5, 3)


def test_cupy():
    cupy = pytest.importorskip("cupy")
    arrays = [cupy.asarray(a) for a in qkv()]
    out, lse = heddle.attention(*arrays, causal="bottom_right", return_lse=True)
    assert isinstance(out, cupy.ndarray)
    leaves = [torch.tensor(a, device="cuda", requires_grad=True) for a in qkv()]
    want = heddle.attention(*leaves, causal="bottom_right")
    assert np.array_equal(out.get(), want.detach().cpu().numpy())
    grads = heddle.attention_backward(out, *arrays, out, lse, causal="bottom_right")
    wants = torch.autograd.grad(want, leaves, want.detach())
    for got, expected in zip(grads.values(), wants, strict=True):
        assert isinstance(got, cupy.ndarray) and np.allclose(got.get(), expected.cpu().numpy(), atol=1e-5)
    with cupy.cuda.Stream():  # work goes to CuPy's current stream
        x = cupy.full((3, 8), 2.0, dtype="float32") + cupy.arange(8, dtype="float32")
        y = heddle.norm_linear(x, cupy.asarray(make((5, 8))))
        low = heddle.attention(*(a.astype("float16") for a in arrays))
    assert y.shape == (3, 5) and low.dtype == np.float16
    want = heddle.norm_linear(torch.tensor(x.get(), device="cuda"), torch.tensor(make((5, 8)), device="cuda"))
    assert np.allclose(y.get(), want.cpu().numpy(), atol=1e-6)
    with pytest.raises(ValueError, match="another device"):
        heddle.attention(arrays[0], *qkv()[1:])


class Stranger:
    """A GPU array of a library that heddle knows nothing of but DLPack and the array standard."""

    def __init__(self, tensor):
        self.tensor, self.dtype = tensor, np.dtype("float32")

    def __dlpack__(self, *, stream=None, **unused):
        return self.tensor.__dlpack__(stream=stream)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __array_namespace__(self):
        return torch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_stranger_on_a_gpu():
    leaves = [torch.tensor(a, device="cuda", requires_grad=True) for a in qkv()]
    strangers = [Stranger(t.detach()) for t in leaves]
    want, want_lse = heddle.attention(*leaves, return_lse=True)
    out, lse = heddle.attention(*strangers, return_lse=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    again = [Stranger(t) for t in (torch.ones_like(out), out, lse)]
    grads = heddle.attention_backward(again[0], *strangers, *again[1:])
    for got, expected in zip(grads.values(), torch.autograd.grad(want, leaves, torch.ones_like(want)), strict=True):
        assert torch.allclose(got, expected, atol=1e-5)
    lost = []
    for _ in range(5):  # other programs may take memory of this GPU, but not each time
        free = torch.cuda.mem_get_info()[0]
        for _ in range(50):
            heddle.attention(*[Stranger(torch.ones(1, 8, 1024, 64, device="cuda"))] * 3)
        torch.cuda.empty_cache()
        lost.append(free - torch.cuda.mem_get_info()[0])
    assert min(lost) < 2**24, lost  # the results' 100 MB are given back


@pytest.mark.parametrize(
    "changed,kind,text",
    [
        ({"k": make((2, 2, 6, 8), np.float64)}, TypeError, "k is float64, but must be float32"),
        ({"k": [[1.0]]}, TypeError, "speaks DLPack"),
        ({"q": make((2, 4, 5, 16))[..., ::2]}, ValueError, "stride 2"),
        ({"q": make((2, 4, 5, 8))[..., ::-1]}, ValueError, "negative stride"),
        ({"q": make((2, 4, 5, 8)).astype(np.int32)}, TypeError, "q is int32"),
        ({"q": make((2, 4, 5, 8)).astype(">f4")}, TypeError, "DLPack"),
        ({"q": make((2, 3, 5, 8))}, ValueError, "hk = 2 does not divide h = 3"),
        ({"q": make((5, 8))}, ValueError, r"\[2, 4, 4\] dimensions"),
        ({"mask": np.ones((5, 6))}, TypeError, "mask is float64"),
        ({"bias": make((5, 5))}, ValueError, "bias has shape"),
        ({"sinks": make(3)}, ValueError, r"sinks has shape \[3\]"),
        ({"seqlens_k": np.array([1, 9], np.int32)}, ValueError, "0 to 6"),
        ({"dropout": 1.5}, ValueError, "dropout = 1.5"),
        ({"scale": float("nan")}, ValueError, "scale"),
        ({"scale": "0.5"}, TypeError, "scale = '0.5' is not a number"),
        ({"scale": 10**400}, ValueError, "is not a finite number"),
        ({"dropout": 0.5, "rng_state": [1, 2, 3]}, TypeError, r"rng_state = \[1, 2, 3\] is not two integers"),
        ({"dropout": 0.5, "rng_state": [1.5, 2]}, TypeError, "is not two integers"),
        ({"dropout": 0.5, "rng_state": (2**64, 0)}, ValueError, "18446744073709551616, which 64 bits do not hold"),
        ({"dropout": 0.5, "rng_state": (0, -(2**63) - 1)}, ValueError, "which 64 bits do not hold"),
        *(
            ({name: "no"}, TypeError, f"{name} = 'no' is neither True nor False")
            for name in ("return_lse", "return_weights", "deterministic", "tf32")
        ),
    ],
    ids=lambda value: None,
)
def test_errors(changed, kind, text):
    q, k, v = qkv()
    with pytest.raises(kind, match=text):
        heddle.attention(**({"q": q, "k": k, "v": v} | changed))


MASKED = np.ma.masked_array


@pytest.mark.parametrize(
    "name", ["q", "k", "v", "bias", "mask", "alibi_slopes", "sinks", "seqlens_k", "q_segments", "block_columns"]
)
@pytest.mark.parametrize("hides", [True, False])
def test_masked_arrays(name, hides):
    """What lies behind their masks is no number."""
    q, k, v = (make((2, 4, 6, 8)) for _ in range(3))
    given = {
        "q": q,
        "k": k,
        "v": v,
        "bias": make((6, 6)),
        "mask": np.ones((6, 6), bool),
        "alibi_slopes": np.ones(4, np.float32),
        "sinks": make(4),
        "seqlens_k": np.array([6, 3], np.int32),
        "q_segments": np.zeros((2, 6), np.int32),
        "block_columns": np.zeros(1, np.int32),
    }
    options = {key: given[key] for key in ("q", "k", "v", name)}
    if name == "block_columns":
        options["block_rows"] = np.array([0, 1], np.int32)
    assert heddle.attention(**options).shape == q.shape
    with pytest.raises(TypeError, match=rf"^{name} is a numpy\.ma\.MaskedArray"):
        heddle.attention(**options | {name: MASKED(given[name], mask=hides)})


def test_masked_arrays_elsewhere():
    q, k, v = (make((4, 6, 8)) for _ in range(3))
    out, lse = heddle.attention(q, k, v, return_lse=True)
    masked = MASKED(q, mask=q > 0)
    with pytest.raises(TypeError, match=r"^dout is a numpy\.ma\.MaskedArray"):
        heddle.attention_backward(masked, q, k, v, out, lse)
    with pytest.raises(TypeError, match=r"^x is a numpy\.ma\.MaskedArray"):
        heddle.norm_linear(masked[0], q[0])
    with pytest.raises(TypeError, match=r"^gamma is a numpy\.ma\.MaskedArray"):
        heddle.norm_linear(q[0], q[0], gamma=MASKED(np.ones(8, np.float32)))
    with pytest.raises(TypeError, match=r"^weight is a numpy\.ma\.MaskedArray"):
        heddle.norm_linear_prepare(masked[0])
    with pytest.raises(TypeError, match=r"^shown is a numpy\.ma\.MaskedArray"):
        heddle.block_lists(MASKED(np.ones((2, 2), bool)))
    with pytest.raises(TypeError, match=r"^scale is a numpy\.ma\.MaskedArray"):
        heddle.attention(q, k, v, scale=MASKED(0.5, mask=True))
    with pytest.raises(TypeError, match=r"^q_offset is a numpy\.ma\.MaskedArray"):
        heddle.attention(q, k, v, q_offset=MASKED(3, mask=True))
    tensors = [torch.tensor(each)[None] for each in (q, k, v)]
    with pytest.raises(
        TypeError, match=r"^seqlens_k is a numpy\.ma\.MaskedArray"
    ):  # which torch takes without its mask
        heddle.attention(*tensors, seqlens_k=MASKED([3], mask=[True]))


def test_a_tensor_with_the_negative_bit():
    """Its memory has the opposite numbers, and DLPack no word for it."""
    q, k, v = qkv()
    negative = torch._neg_view(torch.tensor(k))
    assert negative.is_neg()
    assert np.array_equal(heddle.attention(q, negative, v), heddle.attention(q, -k, v))
    imaginary = torch.complex(torch.tensor(v), torch.tensor(v)).conj().imag.contiguous()
    assert np.array_equal(heddle.attention(q, k, imaginary), heddle.attention(q, k, -v))
    complex_ = torch.complex(torch.tensor(k), torch.tensor(k))
    for tensor in (complex_, complex_.conj()):
        with pytest.raises(TypeError, match=r"^k"):
            heddle.attention(q, tensor, v)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Liar:
    """An array whose capsule says something else than it does."""

    def __init__(self, array, device=(1, 0), shape=None, **fields):
        self.array, self.dtype, self.device = array, array.dtype, device
        self.sizes = (ctypes.c_int64 * array.ndim)(*(shape or array.shape))
        said = {"device_type": 1, "ndim": array.ndim, "type_code": 2, "type_bits": 32, "lanes": 1}
        said |= {"data": array.ctypes.data, "shape": ctypes.addressof(self.sizes)}
        self.tensor = _DLTensor(**said | fields)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_):
        make_capsule = ctypes.pythonapi.PyCapsule_New
        make_capsule.restype = ctypes.py_object
        make_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make_capsule(ctypes.addressof(self.tensor), b"dltensor", None)


@pytest.mark.parametrize(
    "said,kind,text",
    [
        ({"device_type": 2}, ValueError, r"DLPack device \(1, 0\), but its memory on \(2, 0\)"),
        ({"device": (2, 0)}, ValueError, r"DLPack device \(2, 0\), but its memory on \(1, 0\)"),
        ({"ndim": 1 << 30}, TypeError, "a DLPack tensor of 1073741824 dimensions"),
        ({"ndim": -1}, TypeError, "a DLPack tensor of -1 dimensions"),
        ({"shape": (2, 2, -6, 8)}, ValueError, r"has shape \[2, 2, -6, 8\]: sizes must not be negative"),
        ({"lanes": 2}, TypeError, "vector types of 2 lanes"),
    ],
)
def test_capsules_that_say_something_else(said, kind, text):
    q, k, v = qkv()
    assert np.array_equal(heddle.attention(q, Liar(k), v), heddle.attention(q, k, v))
    with pytest.raises(kind, match=f"^k.* {text}"):
        heddle.attention(q, Liar(k, **said), v)


def test_capsules_that_are_none():
    q, k, v = qkv()

    class Other(Liar):
        def __dlpack__(self, **_):
            return 3

    with pytest.raises(TypeError, match=r"^k: that is no unused DLPack capsule"):
        heddle.attention(q, Other(k), v)


def test_tensors_that_are_more_than_their_memory():
    from torch.masked import masked_tensor
    from torch.nn.attention.bias import causal_lower_right

    q = make((4, 6, 8))
    tensor = torch.tensor(q)
    for name, value in (
        ("k", masked_tensor(tensor, tensor > 0)),
        ("k", tensor.to_sparse()),
        ("k", tensor.to("meta")),
        ("bias", causal_lower_right(6, 6)),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"^{name}\b"):
            heddle.attention(**{"q": q, "k": q, "v": q} | {name: value})


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize(
    "changed,kind,text",
    [
        *(
            ({name: value}, TypeError, rf"{name} = .* is not an integer")
            for name in ("q_offset", "k_offset", "h_offset", "whole_sq", "whole_sk", "whole_h")
            for value in (1.5, "3", "", [1], np.array([1, 2]), np.float32(1), True)
        ),
        ({"q_offset": -1}, ValueError, "q_offset = -1 is outside"),
        *(
            ({name: value}, TypeError, rf"{name} = .* is not a number")
            for name in ("scale", "softcap", "dropout")
            for value in (np.array([0.3]), np.array([0.3, 0.4]), np.complex64(1 + 1j), 1j, [], "", np.array("0.3"))
        ),
        ({"window": ([1], 2)}, TypeError, "window = .*: its sides must be integers"),
    ],
    ids=lambda value: None,
)
def test_numbers_by_name(changed, kind, text, tensors):
    given = (torch.tensor(each) if tensors else each for each in qkv())
    with pytest.raises(kind, match=text):
        heddle.attention(*given, **changed)


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("value", ["3", 3.5, 3.0, [3], True, np.array([3])], ids=str)
@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_limits_by_name(name, value, tensors):
    rows, cu = make((3, 4, 8)), np.array([0, 3], np.int32)
    rows, cu = (torch.tensor(rows), torch.tensor(cu)) if tensors else (rows, cu)
    limits = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 3, "max_seqlen_k": np.int64(3)}
    heddle.attention(rows, rows, rows, **limits)
    with pytest.raises(TypeError, match=rf"{name} = .* is not an integer"):
        heddle.attention(rows, rows, rows, **limits | {name: value})


def test_none_is_no_place():
    q, k, v = qkv()
    places = dict.fromkeys(("q_offset", "k_offset", "h_offset", "whole_sq", "whole_sk", "whole_h"))
    want = heddle.attention(q, k, v)
    assert np.array_equal(heddle.attention(q, k, v, **places), want)
    tensors = (torch.tensor(each) for each in (q, k, v))
    assert np.array_equal(heddle.attention(*tensors, **places, return_weights=True)[0], want)


def test_backward_numbers_by_name():
    q, k, v = qkv()
    out, lse = heddle.attention(q, k, v, return_lse=True)
    with pytest.raises(TypeError, match=r"dropout = .* is not a number"):
        heddle.attention_backward(out, q, k, v, out, lse, dropout=np.array([0.1, 0.2]))
    for eps in (np.array([1e-5, 1e-5]), "x"):
        with pytest.raises(TypeError, match=r"eps = .* is not a number"):
            heddle.norm_linear(q, q[0, 0], norm="none", eps=eps)


def test_far_windows():
    assert np.array_equal(heddle.attention(*qkv(), window=(2**70, 1)), heddle.attention(*qkv(), window=(None, 1)))


def test_no_results_of_an_unknown_kind():
    class Unknown:
        def __init__(self, array):
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    q, k, v = qkv()
    with pytest.raises(TypeError, match="Unknown has no __array_namespace__"):
        heddle.attention(Unknown(q), k, v)
    assert np.array_equal(heddle.attention(q, Unknown(k), Unknown(v)), heddle.attention(q, k, v))


def test_backward_errors():
    q, k, v = qkv()
    out, lse = heddle.attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match="rng_state"):
        heddle.attention_backward(out, q, k, v, out, lse, dropout=0.5)
    with pytest.raises(TypeError, match="no option colour"):
        heddle.attention_backward(out, q, k, v, out, lse, colour=1)
    with pytest.raises(ValueError, match="lse has shape"):
        heddle.attention_backward(out, q, k, v, out, lse[..., :3])
    with pytest.raises(TypeError, match="backward"):
        heddle.attention_backward(*(torch.tensor(a) for a in (out, q, k, v, out, lse)))
    with pytest.raises(ValueError, match="weight"):
        heddle.norm_linear(q, make((3, 7)))
    for name in ("tf32", "return_norm"):
        with pytest.raises(TypeError, match=f"{name} = 'no' is neither True nor False"):
            heddle.norm_linear(q, make((3, 8)), **{name: "no"})
