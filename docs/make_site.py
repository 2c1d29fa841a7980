#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a site of the pages, with search, which asks for nothing from elsewhere.

    ./dev docs              (calls docs/make_site.py STAGE SITE with a Python that has mkdocs-material)

STAGE gets the pages as they lie in the tree, and a page for each file and folder that a page links to; SITE what
mkdocs-material makes of them.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

from draw import ROOT

CONFIG = """\
site_name: heddle
docs_dir: {stage}
site_dir: {site}
use_directory_urls: false
theme:
  name: material
  font: false
  features: [navigation.top, toc.follow, search.highlight, content.code.copy]
  palette:
    - media: "(prefers-color-scheme: light)"
      scheme: default
      primary: brown
      toggle: {{icon: material/weather-night, name: dark}}
    - media: "(prefers-color-scheme: dark)"
      scheme: slate
      primary: brown
      toggle: {{icon: material/weather-sunny, name: light}}
markdown_extensions:
  - tables
  - sane_lists
  - attr_list
  - pymdownx.highlight: {{use_pygments: true}}
  - pymdownx.superfences
  - toc: {{permalink: true, slugify: !!python/object/apply:pymdownx.slugs.slugify {{kwds: {{case: lower}}}}}}
plugins: [search]
extra_css: [wide.css]
validation: {{links: {{not_found: warn, anchors: warn, absolute_links: warn, unrecognized_links: warn}}}}
nav:
{nav}
"""

NAV = {
    "heddle": {
        "What it is": "README.md",
        "Ten minutes": "docs/start.md",
        "Install": "docs/install.md",
        "All pages": "docs/index.md",
    },
    "Use it": {
        "The API in C": "docs/api.md",
        "Python": "docs/python.md",
        "The API in Python": "docs/python-api.md",
        "What a call from Python costs": "docs/python-cost.md",
        "Many processes": "docs/parallel.md",
        "Keys in pages": "docs/serving.md",
        "Compatibility": "docs/compatibility.md",
        "Architectures of transformers": "docs/architectures.md",
        "GPUs": "docs/gpus.md",
        "Limits": "docs/limits.md",
        "Every row on a CPU": "docs/cpu-rows.md",
    },
    "Understand it": {
        "Algorithm": "docs/algorithm.md",
        "Mathematics": "docs/math.md",
        "Implementation": "docs/implementation.md",
    },
    "Change it": {
        "Design": "docs/design.md",
        "Working on it": "CONTRIBUTING.md",
        "Adding": "docs/adding.md",
        "Kernels without a GPU": "docs/emulator.md",
        "Measuring": "docs/measuring.md",
        "News": "NEWS.md",
        "Security": "SECURITY.md",
    },
}
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
LANGUAGES = {".c": "c", ".h": "c", ".def": "c", ".py": "python", ".sh": "bash", ".json": "json", ".cff": "yaml"}


def pages() -> list[pathlib.Path]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(path.relative_to(ROOT) for path in found)


class Stage:
    """The tree of pages that mkdocs reads."""

    def __init__(self, where: pathlib.Path) -> None:
        self.where = where
        self.made: set[pathlib.Path] = set()

    def write(self, path: pathlib.Path, text: str) -> None:
        (self.where / path).parent.mkdir(parents=True, exist_ok=True)
        (self.where / path).write_text(text)

    def file_page(self, path: pathlib.Path) -> pathlib.Path:
        """A page that shows a file, or lists a folder."""
        if (ROOT / path).is_dir():
            page = path / "listing.md"
            names = sorted(
                x.name + ("/" if x.is_dir() else "") for x in (ROOT / path).iterdir() if x.name[0] not in "._"
            )
            text = f"# {path}/\n\n" + "\n".join(f"* `{name}`" for name in names) + "\n"
        else:
            page = path.with_name(path.name + ".md")
            language = LANGUAGES.get(path.suffix, "")
            text = f"# {path}\n\n`````{language}\n{(ROOT / path).read_text()}\n`````\n"
        if page not in self.made:
            self.made.add(page)
            self.write(page, "---\nsearch:\n  exclude: true\n---\n\n" + text)
        return page

    def target(self, page: pathlib.Path, link: str) -> str:
        path, mark, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link) or not path:
            return link
        there = pathlib.Path(os.path.normpath(page.parent / path))
        if there.suffix == ".md":
            return link
        if there.suffix in (".svg", ".png"):
            (self.where / there).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / there, self.where / there)
            return link
        return os.path.relpath(self.file_page(there), page.parent) + mark + anchor

    def page(self, page: pathlib.Path) -> None:
        text, out, at = (ROOT / page).read_text(), [], 0
        for fence in [*FENCE.finditer(text), None]:
            part = text[at : fence.start() if fence else len(text)]
            # Python's markdown, unlike others, wants an empty line in front of a list.
            part = re.sub(
                r"^(?!\s*[*-] |\s*\d+\. |\||#|\s*$)(.+)\n(?=(?:[*-]|\d+\.) )", r"\1\n\n", part, flags=re.MULTILINE
            )
            out.append(LINK.sub(lambda m: m[1] + self.target(page, m[2]) + m[3], part))
            out.append(fence.group() if fence else "")
            at = fence.end() if fence else at
        self.write(page, "".join(out))


def navigation() -> str:
    lines = []
    for group, entries in NAV.items():
        lines += [f"  - {group}:", *(f"      - {name}: {path}" for name, path in entries.items())]
    named = {path for entries in NAV.values() for path in entries.values()}
    kernels = [page for page in pages() if page.parts[:2] == ("docs", "kernels")]
    lines += ["  - Kernels:", *(f"      - {page.stem}: {page}" for page in kernels)]
    left = [str(page) for page in pages() if str(page) not in named and page not in kernels]
    if left:
        sys.exit(f"make_site.py: the navigation has no place for {', '.join(left)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", type=pathlib.Path)
    parser.add_argument("site", type=pathlib.Path)
    options = parser.parse_args()
    stage = options.stage.resolve()
    shutil.rmtree(stage, ignore_errors=True)
    tree = Stage(stage / "pages")
    for page in pages():
        tree.page(page)
    # A line of code has up to 120 characters.
    wide = ".md-grid { max-width: 82rem; }\n.md-typeset pre > code { font-size: 0.6rem; }\n"
    (stage / "pages/wide.css").write_text(wide)
    config = stage / "mkdocs.yml"
    config.write_text(CONFIG.format(stage=stage / "pages", site=options.site.resolve(), nav=navigation()))
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(config)]
    done = subprocess.run(command, check=False, env=env)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
