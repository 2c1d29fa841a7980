# SPDX-License-Identifier: Apache-2.0
"""What the pages say of the tree is so: links, names of files, the commands they show, and no line is too long."""

from __future__ import annotations

import fnmatch
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
everywhere = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# A path, or a bare name that ends like a source; <...>, * and {a,b} stand for several.
FILE = re.compile(
    r"(?:[\w.<>*{},-]+/)*[\w.<>*{},-]+\.(?:c|h|cu|cuh|def|py|pyi|sh|md|txt|cmake|cmake\.in|toml|jsonl|yml)"
)
FOLDER = re.compile(r"(?:[\w.<>*-]+/)+")
# Made by a build or by a user's own project.
OTHERS = re.compile(r"^(?:build|venv)(?:/|$)|^CMakeLists\.txt$|^[a-z]\.(?:c|py)$")


def tracked() -> list[str]:
    """Files of the tree; where git is not, those that lie there."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0 and done.stdout:
        return done.stdout.splitlines()
    there = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return [str(path) for path in there if not path.parts[0].startswith(("build", "."))]


FILES = tracked()


def variants(name: str) -> list[str]:
    """{a,b} written out, and <...> as *."""
    found = re.search(r"\{([^{}]*)\}", name)
    if found:
        return [v for part in found[1].split(",") for v in variants(name[: found.start()] + part + name[found.end() :])]
    return [re.sub(r"<[^<>]*>", "*", name)]


def exists(name: str) -> bool:
    """As a path from the root, or as the end of one."""
    if name.endswith("/"):
        return any(fnmatch.fnmatch(f"/{file}", f"*/{name}*") for file in FILES)
    return any(fnmatch.fnmatch(f"/{file}", f"*/{name}") for file in FILES)


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).strip().lower()).replace(" ", "-")


@everywhere
def test_links(page):
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{target}: there is no {other.relative_to(ROOT)}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", FENCE.sub("", other.read_text()), re.MULTILINE)
            assert anchor in map(slug, headings), f"{target}: {other.name} has no such heading"


@everywhere
def test_names_of_files(page):
    text = page.read_text()
    for name in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
        if (FILE.fullmatch(name) or FOLDER.fullmatch(name)) and not OTHERS.match(name):
            for each in variants(name):
                assert exists(each), f"`{name}` is not in the tree"


WORD = re.compile(r"[A-Za-z_]\w*")
SOURCE = (
    ".c",
    ".h",
    ".cu",
    ".cuh",
    ".def",
    ".py",
    ".pyi",
    ".cpp",
    ".cmake",
    ".sh",
    "CMakeLists.txt",
    "budget.txt",
    "dev",
)
# Names with an underscore that are other programs', or none: of transformers, of PyTorch and of its tests.
ELSEWHERE = {
    "lower_snake_case",
    "mask_vs_math",
    "test_transformerencoderlayer_subclass",
    "get_seq_length",
    "tie_weights_keys",
    "run_decompositions",
    "check_vma",
    "aoti_torch_cuda_caching_allocator_raw_alloc",
}


@functools.cache
def words_of(file: str) -> frozenset[str]:
    return frozenset(WORD.findall((ROOT / file).read_text()))


@functools.cache
def words() -> frozenset[str]:
    """Every identifier in the sources, and the files' own names."""
    found = [words_of(file) for file in FILES if file.endswith(SOURCE) and file != "tests/python/test_docs.py"]
    return frozenset().union(*found, (Path(file).stem for file in FILES))


@everywhere
def test_names_of_functions(page):
    """A name with an underscore that stands in backticks is one of the sources', and so is every HEDDLE_ name."""
    text = page.read_text()
    for name in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
        name = name.removesuffix("()")
        if WORD.fullmatch(name) and "_" in name and not name.endswith("_"):  # one that ends so is a prefix
            assert name in words() or name in ELSEWHERE, f"no source has {name}"
    for name in re.findall(r"\bHEDDLE_[A-Z0-9_]*[A-Z0-9]\b", text):
        assert name in words(), f"no source has {name}"


