# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium by its pipe of the DevTools protocol: what a test needs of it, without another package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any


def find() -> str | None:
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class Browser:
    """With it as a context: pages are opened one after the other in one tab."""

    def __init__(self, dark: bool = False) -> None:
        self.complaints: list[str] = []
        self.dark = dark
        self.last = 0
        self.buffer = b""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        path = find()
        assert path
        self.home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read, self.to = os.pipe()
        self.of, write = os.pipe()

        def pipes() -> None:  # the browser reads from 3 and writes to 4
            low, high = os.dup2(read, 60), os.dup2(write, 61)
            os.dup2(low, 3)
            os.dup2(high, 4)

        self.process = subprocess.Popen(
            [
                path,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--remote-debugging-pipe",
                f"--user-data-dir={self.home.name}",
                "--window-size=1280,1000",
                *(["--blink-settings=preferredColorScheme=0"] if self.dark else []),
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=pipes,
        )
        os.close(read)
        os.close(write)
        self.session = ""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        try:
            os.write(self.to, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
            self.process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self.to)
        os.close(self.of)
        self.home.cleanup()

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            more = os.read(self.of, 1 << 20)
            assert more, "the browser has ended"
            self.buffer += more
        line, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self.note(message)
        return message

    def note(self, message: dict[str, Any]) -> None:
        method, what = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(what["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        elif method == "Runtime.consoleAPICalled" and what["type"] in ("error", "assert"):
            self.complaints.append(f"console: {[x.get('value') for x in what['args']]}")
        elif method == "Log.entryAdded" and what["entry"]["level"] == "error":
            self.complaints.append(f"log: {what['entry']['text']} {what['entry'].get('url', '')}")
        elif method == "Network.loadingFailed" and not what.get("canceled"):
            self.complaints.append(f"network: {what['errorText']}")
        elif method == "Network.requestWillBeSent":
            url = what["request"]["url"]
            if not url.startswith(("http://127.0.0.1", "file:", "data:", "blob:", "about:")):
                self.complaints.append(f"asks for {url}")
        if method:
            self.events.append(message)

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        self.last += 1
        message: dict[str, object] = {"id": self.last, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str) -> None:
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.receive()

    def evaluate(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = 20) -> Any:
        """The first value of the script that is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.evaluate(script):
                return value
            time.sleep(0.1)
        raise AssertionError(f"{script} does not come true")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
