#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes docs/api.md of include/heddle.h, and docs/python-api.md of the docstrings of the Python package.

    docs/reference.py [--check]

Of the header: its sections, a heading for each declaration, its comment as text (what is indented there is a formula)
and the declaration itself. Of the package: every public function, class and method, with its signature, found without
importing anything. --check changes nothing and ends with 1 if a page is not as it would be.
"""

import ast
import re
import sys
import textwrap
from collections.abc import Callable, Iterator

from pages import ROOT, arguments_of, finish

WIDTH = 118
MADE = "<!-- made by docs/reference.py: do not change it here -->"


def marked(text: str) -> str:
    """What markdown would take for its own: names with an underscore become code, other marks are taken literally."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    for at in range(0, len(parts), 2):
        names = re.split(r"((?<![\w*])[\w.]*\w_\w*(?:\(\))?)", parts[at])
        plain = [re.sub(r"([*_<>])", r"\\\1", x) if n % 2 == 0 else f"`{x}`" for n, x in enumerate(names)]
        parts[at] = "".join(plain)
    return "".join(parts)


def prose(text: str) -> list[str]:
    """Text of a comment: paragraphs that are laid out anew, and what is indented by four or more as it stands."""
    out: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        for formula, lines in runs(block.splitlines(), lambda line: line.startswith("    ")):
            body = textwrap.dedent("\n".join(lines)).rstrip()
            if formula:
                out += ["```", body, "```", ""]
            elif lines:
                out += [
                    textwrap.fill(marked(" ".join(lines)), WIDTH, break_long_words=False, break_on_hyphens=False),
                    "",
                ]
    return out


def runs(lines: list[str], kind: Callable[[str], bool]) -> Iterator[tuple[bool, list[str]]]:
    """Lines that follow each other and are of one kind."""
    at = 0
    while at < len(lines):
        end = at + 1
        while end < len(lines) and kind(lines[end]) == kind(lines[at]):
            end += 1
        yield kind(lines[at]), lines[at:end]
        at = end


# ---------------------------------------------------------------------------------------------------------- the header


def comment_text(comment: str) -> str:
    body = comment.removeprefix("/*").removesuffix("*/")
    return "\n".join(re.sub(r"^ \* ?", "", line).rstrip() for line in ("" + body).splitlines()).strip("\n")


def pieces(text: str) -> Iterator[tuple[str, str]]:
    """("comment", its text) or ("code", declarations), of the header's part behind its own description."""
    at = 0
    for found in re.finditer(r"^/\*.*?\*/\n", text, re.MULTILINE | re.DOTALL):
        if text[at : found.start()].strip():
            yield "code", text[at : found.start()].strip("\n")
        yield "comment", found.group().rstrip()
        at = found.end()
    if text[at:].strip():
        yield "code", text[at:].strip("\n")


def names(code: str) -> list[str]:
    """What a piece of code declares."""
    found = re.findall(r"^typedef (?:struct|enum) (\w+)", code, re.MULTILINE)
    found += re.findall(r"^HEDDLE_API [^;]*?\b(heddle_\w+)\(", code, re.MULTILINE)
    constants = re.findall(r"^#define (HEDDLE_\w+)", code, re.MULTILINE)
    return found or [" to ".join(dict.fromkeys((constants[0], constants[-1])))]


