# SPDX-License-Identifier: Apache-2.0
"""A norm and its Linear that heddle.replace has joined, with parameters that are computed at every look."""

from __future__ import annotations

import copy

import pytest
import torch
from test_nn_replace import E, shake
from test_nn_replace_pairs import both_of, pair
from torch import nn

import heddle


class Counted(nn.Module):
    """A parametrisation that says how often it was computed."""

    def __init__(self):
        super().__init__()
        self.times = 0

    def forward(self, value):
        self.times += 1
        return value * 1.5


@pytest.mark.parametrize("lies", [True, False])
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_parametrised(norm, place, name, lies):
    """A parameter is computed as often as in PyTorch, where it is registered before and later: once."""
    if norm is nn.RMSNorm and place == 0 and name == "bias":
        pytest.skip("it has none")
    was = shake(nn.Sequential(norm(E), nn.Linear(E, E)))
    if not lies:
        was[1].weight = nn.Parameter(torch.randn(E, E).T)
    later, before = copy.deepcopy(was), copy.deepcopy(was)
    heddle.replace(later)
    for model in (was, later, before):
        nn.utils.parametrize.register_parametrization(model[place], name, Counted())
    heddle.replace(before)
    x = torch.randn(2, 3, E)
    for model in (was, later, before):
        counted = model[place].parametrizations[name][0]
        counted.times = 0
        y = model(x)
        assert counted.times == 1
        assert torch.allclose(y, was(x), atol=1e-4)


def test_spectral_norm():
    """Each look at the weight is a step of its iteration."""
    model, was = both_of(pair)
    for each in (model, was):
        torch.manual_seed(1)
        nn.utils.parametrizations.spectral_norm(each[1])
    x = torch.randn(2, 3, E)
    for _ in range(3):
        assert torch.allclose(model(x), was(x), atol=1e-5)
    assert torch.equal(model[1].parametrizations.weight[0]._u, was[1].parametrizations.weight[0]._u)
