# SPDX-License-Identifier: Apache-2.0
"""Bad input: a fitting exception with the numbers, never a crash and never a wrong result."""

from __future__ import annotations

import ctypes

import pytest
import torch

import heddle
import heddle._C
import heddle._ops
import heddle._schema

ops = torch.ops.heddle


def qkv(**changed):
    torch.manual_seed(0)
    return {"q": torch.randn(2, 4, 5, 8), "k": torch.randn(2, 2, 6, 8), "v": torch.randn(2, 2, 6, 3)} | changed


ATTENTION = [
    ({"k": torch.randn(2, 3, 6, 8), "v": torch.randn(2, 3, 6, 3)}, ValueError, "hk = 3 does not divide h = 4"),
    ({"k": torch.randn(2, 2, 6, 7)}, ValueError, "head dim 8, but k has 7"),
    ({"v": torch.randn(2, 2, 5, 3)}, ValueError, "6 in dimension 2, but v has 5"),
    ({"k": torch.randn(3, 2, 6, 8), "v": torch.randn(3, 2, 6, 3)}, ValueError, "batch size 2, but k has 3"),
    ({"q": torch.randn(4, 5, 8)}, ValueError, "3, 4 and 4 dimensions"),
    ({"q": torch.randn(8)}, ValueError, "dimensions"),
    ({"q": torch.randn(1, 2, 4, 5, 8)}, ValueError, "5, 4 and 4 dimensions"),
    ({"k": torch.randn(2, 2, 6, 8).half()}, TypeError, "k is float16, but must be float32"),
    ({"q": torch.zeros(2, 4, 5, 8, dtype=torch.int32)}, TypeError, "must be float32, bfloat16"),
    ({"q": torch.randn(2, 4, 5, 8, dtype=torch.complex64)}, TypeError, "must be float32, bfloat16"),
    ({"q": torch.randn(2, 4, 8, 5).transpose(2, 3)}, ValueError, "stride 5 in its last dimension"),
    ({"v": torch.randn(2, 2, 6, 6)[..., ::2]}, ValueError, "v has stride 2 in its last dimension"),
    ({"k": [1.0]}, TypeError, "k must be a torch.Tensor"),
    ({"k": torch.randn(2, 2, 6, 8, device="meta")}, ValueError, "k is on meta"),
    ({"q": torch.randn(2, 4, 5, 513), "k": torch.randn(2, 2, 6, 513)}, ValueError, "d = 513 is outside 1 to 512"),
    ({"bias": torch.randn(3, 5, 6)}, ValueError, "bias has shape"),
    ({"bias": torch.randn(1, 2, 4, 5, 6)}, ValueError, "5 dimensions"),
    ({"bias": torch.ones(5, 6, dtype=torch.bool)}, TypeError, "goes into mask"),
    ({"mask": torch.ones(5, 6)}, TypeError, "goes into bias"),
    ({"mask": torch.ones(5, 7, dtype=torch.bool)}, ValueError, "mask has shape"),
    ({"sinks": torch.randn(3)}, ValueError, r"sinks has shape \[3\], but must have \[4\]"),
    ({"alibi_slopes": torch.randn(2)}, ValueError, r"alibi_slopes has shape \[2\]"),
    ({"alibi_slopes": torch.randn(3, 4)}, ValueError, r"must have \[2, 4\]"),
    ({"alibi_slopes": torch.randn(4, requires_grad=True)}, NotImplementedError, "alibi_slopes requires a gradient"),
    ({"causal": True}, ValueError, "sq = 5 is not sk = 6"),
    ({"causal": "left"}, ValueError, "causal = 'left'"),
    ({"window": 3}, ValueError, "no pair"),
    ({"scale": float("nan")}, ValueError, "scale = nan"),
    ({"scale": float("inf")}, ValueError, "scale = inf"),
    ({"scale": 10**400}, ValueError, "is not a finite number"),
    ({"scale": "0.5"}, TypeError, "scale = '0.5' is not a number"),
    ({"softcap": 10**400}, ValueError, "softcap = 1000"),
    ({"softcap": "5"}, TypeError, "softcap = '5' is not a number"),
    ({"dropout": [0.1]}, TypeError, r"dropout = \[0.1\] is not a number"),
    ({"dropout": float("nan")}, ValueError, "dropout = nan"),
    ({"scale": torch.tensor(0.5)}, TypeError, "is not a number"),
    ({"softcap": -1.0}, ValueError, "softcap = -1"),
    ({"dropout": 1.0}, ValueError, "dropout = 1"),
    ({"dropout": -0.5}, ValueError, "dropout = -0.5"),
    ({"dropout": float("nan")}, ValueError, "dropout = nan"),
    ({"dropout": 1 - 2**-18}, ValueError, "dropout = 0.999996185 is 1 when rounded to a multiple of 1/65536"),
    ({"dropout": 0.5, "rng_state": torch.zeros(3, dtype=torch.int64)}, ValueError, r"must have \[2\]"),
    ({"dropout": 0.5, "rng_state": torch.zeros(2)}, TypeError, "rng_state is float32, but must be int64"),
    ({"seqlens_k": torch.tensor([1, 7])}, ValueError, r"seqlens_k\[1\] = 7 is outside 0 to 6"),
    ({"seqlens_q": torch.tensor([-1, 1])}, ValueError, r"seqlens_q\[0\] = -1 is outside 0 to 5"),
    ({"seqlens_q": torch.tensor([1])}, ValueError, r"must have \[2\]"),
    ({"seqlens_q": torch.tensor([1.0, 2.0])}, TypeError, "seqlens_q must be integers"),
    ({"seqlens_q": [1.0, 2.5]}, TypeError, "seqlens_q must be integers, not torch.float"),
    ({"seqlens_k": [True, False]}, TypeError, "seqlens_k must be integers, not torch.bool"),
    ({"seqlens_k": torch.ones(2, dtype=torch.complex64)}, TypeError, "integers, not torch.complex64"),
    ({"seqlens_k": torch.tensor([2**32 + 3, 1])}, ValueError, r"seqlens_k\[0\] = 4294967299 is outside 0 to 6"),
    ({"seqlens_k": [2**32 + 3, 1]}, ValueError, r"seqlens_k\[0\] = 4294967299 is outside 0 to 6"),
    ({"seqlens_q": torch.tensor([1, -(2**40)])}, ValueError, r"seqlens_q\[1\] = -1099511627776 is outside 0 to 5"),
    ({"seqlens_k": "x"}, TypeError, "seqlens_k = 'x' must be integers"),
    ({"seqlens_k": [2**70, 1]}, TypeError, "seqlens_k = .* must be integers"),
    ({"max_seqlen_q": 5}, ValueError, "without cu_seqlens"),
    *(
        ({name: ""}, TypeError, f"{name} = '' is ")
        for name in ("softcap", "dropout", "return_lse", "return_weights", "tf32", "deterministic", "h_offset")
    ),
    *(
        ({name: torch.ones(4, dtype=dtype)}, TypeError, f"{name} is {dtype}, but must be torch.float32")
        for name in ("alibi_slopes", "sinks")
        for dtype in (torch.complex64, torch.int64, torch.bool)
    ),
    *(
        ({name: "no"}, TypeError, f"{name} = 'no' is neither True nor False")
        for name in ("return_lse", "return_weights", "deterministic", "tf32")
    ),
    ({"alibi_slopes": [1.0] * 4}, TypeError, "alibi_slopes must be a torch.Tensor"),
    ({"sinks": [1.0] * 4}, TypeError, "sinks must be a torch.Tensor"),
    ({"mask": [[True]]}, TypeError, "mask must be a torch.Tensor"),
    ({"bias": 1.0}, TypeError, "bias must be a torch.Tensor"),
    ({"dropout": 0.5, "rng_state": [1, 2]}, TypeError, "rng_state must be a torch.Tensor"),
    ({"window": (1.5, 2)}, TypeError, "must be integers"),
    ({"causal": [1]}, ValueError, r"causal = \[1\]"),
]


