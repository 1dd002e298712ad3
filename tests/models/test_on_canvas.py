"""Any net on a canvas: each kind of operation, drawn at random, against the image alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from anysize.errors import ShapeError, UnsupportedNetError
from anysize.geometry import Canvas, Layout, Placement, check_layout, round_up
from anysize.models import canvas_resizing, canvas_rules, field
from anysize.models.on_canvas import geometry_of_net, on_canvas
from anysize.models.prove import prove

SIZES = st.lists(
    st.tuples(st.integers(12, 30), st.integers(12, 30)), min_size=2, max_size=3, unique=True
)
PLACES = st.lists(
    st.tuples(st.integers(0, 1), st.booleans(), st.integers(0, 2), st.integers(0, 2)),
    min_size=3,
    max_size=3,
)
"""For each image: the slot, beside the others or below them, and cells further down and right."""

QUICK = settings(max_examples=15, deadline=None, derandomize=True)


class Around(nn.Module):
    """An operation between convolutions whose biases dirty the outside."""

    def __init__(self, operation, channels=4, activation=None):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.activation = activation or nn.SiLU()
        self.operation = operation
        self.last = nn.LazyConv2d(2, 3, padding=1)

    def forward(self, x):
        return self.last(self.operation(self.activation(self.first(x))))


def seeded(net):
    generator = torch.Generator().manual_seed(0)
    net = net.double()
    net(torch.zeros(1, 3, 40, 40, dtype=torch.float64))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return net


def padded_batch(sizes):
    height, width = (max(s[i] for s in sizes) + 5 for i in (0, 1))
    return Layout(
        Canvas(len(sizes) + 1, height, width),
        tuple(Placement(i, 0, 0, *s) for i, s in enumerate(sizes)),
    )


def mosaic(sizes, places, geometry):
    """Images beside and below each other, as close as the geometry allows or some cells more."""
    assert geometry.mosaic
    assert geometry.size_multiple == 1
    placed = []
    for size, (slot, beside, down, right) in zip(sizes, places, strict=False):
        own = [p for p in placed if p.slot == slot]
        top = left = 0
        if beside:
            left = max((p.left + geometry.step(p.width) for p in own), default=0)
        else:
            top = max((p.top + geometry.step(p.height) for p in own), default=0)
        stride = geometry.output_stride
        placed.append(Placement(slot, top + down * stride, left + right * stride, *size))
    height = max(p.top + p.height for p in placed)
    width = max(p.left + p.width for p in placed)
    canvas = Canvas(2, *(round_up(n, geometry.canvas_multiple) for n in (height, width)))
    layout = Layout(canvas, tuple(placed))
    check_layout(layout, geometry)
    return layout


def difference(net, sizes, places=None):
    """Of outputs and gradients, on a padded batch or a mosaic against alone."""
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(1, 3, *s, generator=generator, dtype=torch.float64) for s in sizes]
    model = on_canvas(net)
    model._multiple = 1  # spares a dry run for each case; these nets take any size
    if places is None:
        layout = padded_batch(sizes)
    else:
        layout = mosaic(sizes, places, geometry_of_net(net, describe_logits=False))
    canvas = layout.canvas
    pixels = torch.full((canvas.slots, 3, *canvas[1:]), 7.0, dtype=torch.float64)
    for image, p in zip(images, layout.placements, strict=True):
        pixels[p.slot, :, p.top : p.top + p.height, p.left : p.left + p.width] = image[0]
    alone = [net(image) for image in images]
    y = model(pixels, layout)
    ours = [
        y[r.slot : r.slot + 1, :, r.top : r.top + r.height, r.left : r.left + r.width]
        for r in field.field_of(y).level.rects
    ]
    assert [o.shape for o in ours] == [a.shape for a in alone]
    names = list(net.parameters())
    theirs = torch.autograd.grad(sum(a.square().sum() for a in alone), names)
    own = torch.autograd.grad(sum(o.square().sum() for o in ours), names)
    outputs = max(
        float((a - o).detach().abs().max() / a.detach().abs().max())
        for a, o in zip(alone, ours, strict=True)
    )
    largest = max(float(g.abs().max()) for g in theirs)
    gradients = max(float((a - o).abs().max()) / largest for a, o in zip(theirs, own, strict=True))
    return max(outputs, gradients)


@QUICK
@given(
    sizes=SIZES,
    places=st.none() | PLACES,
    kernel=st.integers(1, 5),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    padding=st.integers(0, 3),
    groups=st.sampled_from([1, 2, 4]),
)
def test_convolutions(sizes, places, kernel, stride, dilation, padding, groups):
    conv = nn.Conv2d(4, 4, kernel, stride, padding, dilation, groups)
    assert difference(seeded(Around(conv)), sizes, places) < 1e-12


@QUICK
@given(
    sizes=SIZES,
    places=st.none() | PLACES,
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 1),
    dilation=st.integers(1, 2),
)
def test_transposed_convolutions(sizes, places, kernel, stride, padding, dilation):
    padding = min(padding, kernel - 1)
    conv = nn.ConvTranspose2d(
        4, 4, kernel, stride, padding, output_padding=stride - 1, dilation=dilation
    )
    assert difference(seeded(Around(conv)), sizes, places) < 1e-12


@QUICK
@given(
    sizes=SIZES,
    places=st.none() | PLACES,
    kernel=st.integers(2, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 1),
    dilation=st.integers(1, 2),
    ceil=st.booleans(),
    kind=st.sampled_from(["max", "max of relu", "average", "average inside"]),
)
def test_poolings(sizes, places, kernel, stride, padding, dilation, ceil, kind):
    if kind.startswith("max"):
        pool = nn.MaxPool2d(kernel, stride, padding, dilation, ceil_mode=ceil)
    else:
        pool = nn.AvgPool2d(
            kernel, stride, padding, ceil_mode=ceil, count_include_pad=kind == "average"
        )
    net = Around(pool, activation=nn.ReLU() if "relu" in kind else nn.SiLU())
    assert difference(seeded(net), sizes, places) < 1e-12


@QUICK
@given(
    sizes=SIZES,
    places=st.none() | PLACES,
    scale=st.sampled_from([2, 3, 4, 1.5, 0.5]),
    mode=st.sampled_from(["nearest", "bilinear", "corners"]),
)
def test_resizing(sizes, places, scale, mode):
    corners = {"nearest": None, "bilinear": False, "corners": True}[mode]
    kind = "nearest" if mode == "nearest" else "bilinear"
    up = nn.Upsample(scale_factor=scale, mode=kind, align_corners=corners)
    net = seeded(Around(up))
    if not geometry_of_net(net, describe_logits=False).mosaic:
        assert scale in (1.5, 0.5, 3) or mode == "corners"
        places = None
    assert difference(net, sizes, places) < 1e-12


class Decoder(nn.Module):
    """Doubles what was halved to meet the encoder's extent, odd or even."""

    def __init__(self):
        super().__init__()
        self.halve = nn.Conv2d(4, 4, 3, stride=2, padding=1)

    def forward(self, x):
        y = F.silu(self.halve(x))
        return torch.cat([x, F.interpolate(y, size=x.shape[2:])], 1)


