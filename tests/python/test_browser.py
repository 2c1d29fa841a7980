# SPDX-License-Identifier: Apache-2.0
"""The site of the pages and the report of the bench, in a headless browser: nothing complains, nothing is asked for
from elsewhere, links lead somewhere, search finds, tables sort. Under --long, where Chromium is there."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import browser
import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.skipif(not os.environ.get("HEDDLE_LONG"), reason="only in long runs"),
    pytest.mark.skipif(browser.find() is None, reason="no Chromium"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, served from this machine."""
    python = next((p for p in (os.environ.get("HEDDLE_DOCS_PYTHON"), sys.executable) if p and has_mkdocs(p)), None)
    if python is None:
        pytest.skip("no Python with mkdocs-material: ./dev docs installs one, HEDDLE_DOCS_PYTHON names it")
    where = tmp_path_factory.mktemp("site")
    subprocess.run([python, ROOT / "docs/make_site.py", where / "stage", where / "site"], check=True)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(where / "site")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield where / "site", f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def has_mkdocs(python: str) -> bool:
    return subprocess.run([python, "-c", "import material, mkdocs"], capture_output=True, check=False).returncode == 0


LINKS = """[...document.querySelectorAll('a[href], img[src], link[href], script[src]')]
    .map(x => x.href || x.src).filter(x => x && !x.startsWith('javascript:'))"""
ANCHORS = "[...document.querySelectorAll('[id], a[name]')].map(x => x.id || x.name)"


def test_site(site):
    """Every page: no complaint, and each of its links is a page or a file that is there, with its anchor."""
    where, address = site
    pages = sorted(path.relative_to(where).as_posix() for path in where.rglob("*.html"))
    assert len(pages) > 30
    links, anchors = {}, {}
    with browser.Browser() as tab:
        for page in pages:
            tab.open(f"{address}/{page}")
            links[page], anchors[page] = tab.evaluate(LINKS), set(tab.evaluate(ANCHORS))
            # 404.html is shown for any address, so its links are absolute.
            assert not tab.complaints, f"{page}: {tab.complaints}"
    dead = []
    for page, targets in links.items():
        for target in targets:
            if page == "404.html" or not target.startswith(address):
                continue
            path, _, anchor = target.removeprefix(f"{address}/").partition("#")
            anchor = urllib.parse.unquote(anchor)
            path = path.partition("?")[0]
            path = path + "index.html" if not path or path.endswith("/") else path
            there = (where / path).is_file()
            if not there or (anchor and path in anchors and anchor not in anchors[path]):
                dead.append(f"{page}: {target}")
    assert not dead, "\n".join(dead[:20])