@pytest.mark.parametrize("changed,kind,text", ATTENTION, ids=lambda value: None)
def test_attention(changed, kind, text):
    with pytest.raises(kind, match=text):
        heddle.attention(**qkv(**changed))


def test_numbers_of_numpy_and_far_windows():
    numpy = pytest.importorskip("numpy")
    out = heddle.attention(**qkv(), scale=0.25)
    assert torch.equal(heddle.attention(**qkv(), scale=numpy.float32(0.25)), out)
    assert torch.equal(heddle.attention(**qkv(), scale=0.25, window=(2**70, numpy.int64(9))), out)


def packed(**changed):
    cu = torch.tensor([0, 3, 9], dtype=torch.int32)
    given = {"q": torch.randn(9, 4, 8), "k": torch.randn(9, 4, 8), "v": torch.randn(9, 4, 8)}
    given |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 6, "max_seqlen_k": 6}
    return given | changed


@pytest.mark.parametrize(
    "changed,text",
    [
        ({"max_seqlen_q": None}, "need max_seqlen_q"),
        ({"cu_seqlens_k": None}, "only one is given"),
        ({"cu_seqlens_q": torch.tensor([0, 3])}, r"must have \[2\]"),
        ({"cu_seqlens_q": torch.tensor([0, 5, 3])}, "must not fall"),
        ({"cu_seqlens_k": torch.tensor([0, 3, 10])}, "exceed the 9 rows"),
        ({"max_seqlen_k": 5}, "max_seqlen_k = 5"),
        ({"max_seqlen_q": 2**63}, "max_seqlen_q = 9223372036854775808 is outside 0 to 1099511627776"),
        ({"max_seqlen_k": -1}, "max_seqlen_k = -1 is outside 0 to 1099511627776"),
        ({"cu_seqlens_k": torch.tensor([0, 2**32 + 3, 9])}, r"cu_seqlens_k\[1\] = 4294967299 .*exceed the 9 rows"),
        ({"q": torch.randn(1, 9, 4, 8)}, "4 dimensions, but must have 3"),
    ],
)
def test_packed(changed, text):
    with pytest.raises(ValueError, match=text):
        heddle.attention(**packed(**changed))


