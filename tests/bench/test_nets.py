"""The nets of the arms: the plain one is the product's, and masks are there or not."""

import pytest
import torch

from anysize.bench.arms import NUM_CLASSES, Arm, WorkPlan
from anysize.bench.nets import CanvasNet, PlainNet, build_net
from anysize.bench.plain import PlainFCN
from anysize.bench.sizes import draw_sizes, size_sets
from anysize.config import ModelConfig
from anysize.geometry import Canvas, Layout, Size, single, target_rect
from anysize.models.build import build_model, geometry_of

CPU = torch.device("cpu")
TINY = ModelConfig(units=(1, 2, 1, 2), base_depth=16)


def copy(conv, norm, source):
    conv.weight.data = source.weights.data
    norm.weight.data, norm.bias.data = source.gamma.data, source.beta.data
    norm.running_mean, norm.running_var = source.moving_mean, source.moving_variance


def plain_of(model, config):
    """The plain net with the values of the product's."""
    plain = PlainFCN(config, NUM_CLASSES).double().train()
    copy(plain.conv1, plain.bn1, model.body.conv1)
    for unit, source in zip(plain.units, model.body.units.values(), strict=True):
        for i, (conv, norm) in enumerate(zip(unit.convs, unit.norms, strict=True), start=1):
            copy(conv, norm, getattr(source, f"conv{i}"))
        assert (unit.shortcut is None) == (source.shortcut is None)
        if unit.shortcut is not None:
            copy(*unit.shortcut, source.shortcut)
    plain.head.weight.data, plain.head.bias.data = model.head.weights.data, model.head.biases.data
    return plain


@pytest.mark.parametrize("basic", [False, True])
@pytest.mark.parametrize("output_stride", [8, 16, 32])
def test_the_plain_net_is_the_products_net_on_an_image_alone(output_stride, basic):
    # The one difference: as people write it, pooling is padded on both sides.
    config = ModelConfig(
        units=TINY.units,
        basic_units=basic,
        base_depth=16,
        output_stride=output_stride,
        pool_padding="torchvision",
    )
    generator = torch.Generator().manual_seed(0)
    model = build_model(config, NUM_CLASSES, generator=generator).double().train()
    for name, values in model.state_dict().items():
        if name.endswith(("gamma", "variance")):
            values.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith(("beta", "mean")):
            values.normal_(generator=generator)
    size = Size(61, 90)
    layout = single(size, geometry_of(config))
    (p,) = layout.placements
    image = torch.randn(1, 3, *size, dtype=torch.float64, generator=generator)
    pixels = torch.zeros(1, 3, *layout.canvas[1:], dtype=torch.float64)
    pixels[:, :, p.top : p.top + p.height, p.left : p.left + p.width] = image
    plain = plain_of(model, config)(image)
    r = target_rect(p, geometry_of(config), "grid")
    ours = model(pixels, layout)[:, :, r.top : r.top + r.height, r.left : r.left + r.width]
    torch.testing.assert_close(plain[:, :, : r.height, : r.width], ours)
    # The control: another head is seen.
    plain_head = plain + 1e-3
    with pytest.raises(AssertionError):
        torch.testing.assert_close(plain_head[:, :, : r.height, : r.width], ours)


def test_the_norms_of_the_plain_net_are_frozen():
    plain = PlainFCN(TINY, NUM_CLASSES).train()
    before = plain.bn1.running_mean.clone()
    plain(torch.randn(1, 3, 40, 40))
    assert torch.equal(plain.bn1.running_mean, before)
    assert plain.training


