"""`prove` on nets that are strange or at fault: a clear error, or a proof that says so."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anysize.errors import ShapeError, UnsupportedNetError
from anysize.models.on_canvas import on_canvas
from anysize.models.prove import prove

SIZES = [(17, 22), (24, 14)]


class Net(nn.Module):
    """Two convolutions; what comes in and out is changed by the cases below."""

    def __init__(self, ending=lambda net, y: y, channels=3):
        super().__init__()
        self.a = nn.Conv2d(channels, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 2, 3, padding=1)
        self.register_buffer("calls", torch.zeros(()))
        self.ending = ending

    def forward(self, x):
        return self.ending(self, self.b(F.silu(self.a(x))))


def counted(net, y):
    net.calls += 1
    return y


REFUSED = {
    "no module": (3, "not a torch.nn.Module"),
    "a class, not built": (Net, "not a torch.nn.Module"),
    "nothing": (None, "not a torch.nn.Module"),
    "a list of tensors": (Net(lambda _, y: [y, y]), "returns 2 values"),
    "a tuple of one": (Net(lambda _, y: (y,)), "returns 1 values"),
    "a dict without out": (Net(lambda _, y: {"mask": y, "aux": y}), r"\['aux', 'mask'\]"),
    "text": (Net(lambda *_: "mask"), "returns str"),
    "no tensor": (Net(lambda *_: None), "returns NoneType"),
    "labels instead of logits": (Net(lambda _, y: y.argmax(1, keepdim=True)), "int64"),
    "a state that changes": (Net(counted), "changes its own state"),
    "other channels": (Net(channels=1), "fails on images of 3 channels"),
    "an output not made of the images": (Net(lambda _, y: torch.ones(1)), "not made of the images"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_nets_are_refused_with_what_is_wrong(name):
    net, says = REFUSED[name]
    with pytest.raises(UnsupportedNetError, match=says):
        prove(net, SIZES)


def test_an_entry_of_a_dict_or_list_can_be_named():
    assert prove(Net(lambda _, y: {"out": y, "aux": 2}), SIZES).exact
    assert prove(Net(lambda _, y: {"mask": y}), SIZES, output="mask").exact
    assert prove(Net(lambda _, y: [y, y]), SIZES, output=-1).exact
    with pytest.raises(UnsupportedNetError, match="no entry 'masks'"):
        prove(Net(lambda _, y: {"mask": y}), SIZES, output="masks")


def test_sizes_that_prove_nothing_are_refused():
    with pytest.raises(ShapeError, match="no sizes"):
        prove(Net(), [])
    deep = nn.Sequential(nn.Conv2d(3, 4, 3, 8, 1), nn.BatchNorm2d(4))
    with pytest.raises(ShapeError, match="batch norm"):
        prove(deep, [(8, 8)], train=True)


def test_frozen_parameters_are_proven_as_well_and_stay_frozen():
    net = Net().requires_grad_(False)
    proof = prove(net, SIZES)
    assert proof.exact
    assert proof.comparisons[0].gradients < 1e-12
    assert not any(p.requires_grad for p in net.parameters())


def test_a_net_without_parameters_is_proven_by_its_outputs():
    net = nn.Sequential(nn.Softplus(), nn.AvgPool2d(3, 1, 1), nn.Softplus(), nn.AvgPool2d(5, 2))
    assert prove(net, SIZES).exact


def test_a_net_that_works_in_its_own_input_is_proven():
    class InPlace(Net):
        def forward(self, x):
            return super().forward(x.sub_(1).relu_())

    assert prove(InPlace(), SIZES).exact


def test_control_a_net_that_gives_nan_is_not_exact():
    """A difference that is not a number must not get lost in a maximum."""

    class Odd(Net):
        def forward(self, x):
            y = super().forward(x)
            return y * torch.where(x.amax((2, 3), keepdim=True).amax(1, True) > 3.4, math.nan, 1.0)

    assert not prove(Odd(), [(17, 22), (40, 60), (18, 20)], train=False).exact


def test_a_module_that_is_on_canvases_already_is_taken_as_it_is():
    model = on_canvas(Net())
    assert on_canvas(model) is model
    assert prove(model, SIZES).exact