@pytest.mark.parametrize("most", [2**40 + 1, 2**63, 2**64, -(2**70)])
def test_packed_arrays(most):
    given = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in packed().items()}
    for name in ("max_seqlen_q", "max_seqlen_k"):
        with pytest.raises(ValueError, match=f"{name} = {most} is outside 0 to 1099511627776"):
            heddle.attention(**given | {name: most})


NORM_LINEAR = [
    ({"weight": torch.randn(5, 7)}, ValueError, r"x has 8 features, but weight is \[5, 7\]"),
    ({"weight": torch.randn(5)}, ValueError, "weight has 1 dimensions"),
    ({"weight": torch.randn(8, 5).T}, ValueError, "weight has stride 5 in its last dimension"),
    ({"weight": torch.randn(5, 8).bfloat16()}, TypeError, "weight is bfloat16, but must be float32"),
    ({"bias": torch.randn(4)}, ValueError, r"bias has shape \[4\], but must have \[5\]"),
    ({"gamma": torch.randn(5)}, ValueError, r"gamma has shape \[5\], but must have \[8\]"),
    ({"beta": torch.randn(1, 8)}, ValueError, r"beta has shape \[1, 8\]"),
    ({"eps": -1.0}, ValueError, "eps = -1"),
    ({"eps": float("nan")}, ValueError, "eps = nan"),
    ({"norm": "batch"}, ValueError, "'batch'"),
    ({"norm": "none", "eps": 0.1}, ValueError, "eps = 0.1, but norm = 'none' has no variance"),
    ({"norm": "none", "gamma": torch.randn(8)}, ValueError, "gamma is given, but norm is HEDDLE_NO_NORM"),
    ({"norm": ["layer"]}, ValueError, "none of 'layer', 'rms', 'none'"),
    ({"x": torch.zeros(3, 8, dtype=torch.int64)}, TypeError, "must be float32"),
    ({"x": torch.randn(())}, ValueError, "0 dimensions"),
    ({"weight": "w"}, TypeError, "torch.Tensor"),
    ({"bias": [1.0] * 5}, TypeError, "bias must be a torch.Tensor, not list"),
    ({"residual": [1.0] * 5}, TypeError, "residual must be a torch.Tensor, not list"),
    ({"eps": "small"}, TypeError, "eps = 'small' is not a number"),
    ({"eps": True}, TypeError, "eps = True is not a number"),
    ({"return_norm": "no"}, TypeError, "return_norm = 'no' is neither True nor False"),
    ({"tf32": "no"}, TypeError, "tf32 = 'no' is neither True nor False"),
]