NAMED = r"`[\w.]+(?:\(\))?`"
NAME_OF_FILE = re.compile(rf"((?:{NAMED}(?:, | and |, and )?)+) of `([\w./*{{}},-]+\.\w+|heddle\.\w+)`")


@everywhere
def test_names_in_files(page):
    """`name` of `file`: the file has it, also where the file is a module of the package."""
    text = re.sub(r"\s+", " ", FENCE.sub("", page.read_text()))
    for names, named in NAME_OF_FILE.findall(text):
        module = f"python/{named.replace('.', '/')}"
        file = next((f for f in (f"{module}.py", f"{module}/__init__.py") if f in FILES), named)
        if not FILE.fullmatch(file):
            continue  # a keyword of a function, not a name in a file
        files = [f for each in variants(file) for f in FILES if fnmatch.fnmatch(f"/{f}", f"*/{each}")]
        for name in re.findall(r"`([\w.]+)(?:\(\))?`", names):
            if not FILE.fullmatch(name) and not name.startswith("heddle."):
                assert any(name.split(".")[-1] in words_of(f) for f in files), f"{named} has no {name}"


@functools.cache
def commits() -> tuple[list[str], list[str]]:
    """Those of the history, and those that bench/results have numbers of."""
    done = subprocess.run(["git", "log", "--format=%H"], cwd=ROOT, capture_output=True, text=True)
    recorded = [
        commit
        for file in FILES
        if file.startswith("bench/results/") and file.endswith(".jsonl")
        for commit in set(re.findall(r'"commit": "([0-9a-f]+)', (ROOT / file).read_text()))
    ]
    return done.stdout.split() if done.returncode == 0 else [], recorded


@everywhere
def test_commits(page):
    """A commit that a page names is in the history, or it was recorded in bench/results and the page says so."""
    text = re.sub(r"\s+", " ", FENCE.sub("", page.read_text()))
    hashes = set(re.findall(r"\b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7,12}\b", text))
    hashes -= {"ab84f925", "0251105a", "d99724f", "0000ffff"}  # of other repositories, and a number
    history, recorded = commits()
    if not any(commit.startswith("b8fbf8e") for commit in history):
        pytest.skip("not a clone with the whole history")
    words = re.compile(r"\bnot in this repository's history\b")
    told = " ".join(sentence for sentence in text.split(".") if words.search(sentence))
    for each in hashes:
        if not any(commit.startswith(each) for commit in history):
            assert any(x.startswith(each) or each.startswith(x) for x in recorded), f"nobody knows {each}"
            assert each in told, f"no clone has {each}, and the page does not say so"
    assert page.name != "adding.md" or len(hashes) > 5


def test_options_of_the_build():
    """install.md has every option of CMake that is heddle's, and no other."""
    build = "".join((ROOT / file).read_text() for file in FILES if file.endswith((".cmake", "CMakeLists.txt")))
    options = set(re.findall(r"^ *option\((HEDDLE_\w+)", build, re.MULTILINE))
    options |= set(re.findall(r"^set\((HEDDLE_\w+) .*CACHE", build, re.MULTILINE))
    table = set(re.findall(r"^\| `(HEDDLE_\w+)` \|", (ROOT / "docs/install.md").read_text(), re.MULTILINE))
    assert table == options


def test_tree_of_design():
    """What begins a line of design.md's tree is there."""
    (tree,) = re.findall(r"^## 1\..*?^```\n(.*?)^```", (ROOT / "docs/design.md").read_text(), re.MULTILINE | re.DOTALL)
    for line in tree.splitlines():
        if not line.startswith(" "):
            for name in re.split(r",? +", line.partition("  ")[0]):
                for each in variants(name):
                    assert exists(each), f"{each} is not in the tree"


