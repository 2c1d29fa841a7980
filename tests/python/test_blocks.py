# SPDX-License-Identifier: Apache-2.0
"""Lists of blocks: the same results as of a boolean mask, from torch, NumPy and JAX; errors say what is wrong."""

import numpy as np
import pytest
import torch
from conftest import devices
from test_segments import OPTIONS

import heddle

torch.manual_seed(0)
B, H, HK, SQ, SK, D = 2, 4, 2, 300, 410, 16
each_device = pytest.mark.parametrize("device", devices())
LISTS = ((1, 1), (B, 1), (1, H), (B, H))


def problem(of=(B, H), sizes=(64, 128), dtype=torch.float32, sq=SQ, sk=SK, device="cpu"):
    q = torch.randn(B, H, sq, D, dtype=dtype, device=device)
    k, v = (torch.randn(B, HK, sk, D, dtype=dtype, device=device) for _ in range(2))
    shown = torch.rand(*of, -(-sq // sizes[0]), -(-sk // sizes[1]), device=device) < 0.5
    shown[:, :, 1] = False  # queries that see nothing
    mask = shown.repeat_interleave(sizes[0], 2)[:, :, :sq].repeat_interleave(sizes[1], 3)[..., :sk]
    rows, columns = heddle.block_lists(shown)
    return q, k, v, {"block_rows": rows, "block_columns": columns, "block_size": sizes}, mask


def wide(options, device):
    """test_segments' options, of this problem."""
    chosen = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    if "mask" in chosen:
        chosen["mask"] = torch.rand(B, 1, SQ, SK, device=device) < 0.8
    if "seqlens_k" in chosen:
        chosen["seqlens_k"] = [SK, 200]
    return chosen


def test_lists():
    shown = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 1]], dtype=torch.bool)
    rows, columns = heddle.block_lists(shown)
    assert rows.tolist() == [[[0, 2, 2, 4]]] and columns.tolist()[:4] == [0, 2, 1, 2] and columns.shape == (9,)
    assert rows.dtype == columns.dtype == torch.int32
    several = torch.rand(2, 3, 4, 5) < 0.4
    for made in (heddle.block_lists(several), heddle.block_lists(several.numpy())):
        rows, columns = (np.asarray(x) for x in made)
        assert rows.shape == (2, 3, 5) and rows[-1, -1, -1] == several.sum()
        for b, h, r in np.ndindex(2, 3, 4):
            expected = several[b, h, r].nonzero().flatten().tolist()
            assert columns[rows[b, h, r] : rows[b, h, r + 1]].tolist() == expected
    assert heddle.block_lists(shown[:0])[0].tolist() == [[[0]]]
    for wrong in (shown.int(), shown[0], shown.numpy().astype(int)):
        with pytest.raises(TypeError, match="shown is"):
            heddle.block_lists(wrong)


@each_device
@pytest.mark.parametrize("of", LISTS)
@pytest.mark.parametrize("at", range(len(OPTIONS)))
def test_like_a_mask(at, of, device):
    q, k, v, lists, mask = problem(of, ((64, 128), (128, 64), (64, 64), (128, 128))[at % 4], device=device)
    options = wide(OPTIONS[at], device)
    both = mask & options["mask"] if "mask" in options else mask
    leaves = [[x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2)]
    ours = heddle.attention(*leaves[0], **lists, **options)
    theirs = heddle.attention(*leaves[1], **{**options, "mask": both})
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    first = [x[0] if isinstance(x, tuple) else x for x in (ours, theirs)]
    grads = [torch.autograd.grad(x.square().sum(), leaf) for x, leaf in zip(first, leaves, strict=True)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_packed():
    q, k, v, _, _ = problem()
    lengths = ((300, 410), (130, 70))
    shown = torch.rand(B, H, 5, 4) < 0.5
    rows, columns = heddle.block_lists(shown)
    parts = [[x[n, :, : lengths[n][at > 0]].transpose(0, 1) for n in range(B)] for at, x in enumerate((q, k, v))]
    packed = [torch.cat(each) for each in parts]
    cu = [torch.tensor([0, lengths[0][x], lengths[0][x] + lengths[1][x]], dtype=torch.int32) for x in range(2)]
    options = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1], "max_seqlen_q": 320, "max_seqlen_k": 512}
    lists = {"block_rows": rows, "block_columns": columns, "block_size": (64, 128)}
    out = heddle.attention(*packed, **options, **lists)
    for n, (sq, sk) in enumerate(lengths):
        mask = shown[n].repeat_interleave(64, 1)[:, :sq].repeat_interleave(128, 2)[..., :sk]
        each = [x[n : n + 1, :, : (sk if at else sq)] for at, x in enumerate((q, k, v))]
        expected = heddle.attention(*each, mask=mask)[0].transpose(0, 1)
        torch.testing.assert_close(out[cu[0][n] : cu[0][n + 1]], expected, rtol=1e-5, atol=1e-5)
    tangents = [torch.randn_like(x) for x in packed]
    _, moved = torch.func.jvp(lambda *x: heddle.attention(*x, **options, **lists), tuple(packed), tuple(tangents))
    leaves = [x.clone().requires_grad_() for x in packed]
    out = heddle.attention(*leaves, **options, **lists)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    expected = sum((g * t).sum() for g, t in zip(grads, tangents, strict=True))
    torch.testing.assert_close((moved * dout).sum(), expected, rtol=1e-3, atol=1e-3)