@pytest.mark.parametrize("changed,kind,text", NORM_LINEAR, ids=lambda value: None)
def test_norm_linear(changed, kind, text):
    with pytest.raises(kind, match=text):
        heddle.norm_linear(**({"x": torch.randn(3, 8), "weight": torch.randn(5, 8)} | changed))


def test_what_has_no_gradient(monkeypatch):
    """An input of floating point without a gradient is refused by its name, whichever it is: here as if w had none."""
    x, w = torch.randn(2, 3), torch.randn(4, 3, requires_grad=True)
    heddle.norm_linear(x, w).sum().backward()
    constants = [heddle._schema.names("attention")[at] for at in heddle._ops._CONSTANTS["attention"]]
    assert constants == ["alibi_slopes", "k_scale", "v_scale"]
    monkeypatch.setitem(heddle._ops._CONSTANTS, "norm_linear", (heddle._schema.names("norm_linear").index("weight"),))
    with pytest.raises(NotImplementedError, match="weight requires a gradient"):
        heddle.norm_linear(x, w)


def test_scaled_dot_product_attention():
    q = torch.randn(2, 4, 5, 8)
    for mask, kind, text in (
        (torch.zeros(1, 1, 2, 5, 5), ValueError, "more dimensions"),
        (torch.ones(5, 6, dtype=torch.bool), ValueError, "mask has shape"),
        ([[True]], TypeError, "attn_mask must be a torch.Tensor"),
    ):
        with pytest.raises(kind, match=text):
            heddle.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    with pytest.raises(ValueError, match=r"attn_mask has shape \[2, 4, 5, 5\], but must broadcast to \[4, 5, 5\]"):
        heddle.scaled_dot_product_attention(q[0], q[0], q[0], attn_mask=torch.zeros(2, 4, 5, 5))
    with pytest.raises(ValueError, match=r"must broadcast to \[1, 2, 4, 5, 5\]"):
        heddle.scaled_dot_product_attention(q[None], q[None], q[None], attn_mask=torch.zeros(3, 2, 4, 5, 5))
    none = torch.randn(2, 0, 4, 5, 8)
    assert heddle.scaled_dot_product_attention(none, none, none, torch.zeros(2, 1, 1, 5, 5)).shape == none.shape
    with pytest.raises(ValueError, match="do not broadcast"):
        heddle.scaled_dot_product_attention(q, q.expand(3, 2, 4, 5, 8), q.expand(7, 2, 4, 5, 8))


