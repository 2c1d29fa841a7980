# SPDX-License-Identifier: Apache-2.0
"""Every command that a page shows is run: here, by another test that is named here, or there is a reason why not.

The dear ones (a clone, its build, what is installed of it, `pip install .`) run under --long.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START = (ROOT / "docs/start.md").read_text()
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What stands in backticks is a command where a program with arguments begins it; a file's name alone is none.
INLINE = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:\./dev|(?:\./build/)?heddle|cmake|pip|python3?|git|cc|torchrun|conan|perf|ruff|mypy|cuobjdump"
    r"|(?:tests|docs|bench)/\S+\.(?:sh|py)) \S.*|\./build/examples/\w+"
)
long = pytest.mark.skipif(not os.environ.get("HEDDLE_LONG"), reason="only in long runs")


def shown(text: str) -> list[str]:
    """Commands of a page, without their comments, and `heddle` for where it was built."""
    lines = []
    for language, block in BLOCK.findall(text):
        if language in ("sh", "bash"):
            lines += block.splitlines()
        elif language == "console":
            lines += [line[2:] for line in block.splitlines() if line.startswith("$ ")]
        elif not language:
            lines += [line for line in block.splitlines() if re.match(r"(?:\./dev|cmake|pip|python3?|git|cc) \S", line)]
    outside = BLOCK.sub("", text)
    lines += [line for line in re.findall(r"`([^`\n]+)`", outside) if INLINE.fullmatch(line)]
    # What a comment names as another way is a command, too.
    lines += [line for comment in lines for line in re.findall(r"(?:# or: |#.*?`)(\./dev [^`]*)", comment)]
    commands = [re.sub(r"\s+#.*", "", line).strip().replace("./build/heddle", "heddle") for line in lines]
    return [command for command in commands if command]


SHOWN = {command for page in PAGES for command in shown(page.read_text())}
# Of start.md the blocks that tests/test_pages.sh runs, word for word.
MARKED = shown("".join(re.findall(r"^<!-- run -->\n(```console\n.*?^```\n)", START, re.MULTILINE | re.DOTALL)))

# Which file has what runs it, and how that is found there.
ELSEWHERE = {
    "|".join(map(re.escape, MARKED)): ("tests/test_pages.sh", r"^session\(\)"),
    r"\./build/examples/(?:derivation|online_softmax)": ("tests/test_pages.sh", r"^check derivation math\.md"),
    r"heddle (?:COMMAND )?--help|heddle attention(?: --help)?": ("tests/test_cli.sh", r"works \$command --help"),
    r"heddle attention --time": ("tests/test_cli.sh", r"--time"),
    r"heddle demo": ("tests/install/run.sh", r'bin/heddle" demo'),
    r"heddle bench --device cuda(?: --json > .*)?": ("tests/gpu/bench.sh", r"bench --device cuda"),
    r"heddle bench --html": ("tests/python/test_browser.py", r'"--html"'),
    r"heddle verify --case (?:p22|day19|day50|day55|fa2-warps)": (
        "tests/test_cli.sh",
        r"for case in p22 day19 day50 day55 fa2-warps",
    ),
    r"heddle verify --random": ("tests/CMakeLists.txt", r"heddle_command verify --random"),
    r"python examples/serve\.py .*": ("tests/python/test_package.py", r"examples/serve\.py"),
    r"torchrun --nproc-per-node 2 examples/train_long\.py .*": (
        "tests/python/parallel_cases.py",
        r"examples/train_long\.py",
    ),
    r"python tests/python/compatibility\.py --write": ("tests/python/test_compatibility.py", r'RIGHT.* "--write"'),
    r"python tests/python/compatibility\.py --batches --write": (
        "tests/python/test_compatibility.py",
        r'"--batches", "--write"',
    ),
    r"python tests/python/torch_suite\.py .*": ("tests/python/test_torch_suite.py", r'"torch_suite\.py"'),
    r"python -m pytest tests/python": ("dev", r"-m pytest -q"),
    r"ruff format .*|mypy --strict": ("tests/python/test_package.py", r'\["ruff", "format", "--check"\], \["mypy"\]'),
    r"\./dev test -R neon": ("dev", r"^ +test_neon$"),
    r"\./dev python": ("dev", r"^ +run_pytest$"),
    r"\./dev fuzz": ("dev", r"fuzz_all 60 "),
    r"\./dev format": ("dev", r"elif format_check"),
    r"\./dev package(?: deb -DHEDDLE_BUILD_CUDA=OFF)?": ("dev", r"if \./dev package"),
    r"heddle verify --bins --json": ("tests/test_failures.sh", r"verify --device cpu --bins .*--json"),
    r"\./dev abi": ("dev", r"elif \./dev abi; then"),
    r"conan create \.": ("dev", r'conan" create \.'),
    r"cmake -S \. -B build/windows .*": ("dev", r"toolchain cmake/x86_64-w64-mingw32\.cmake"),
    r"cmake -S \. -B build/macos .*": ("dev", r"toolchain cmake/arm64-macos\.cmake"),
    r"\./dev code (?:HEAD.*|COMMIT)": ("tests/python/test_code.py", r'code\(tree, "HEAD"'),
    r"tests/gpu/compare_code\.py before build": ("tests/python/test_compare_code.py", r"compare_code"),
}

# What no test runs, and why.
NOT = {
    r"\./dev test(?: -R attention| -R emulated| --long)?": "it is what runs this",
    r"\./dev bench --gpu": "an hour of a GPU; test_gpu_bench runs its parts",
    r"python3 bench/parallel\.py .*": "wants several GPUs",
    r"HEDDLE_TORCH_SUITE=.* \./dev test --long": "wants PyTorch's sources; what it runs is run on a small file",
    r"\./dev gpu-test": "wants a GPU",
    r"heddle (?:verify|attention .*) --device cuda.*": "wants a GPU; test_gpu_commands runs them there",
    r"\./dev report \[bench options\]": "what stands for options; ./dev report itself is run",
    r"git show HASH": "git's own",
    r"perf record.*|cuobjdump -sass|gdb --args .*": "somebody else's program, on a machine that is at rest",
}

# What the tests below run, word for word or with smaller numbers.
HERE = {
    "test_whole_commands": (r"heddle verify(?: --bins)?", r"heddle bench"),
    "test_sweep": (r"\./dev sweep(?: \d+)?", r"HEDDLE_SWEEP_KEEP=.*", r"tests/sweep\.sh --merge .*"),
    "test_emulated": (r"export HEDDLE_TEST_DEVICE=.*", r"HEDDLE_SEED=\d+ .*/emulated_sweep"),
    "test_gpu_bench": (
        r"\./dev bench --gpu (?:attention|norm_linear|overhead|step).*",
        r"python3 bench/(?:gpu_norm_linear|ways_in)\.py.*",
    ),
    "test_gpu_sweep": (r"HEDDLE_TEST_DEVICE=cuda .*",),
    "test_cpu_bench": (
        r"\./dev bench --cpu(?: --only (?:options|small-batches))?",
        r"\./dev bench --cpu (?:overhead|ways-in)",
    ),
    "test_help": (r"\./dev help",),
    "test_clone": (
        r"git clone .*",
        r"cd heddle",
        r"\./dev build(?: --time| -DHEDDLE_BUILD_CUDA=OFF| -DCMAKE_CXX_FLAGS=-g)?",
        r"cmake -B build .*",
        r"cmake --build build",
        r"cmake --install build .*",
        r"\./dev install /usr/local",
        r"cc my_program\.c .*",
        r"\./dev demo",
        r"\./dev report",
        r"\./dev docs",
    ),
    "test_plot": (r"\./dev bench --plot",),
    "test_fuzz": (r"\./dev fuzz 3600 npy",),
    "test_lint": (r"\./dev lint",),
    "test_checkers": (r"\./dev sanitize(?: thread)?|\./dev valgrind",),
    "test_pip": (
        r"python3 -m venv venv",
        r"\. venv/bin/activate",
        r"pip install \.(?: numpy| -C .*)?",
        r'python -c "import heddle; print\(heddle\.info\(\)\)"',
    ),
}


def matches(pattern: str, command: str) -> bool:
    return re.fullmatch(pattern, command) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_is_run(page):
    patterns = [*ELSEWHERE, *NOT, *(pattern for group in HERE.values() for pattern in group)]
    for command in shown(page.read_text()):
        assert any(matches(pattern, command) for pattern in patterns), f"no test runs what {page.name} shows: {command}"


def test_tables_are_true():
    """What runs elsewhere is found there, and each line of the tables is of a command that some page shows."""
    for file, found in ELSEWHERE.values():
        assert re.search(found, (ROOT / file).read_text(), re.MULTILINE), f"{file} has no {found}"
    for pattern in [*ELSEWHERE, *NOT, *(pattern for group in HERE.values() for pattern in group)]:
        assert any(matches(pattern, command) for command in SHOWN), f"no page shows {pattern}"
    assert all(name in globals() for name in HERE)


def of_page(page: str, pattern: str) -> str:
    """The one command of the page that is so."""
    (command,) = {command for command in shown((ROOT / page).read_text()) if matches(pattern, command)}
    return command


def run(command: str, where: Path, **environment: str) -> str:
    """In a shell of its own, as somebody would type it."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=where,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