def test_compile_export_vmap_opcheck():
    q, k, v, lists, mask = problem()
    expected = heddle.attention(q, k, v, mask=mask)

    def run(q, k, v, rows, columns):
        return heddle.attention(q, k, v, block_rows=rows, block_columns=columns, block_size=(64, 128))

    given = (q, k, v, lists["block_rows"], lists["block_columns"])
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), expected, rtol=1e-5, atol=1e-5)
    made = torch.compile(heddle.block_lists, backend="aot_eager", fullgraph=True)(torch.ones(3, 2, dtype=torch.bool))
    assert made[0].tolist() == [[[0, 2, 4, 6]]]
    each = torch.func.vmap(run, in_dims=(0, 0, 0, None, None))(*(torch.stack((x, x)) for x in given[:3]), *given[3:])
    torch.testing.assert_close(each[1], expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="vmap over block_rows"):
        torch.func.vmap(run, in_dims=(None, None, None, 0, None))(*given[:3], torch.stack((given[3],) * 2), given[4])

    def loss(q):
        return run(q, *given[1:]).square().sum()

    several = torch.func.vmap(torch.func.grad(loss))(torch.stack((q, 2 * q)))
    torch.testing.assert_close(several[1], torch.func.grad(loss)(2 * q), rtol=1e-5, atol=1e-5)
    names = {"block_rows": given[3], "block_columns": given[4], "block_q": 64, "block_k": 128}
    torch.library.opcheck(torch.ops.heddle.attention.default, given[:3], names)

    class Module(torch.nn.Module):
        def forward(self, *x):
            return run(*x)

    exported = torch.export.export(Module(), given).module()
    torch.testing.assert_close(exported(*given), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("of", LISTS)
def test_second_derivative(of):
    q, k, v, lists, mask = problem(of, (64, 64), torch.float64, 70, 130)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    results = []
    for options in (lists, {"mask": mask}):
        out = heddle.attention(*leaves, causal="bottom_right", **options)
        first = torch.autograd.grad((out * out.detach().cos()).sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
        _, moved = torch.func.jvp(lambda q: heddle.attention(q, k, v, **options), (q.detach(),), (q.detach().sin(),))  # noqa: B023
        results[-1] = (*results[-1], moved)
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


def test_order_and_repetition_do_not_matter():
    q, k, v, _, _ = problem((1, 1), (64, 128))
    rows = torch.tensor([0, 3, 3, 4, 6, 8], dtype=torch.int32)
    once = torch.tensor([0, 2, 3, 1, 0, 3, 1, 2], dtype=torch.int32)
    turned = torch.tensor([3, 0, 2, 1, 3, 0, 2, 1, 77], dtype=torch.int32)  # the last one counts for nothing
    ours, theirs = (
        heddle.attention(q, k, v, block_rows=rows, block_columns=x, block_size=(64, 128)) for x in (once, turned)
    )
    assert torch.equal(ours, theirs)
    twice = torch.tensor([0, 2, 3, 3, 1, 0, 3, 1, 2], dtype=torch.int32)
    again = rows + (rows > 0).int()
    theirs = heddle.attention(q, k, v, block_rows=again, block_columns=twice, block_size=(64, 128))
    assert torch.equal(ours, theirs)
    moved = torch.func.jvp(
        lambda q: heddle.attention(q, k, v, block_rows=again, block_columns=twice, block_size=(64, 128)), (q,), (q,)
    )[1]
    expected = torch.func.jvp(
        lambda q: heddle.attention(q, k, v, block_rows=rows, block_columns=once, block_size=(64, 128)), (q,), (q,)
    )[1]
    assert torch.equal(moved, expected)


def test_arrays():
    q, k, v, lists, mask = problem()
    q, k, v, mask = (x.numpy() for x in (q, k, v, mask))
    lists = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in lists.items()}
    out, lse = heddle.attention(q, k, v, return_lse=True, **lists)
    np.testing.assert_allclose(out, heddle.attention(q, k, v, mask=mask), rtol=1e-5, atol=1e-5)
    ours = heddle.attention_backward(out, q, k, v, out, lse, **lists)
    theirs = heddle.attention_backward(out, q, k, v, out, lse, mask=mask)
    for name, made in ours.items():
        np.testing.assert_allclose(made, theirs[name], rtol=1e-4, atol=1e-5)

    def fails(kind, match, **options):
        with pytest.raises(kind, match=match):
            heddle.attention(q, k, v, **(lists | options))

    rows, columns = lists["block_rows"], lists["block_columns"]
    fails(ValueError, "come together", block_rows=None)
    fails(ValueError, "block_rows has shape", block_rows=rows[..., 1:])
    fails(ValueError, "block_columns has 2 dim", block_columns=columns[None])
    fails(TypeError, "block_rows is int64", block_rows=rows.astype(np.int64))
    fails(ValueError, "must be contiguous", block_rows=np.broadcast_to(rows[:1], rows.shape))
    fails(ValueError, "is none of the 4 blocks", block_columns=columns + 9)
    fails(ValueError, "block_size = 32 is neither", block_size=32)


def test_jax():
    jax = pytest.importorskip("jax")
    heddle_jax = pytest.importorskip("heddle.jax")
    q, k, v, lists, mask = problem()
    q, k, v, mask = (jax.numpy.asarray(x.numpy()) for x in (q, k, v, mask))
    shown = mask[:, :, ::64, ::128]
    rows, columns = jax.jit(heddle.block_lists)(shown)
    np.testing.assert_array_equal(rows, lists["block_rows"].numpy())
    count = int(rows[-1, -1, -1])
    np.testing.assert_array_equal(columns[:count], lists["block_columns"][:count].numpy())

    def loss(q, k, v, **options):
        return (heddle_jax.attention(q, k, v, **options, block_size=(64, 128)) ** 2).sum()

    def plain(q, k, v):
        return (heddle_jax.attention(q, k, v, mask=mask) ** 2).sum()

    ours = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v, block_rows=rows, block_columns=columns)
    for one, other in zip(ours, jax.grad(plain, argnums=(0, 1, 2))(q, k, v), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)

    def run(q, rows, columns):
        return heddle_jax.attention(q, k, v, block_rows=rows, block_columns=columns, block_size=(64, 128))

    expected = run(q, rows, columns)
    for dims, given in (
        ((0, None, None), (jax.numpy.stack((q, q)), rows, columns)),
        ((None, 0, 0), (q, jax.numpy.stack((rows, rows)), jax.numpy.stack((columns, columns)))),
    ):
        np.testing.assert_allclose(jax.vmap(run, dims)(*given)[1], expected, rtol=1e-5, atol=1e-5)
    if jax.default_backend() == "cpu":  # on a GPU nobody waits for the lists
        with pytest.raises(Exception, match="is none of the 4 blocks of keys"):
            jax.block_until_ready(jax.jit(run)(q, rows, columns + 9))
        with pytest.raises(Exception, match="block_rows ends with"):
            jax.block_until_ready(jax.jit(run)(q, rows + 1000, columns))
    with pytest.raises(TypeError, match="block_columns is float32"):
        run(q, rows, columns.astype("float32"))
    with pytest.raises(ValueError, match="come together"):
        run(q, rows, None)


