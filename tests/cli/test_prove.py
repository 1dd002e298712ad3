"""`anysize prove`, as a process, on nets of someone else's file."""

import pytest
from tests.cli.command import anysize

NETS = """
import torch
from torch import nn


class Edges(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class Rolled(Edges):
    def forward(self, x):
        return super().forward(x).roll(1, -1)


def hidden():  # Positions are mixed inside a function of autograd.
    class Flip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.flip(-1)

        @staticmethod
        def backward(ctx, grad):
            return grad.flip(-1)

    class Net(Edges):
        def forward(self, x):
            return Flip.apply(super().forward(x))

    return Net()


number = lambda: 3


def nothing_built():
    Edges()


def broken(depth):
    return Edges()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


def test_an_exact_net_is_proven(folder):
    said = anysize("prove", "nets:Edges", "--sizes", "12x20", "9x7", cwd=folder)
    assert "Exact to" in said
    assert "masks off" in said


@pytest.mark.parametrize(
    ("net", "code", "message"),
    [
        ("nets:Rolled", 2, "roll"),
        ("nets:hidden", 2, "flip"),
        ("nets:number", 2, "int"),
        ("nets:nothing", 2, "cannot be imported"),
        ("nets:nothing_built", 2, "NoneType"),
        ("nets:broken", 2, "missing 1 required positional argument: 'depth'"),
        ("nets", 2, "PACKAGE.MODULE:BUILD"),
    ],
)
def test_what_is_no_exact_net_is_refused_by_name(folder, net, code, message):
    assert message in anysize("prove", net, "--sizes", "12x20", "9x7", cwd=folder, code=code)