# ----------------------------------------------------------------------------------------------- with what is built


@pytest.fixture(scope="module")
def build() -> Path:
    """The build folder that this Python's package is of, with the command."""
    named = os.environ.get("HEDDLE_COMMAND")
    package = importlib.util.find_spec("heddle")
    found = [Path(named).parent] if named else [Path(package.origin).parents[2]] if package and package.origin else []
    if not found or not (found[0] / "heddle").is_file():
        pytest.skip("no command beside the package: it is not of a build folder")
    return found[0]


def with_command(build: Path) -> dict[str, str]:
    return {"PATH": f"{build}{os.pathsep}{os.environ['PATH']}"}


def test_program_of_the_header(build, tmp_path):
    """What heddle.h begins with compiles, runs, and finds nothing to say."""
    cc = shutil.which(os.environ.get("CC", "cc"))
    if cc is None:
        pytest.skip("no C compiler")
    header = (ROOT / "include/heddle.h").read_text().partition("Conventions that hold")[0]
    program = re.findall(r"^ \*     (.*)$", header, re.MULTILINE)
    assert any("heddle_attention_forward" in line for line in program)
    arrays = ", ".join(f"{x}[8 * 1024 * 64]" for x in ("q", "k", "v", "o"))
    (tmp_path / "begin.c").write_text(
        f"#include <heddle.h>\n#include <stdio.h>\n#include <stdlib.h>\nstatic float {arrays}, lse[8 * 1024];\n"
        "int main(void) {\n" + "\n".join(program) + "\nfree(workspace);\nreturn 0;\n}\n"
    )
    where = shlex.quote(str(build))
    run(f"{shlex.quote(cc)} -I{shlex.quote(str(ROOT))}/include begin.c -o begin -L{where} -lheddle", tmp_path)
    done = subprocess.run(
        ["./begin"],
        cwd=tmp_path,
        env={**os.environ, "LD_LIBRARY_PATH": str(build)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout + done.stderr == ""


def test_gpu_commands(build, tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    for x in "qkv":
        run(f"heddle random --shape 1,2,33,16 --out {x}.npy", tmp_path, **with_command(build))
    run(of_page("docs/start.md", r"heddle attention .* --device cuda .*"), tmp_path, **with_command(build))
    if os.environ.get("HEDDLE_LONG"):
        run("heddle verify --device cuda", tmp_path, **with_command(build))


# Of each script what makes its run short: a row or two, if it has many.
SHORTER = {
    r"\./dev bench --gpu attention.*D512": " --regime rest --alone",
    r"\./dev bench --gpu attention --table shapes": " --regime rest --alone --filter B3H5/5S1537D64",
    r"\./dev bench --gpu attention.*": " --regime rest --alone --filter B32H16/16S512D128c-bfloat16",
    r"\./dev bench --gpu norm_linear": " --regime rest --filter 'm16 k4096 n4096 bfloat16'",
    r"python3 bench/gpu_norm_linear\.py.*": " --regime rest --filter 'm16 k4096 n4096 bfloat16'",
    r"\./dev bench --gpu step": " --layers 1 --rounds 1 --no-compile --filter 'gpt2 124M 1k'",
    r"\./dev bench --gpu overhead": "",
    r"python3 bench/ways_in\.py.*": " --rounds 2",
    r"\./dev bench --cpu": " --quick --seconds 0.02 --only vit --only dropout",
    r"\./dev bench --cpu --only .*": " --quick --seconds 0.02 --threads 1",
    r"\./dev bench --cpu overhead": "",
    r"\./dev bench --cpu ways-in": " --rounds 2",
}


SAID = {"overhead": " us", "ways": "PyTorch's switch", "--cpu": "rows reach their goals"}


def in_short(name: str) -> list[str]:
    """What pages show of this test's, each command with less to do."""
    commands = sorted(c for c in SHOWN if any(matches(pattern, c) for pattern in HERE[name]))
    return [c + next(more for pattern, more in SHORTER.items() if matches(pattern, c)) for c in commands]


def told_of(command: str) -> str:
    """What is printed only where something was measured: a row that was asked for, or how the rows of a script are."""
    asked = re.findall(r"--filter (?:'(.*?)'|(\S+))", command)
    if asked:
        return "".join(asked[-1])
    return next(said for name, said in SAID.items() if name in command)


def only_with_gpu() -> None:
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("no GPU")


@pytest.mark.parametrize("command", in_short("test_gpu_bench"))
def test_gpu_bench(build, command):
    only_with_gpu()
    if command.startswith("python3"):
        command = command.replace("python3", shlex.quote(sys.executable))
        command += f" --library {shlex.quote(str(build))}/libheddle.so" * ("norm_linear" in command)
    environment = {"HEDDLE_BUILD_DIR": str(build), "HEDDLE_BENCH_PYTHON": sys.executable}
    assert told_of(command) in run(command.replace("--filter prepared ", ""), ROOT, **environment)


def test_gpu_sweep(build):
    only_with_gpu()
    command = of_page("CONTRIBUTING.md", HERE["test_gpu_sweep"][0])
    command = command.replace("HEDDLE_SWEEP_RECORD=record ", "").replace("100000 32", "3 1").replace("=60", "=1")
    assert "cases" in run(command, ROOT, HEDDLE_BUILD_DIR=str(build))


@long
def test_whole_commands(build, tmp_path):
    """Each kernel of this machine against float64, and how fast it is, at the smallest number of measurements."""
    assert "overall: ok" in run("heddle verify", tmp_path, **with_command(build))
    assert "overall: ok" in run("heddle verify --bins --random 50", tmp_path, **with_command(build))
    assert "GF/s" in run("heddle bench --seconds 0.01", tmp_path, **with_command(build))


def test_sweep(build, tmp_path):
    """CONTRIBUTING's way to a record, with ten cases for a thousand."""
    if not (build / "tests/test_sweep").is_file():
        pytest.skip("a build without tests in C")
    environment = {"HEDDLE_BUILD_DIR": str(build), "HEDDLE_JOBS": "1"}
    for command in sorted(filter(lambda c: matches(r"\./dev sweep \d+", c), SHOWN)):
        run(re.sub(r"\d+$", "3", command), ROOT, **environment)
    counts = of_page("CONTRIBUTING.md", HERE["test_sweep"][1])
    counts = counts.replace("=counts", f"={shlex.quote(str(tmp_path / 'counts'))}").replace(
        "HEDDLE_CPU=...", "HEDDLE_CPU=baseline"
    )
    run(counts.replace("HEDDLE_SEED=...", "HEDDLE_SEED=7").replace("sweep 1000", "sweep 10"), ROOT, **environment)
    merge = of_page("CONTRIBUTING.md", HERE["test_sweep"][2]).replace(">tests/sweep.json", "")
    record = run(merge.replace("counts/*", f"{tmp_path}/counts/*"), ROOT)
    assert {"attention", "norm-linear"} <= set(json.loads(record))


def test_emulated(build, tmp_path):
    """emulator.md's problem is drawn again, and its launches are told."""
    if not (build / "tests/emulator/emulated_sweep").is_file():
        pytest.skip("a build without the emulator")
    where, problem = (of_page("docs/emulator.md", pattern) for pattern in HERE["test_emulated"])
    problem = problem.replace(" build/", f" {shlex.quote(str(build))}/")
    out = run(f"{where}\n{problem} 2>&1", tmp_path)
    assert "1 cases from seed 51000011624" in out and re.search(r"^emulator: heddle_\w+_sm80, \d+ blocks", out, re.M)


def test_help():
    assert "./dev test" in run("./dev help", ROOT)


@long
def test_fuzz(build):
    """A second for an hour, where `./dev test` has built the target."""
    if not (build / "fuzz/tests/fuzz/fuzz_npy").is_file():
        pytest.skip("no fuzz targets in the build")
    (command,) = HERE["test_fuzz"]
    command = command.replace("\\", "").replace("3600", "1")
    assert run(command, ROOT, HEDDLE_BUILD_DIR=str(build)).endswith("1 passed, 0 failed\n")


# ------------------------------------------------------------------------------------------------- from a fresh clone


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """As start.md says. Kernels for GPUs are left out, whose build the tests have behind them, and so are the tests."""
    where = tmp_path_factory.mktemp("clone")
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("not a clone")
    (where / "once.cmake").write_text(
        'set(HEDDLE_BUILD_CUDA OFF CACHE STRING "")\nset(HEDDLE_BUILD_TESTS OFF CACHE BOOL "")\n'
    )
    session = [of_page("docs/start.md", pattern) for pattern in HERE["test_clone"][:2]]
    session[0] = re.sub(r"<.*>", shlex.quote(str(ROOT)), session[0])
    run("\n".join([*session, "./dev help"]), where)
    return where / "heddle", {
        "CMAKE_TOOLCHAIN_FILE": str(where / "once.cmake"),
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("HEDDLE_JOBS", str(os.cpu_count())),
        "HEDDLE_BUILD_DIR": "build",
    }


@long
def test_cpu_bench(clone):
    """Numbers come out; on a machine that is not at rest they say nothing."""
    tree, environment = clone
    for command in in_short("test_cpu_bench"):
        assert told_of(command) in run(command, tree, HEDDLE_BENCH_PYTHON=sys.executable, **environment)


@long
def test_clone(clone, tmp_path):
    """It is built, installed and linked as the pages say, and the demo, the report and the site are made."""
    tree, environment = clone
    run("./dev build", tree, **environment)
    for pattern in HERE["test_clone"][3:5]:
        run(of_page("docs/install.md", pattern), tree, **environment)
    run("./dev build --time", tree, **environment)
    run("./dev build -DHEDDLE_BUILD_CUDA=OFF", tree, **environment)
    run("./dev build -DCMAKE_CXX_FLAGS=-g", tree, **environment)
    assert re.search(r"^CMAKE_CXX_FLAGS:\w+=-g$", (tree / "build/CMakeCache.txt").read_text(), re.MULTILINE)
    for pattern in HERE["test_clone"][5:7]:
        install = of_page("docs/install.md", pattern)
        prefix = tmp_path / install.split()[0].strip("./")
        run(install.replace("/usr/local", shlex.quote(str(prefix))), tree, **environment)
        link_as_shown(prefix, tmp_path / f"{prefix.name}-program")
    assert "validation loss" in run("./dev demo -- --seconds 1 --width 16 --layers 1", tree, **environment)
    run("./dev report --seconds 0 --no-error --filter s1024", tree, **environment)
    assert "<html" in (tree / "build/report.html").read_text()
    if os.environ.get("HEDDLE_DOCS_PYTHON"):
        run("./dev docs", tree, **environment)
        assert (tree / "build/site/index.html").is_file()


@long
def test_plot(clone):
    """What it writes into the tree is what is there."""
    tree, environment = clone
    run("./dev bench --plot", tree, **environment)
    assert run("git status --porcelain -- README.md docs", tree) == ""


# What follows asks for programs that `./dev` installs where it can: of some files, and of one test, as
# all are an hour. Without optimisation, and without the kernels that take longest to compile.
QUICK = """
foreach(isa AVX2 AVX512 AVX512BF16 AMX SVE256)
    set(HEDDLE_COMPILER_HAS_${isa} OFF CACHE BOOL "")
endforeach()
set(HEDDLE_BUILD_CUDA OFF CACHE STRING "")
set(HEDDLE_BUILD_EXAMPLES OFF CACHE BOOL "")
set(HEDDLE_BUILD_TOOLS OFF CACHE BOOL "")
set(CMAKE_C_FLAGS_RELWITHDEBINFO "-O0 -g1" CACHE STRING "")
"""


@pytest.fixture(scope="module")
def quick(clone):
    tree, environment = clone
    (tree.parent / "quick.cmake").write_text(QUICK)
    return tree, {**environment, "CMAKE_TOOLCHAIN_FILE": str(tree.parent / "quick.cmake"), "HEDDLE_BUILD_DIR": "quick"}


def wants(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"no {program}")


@long
def test_lint(quick):
    wants("clang-tidy", "shellcheck")
    tree, environment = quick
    run("./dev lint src/status.c tests/test_words.c dev tests/test_cli.sh", tree, **environment)
    (tree / "worse.sh").write_text("#!/bin/sh\ncd $1\n")
    with pytest.raises(AssertionError, match="SC2164"):
        run("./dev lint worse.sh", tree, **environment)


@long
@pytest.mark.parametrize("checker", ["sanitize", "sanitize thread", "valgrind"])
def test_checkers(quick, checker):
    wants({"sanitize": "cc", "sanitize thread": "clang", "valgrind": "valgrind"}[checker])
    tree, environment = quick
    assert matches(HERE["test_checkers"][0], f"./dev {checker}")
    out = run(f"./dev {checker} -R '^api$'", tree, **environment)
    assert out.endswith("1 passed, 0 failed\n"), out


def link_as_shown(prefix: Path, where: Path) -> None:
    """install.md's project for CMake, and its line for pkg-config."""
    where.mkdir()
    shutil.copy(ROOT / "examples/smallest.c", where / "my_program.c")
    (snippet,) = re.findall(r"^```cmake\n(.*?)^```$", (ROOT / "docs/install.md").read_text(), re.MULTILINE | re.DOTALL)
    begin = "cmake_minimum_required(VERSION 3.20)\nproject(mine C)\nadd_executable(my_program my_program.c)\n"
    for kind in ("heddle::heddle", "heddle::heddle_static"):
        assert kind in snippet
        text = re.sub(r"PRIVATE \S+?\)", f"PRIVATE {kind})", snippet)
        (where / "CMakeLists.txt").write_text(begin + text)
        run(f"rm -rf b && cmake -B b -DCMAKE_PREFIX_PATH={shlex.quote(str(prefix))} && cmake --build b", where)
        assert run("./b/my_program", where).startswith("o[0] = -1,")
    if shutil.which("pkg-config") is None:
        return
    (found,) = prefix.rglob("heddle.pc")
    run(of_page("docs/install.md", HERE["test_clone"][7]), where, PKG_CONFIG_PATH=str(found.parent))
    assert run("./a.out", where, LD_LIBRARY_PATH=str(found.parents[1])).startswith("o[0] = -1,")


@long
def test_pip(clone):
    """An environment of its own, the package in it each way that a page shows, and start.md's first program with it."""
    tree, environment = clone
    begin = [of_page("docs/start.md", pattern) for pattern in HERE["test_pip"][:2]]
    installs = sorted({command for command in SHOWN if matches(HERE["test_pip"][2], command)})
    assert len(installs) == 3
    ask = of_page("docs/python.md", HERE["test_pip"][3])
    out = run("\n".join([*begin, *installs, ask]), tree, **environment)
    assert "cpu: " in out
    program, printed = re.findall(
        r"^<!-- run -->\n```python\n(.*?)^```\n\n```\n(.*?)^```",
        START,
        re.MULTILINE | re.DOTALL,
    )[0]
    (tree / "first.py").write_text(program)
    assert run(f"{begin[1]}\npython first.py", tree, PYTHONPATH="", LD_LIBRARY_PATH="") == printed
