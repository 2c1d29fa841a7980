# SPDX-License-Identifier: Apache-2.0
"""Times of the device alone, of calls that take turns in one process, in two regimes.

*rest*: before each sample the second-level cache is overwritten and the device kept busy until the host has enqueued the
sample, so that neither the host's time nor warm caches are in it; between samples the card rests, and its clocks are high.
*power*: the call back to back for 60 ms behind 40 ms of the same, as in training: at the card's power limit.
"""
import statistics
import time

import torch

REST, POWER = "rest", "power"
FLUSH_BYTES = 256 << 20  # some four times the second-level cache of an H200
RECOVERY = 1.0  # seconds in which a card at its power limit comes back to the clocks that it has at rest
BURST = 100  # calls enqueued behind a device that is kept busy, where the host is slower than the device


def need_gpu(parser):
    """Ends the program of these arguments with a word where there is nothing to measure."""
    if not torch.cuda.is_available():
        parser.exit(1, f"{parser.prog}: torch {torch.__version__} sees no GPU\n")


class Clock:
    def __init__(self):
        self.flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        begin, end = self.events(2)
        begin.record()
        torch.cuda._sleep(10_000_000)
        end.record()
        end.synchronize()
        self.cycles = 10_000_000 / (begin.elapsed_time(end) * 1e-3)  # of _sleep, a second

    @staticmethod
    def events(n):
        return [torch.cuda.Event(enable_timing=True) for _ in range(n)]

    def hold(self, seconds):
        """Keeps the device busy while the host enqueues."""
        torch.cuda._sleep(int(seconds * self.cycles))

    def host_seconds(self, call):
        """What enqueueing one call takes the host, warmed up."""
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        taken = time.perf_counter() - begin
        torch.cuda.synchronize()
        return taken

    def rest(self, calls, samples=9):
        """Seconds of the device for each call, a list of samples each; the calls take turns."""
        hosts = [self.host_seconds(call) for call in calls]
        times = [[] for _ in calls]
        for _ in range(samples):
            for call, host, list_ in zip(calls, hosts, times):
                begin, end = self.events(2)
                self.hold(2 * host + 100e-6)
                self.flush.zero_()
                begin.record()
                call()
                end.record()
                end.synchronize()
                list_.append(begin.elapsed_time(end) * 1e-3)
        return times

    def power(self, calls, samples=3, warm=0.040, measured=0.060):
        """The same, of calls back to back. Where the host is slower than the device, of bursts that it enqueued before."""
        times = [[] for _ in calls]
        hosts = [self.host_seconds(call) for call in calls]
        seconds = [statistics.median(x) for x in self.rest(calls, 3)]
        for _ in range(samples):
            for call, each, host, list_ in zip(calls, seconds, hosts, times):
                hidden = host > 0.8 * each
                count = BURST if hidden else max(1, round(measured / each))
                for _ in range(1 if hidden else max(1, round(warm / each))):
                    call()
                begin, end = self.events(2)
                if hidden:
                    self.hold(1.2 * count * host + 200e-6)
                begin.record()
                for _ in range(count):
                    call()
                end.record()
                end.synchronize()
                list_.append(begin.elapsed_time(end) * 1e-3 / count)
        return times

    def measure(self, regime, calls):
        """Medians in seconds."""
        return [statistics.median(x) for x in (self.rest(calls) if regime == REST else self.power(calls))]

    def peaks(self):
        """This card's own: TFLOP/s of a bfloat16 product of 8192³ back to back, TB/s of a copy, bytes read plus written."""
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        source, to = (torch.empty(1 << 31, dtype=torch.uint8, device="cuda") for _ in range(2))
        product, copy = self.power([lambda: torch.mm(a, b, out=out), lambda: to.copy_(source)])
        time.sleep(RECOVERY)
        return 2 * 8192**3 / statistics.median(product) * 1e-12, 2 * source.nbytes / statistics.median(copy) * 1e-12