def test_errors():
    q, k, v, lists, _ = problem()
    rows, columns = lists["block_rows"], lists["block_columns"]

    def fails(kind, match, **options):
        with pytest.raises(kind, match=match):
            heddle.attention(q, k, v, **(lists | options))

    fails(ValueError, "come together", block_columns=None)
    fails(ValueError, "without block_rows and block_columns", block_rows=None, block_columns=None)
    for size in (32, (64, 96), (64,), "64", 0):
        fails(ValueError, "block_size = ", block_size=size)
    fails(ValueError, "block_rows has shape", block_rows=rows[..., :-1])
    fails(ValueError, "block_rows has shape", block_rows=rows[:, :3].contiguous())
    fails(ValueError, "block_rows has 4 dimensions", block_rows=rows[None])
    fails(ValueError, "block_columns has 2 dimensions", block_columns=columns[None])
    fails(TypeError, "block_rows is torch.int64", block_rows=rows.long())
    fails(TypeError, "block_columns must be a torch.Tensor", block_columns=[0, 1])
    falling = rows.clone()
    falling[1, 2, 2] = falling[1, 2, 1] - 1
    fails(ValueError, "it must not fall within a head", block_rows=falling)
    below = rows.clone()
    below[0, 0, 0] = -1
    fails(ValueError, "block_rows has -1 behind 0", block_rows=below)
    fails(ValueError, "block_rows ends with", block_rows=rows + 1000)
    far = columns.clone()
    far[3] = 4
    fails(ValueError, r"block_columns\[3\] = 4 is none of the 4 blocks of keys", block_columns=far)
    far[3] = -1
    fails(ValueError, r"block_columns\[3\] = -1", block_columns=far)
    if torch.cuda.is_available():
        fails(ValueError, "block_rows is on", block_rows=rows.cuda())
    op = torch.ops.heddle.attention
    with pytest.raises(RuntimeError, match="block_rows and block_columns come together"):
        op(q, k, v, block_rows=rows, block_q=64, block_k=64)
    with pytest.raises(RuntimeError, match="block_q = 3, but"):
        op(q, k, v, block_q=3)
    with pytest.raises(RuntimeError, match="block_rows must be contiguous"):
        op(q, k, v, block_rows=rows[:1].expand(B, -1, -1), block_columns=columns, block_q=64, block_k=128)
    meta = [x.to("meta") for x in (q, k, v, rows, columns)]
    with pytest.raises(ValueError, match="block_rows has shape"):
        heddle.attention(*meta[:3], block_rows=meta[3][..., 1:], block_columns=meta[4], block_size=(64, 128))


