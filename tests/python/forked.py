# SPDX-License-Identifier: Apache-2.0
"""Programs in processes of their own, without each importing torch: they are forks of one process that has done so, and
otherwise run, and end, as `python` runs them."""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile

SECONDS = 600  # a program that takes longer is killed


class Forks:
    """`run` as subprocess.run([sys.executable, *command], capture_output=True, text=True), with `modules` imported."""

    def __init__(self, *modules: str) -> None:
        import torch

        self.process = None
        if hasattr(os, "fork") and not torch.cuda.is_available():  # CUDA is not for children of fork()
            command = [sys.executable, __file__, *modules]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        given = [str(word) for word in command]
        if self.process is None:
            return subprocess.run([sys.executable, *given], capture_output=True, text=True, timeout=SECONDS)
        print(json.dumps(given), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, f"the process that forks has ended: {self.process.wait()}"
        return subprocess.CompletedProcess(given, **json.loads(answer))

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
            self.process.stdout.close()


def serve() -> list[str]:
    """Answers each line of stdin with what became of that command; returns in its process alone."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            child = os.fork()
            if child == 0:
                for at, file in enumerate((os.open(os.devnull, os.O_RDONLY), out.fileno(), errors.fileno())):
                    os.dup2(file, at)
                os.close(answers.fileno())
                signal.alarm(SECONDS)
                return json.loads(line)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = []
            for file in (out, errors):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        answer = {"returncode": code, "stdout": texts[0], "stderr": texts[1]}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # of no child: each would take a second at its end to look through all of it
    sys.argv[:] = serve()
    if sys.argv[0] == "-c":
        sys.path[0], code = "", sys.argv.pop(1)
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