def test_records_of_sweeps():
    """CONTRIBUTING's table of random cases is what the records say."""
    records = [
        json.loads((ROOT / "tests/sweep.json").read_text()),
        *json.loads((ROOT / "tests/sweep-gpu.json").read_text()),
    ]
    rows = []
    for r in records:
        worst = r["worst_error_over_tolerance"]
        averages = [average for tensors in r["bins"].values() for n, average in tensors.values() if n >= 100]
        rows.append(
            f"| {r['backend']} | {r['commit'][:7]} | {r['attention']['cases']}, {r['norm-linear']['cases']} "
            f"| {r['attention']['failed']}, {r['norm-linear']['failed']} | {worst['ratio']:.2f}: {worst['tensor']} "
            f"| {max(averages):.2f} |"
        )
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert [row for row in rows if row not in text] == []


def test_numbers_of_architectures():
    """compatibility.md counts them as architectures.md does."""
    listed = (ROOT / "docs/architectures.md").read_text()
    counts = [
        dict(re.findall(r"^\| ([a-z, ]+) \| (\d+) \|$", part, re.MULTILINE))
        for part in re.findall(r"^### transformers .*?(?=^\| architecture)", listed, re.MULTILINE | re.DOTALL)
    ]
    page = (ROOT / "docs/compatibility.md").read_text()
    table = re.findall(r"^\| ([a-z, ]+) \| (\d*) *\| (\d*) *\| [^|]+ \|$", page, re.MULTILINE)
    assert [{row[0]: row[1 + n] for row in table if row[1 + n]} for n in (0, 1)] == counts


@everywhere
def test_no_notes(page):
    """Notes to ourselves, and how work is organised, are not what a reader came for."""
    text = FENCE.sub("", page.read_text())
    found = re.findall(r"\b(?:TODO|FIXME|XXX|TBD)\b|\bthe issue's\b|\bthis session\b", text)
    assert found == []


def test_index():
    """docs/index.md has every page."""
    text = (ROOT / "docs/index.md").read_text()
    for page in PAGES:
        name = os.path.relpath(page, ROOT / "docs")
        assert name == "index.md" or f"]({name})" in text, f"the index has no {name}"


def commands(text: str) -> list[str]:
    """Lines of shell, and what stands in backticks."""
    shell = re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in shell for line in block.splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


@everywhere
def test_verbs_of_dev(page):
    script = (ROOT / "dev").read_text()
    verbs = set(re.findall(r"^\./dev ([\w-]+)", script, re.MULTILINE))
    for command in commands(page.read_text()):
        for verb, rest in re.findall(r"\./dev ([\w-]+)([^#|&;]*)", command):
            assert verb in verbs, f"{command}: ./dev has no {verb}"
            for option in re.findall(r"(?<!\S)--[a-z][\w-]*", rest):
                # bench hands its options to the programs that measure.
                sources = [
                    script,
                    *((ROOT / file).read_text() for file in FILES if file.startswith("bench/") and file[-3:] == ".py"),
                ]
                assert any(option in source for source in sources), f"{command}: nobody knows {option}"


def test_help_of_dev():
    """`./dev help` has a place for every verb that ./dev takes, and no line that a window cuts."""
    done = subprocess.run([ROOT / "dev", "help"], capture_output=True, text=True, check=True)
    described = re.findall(r"^\./dev ([\w-]+)", done.stdout, re.MULTILINE)
    script = (ROOT / "dev").read_text()
    cases = script[script.rindex("case $verb in") :]
    taken = {verb.strip() for arm in re.findall(r"^([\w| -]+)\)", cases, re.MULTILINE) for verb in arm.split("|")}
    assert set(described) == taken - {"-h", "--help"}
    assert [line for line in done.stdout.splitlines() if len(line) > 120] == []


@everywhere
def test_commands_of_heddle(page):
    table = (ROOT / "tools/heddle.c").read_text()
    subcommands = set(re.findall(r'\{"([a-z-]+)", cmd_\w+', table))
    assert {"attention", "norm-linear", "verify"} <= subcommands
    for command in commands(page.read_text()):
        for name, rest in re.findall(r"(?:^|[;&|(] *|\./build/|^\$ )heddle ([a-z][\w-]*)([^#|&;]*)", command):
            assert name in subcommands, f"{command}: heddle has no {name}"
            source = (ROOT / f"tools/cmd_{name.replace('-', '_')}.c").read_text()
            for option in re.findall(r"(?<!\S)--[a-z][\w-]*", rest):
                assert option in source, f"{command}: heddle {name} has no {option}"