def test_nothing():
    q, k, v, lists, mask = problem()
    assert heddle.attention(q[:, :0], k[:, :0], v[:, :0], **lists).shape == (B, 0, SQ, D)
    ours = heddle.attention(q[..., :0], k[..., :0], v, **lists)
    torch.testing.assert_close(ours, heddle.attention(q[..., :0], k[..., :0], v, mask=mask), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_numbers_of_no_block_on_a_gpu():
    """There they are clamped, or name nothing: never a stray read."""
    q, k, v, lists, _ = problem(device="cuda")
    for rows, columns in ((0, 99), (0, -99), (1000, 0), (-1000, 0)):
        wild = {"block_rows": lists["block_rows"] + rows, "block_columns": lists["block_columns"] + columns}
        assert heddle.attention(q, k, v, **(lists | wild)).isfinite().all()


@each_device
def test_unseen_is_not_read(device):
    q, k, v, lists, _ = problem((1, 1), device=device)
    lists["block_rows"] = torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32, device=device)
    lists["block_columns"] = torch.tensor([0, 1, 3, 1, 0], dtype=torch.int32, device=device)
    unseen = torch.arange(SK) // 128 == 2
    k[:, :, unseen] = float("nan")
    v[:, :, unseen] = float("inf")
    assert heddle.attention(q, k, v, **lists).isfinite().all()


def test_self_attention():
    """segments and lists of blocks of heddle.nn.SelfAttention."""
    torch.manual_seed(3)
    module, x = heddle.nn.SelfAttention(32, 4, causal=True), torch.randn(2, 130, 32)
    shown = torch.tensor([[1, 0], [0, 1]], dtype=torch.bool)
    rows, columns = heddle.block_lists(shown)
    ids = torch.arange(130, dtype=torch.int32) // 64
    seen = torch.zeros(130, 130, dtype=torch.bool)
    seen[:128, :128] = seen[128:, 128:] = True
    pairs = (
        ({"segments": ids}, {"mask": ids[:, None] == ids}),
        ({"block_rows": rows, "block_columns": columns}, {"mask": seen}),
        ({"block_rows": rows, "block_columns": columns, "segments": ids}, {"mask": seen & (ids[:, None] == ids)}),
    )
    for options, theirs in pairs:
        torch.testing.assert_close(module(x, **options), module(x, **theirs), rtol=1e-4, atol=1e-5)
        assert (module(x, **options) - module(x)).abs().max() > 0.01
    with pytest.raises(ValueError, match="block_size"):
        module(x, block_size=128)
