# SPDX-License-Identifier: Apache-2.0
"""What bench/cpu.py measures with: the libraries and clocks, this machine's peaks, rows and where they are recorded."""
import ctypes
import datetime
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time

import torch

from heddle_c import Library

ROOT = pathlib.Path(__file__).resolve().parent.parent
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHORT = {F32: "f32", BF16: "bf16", F16: "f16"}
TOLERANCE = {F32: 2e-5, BF16: 2e-2, F16: 4e-3}  # only to see that both compute the same thing; tests/ judge accuracy


class Machine:
    """The libraries, the clock and the peaks."""

    def __init__(self, build, seconds):
        self.heddle = Library(build / "libheddle.so")
        self.peers = ctypes.CDLL(str(build / "bench" / "libpeers.so"))
        self.peers.peak_flops.restype = self.peers.peak_read.restype = ctypes.c_double
        self.peers.peak_flops.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_double]
        self.peers.peak_read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        # libheddle's OpenMP. torch's wheel brings a libgomp of the same soname, so as a rule it is torch's too.
        self.openmp = ctypes.CDLL("libgomp.so.1")
        self.openmps = sorted({line.split()[-1] for line in open("/proc/self/maps") if re.search("lib[gi]?omp", line)})
        self.build, self.seconds = build, seconds
        self.set_threads(1)

    def set_threads(self, n):
        self.disturbed = False
        self.threads = n
        torch.set_num_threads(n)
        self.openmp.omp_set_num_threads(n)
        self.clock = time.thread_time if n == 1 else time.perf_counter

    def peak(self, isa=None):
        """Of several threads on a busy machine, the best of a few: each must have had a core of its own."""
        isa = (isa or self.heddle.isa).encode()
        best = 0.0
        for _ in range(1 if self.threads == 1 else 8):
            waited = waiting_seconds() if self.threads > 1 else 0.0
            best = max(best, self.peers.peak_flops(isa, self.threads, 1.5e-3))
            if self.threads == 1 or waiting_seconds() - waited < 2e-5 * self.threads:
                break
        return best

    def read(self, *tensors):
        """Bytes/s of reading these tensors once."""
        def once():
            return sum(x.nbytes for x in tensors) / sum(
                x.nbytes / self.peers.peak_read(x.data_ptr(), x.nbytes, self.threads) for x in tensors)
        return max(once() for _ in range(1 if self.threads == 1 else 5))

    def cores_apart(self):
        """Whether each thread has a core: those of a virtual machine may share one for a while, which its kernel cannot see."""
        isa = self.heddle.isa.encode()
        one, each = (max(self.peers.peak_flops(isa, n, 3e-4) for _ in range(3)) for n in (1, self.threads))
        return each > 0.9 * self.threads * one

    def sample(self, call, n, tries=24):
        """Seconds of a call, and whether our threads could run all the time, on cores of their own."""
        best, begin = None, time.perf_counter()
        for _ in range(tries if self.threads > 1 else 1):
            waited = waiting_seconds() if self.threads > 1 else 0.0
            start = self.clock()
            for _ in range(n):
                call()
            taken = self.clock() - start
            waited = (waiting_seconds() - waited) / taken if self.threads > 1 else 0.0
            if self.threads > 1 and not self.cores_apart():
                waited = 1.0
            best = min(best or (waited, taken), (waited, taken))
            if waited < 0.02 or time.perf_counter() - begin > 1:
                break
            time.sleep(0.02 if waited == 1 else 0)
        return best[1] / n, best[0] < 0.02

    def time(self, calls, peak=None, rounds=15, least=3):
        """{name: call} in turn -> {name: [seconds]}, {name: [peak measured just before]}."""
        peak, disturbed = peak or self.peak, dict.fromkeys(calls, 0)
        inner, times, peaks = {}, {n: [] for n in calls}, {n: [] for n in calls}
        for name, call in calls.items():
            call()
            start = self.clock()
            call()
            inner[name] = max(1, int(2e-3 / max(self.clock() - start, 1e-6)))
        begin, order = time.perf_counter(), list(calls)
        while len(times[order[0]]) < rounds:
            if len(times[order[0]]) >= least and time.perf_counter() - begin > self.seconds:
                break
            for name in order:
                peaks[name].append(peak())
                taken, alone = self.sample(calls[name], inner[name])
                times[name].append(taken)
                disturbed[name] += not alone
            order.reverse()
        self.disturbed = any(2 * disturbed[n] > len(times[n]) for n in calls)
        return times, peaks


def waiting_seconds():
    """How long threads of this process have been ready to run while another had the core."""
    total = 0
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/schedstat") as file:
                total += int(file.read().split()[1])
        except (OSError, IndexError):
            pass  # a thread that has ended, or a kernel that does not count
    return 1e-9 * total


def median(x):
    return statistics.median(x)


def ratio(a, b):
    return median([x / y for x, y in zip(a, b)])


def normal(*shape, dtype=F32):
    return torch.randn(*shape).to(dtype)