@everywhere
def test_fences(page):
    """What begins or ends a block stands alone, with at most one word behind it, and each block ends."""
    fences = [line.strip() for line in page.read_text().splitlines() if "```" in line]
    for line in fences:
        assert re.fullmatch(r"```\w*", line), f"no fence, and no text: {line}"
    assert len(fences) % 2 == 0
    assert all(line == "```" for line in fences[1::2]), "a block ends with a word, or one does not end"


def test_length_of_readme():
    """It is read in one go: what needs more words has a page of its own."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1150


@everywhere
def test_length_of_lines(page):
    fence = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence ^= line.startswith("```")
        if not line.startswith("|") and (not fence or page.parent.name == "kernels"):
            assert len(line) <= 120, f"line {number} has {len(line)} characters"


def test_python_reference():
    """python-api.md has a heading for every function and class that `heddle` and its modules export."""
    text = (ROOT / "docs/python-api.md").read_text()
    headings = set(re.findall(r"^### ([\w.]+)$", text, re.MULTILINE))
    for part in ("heddle", "heddle.nn", "heddle.jax", "heddle.parallel", "heddle.hf", "heddle.compat.gpu_kernels"):
        pytest.importorskip("jax" if part == "heddle.jax" else "torch")
        module = pytest.importorskip(part)
        own = [n for n, x in vars(module).items() if n[0] != "_" and getattr(x, "__module__", "") == part]
        names = [name for name in getattr(module, "__all__", own) if callable(getattr(module, name))]
        assert names and [name for name in names if f"{part}.{name}" not in headings] == []


def test_five_lines():
    """The README's program runs, and has five lines."""
    pytest.importorskip("heddle")
    pytest.importorskip("torch")
    text = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"^<!-- run -->\n```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert program.count("\n") == 5
    variables: dict[str, object] = {}
    exec(compile(program, "README.md", "exec"), variables)
    assert variables["q"].grad.abs().max() > 0


def test_first_steps(capsys):
    """The programs of start.md print what stands below them."""
    pytest.importorskip("heddle")
    pytest.importorskip("numpy")
    pattern = r"^<!-- run -->\n```python\n(.*?)^```\n\n```\n(.*?)^```"
    programs = re.findall(pattern, (ROOT / "docs/start.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(programs) == 2
    for program, printed in programs:
        exec(compile(program, "docs/start.md", "exec"), {})
        assert capsys.readouterr().out == printed


@pytest.mark.parametrize("page", sorted((ROOT / "docs/kernels").glob("*.md")), ids=lambda page: page.name)
def test_parts_of_kernels(page):
    text = page.read_text()
    parts = re.findall(r"^## (.*)$", FENCE.sub("", text), re.MULTILINE)
    measured = page.name == "cpu-measured.md"  # which has tables and no kernels
    assert parts == ["How it works", "What was recorded" if measured else "History"]
    works = text[text.index("## How it works") : text.index(f"\n## {parts[1]}\n")]
    assert FENCE.search(works), "no drawing of a step"
    assert re.search(r"^\|(?:---\|)+$", works, re.MULTILINE), "no table"


def test_drawings():
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("no C compiler")
    done = subprocess.run(
        [sys.executable, ROOT / "docs/kernels/draw.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_tables_of_cpus():
    done = subprocess.run(
        [sys.executable, ROOT / "bench/plot.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_versions():
    """The header has the version; what cites it and what tells its news must not lag behind."""
    header = (ROOT / "include/heddle.h").read_text()
    version = ".".join(
        re.search(rf"#define HEDDLE_VERSION_{part} +(\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH")
    )
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^## (\S+?),? ", (ROOT / "NEWS.md").read_text(), re.MULTILINE)[1] == version
    assert (ROOT / "debian/changelog").read_text().startswith(f"heddle ({version}) ")
