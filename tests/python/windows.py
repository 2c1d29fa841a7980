#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package for Windows, as far as a machine without Windows can run it.

windows.py BUILD: BUILD is a build by cmake/x86_64-w64-mingw32.cmake with -DHEDDLE_PYTHON=ON. Checks that heddle._C asks
python3.dll for nothing but the limited API of 3.10, fetches PyTorch's wheel for Windows (120 MB, once, into
BUILD/torch), and runs the operators in it, in wine (windows_host.c). `import heddle` is not run, since no package has
Python itself for Windows. Exit status 77 where the wheel, abi3info or wine is not to be had."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "python" / "src"
COMPILER = "x86_64-w64-mingw32-gcc-posix"
TORCH = "2.13.0"


def without(what: str) -> None:
    print(f"skipped: {what}")
    raise SystemExit(77)


def names_of(definition: Path) -> list[str]:
    lines = definition.read_text().partition("EXPORTS\n")[2].splitlines()
    return [line.split()[0] for line in lines]


def check_python(module: Path) -> None:
    """What it imports is what python3.def has, and all of that has been in the stable ABI since 3.10."""
    try:
        from abi3info import DATAS, FUNCTIONS
    except ImportError:
        without("abi3info is not here")
    stable = {entry.symbol.name: entry.added for entry in (*FUNCTIONS.values(), *DATAS.values())}
    names = names_of(SOURCE / "python3.def")
    late = [name for name in names if name not in stable or (stable[name].major, stable[name].minor) > (3, 10)]
    assert not late, f"not in the limited API of Python 3.10: {late}"
    told = subprocess.run(
        ["x86_64-w64-mingw32-objdump", "-p", module], capture_output=True, text=True, check=True
    ).stdout
    dlls = {line.split()[-1].lower() for line in told.splitlines() if "DLL Name:" in line}
    assert dlls <= {"python3.dll", "libheddle.dll", "kernel32.dll", "msvcrt.dll"}, dlls
    print(f"{module.name}: {len(names)} names of python3.dll, all in the limited API of 3.10")


def torch_libraries(build: Path) -> Path:
    """The folder with PyTorch's DLLs."""
    folder = build / "torch"
    libraries = folder / "torch" / "lib"
    if not (libraries / "torch_cpu.dll").exists():
        only = ["--platform", "win_amd64", "--python-version", "3.11", "--only-binary=:all:", "--no-deps"]
        got = subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", *only, "-d", folder, f"torch=={TORCH}"],
            capture_output=True,
            text=True,
        )
        wheels = list(folder.glob("torch-*win_amd64.whl"))
        if got.returncode or not wheels:
            without(f"PyTorch {TORCH} for Windows could not be fetched: {got.stderr.strip()[-300:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(
                folder, [name for name in wheel.namelist() if name.startswith("torch/lib/") and name.endswith(".dll")]
            )
        wheels[0].unlink()
    return libraries


def runtime_of(name: str) -> Path:
    """A DLL of the compiler's own."""
    found = Path(
        subprocess.run(
            [COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    if found.is_absolute():
        return found
    return next(Path("/usr/x86_64-w64-mingw32").rglob(name))


def run_operators(build: Path) -> None:
    libraries, package, wine = torch_libraries(build), build / "package", shutil.which("wine")
    if wine is None:
        without("wine is not here")
    package.mkdir(exist_ok=True)
    for name in ("libgomp-1.dll", "libgcc_s_seh-1.dll", "libwinpthread-1.dll"):
        shutil.copy(runtime_of(name), package)
    shutil.copy(build / "libheddle.dll", package)
    shutil.copy(build / "python" / "heddle" / "_torch_ops.so", package)
    host = build / "windows_host.exe"
    subprocess.run([COMPILER, "-std=gnu11", "-O1", f"-I{SOURCE}", HERE / "windows_host.c", "-o", host], check=True)
    # Wine 8 has no GetNumaNodeProcessorMaskEx, by which PyTorch's OpenMP would bind threads.
    environment = os.environ | {
        "KMP_AFFINITY": "disabled",
        "WINEDEBUG": "-all",
        "WINEPREFIX": str((build / "wine").resolve()),
    }
    paths = ["Z:" + str(path.resolve()).replace("/", "\\") for path in (libraries, package / "_torch_ops.so")]
    subprocess.run([wine, host, *paths], env=environment, check=True, timeout=300)


def main() -> None:
    build = Path(sys.argv[1])
    check_python(build / "python" / "heddle" / "_C.pyd")
    run_operators(build)


if __name__ == "__main__":
    main()
