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
SHORT = 300e-6  # a call under so many seconds is repeated from a CUDA graph, where the host would be in the way


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
        """The same, of calls back to back."""
        times = [[] for _ in calls]
        ready = [self.repeated(call) for call in calls]
        for _ in range(samples):
            for (call, each, count), list_ in zip(ready, times):
                begin, end = self.events(2)
                self.hold(200e-6)
                for _ in range(max(1, round(warm / each / count))):
                    call()
                begin.record()
                rounds = max(1, round(measured / each / count))
                for _ in range(rounds):
                    call()
                end.record()
                end.synchronize()
                list_.append(begin.elapsed_time(end) * 1e-3 / rounds / count)
        return times

    def repeated(self, call):
        """(something to call, seconds a time of `call`, how many times it does `call`)."""
        seconds = statistics.median(self.rest([call], 3)[0])
        if seconds > SHORT:
            return call, seconds, 1
        count = max(1, int(2e-3 / seconds))
        try:
            return graph_of(call, count).replay, seconds, count
        except RuntimeError:  # what cannot be captured is taken with the host's time in it
            torch.cuda.synchronize()
            return call, seconds, 1

    def measure(self, regime, calls):
        """Medians in seconds."""
        return [statistics.median(x) for x in (self.rest(calls) if regime == REST else self.power(calls))]

    def peaks(self):
        """This card's own: TFLOP/s of a bfloat16 product of 8192³ back to back, TB/s of a copy, bytes read plus written."""
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        source, to = (torch.empty(1 << 31, dtype=torch.uint8, device="cuda") for _ in range(2))
        product, copy = self.power([lambda: torch.mm(a, b, out=out), lambda: to.copy_(source)])
        return 2 * 8192**3 / statistics.median(product) * 1e-12, 2 * source.nbytes / statistics.median(copy) * 1e-12


def graph_of(call, count):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(count):
                call()
    torch.cuda.current_stream().wait_stream(side)
    return graph