@pytest.mark.parametrize(
    "arm",
    [Arm("plain", "all", "float32"), Arm("plain", "one", "bf16"), Arm("mosaic", "all", "bf16")],
    ids=str,
)
def test_a_step_trains_and_takes_time(arm):
    net = build_net(arm, TINY, CPU)
    assert isinstance(net, CanvasNet if arm.policy == "mosaic" else PlainNet)
    before = [p.detach().clone() for p in net.model.parameters()]
    work = WorkPlan(
        size_sets(draw_sizes(8, (0.001, 0.004))), geometry_of(TINY), 4, full=False, on_gpu=False
    )
    assert net.step(work.work(arm.policy, arm.sizes).turns[0][0]) > 0
    after = net.model.parameters()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_pads_a_batch_is_no_pixel_and_has_no_label():
    net = PlainNet(Arm("pad to batch maximum", "all", "float32"), TINY, CPU)
    work = WorkPlan(
        size_sets(draw_sizes(8, (0.001, 0.004))), geometry_of(TINY), 4, full=False, on_gpu=False
    )
    ((layout,),) = work.work("pad to batch maximum", "all").turns[0]
    pixels, target = net._batch(layout)
    assert int((pixels[:, 0] != 0).sum()) == layout.valid_pixels
    cells = sum(-(-p.height // 8) * -(-p.width // 8) for p in layout.placements)
    assert int((target != 255).sum()) == cells
    assert target.shape == net.model(pixels)[:, 0].shape


def test_masks_are_off_where_they_shall_be_and_on_elsewhere():
    model = build_net(Arm("mosaic", "all", "float32"), TINY, CPU).model
    layout = Layout(Canvas(1, 64, 96), single(Size(40, 40), geometry_of(TINY)).placements)
    pixels = torch.zeros(1, 3, 64, 96)
    p = layout.placements[0]
    pixels[:, :, p.top : p.top + 40, p.left : p.left + 40].normal_()
    with torch.no_grad():
        for name, values in model.state_dict().items():
            if name.endswith("beta"):
                values.fill_(0.5)
        masked, again = model(pixels, layout)[..., :5, :5], model(pixels, layout)[..., :5, :5]
        assert torch.equal(masked, again)
        arm = build_net(Arm("mosaic without masks", "all", "float32"), TINY, CPU)
        with arm.masks():
            unmasked = model(pixels, layout)[..., :5, :5]
        assert torch.equal(model(pixels, layout)[..., :5, :5], masked)
    assert float((masked - unmasked).abs().max()) > 1e-2 * float(masked.abs().max())


def test_operations_are_counted_on_a_real_step():
    net = PlainNet(Arm("plain", "one", "float32"), TINY, CPU)
    size = Size(64, 64)
    layout = Layout(Canvas(1, *size), tuple(single(size, geometry_of(TINY)).placements))
    modules, forward = [], []
    for module in net.model.modules():
        if isinstance(module, torch.nn.Conv2d):
            modules.append(
                module.register_forward_hook(
                    lambda m, _, y: forward.append(2 * m.weight.numel() * y[0, 0].numel())
                )
            )
    net.model(torch.zeros(1, 3, *size))
    for hook in modules:
        hook.remove()
    head = 2 * net.model.head.weight.numel() * 4 * 4
    # Backward is twice forward, but for the pixels, which need no gradient.
    expected = 3 * (sum(forward) + head) - forward[0]
    assert net.flops_a_pixel(layout) == expected / size.pixels


UNET = ModelConfig(net="tests.models.small_nets:SmallUnet", arguments={"width": 8})


def test_a_net_that_is_named_is_measured_plain_masked_and_without_masks():
    sets = size_sets(draw_sizes(8, (0.001, 0.004)))
    work = WorkPlan(sets, geometry_of(UNET), 4, full=False, on_gpu=False)
    plain = PlainNet(Arm("plain", "all", "float32"), UNET, CPU)
    for policy in ("plain batch 1", "pad to batch maximum"):
        turn = work.work(policy, "all").turns[0]
        for layout in turn[0]:
            pixels, target = plain._batch(layout)
            assert target.shape == plain.model(pixels)[:, 0].shape
            assert int((target != 255).sum()) == layout.valid_pixels
        assert plain.step(turn[0]) > 0
    ((layout, *_),) = work.work("mosaic", "all").turns[0]
    layout = Layout(layout.canvas._replace(height=layout.canvas.height + 8), layout.placements)
    x = torch.randn(layout.canvas.slots, 3, *layout.canvas[1:])
    found = {}
    for policy in ("mosaic without masks", "mosaic"):
        net = build_net(Arm(policy, "all", "float32"), UNET, CPU)
        assert net.step((layout,)) > 0
        net.model.load_state_dict(plain.model.state_dict())
        found[policy] = net.model(x, layout)
    assert torch.equal(found["mosaic without masks"], plain.model(x))
    assert not torch.allclose(found["mosaic"], found["mosaic without masks"], atol=1e-3)
