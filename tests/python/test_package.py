# SPDX-License-Identifier: Apache-2.0
"""The package itself: what importing it does not do, what its binaries ask for, its docstrings, types and style."""

from __future__ import annotations

import contextlib
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import Forks

import heddle
import heddle._arrays
import heddle._fake
import heddle._ops
import heddle._schema
import heddle._torch
import heddle.compat
import heddle.hf
import heddle.nn

PACKAGE = Path(heddle.__file__).parent
ROOT = Path(__file__).resolve().parents[2]


def test_info_without_torch():
    code = (
        "import heddle, sys; print(heddle.info()); "
        "print('imported', [m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert text.startswith(f"heddle {heddle.__version__}") and "torch: not imported" in text and "imported []" in text
    for device in ("cpu", "cuda", "ref"):
        assert re.search(rf"^{device}: \S", text, re.MULTILINE)
    assert f"torch: {torch.__version__}" in heddle.info()


@pytest.mark.parametrize("order", ["torch, heddle", "heddle, torch"])
def test_order_of_imports(order, forks):
    """Either call may be the first one; where torch comes second, heddle.ops registers PyTorch's operators."""
    first = order.startswith("torch")
    calls = ("heddle.attention(q, q, q)", "torch.ops.heddle.attention(q, q, q)[0]")
    with contextlib.nullcontext(forks) if first else Forks(*order.split(", ")) as fork:
        for call in calls:
            registered = "" if first or call == calls[0] else "heddle.ops; "
            program = f"import {order}; {registered}q = torch.ones(1, 1, 2, 3); print({call}.sum().item())"
            done = fork.run("-c", program)
            assert (done.returncode, done.stdout) == (0, "6.0\n"), f"{call}: {done.stderr}"


def test_fake_kernels_have_the_arguments_of_the_schemas():
    for name in ("attention", "norm_linear", "norm_linear_backward"):
        fake = inspect.signature(getattr(heddle._fake, f"_{name}_fake")).parameters
        assert tuple(fake) == heddle._schema.names(name)
        given = {n: p.default for n, p in fake.items() if p.default is not inspect.Parameter.empty}
        assert given == heddle._schema.defaults(name)


def test_positions_are_those_of_the_schemas():
    assert heddle._schema.differentiable("attention", "attention") == (0, 1, 2, 3, 6)
    assert heddle._schema.differentiable("norm_linear", "norm_linear") == (0, 1, 2, 3, 4)
    assert heddle._ops._DIFFERENTIABLE == {
        "attention": 19,  # to the scales of keys and values, which are refused a gradient by name
        "attention_backward": 12,
        "norm_linear": 11,  # the residual is behind the numbers
        "norm_linear_backward": 17,
    }
    of = {name: pick(heddle._schema.names(name)) for name, pick in heddle._ops._CAN_REQUIRE.items()}
    assert of["attention"] == ("q", "k", "v", "bias", "alibi_slopes", "sinks", "k_scale", "v_scale")
    assert of["norm_linear"] == ("x", "weight", "bias", "gamma", "beta", "residual")
    for name in ("attention_backward", "norm_linear_backward"):
        assert of[name] == heddle._schema.names(name)[: heddle._ops._DIFFERENTIABLE[name]]
    defaults = (0, 0, 0, -1, -1, *[0.0] * 3, *[False] * 3, *[0] * 9)
    assert defaults == heddle._ops._OPTION_DEFAULTS


def test_tensors_take_the_options_of_attention():
    def keywords(function):
        parameters = inspect.signature(function).parameters.values()
        return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

    assert keywords(heddle._torch.attention) == keywords(heddle.attention)


@pytest.mark.skipif(not shutil.which("readelf"), reason="no readelf")
def test_binaries_ask_for_no_more_than_names():
    operators = subprocess.run(
        ["readelf", "-d", "--dyn-syms", "-W", str(PACKAGE / "_torch_ops.so")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", operators)
    assert "libtorch_cpu.so" in needed and not any("stdc++" in name or "cuda" in name for name in needed)
    undefined = re.findall(r"UND (\w*torch\w*)", operators)
    assert undefined and all(name.startswith(("aoti_torch_", "torch_")) for name in undefined)
    module = subprocess.run(
        ["readelf", "-d", str(next(PACKAGE.glob("_C*.so")))], capture_output=True, text=True, check=True
    ).stdout
    assert "python" not in "".join(re.findall(r"NEEDED.*", module))


def is_hardened():
    """Of a build folder its cache says so; an installed package is."""
    cache = PACKAGE.parents[1] / "CMakeCache.txt"
    text = cache.read_text() if cache.is_file() else "CMAKE_BUILD_TYPE:STRING=Release\nHEDDLE_HARDEN:BOOL=ON\n"
    wanted = all(
        re.search(line, text, re.MULTILINE) for line in (r"^CMAKE_BUILD_TYPE:.*=Rel", r"^HEDDLE_HARDEN:.*=ON$")
    )
    return wanted and not re.search(r"^HEDDLE_SANITIZE:.*=.", text, re.MULTILINE)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ELF's")
@pytest.mark.skipif(not (shutil.which("readelf") and shutil.which("nm")), reason="no readelf and nm")
@pytest.mark.skipif(not is_hardened(), reason="a build that is not hardened")
def test_binaries_are_hardened():
    modules = [str(module) for module in PACKAGE.glob("*.so")]
    assert len(modules) == 2
    done = subprocess.run(["bash", str(ROOT / "tests/hardened.sh"), *modules], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def public():
    for name in heddle.__all__:
        value = getattr(heddle, name)
        if inspect.isfunction(value):
            yield name, value
    for module in (heddle.nn, heddle.hf, heddle.compat.gpu_kernels):
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_"):
                yield f"{module.__name__}.{name}", value


@pytest.mark.parametrize("name,value", list(public()), ids=lambda value: value if isinstance(value, str) else "")
def test_docstrings(name, value):
    """Shapes, dtypes, devices, errors and source."""
    text = value.__doc__ or ""
    assert text.strip(), name
    if name in ("info", "heddle.hf.register", "patch"):
        return
    for word in ("Raises:", "Source:", "["):
        assert word in text, f"{name} has no {word}"
    assert re.search(r"float32|dtype|as SelfAttention|As ``|like q|int32", text), f"{name} tells no dtype"


@pytest.mark.parametrize("command", [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]], ids=" ".join)
def test_style(command):
    tool = [sys.executable, "-m", *command]
    if subprocess.run([*tool[:3], "--version"], capture_output=True).returncode:
        pytest.skip(f"no {command[0]}")
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("not in the source tree")
    paths = ["python/heddle", "examples"] + (["tests/python"] if command[0] == "ruff" else [])
    done = subprocess.run([*tool, *paths], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# Programs that check themselves, with what they want beside torch, or in its place.
EXAMPLES = {
    "day19_50.py": None,
    "flash_names.py": None,
    "hessian.py": None,
    "jax_attention.py": "jax",
    "layernorm_linear_autograd.py": None,
    "llama.py": None,
    "numpy_arrays.py": "numpy",
    "patch.py": None,
    "replace.py": None,
    "transformers_gpt2.py": "transformers",
}
WITHOUT_TORCH = ("jax_attention.py", "numpy_arrays.py")


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name, forks):
    if EXAMPLES[name]:
        pytest.importorskip(EXAMPLES[name])
    path = str(ROOT / "examples" / name)
    if name in WITHOUT_TORCH:
        done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300)
    else:
        done = forks.run(path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_examples():
    """Each program in Python is in the table of python.md, and a test runs it."""
    page = (ROOT / "docs/python.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests/python").glob("*.py"))
    for path in (ROOT / "examples").glob("*.py"):
        assert f"| `examples/{path.name}`" in page, f"python.md's table has no {path.name}"
        assert path.name in tests, f"no test runs {path.name}"


def test_training_example(tmp_path, forks):
    options = ["--steps", "12", "--batch", "2", "--length", "32", "--dim", "32", "--layers", "1", "--heads", "2"]
    done = forks.run(ROOT / "examples/train_gpt.py", *options, "--plot", tmp_path / "loss.png")
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"(heddle|torch): loss ([\d.]+) -> ([\d.]+)", done.stdout)
    assert len(losses) == 2 and all(float(last) < float(first) for _, first, last in losses)
    assert abs(float(losses[0][2]) - float(losses[1][2])) < 0.02


def test_serving_example(tmp_path, forks):
    """Tokens as without pages, though prompts share them, come in chunks and start anew for want of them."""
    page = (ROOT / "docs/serving.md").read_text()
    options = re.search(r"python examples/serve.py (.*) --check --plot docs/img/serving.svg", page)[1].split()
    picture = tmp_path / "serve.svg"
    done = forks.run(ROOT / "examples/serve.py", *options, "--check", "--plot", picture)
    assert done.returncode == 0, done.stderr
    counts = re.search(r"(\d+) tokens made.*?(\d+) tokens of prompts found.* (\d+) restarts", done.stdout, re.S)
    made, found, restarts = map(int, counts.groups())
    assert made > 100 and found > 0 and restarts > 0 and "16 requests" in done.stdout
    assert picture.read_text() == (ROOT / "docs/img/serving.svg").read_text()
