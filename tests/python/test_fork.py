# SPDX-License-Identifier: Apache-2.0
"""Children of fork(), after the parent has computed with several threads: the same bits, and they end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import heddle

if not hasattr(os, "fork"):
    pytest.skip("no fork()", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # that there are threads: the point of it


@contextlib.contextmanager
def several_threads():
    """q and its attention, by several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.manual_seed(0)
    q = torch.randn(2, 4, 128, 32)
    torch.mm(torch.randn(512, 512), torch.randn(512, 512))  # PyTorch's functions use the same threads
    yield q, heddle.attention(q, q, q)
    torch.set_num_threads(before)


@pytest.fixture
def computed():
    with several_threads() as both:
        yield both


def ended(child: int, seconds: float = 30) -> int:
    """Its exit status; a child that hangs is killed."""
    for _ in range(int(seconds * 100)):
        there, status = os.waitpid(child, os.WNOHANG)
        if there:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


def fork_twice(q, want):
    for _ in range(2):
        child = os.fork()
        if child == 0:
            same = torch.equal(heddle.attention(q, q, q), want)
            leaf = q.clone().requires_grad_()
            heddle.attention(leaf, leaf, leaf).sum().backward()
            os._exit(0 if same and torch.isfinite(leaf.grad).all() else 1)
        assert ended(child) == 0
        assert torch.equal(heddle.attention(q, q, q), want)


def test_fork():
    """In a process of its own without a GPU: with one, PyTorch's autograd is not for children of fork()."""
    subprocess.run([sys.executable, __file__], check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})


def _answer(q, answers):
    answers.put(heddle.attention(q, q, q).numpy().tobytes())


def test_multiprocessing(computed):
    q, want = computed
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_answer, args=(q, answers), daemon=True)
    child.start()
    deadline = time.monotonic() + 30
    while answers.empty() and time.monotonic() < deadline:
        time.sleep(0.01)
    if answers.empty():
        child.kill()
        pytest.fail("the child hangs")
    assert answers.get() == want.numpy().tobytes()
    child.join(30)
    assert child.exitcode == 0


class Attended(torch.utils.data.Dataset):
    def __init__(self, q):
        self.q = q

    def __len__(self):
        return 4

    def __getitem__(self, at):
        torch.set_num_threads(2)  # a worker's one thread would hide a fault
        return heddle.attention(self.q, self.q, self.q)


def test_data_loader(computed):
    q, want = computed
    loader = torch.utils.data.DataLoader(
        Attended(q), batch_size=2, num_workers=2, timeout=30, multiprocessing_context="fork"
    )
    batches = list(loader)
    assert len(batches) == 2
    for batch in batches:
        assert all(torch.equal(each, want) for each in batch)


if __name__ == "__main__":
    with several_threads() as both:
        fork_twice(*both)