@pytest.mark.parametrize(
    "changed,kind,text",
    [
        ({"v": torch.randn(2, 1, 2, 8)}, ValueError, r"v has shape \[2, 1, 2, 8\], but must have \[2, 1, 4, 8\]"),
        ({"v": torch.randn(2, 2, 4, 8)}, ValueError, "v has shape"),
        ({"k": torch.randn(2, 1, 4, 8).half()}, TypeError, "k is torch.float16"),
        ({"cache_seqlens": [1, 2]}, TypeError, "not list"),
        ({"cache_seqlens": -3}, ValueError, "must not be negative"),
        ({"cache_seqlens": True}, TypeError, "not bool"),
        ({"cache_seqlens": torch.tensor([1.5, 2.0])}, TypeError, "cache_seqlens is torch.float32"),
        ({"cache_seqlens": torch.tensor([1, 2, 3])}, ValueError, r"cache_seqlens has shape \[3\], but must have \[2\]"),
        ({"cache_seqlens": torch.tensor([2**32 + 1, 1])}, ValueError, "too few for 4294967297 and 1"),
        ({"cache_batch_idx": [0, 1]}, TypeError, "cache_batch_idx must be a torch.Tensor, not list"),
        ({"cache_batch_idx": torch.tensor([0.0, 1.5])}, TypeError, "cache_batch_idx is torch.float32"),
        ({"cache_batch_idx": torch.tensor([0])}, ValueError, r"cache_batch_idx has shape \[1\]"),
        ({"cache_batch_idx": torch.tensor([0, 2])}, ValueError, r"cache_batch_idx = \[0, 2\] is not all from 0 to 1"),
        ({"cache_batch_idx": torch.tensor([0, -1])}, ValueError, r"\[0, -1\] is not all from 0 to 1"),
        ({"q": [1.0]}, TypeError, "q must be a torch.Tensor"),
        ({"q": torch.randn(2, 1, 4, 7)}, ValueError, "differ"),
        ({"q": torch.randn(2, 1, 4, 8).half()}, TypeError, "k_cache is torch.float32, but must be torch.float16"),
        ({"v_cache": torch.randn(2, 3, 4, 8)}, ValueError, r"\[2, 3, 4, 8\]\]: .* differ"),
    ],
    ids=lambda value: None,
)
def test_a_cache_is_left_alone(changed, kind, text):
    cache = torch.randn(2, 2, 6, 4, 8)
    before = cache.clone()
    new = {"k": torch.randn(2, 1, 4, 8), "v": torch.randn(2, 1, 4, 8), "cache_seqlens": 3} | changed
    with pytest.raises(kind, match=text):
        heddle.flash_attn_with_kvcache(
            **({"q": torch.randn(2, 1, 4, 8), "k_cache": cache[0], "v_cache": cache[1]} | new)
        )
    assert torch.equal(cache, before)


def test_raw_operators_name_the_rule():
    q = torch.randn(2, 4, 5, 8)
    with pytest.raises(RuntimeError, match="hk = 3 does not divide h = 4"):
        ops.attention(q, q[:, :3], q[:, :3])
    with pytest.raises(RuntimeError, match="causal = 7"):
        ops.attention(q, q, q, causal=7)
    with pytest.raises(RuntimeError, match="needs rng_state"):
        ops.attention(q, q, q, dropout=0.5)
    with pytest.raises(RuntimeError, match="norm = 3"):
        ops.norm_linear(q, torch.randn(3, 8), norm=3)
    with pytest.raises(RuntimeError, match="q has 3 dimensions"):
        ops.attention(q[0], q, q)


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": torch.zeros(4)},
        {"alibi_slopes": torch.zeros(4)},
        {"dropout": 0.5, "rng_state": torch.zeros(2, dtype=torch.int64)},
        {"seqlens_k": torch.tensor([1, 2], dtype=torch.int32)},
        {"bias": torch.zeros(1, 1, 5, 6)},
    ],
    ids=lambda options: list(options)[-1],
)
def test_one_tensor_on_meta(options):
    """It brings a call to the kernels that compute nothing: memory as it was found would come back."""
    name = list(options)[-1]
    with pytest.raises(ValueError, match=f"{name} is on meta, the first tensor on cpu"):
        heddle.attention(**qkv(), **(options | {name: options[name].to("meta")}))


def test_one_tensor_on_meta_when_packed():
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        with pytest.raises(ValueError, match=f"{name} is on meta"):
            heddle.attention(**packed(**{name: torch.tensor([0, 3, 9], dtype=torch.int32, device="meta")}))


def test_one_tensor_on_meta_in_backward():
    given = qkv()
    out, lse = heddle.attention(**given, return_lse=True)
    rest = (None, None, out, lse, *given.values())
    for at, name in ((3, "out"), (4, "lse"), (6, "k")):
        args = [out, *rest]
        args[at] = args[at].to("meta")
        with pytest.raises(ValueError, match=f"{name} is on meta"):
            ops.attention_backward(*args)
    y, mean, rstd, *_ = ops.norm_linear(torch.randn(3, 8), torch.randn(5, 8))
    with pytest.raises(ValueError, match="rstd is on meta"):
        ops.norm_linear_backward(y, mean, rstd.to("meta"), torch.randn(3, 8), torch.randn(5, 8))


def test_a_weight_on_meta_is_not_prepared():
    """How many bytes there are, a processor decides."""
    weight = torch.empty(5, 8, device="meta")
    with pytest.raises(ValueError, match="weight is on meta"):
        heddle.norm_linear_prepare(weight)
    with pytest.raises(RuntimeError, match="weight is on meta"):
        ops.norm_linear_prepare(weight)