def contents(out: list[str]) -> list[str]:
    """A list of the page's parts, each with links to what is in it."""
    lines: list[str] = []
    for line in out:
        mark, _, title = line.partition(" ")
        link = f"[{title}](#{re.sub(r'[^a-z0-9_ -]', '', title.lower()).replace(' ', '-')})"
        if mark == "##":
            lines.append(f"* {link}")
        elif mark == "###":
            lines[-1] += f"{':' if lines[-1].count('](') == 1 else ','} {link}"
    wrapped = [textwrap.fill(x, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for x in lines]
    return ["**On this page**", "", *wrapped, ""]


def api_page() -> str:
    header = (ROOT / "include/heddle.h").read_text()
    guard = header.index("#ifndef HEDDLE_H")
    inside = header[
        header.index('extern "C" {\n#endif') + len('extern "C" {\n#endif') : header.index("#ifdef __cplusplus\n}")
    ]
    head = comment_text(header[:guard].strip().removeprefix("/* SPDX-License-Identifier: Apache-2.0"))
    version = re.findall(r"^#define HEDDLE_VERSION_(?:MAJOR|MINOR|PATCH) +(\d+)", header, re.MULTILINE)
    head, _, manners = head.partition("Conventions that hold for every function")
    begin = ["# The API in C", "", MADE, ""]
    line = (
        f"Version {'.'.join(version)}, from [heddle.h](../include/heddle.h); programs to start from are "
        "[smallest.c](../examples/smallest.c) and [train_gpt.c](../examples/train_gpt.c)."
    )
    begin += [textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False), "", *prose(head)]
    out = ["## Conventions that hold for every function", ""]
    for name, words in re.findall(r"^  (\w+) +(.*?)(?=^  \w|\Z)", manners, re.MULTILINE | re.DOTALL):
        line = f"* **{name}**: {marked(words)}"
        out.append(textwrap.fill(line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    out.append("")
    comment = ""
    for kind, text in pieces(inside):
        if kind == "comment" and re.match(r"/\* -{10,} ", text):
            title = text.strip("-/* ")
            out += [f"## {title[0].upper()}{title[1:]}", ""]
            comment = ""
        elif kind == "comment":
            out += prose(comment) if comment else []
            comment = comment_text(text)
        else:
            found = names(text)
            out += [f"### {', '.join(found)}", "", *prose(comment), "```c", text, "```", ""]
            comment = ""
    return "\n".join([*begin, *contents(out), *out]).rstrip() + "\n"


# ---------------------------------------------------------------------------------------------------------- the package

PARTS = [  # the name that a user writes, and the file; public is what the __all__ of that name has, or all of it
    ("heddle", "__init__"),
    ("heddle", "_append"),
    ("heddle", "_sdpa"),
    ("heddle", "_flex"),
    ("heddle", "_flash"),
    ("heddle", "_replace"),
    ("heddle.nn", "nn"),
    ("heddle.nn", "_nn_multihead"),
    ("heddle.hf", "hf"),
    ("heddle.jax", "jax"),
    ("heddle.parallel", "parallel"),
    ("heddle.compat.gpu_kernels", "compat/gpu_kernels"),
    ("heddle", "_errors"),
]


def listed(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [ast.literal_eval(x) for x in getattr(node.value, "elts", [])]
    return None


def signature(name: str, node: ast.FunctionDef, method: bool) -> str:
    arguments = node.args
    if method:
        for group in (arguments.posonlyargs, arguments.args):
            if group and group[0].arg in ("self", "cls"):
                del group[0]
                break
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    text = f"{name}({ast.unparse(arguments)}){returns}"
    if len(text) <= 110:
        return text
    parts = ast.unparse(arguments).split(", ")
    lines, depth = [""], 0
    for part in parts:
        lines[-1] += part
        depth += sum(part.count(c) for c in "([{") - sum(part.count(c) for c in ")]}")
        lines[-1] += ", " if depth else ","
        if depth == 0:
            lines.append("")
    return f"{name}(\n" + "\n".join("    " + line.rstrip() for line in lines if line) + f"\n){returns}"


def described(text: str | None) -> list[str]:
    """A docstring, as it is written, in which "Args:" and the like begin lists."""
    out: list[str] = []
    for line in (text or "").splitlines():
        found = re.fullmatch(r"(Args|Returns|Raises|Yields|Note|Example):\s*", line)
        if found:
            out += ["", f"*{found[1]}*", ""]
        elif re.match(r" {4}[*\w]+(?:, [*\w]+)*: ", line) and out:
            name, _, rest = line.strip().partition(": ")
            out.append(f"* `{name}`: {rest}")
        elif re.match(r" {4}\S", line) and out and out[-1] != "" and not out[-1].startswith("*Returns"):
            out.append(line.strip())
        elif line.startswith("    ") and not line.strip().startswith(("*", "-")):
            out.append("  " + line.strip())
        else:
            out.append(line.strip() if line.startswith("    ") else line)
    text = "\n".join(out).replace("``", "`")
    return [re.sub(r"\n{3,}", "\n\n", text), ""] if text else []


def functions(body: list[ast.stmt]) -> list[ast.FunctionDef]:
    """The last of each name, as overloads stand in front of what they describe."""
    found = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    return [node for name, node in found.items() if not name.startswith("_")]


def python_page() -> str:
    begin = ["# The API in Python", "", MADE, "", "From the docstrings; [python.md](python.md) leads through it.", ""]
    out: list[str] = []
    exported = {
        prefix: listed(ast.parse((ROOT / f"python/heddle/{path}.py").read_text()))
        for prefix, path in (("heddle", "__init__"), ("heddle.nn", "nn"))
    }
    last = ""
    for prefix, path in PARTS:
        tree = ast.parse((ROOT / f"python/heddle/{path}.py").read_text())
        public = listed(tree)
        title = "Errors" if path == "_errors" else prefix
        if title != last:
            out += [f"## {title}", "", *described(ast.get_docstring(tree))]
        last = title
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        wanted = exported if prefix == "heddle" and path != "_errors" else public
        wanted = None if path == "_errors" else exported.get(prefix, public)
        for node in [*functions(tree.body), *classes]:
            if wanted is not None and node.name not in wanted:
                continue
            out += [f"### {node.name}" if path == "_errors" else f"### {prefix}.{node.name}", ""]
            if isinstance(node, ast.FunctionDef):
                out += ["```python", signature(node.name, node, False), "```", "", *described(ast.get_docstring(node))]
                continue
            made = [m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"]
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            line = signature(node.name, made[0], True) if made else f"class {node.name}({bases})"
            out += ["```python", line.replace(" -> None", ""), "```", "", *described(ast.get_docstring(node))]
            for method in functions(node.body):
                out += [
                    f"#### {node.name}.{method.name}",
                    "",
                    "```python",
                    signature(method.name, method, True),
                    "```",
                    "",
                ]
                out += described(ast.get_docstring(method))
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*begin, *contents(out), *out])).rstrip() + "\n"


PAGES = {"docs/api.md": api_page, "docs/python-api.md": python_page}


def main() -> int:
    check = arguments_of(__doc__).parse_args().check
    return finish({name: page() for name, page in PAGES.items()}, check, "docs/reference.py")


if __name__ == "__main__":
    sys.exit(main())