def same(ours, theirs, dtype, what):
    for a, b in zip(ours, theirs):
        a, b = a.detach().float(), b.detach().float()
        difference = ((a - b).norm() / b.norm()).item()
        if not difference < TOLERANCE[dtype]:
            sys.exit(f"cpu.py: {what}: heddle and PyTorch differ by {difference:.2g} of the norm")


def attention_flops(b, h, sq, sk, d, causal):
    return 4.0 * b * h * sq * sk * d * (0.5 if causal else 1)


class Report:
    """Rows as they come: a line on the terminal each, with the goals beside what was measured."""

    def __init__(self, machine, header):
        self.machine, self.header, self.rows = machine, header, []

    def section(self, title, note=""):
        print(f"\n{title}{'  ' + note if note else ''}")
        print(f"  {'':47} {'thr':>3} {'ms':>9} {'GF/s':>7} {'of peak':>8} {'goal':>6} {'x torch':>8} {'goal':>6}"
              f" {'x other':>8} {'goal':>6}")

    def add(self, section, name, *, ms, gflops=None, fraction=None, torch_ms=None, over_torch=None, over_other=None,
            other=None, goals=(None, None, None), **more):
        checks = [(v, g) for v, g in zip((fraction, over_torch, over_other), goals) if v is not None and g is not None]
        verdict = "" if not checks else "pass" if all(v >= g for v, g in checks) else "miss"
        if self.machine.disturbed:
            verdict += "?"

        def percent(x):
            return f"{100 * x:.1f}%" if x is not None else ""

        def times(x):
            return "" if x is None else f"{x:.2f}x" if x < 20 else f"{x:.0f}x"

        fields = (f"{ms:9.3f}", f"{gflops:7.1f}" if gflops else " " * 7, f"{percent(fraction):>8}",
                  f"{percent(goals[0])[:-3] + '%' if goals[0] else '':>6}", f"{times(over_torch):>8}",
                  f"{times(goals[1]):>6}", f"{times(over_other):>8}", f"{times(goals[2]):>6}")
        note = f" ({other})" if other else ""
        print(f"  {name:47} {self.machine.threads:3} {' '.join(fields)} {verdict}{note}", flush=True)
        row = dict(self.header, section=section, name=name, threads=self.machine.threads, ms=ms, gflops=gflops,
                   fraction=fraction, torch_ms=torch_ms, over_torch=over_torch, over_other=over_other, other=other,
                   goal_fraction=goals[0], goal_over_torch=goals[1], goal_over_other=goals[2], verdict=verdict,
                   disturbed=self.machine.disturbed or None, **more)
        self.rows.append({k: round_number(v) for k, v in row.items() if v is not None})


def round_number(v):
    return float(f"{v:.5g}") if isinstance(v, float) else v


def fraction_of(flops, times, peaks):
    return median([flops / t / p for t, p in zip(times, peaks)])


def cpu_info():
    info = {}
    for line in open("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        info.setdefault(key.strip(), value.strip())
    return info


def header_of(m):
    cpu = cpu_info()
    flags = set(cpu.get("flags", cpu.get("Features", "")).split())
    wanted = ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_bf16 avx512_fp16 avx512_vnni avx_vnni amx_tile "
              "amx_bf16 asimd asimdhp sve bf16").split()

    def output(*command):
        try:
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    cache = (m.build / "CMakeCache.txt").read_text()
    compiler = re.search(r"^CMAKE_C_COMPILER:\w+=(.*)$", cache, re.M)
    dirty = "+changes" if output("git", "status", "--porcelain", "--untracked-files=no", "src", "include") else ""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "commit": output("git", "rev-parse", "--short=12", "HEAD") + dirty,
        "cpu": cpu.get("model name", platform.machine()), "family": cpu.get("cpu family"), "model": cpu.get("model"),
        "cores": os.cpu_count(), "flags": " ".join(f for f in wanted if f in flags), "isa": m.heddle.isa,
        "compiler": output(compiler.group(1) if compiler else "cc", "--version").splitlines()[0],
        "torch": torch.__version__, "torch_cpu": torch.backends.cpu.get_cpu_capability(),
        "openmp": len(m.openmps), "load": round(os.getloadavg()[0], 2),
    }


def results_path(header):
    words = [header["cpu"], *(f"{k}{header[k]}" for k in ("family", "model") if header.get(k))]
    words.append(f"{header['cores']}cores")
    return ROOT / "bench" / "results" / (re.sub("[^a-z0-9]+", "-", " ".join(words).lower()).strip("-") + ".jsonl")


def record(path, rows):
    """Replaces the rows of the sections that were run; what was disturbed keeps its old row, if it has one."""
    ran = {(r["section"], r["threads"]) for r in rows}
    disturbed = {(r["section"], r["threads"], r["name"]) for r in rows if r.get("disturbed")}
    old = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [r for r in old if (r["section"], r["threads"]) not in ran or
            (r["section"], r["threads"], r["name"]) in disturbed] + [r for r in rows if not r.get("disturbed")]
    rows.sort(key=lambda r: r["threads"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