@QUICK
@given(sizes=SIZES, places=st.none() | PLACES)
def test_doubling_to_the_extent_of_an_encoder(sizes, places):
    net = seeded(Around(Decoder()))
    assert geometry_of_net(net, describe_logits=False).mosaic
    assert difference(net, sizes, places) < 1e-12


def test_doubling_goes_where_pytorch_goes():
    for n in (1, 2, 3, 300, 1023, canvas_resizing._MOST_DOUBLED):
        for out in (2 * n - 1, 2 * n):
            cells = torch.arange(n).view(1, 1, 1, n).float()
            found = F.interpolate(cells, size=(1, out))[0, 0, 0]
            assert torch.equal(found, torch.arange(out).div(2, rounding_mode="floor").float())


@QUICK
@given(sizes=SIZES, places=st.none() | PLACES, edges=st.tuples(*[st.integers(-2, 3)] * 4))
def test_padding_and_cropping(sizes, places, edges):
    assert difference(seeded(Around(nn.ZeroPad2d(edges))), sizes, places) < 1e-12


@pytest.mark.parametrize("edges", [(0, 0, 2, -2), (2, -2, 0, 0), (-2, 2, 0, 0), (0, 0, -2, 2)])
def test_cells_that_padding_adds_are_not_those_that_a_neighbour_loses(edges):
    places = [(0, edges[0] != 0, 0, 0)] * 3
    sizes = [(12, 12), (12, 13), (14, 12)]
    assert difference(seeded(Around(nn.ZeroPad2d(edges))), sizes, places) < 1e-12


LEFT_OUT = {
    "conv2d": nn.Conv2d(4, 4, 3, 2, 2, dilation=2),
    "conv_transpose2d": nn.ConvTranspose2d(4, 4, 3, 2, 1, output_padding=1),
    "max_pool2d": nn.MaxPool2d(3, 2, 1),
    "avg_pool2d": nn.AvgPool2d(3, 2, 1),
    "interpolate": nn.Upsample(scale_factor=2, mode="bilinear"),
    "pad": nn.ZeroPad2d((2, 1, 1, 2)),
}
"""Operations by name, of which each masks what it reads."""