def test_search(site):
    _, address = site
    with browser.Browser() as tab:
        tab.open(f"{address}/index.html")
        tab.evaluate("document.querySelector('label[for=__search]').click()")
        tab.evaluate(
            "(() => { const x = document.querySelector('input.md-search__input'); x.focus(); x.value = 'softcap';"
            " x.dispatchEvent(new Event('input', { bubbles: true }));"
            " x.dispatchEvent(new KeyboardEvent('keyup', { bubbles: true })); })()"
        )
        found = tab.until("document.querySelectorAll('.md-search-result__item a').length")
        assert found > 2
        if folder := os.environ.get("HEDDLE_SCREENSHOTS"):
            tab.screenshot(Path(folder) / "site-search.png")
        assert not tab.complaints, tab.complaints


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_report(tmp_path, dark):
    """The page of heddle bench: opened from a file, sorted, searched, pointed at."""
    command = os.environ.get("HEDDLE_COMMAND") or shutil.which("heddle")
    if not command:
        pytest.skip("no heddle: HEDDLE_COMMAND names it")
    page = tmp_path / "report.html"
    peers = [x for path in sorted((ROOT / "bench/results").glob("*cores.jsonl")) for x in ("--peers", str(path))]
    arguments = [
        "--op",
        "attention",
        "--dtype",
        "f32",
        "--filter",
        "s1024",
        "--seconds",
        "0",
        "--no-error",
        "--html",
        str(page),
    ]
    subprocess.run([command, "bench", *arguments, *peers], check=True, capture_output=True)
    kept = json.loads(re.search(r"^const ROWS = (\[.*?\]);$", page.read_text(), re.MULTILINE | re.DOTALL)[1])
    with browser.Browser(dark) as tab:
        tab.open(page.as_uri())
        rows = tab.evaluate("document.querySelectorAll('#body tr').length")
        assert rows == len(kept)
        assert tab.evaluate("document.querySelectorAll('#plot rect').length") > rows  # peers, too
        beside = "ROWS.filter(r => r.pass === '{}' && r.peers.PyTorch && r.peers.PyTorch.rate > 0).length"
        assert tab.evaluate(beside.format("backward")) == tab.evaluate(beside.format("forward")) > 0
        tab.evaluate("[...document.querySelectorAll('#head button')].find(x => x.textContent === 'ms').click()")
        times = tab.evaluate("[...document.querySelectorAll('#body tr')].map(x => Number(x.cells[3].textContent))")
        assert times == sorted(times, reverse=True) and times[0] > times[-1]
        tab.evaluate(
            "(() => { const x = document.getElementById('search'); x.value = 'd128 backward';"
            " x.dispatchEvent(new Event('input')); })()"
        )
        assert 0 < tab.evaluate("document.querySelectorAll('#body tr').length") < rows
        tab.evaluate(
            "document.querySelector('#plot rect').dispatchEvent("
            "new MouseEvent('mousemove', { bubbles: true, clientX: 400, clientY: 300 }))"
        )
        assert "heddle" in tab.evaluate("document.getElementById('tip').textContent")
        assert tab.evaluate("document.getElementById('machine').children.length") >= 10
        background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") != dark
        if folder := os.environ.get("HEDDLE_SCREENSHOTS"):
            tab.screenshot(Path(folder) / f"report-{'dark' if dark else 'light'}.png")
        assert not tab.complaints, tab.complaints


def test_nearest_peers(tmp_path):
    """Of several machines' rows those of a processor like this one stand beside ours, in any order of files."""
    command = os.environ.get("HEDDLE_COMMAND") or shutil.which("heddle")
    if not command:
        pytest.skip("no heddle: HEDDLE_COMMAND names it")
    page = tmp_path / "report.html"
    bench = [
        command,
        "bench",
        "--op",
        "attention",
        "--dtype",
        "f32",
        "--filter",
        "s64 ",
        "--seconds",
        "0",
        "--no-error",
    ]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*bench, "--html", str(page)], check=True, capture_output=True, env=alone)
    machine = json.loads(re.findall(r"^const MACHINE = (.*);$", page.read_text(), re.MULTILINE)[0])
    told = re.fullmatch(r"(.*), family (\d+), model (\d+)", machine["processor"])
    if told is None:
        pytest.skip("a processor that tells no family and model")
    here = dict(zip(("cpu", "family", "model"), told.groups(), strict=True))
    row = {"section": "s", "name": "b1 h1 s64 d64 forward", "threads": 1, "over_torch": 2.0}
    kinds = {
        "same": {**row, **here, "gflops": 100, "date": "2026-01-02"},
        "older": {**row, **here, "gflops": 200, "date": "2026-01-01"},
        "alike": {**row, **here, "model": "none", "gflops": 300, "date": "2026-01-04"},
        "other": {**row, "cpu": "another", "family": "1", "model": "1", "gflops": 400, "date": "2026-01-05"},
    }
    for name, content in kinds.items():
        (tmp_path / name).write_text(json.dumps(content) + "\n")
    with browser.Browser() as tab:
        for order, rate in (
            (("same", "older", "alike", "other"), 50),
            (("other", "alike", "older", "same"), 50),
            (("alike", "other"), 150),
            (("other", "alike"), 150),
            (("other",), 200),
        ):
            peers = [x for name in order for x in ("--peers", str(tmp_path / name))]
            subprocess.run([*bench, "--html", str(page), *peers], check=True, capture_output=True, env=alone)
            tab.open(page.as_uri())
            assert tab.evaluate("ROWS[0].peers.PyTorch.rate") == rate, order
            titles = tab.evaluate("[...document.querySelectorAll('#body td')].map(x => x.title).join('')")
            assert ("another than this" in titles) == ("same" not in order), titles
        assert not tab.complaints, tab.complaints