def test_errors_under_compile():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k: heddle.attention(q, k, k), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="hk = 3 does not divide h = 4"):
        compiled(torch.randn(2, 4, 5, 8), torch.randn(2, 3, 5, 8))


def test_old_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(ImportError, match=r"needs torch 2\.10 or later, this is torch 2\.9\.1"):
        heddle._ops._load()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_mixed_devices():
    with pytest.raises(ValueError, match="device"):
        heddle.attention(**qkv(k=torch.randn(2, 2, 6, 8, device="cuda")))
    with pytest.raises(ValueError, match="device"):
        heddle.norm_linear(torch.randn(3, 8, device="cuda"), torch.randn(5, 8))


def capsule(ndim, shape):
    """A DLPack capsule with what no library should put there."""

    class Tensor(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32)]
        _fields_ += [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]
        _fields_ += [("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64)]

    tensor = Tensor(64, (1, 0), ndim, 2, 32, 1, shape, None, 2)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return tensor, new(ctypes.addressof(tensor), b"dltensor", None)


def test_capsules():
    for ndim, text in ((-1, "of -1 dimensions"), (2, "of 2 dimensions without a shape")):
        tensor, bad = capsule(ndim, None)
        with pytest.raises(BufferError, match=text):
            heddle._C.view(bad)
        assert tensor.ndim == ndim  # it has to live as long as the capsule
    tensor, good = capsule(0, None)
    assert heddle._C.view(good)[0] == tensor.data + tensor.byte_offset


def test_numbers_that_fit_nowhere():
    for name in ("dtype", "device", "mask"):
        with pytest.raises(OverflowError, match=f"{name} = 4294967296 does not fit"):
            heddle._C.kernel("attention", 0, {"b": 1, "h": 1, "sq": 1, "sk": 1, "d": 8, name: 2**32})


@pytest.mark.parametrize(
    "call",
    [
        lambda: heddle.attention(**qkv(k=torch.randn(2, 3, 6, 8), v=torch.randn(2, 3, 6, 3))),  # from C
        lambda: heddle.attention(**qkv(q=torch.randn(8))),
        lambda: heddle.attention(**qkv(), causal="left"),
        lambda: heddle.norm_linear(torch.randn(3, 8), torch.randn(5, 7)),
        lambda: heddle.scaled_dot_product_attention(torch.randn(8), torch.randn(8), torch.randn(8)),
        lambda: heddle.flash_attn_func(torch.randn(8), torch.randn(8), torch.randn(8)),
        lambda: heddle.nn.SelfAttention(8, 3),
    ],
)
def test_a_wrong_value_is_both(call):
    """ValueError to those who know Python, RuntimeError to those who know PyTorch."""
    for kind in (ValueError, RuntimeError):
        with pytest.raises(kind):
            call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: heddle.attention(**qkv(k=torch.randn(2, 2, 6, 8).half())),  # from C
        lambda: heddle.attention(**qkv(k=None)),
        lambda: heddle.norm_linear(torch.randn(3, 8), torch.randn(5, 8), bias=[1.0] * 5),  # from PyTorch
        lambda: heddle.scaled_dot_product_attention(None, None, None),
    ],
)
def test_a_wrong_type_is_both(call):
    for kind in (TypeError, RuntimeError):
        with pytest.raises(kind):
            call()


@pytest.mark.parametrize(
    "window",
    [(torch.tensor(1.5), 2), (torch.tensor([1, 2]), 2), (torch.tensor(True), 1.0), (torch.tensor([]), 1)],
    ids=str,
)
def test_windows_of_tensors(window):
    with pytest.raises(TypeError, match="its sides must be integers"):
        heddle.attention(**qkv(), window=window)
    q = torch.randn(1, 5, 2, 8)
    with pytest.raises(TypeError, match="its sides must be integers"):
        heddle.flash_attn_func(q, q, q, window_size=window)
    with pytest.raises(ValueError, match=r"tensor\(3\) is no pair"):
        heddle.flash_attn_func(q, q, q, window_size=torch.tensor(3))