@pytest.mark.parametrize("where", ["padded batch", "mosaic"])
@pytest.mark.parametrize("name", LEFT_OUT)
def test_control_an_operation_that_does_not_mask(monkeypatch, name, where):
    """With only this operation's own masking left out, its result must differ."""
    net = seeded(Around(LEFT_OUT[name]))
    if name != "conv2d":  # so that no later operation is at fault
        net.last = nn.Conv2d(4, 2, 1).double()
    rule = canvas_rules.RULES[name]

    def forgetful(call):
        with monkeypatch.context() as patch:
            for module in (canvas_rules.canvas_ops, canvas_rules.canvas_resizing):
                for masking in ("zero_outside", "filled_outside"):
                    patch.setattr(module, masking, lambda x, *_, **__: x)
            patch.setattr(canvas_rules.canvas_resizing._Replicated, "apply", lambda x, *_: x)
            return rule(call)

    sizes = [(17, 22), (24, 13), (20, 20)]
    places = None if where == "padded batch" else [(0, True, 0, 0)] * 2 + [(0, False, 0, 1)]
    assert difference(net, sizes, places) < 1e-12
    monkeypatch.setitem(canvas_rules.RULES, name, forgetful)
    assert difference(net, sizes, places) > 1e-4


class Pieces(nn.Module):
    """What nets do between layers, by name."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv2d(4, 4, 3, 2, 1)
        self.plain = nn.Conv2d(4, 4, 1)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):  # noqa: C901
        match self.kind:
            case "skip and concatenation":
                y = F.interpolate(self.conv(x), size=x.shape[-2:], mode="bilinear")
                return torch.cat([x, y], 1)
            case "squeeze and excite":
                return x * torch.sigmoid(self.plain(x.mean((2, 3), keepdim=True)))
            case "pyramid pooling":
                y = F.adaptive_avg_pool2d(x, 3)
                return x + F.interpolate(self.plain(y), size=x.shape[2:], mode="bilinear")
            case "global image feature":
                y = F.adaptive_avg_pool2d(x, 1)
                return x + F.interpolate(y, size=x.shape[2:], mode="bilinear")
            case "TensorFlow's padding":
                h, w = x.shape[-2:]
                total = [max((-(-n // 2) - 1) * 2 + 3 - n, 0) for n in (h, w)]
                x = F.pad(
                    x,
                    (
                        total[1] // 2,
                        total[1] - total[1] // 2,
                        total[0] // 2,
                        total[0] - total[0] // 2,
                    ),
                )
                return F.conv2d(x, self.conv.weight, self.conv.bias, 2)
            case "channels last":
                return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            case "group norm":
                return F.group_norm(x, 2)
            case "response norm":
                x = x.permute(0, 2, 3, 1)
                return (x * x.norm(dim=(1, 2), keepdim=True)).permute(0, 3, 1, 2)
            case "in place on a part":
                x = F.relu(x)
                x = x.clone()
                a = x[:, :2]
                a += 1
                return torch.cat([x, a], 1)
            case "crop":
                return x[:, :, 1:-1, :-2]
            case "steps":
                return x[:, :, ::2, ::2]
            case "channel shuffle":
                n, c, h, w = x.shape
                return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
            case "constant padding":
                return F.pad(x, (1, 2, 0, 3), value=0.5)
            case "sum of a stack":
                return torch.stack([x, torch.sigmoid(x), self.plain(x)]).sum(dim=0)
            case "largest":
                return x * x.amax((2, 3), keepdim=True)


KINDS = [
    "skip and concatenation",
    "squeeze and excite",
    "pyramid pooling",
    "global image feature",
    "TensorFlow's padding",
    "channels last",
    "group norm",
    "response norm",
    "in place on a part",
    "crop",
    "steps",
    "channel shuffle",
    "constant padding",
    "sum of a stack",
    "largest",
]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_nets(kind):
    net = seeded(Around(Pieces(kind)))
    sizes = [(17, 22), (24, 13), (20, 20)]
    assert _difference_of_used(net, sizes) < 1e-12


def _difference_of_used(net, sizes):
    used = [p for n, p in net.named_parameters() if not n.startswith("operation.")]
    net.parameters = lambda recurse=True: iter(used)
    return difference(net, sizes)


class Attention(nn.Module):
    def forward(self, x):
        flat = x.flatten(2)
        return (flat @ (flat.transpose(1, 2) @ flat).softmax(-1)).view(x.shape)


class Stacked(nn.Module):
    def forward(self, x):
        return torch.stack([x, x]).relu().sum(0)


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(1, 4, 40, 40))

    def forward(self, x):
        return x + self.positions


@pytest.mark.parametrize(
    ("operation", "where"),
    [
        (Attention(), r"operation \(Attention\): `flatten`"),
        (Stacked(), r"operation \(Stacked\): `relu`"),
        (Learned(), r"operation \(Learned\): `add`"),
        (nn.ReflectionPad2d(1), r"operation \(ReflectionPad2d\): `pad`"),
    ],
)
def test_what_is_not_known_is_refused_by_name(operation, where):
    net = Around(operation)
    net.last = nn.Conv2d(4, 2, 1)
    layout = Layout(Canvas(1, 40, 40), (Placement(0, 0, 0, 20, 30),))
    with pytest.raises(UnsupportedNetError, match=where):
        on_canvas(net)(torch.zeros(1, 3, 40, 40), layout)


def unet(norm=True):
    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
            self.deep = nn.Sequential(
                nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 3, padding=2, dilation=2)
            )
            self.last = nn.Conv2d(8, 2, 3, padding=1)

        def forward(self, x):
            if x.shape[2] % 2 or x.shape[3] % 2:
                raise ValueError("multiples of 2 only")
            x = self.down(x)
            y = F.interpolate(F.relu(self.deep(x), inplace=True), scale_factor=2)
            return self.last(torch.cat([x, y], 1))

    return UNet()


def test_a_net_is_described_and_proven():
    geometry = geometry_of_net(unet())
    assert (geometry.output_stride, geometry.size_multiple, geometry.mosaic) == (2, 2, True)
    assert geometry.logits_extent(31) == 32
    proof = prove(unet(), [(30, 22), (17, 40)])
    assert proof.exact
    assert {c.name for c in proof.comparisons} > {"padded batch, eval", "mosaic, eval"}
    assert "multiple of 2" in proof.summary


@pytest.mark.parametrize("left_out", ["conv2d", "max_pool2d", "cat"])
def test_control_one_operation_without_its_rule(monkeypatch, left_out):
    """Convolutions and poolings that read the outside as it is must be noticed."""
    rule = canvas_rules.RULES[left_out]

    def forgetful(call):
        with monkeypatch.context() as patch:
            for module in (canvas_rules.canvas_ops, canvas_rules.canvas_resizing):
                patch.setattr(module, "zero_outside", lambda x, *_, **__: x)
            return rule(call)

    def blind(call):
        y = rule(call)
        return field.put(y, field.field_of(y), clean=True)

    monkeypatch.setitem(canvas_rules.RULES, left_out, blind if left_out == "cat" else forgetful)
    proof = prove(unet(), [(30, 22), (16, 40)], train=False)
    assert not proof.exact
    assert "Not exact" in proof.summary


def test_a_gutter_one_cell_short_is_refused():
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 5, padding=4, dilation=2))
    assert geometry_of_net(net).gutter == 4
    for gap, fits in ((4, True), (3, False)):
        layout = Layout(
            Canvas(1, 10, 30), (Placement(0, 0, 0, 10, 10), Placement(0, 0, 10 + gap, 10, 10))
        )
        if fits:
            on_canvas(net)(torch.zeros(1, 3, 10, 30), layout)
        else:
            with pytest.raises(ShapeError, match="too close"):
                on_canvas(net)(torch.zeros(1, 3, 10, 30), layout)


def test_images_start_at_whole_cells_of_every_level_of_a_net_with_strides_2_and_3():
    both = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Upsample(scale_factor=2),
        nn.AvgPool2d(3, 3),
        nn.Conv2d(4, 2, 3, 2, 1),
    )
    assert geometry_of_net(both, describe_logits=False).output_stride == 3
    proof = prove(both, [(35, 26), (20, 35)], train=False)
    assert "mosaic, eval" in {c.name for c in proof.comparisons}
    assert proof.exact


def test_state_dict_modes_and_copies_are_the_nets_own():
    net = unet()
    model = on_canvas(net)
    assert list(model.state_dict()) == list(net.state_dict())
    model.eval()
    assert not net.training
    assert not net.down.training
    for module in model.modules():  # As evaluators restore modes: the net is not among these.
        module.training = True
    assert net.training
    copied = copy.deepcopy(model)
    assert copied.net is not net
    with torch.no_grad():
        next(iter(copied.parameters())).fill_(3)
    assert float(next(iter(copied.net.parameters())).detach().mean()) == 3
    assert float(next(iter(net.parameters())).detach().mean()) != 3


def test_strange_nets_are_refused():
    layout = Layout(Canvas(1, 8, 8), (Placement(0, 0, 0, 8, 8),))
    with pytest.raises(UnsupportedNetError, match=r"torch\.nn\.Module"):
        on_canvas(3)

    class Many(nn.Module):
        def forward(self, x):
            return [x, x]

    class Named(nn.Module):
        def forward(self, x):
            return {"out": x * 2, "aux": x}

    with pytest.raises(UnsupportedNetError, match="2 values"):
        on_canvas(Many())(torch.zeros(1, 3, 8, 8), layout)
    ones = torch.ones(1, 3, 8, 8)
    assert float(on_canvas(Many(), output=1)(ones, layout).mean()) == 1
    assert float(on_canvas(Named())(ones, layout).mean()) == 2
