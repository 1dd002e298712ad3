"""The proof: on a canvas, outputs, loss and all gradients are those of each image alone."""

import pytest
import torch
import torch.nn.functional as F
from tests.parity.reference import Reference, full_resolution

from anysize.config import ModelConfig
from anysize.data.batch import Batch
from anysize.errors import ShapeError
from anysize.geometry import (
    Canvas,
    Layout,
    NetGeometry,
    Size,
    check_layout,
    coarse_rect,
    grid_centres,
    outside,
    place,
    round_up,
    single,
    target_canvas,
    target_rect,
)
from anysize.models import ops, resnet_v1
from anysize.models.build import build_model
from anysize.models.ops import upsample
from anysize.training.losses import CrossEntropy, SigmoidCrossEntropy

NUM_CLASSES = 3
IGNORE = 255
LOSSES = {"multiclass": CrossEntropy(), "multilabel": SigmoidCrossEntropy()}
UNITS = (2, 2, 2, 2)
TORCHVISION = {
    "pool_padding": "torchvision",
    "stride_position": "first_3x3",
    "dilation_rule": "previous",
}
# All 16 classes of (H mod 4, W mod 4), and tiny sizes.
SIZES = [Size(29 + i, 38 + j) for i in range(4) for j in range(4)] + [Size(1, 1), Size(3, 200)]


def build(output_stride, *, norm="frozen", loss_at="grid", dtype=torch.float64, **rules):
    config = ModelConfig(
        units=UNITS, base_depth=4, output_stride=output_stride, norm=norm, loss_at=loss_at, **rules
    )
    generator = torch.Generator().manual_seed(3)
    model = build_model(config, NUM_CLASSES, generator=generator)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            leaf = name.rsplit(".", 1)[1]
            draw = torch.rand(tensor.shape, generator=generator)
            if leaf in ("gamma", "moving_variance"):
                tensor.copy_(0.5 + draw)
            elif leaf in ("beta", "moving_mean", "biases"):
                tensor.copy_(draw - 0.3)
    return model.to(dtype).train()


def draw_images(sizes, kind, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    images = [torch.randn(1, 3, *s, generator=generator, dtype=torch.float64) for s in sizes]
    masks = []
    for s in sizes:
        shape = (NUM_CLASSES, *s) if kind == "multilabel" else tuple(s)
        top = 2 if kind == "multilabel" else NUM_CLASSES
        mask = torch.randint(0, top, shape, generator=generator)
        mask[torch.rand(shape, generator=generator) < 0.1] = IGNORE
        masks.append(mask)
    return [i.to(dtype) for i in images], masks


def reference_loss(logits, masks, kind, loss_at, geometry):
    total, count = 0.0, 0
    for x, mask in zip(logits, masks, strict=True):
        size = mask.shape[-2:]
        if loss_at == "full":
            x, y = full_resolution(x, size, geometry.head_stride), mask
        else:
            s = geometry.head_stride
            rows = [min(i * s + s // 2, size[0] - 1) for i in range(-(-size[0] // s))]
            columns = [min(j * s + s // 2, size[1] - 1) for j in range(-(-size[1] // s))]
            rows, columns = rows[: x.shape[2]], columns[: x.shape[3]]
            y = mask[..., rows, :][..., columns]
            x = x[:, :, : len(rows), : len(columns)]
        keep = y != IGNORE
        if kind == "multiclass":
            logp = torch.log_softmax(x[0], 0).permute(1, 2, 0)
            total = total - logp[keep].gather(1, y[keep][:, None]).sum()
        else:
            x = x[0][keep]
            total = total - torch.where(y[keep] == 1, F.logsigmoid(x), F.logsigmoid(-x)).sum()
        count += int(keep.sum())
    return total / count


def layouts_of(kind, sizes, geometry):
    """Layouts that together hold all images once, and which images each holds."""
    os = geometry.output_stride
    if kind == "single":
        for i, size in enumerate(sizes):
            tight = single(size, geometry)
            # Larger than the image on purpose, at an origin of its own: a padded single.
            canvas = Canvas(1, tight.canvas.height + 2 * os + 12, tight.canvas.width + os + 4)
            yield Layout(canvas, (place(size, geometry, slot=0, cell_top=1, cell_left=1),)), [i]
    elif kind == "batch":
        canvas = Canvas(
            len(sizes),
            max(geometry.canvas_extent(s.height) for s in sizes) + 8,
            max(geometry.canvas_extent(s.width) for s in sizes) + 4,
        )
        placements = [
            place(s, geometry, slot=i, cell_top=0, cell_left=0) for i, s in enumerate(sizes)
        ]
        yield Layout(canvas, tuple(placements)), list(range(len(sizes)))
    else:
        yield mosaic(sizes, geometry, geometry.gutter_cells), list(range(len(sizes)))


def mosaic(sizes, geometry, gap_cells):
    """Shelves of about five images in two slots, exactly `gap_cells` apart."""
    placements, half = [], len(sizes) // 2
    height = width = 0
    for slot, group in enumerate((sizes[:half], sizes[half:])):
        top = 0
        for k in range(0, len(group), 5):
            shelf = group[k : k + 5]
            left = 0
            for size in shelf:
                p = place(size, geometry, slot=slot, cell_top=top, cell_left=left)
                placements.append(p)
                left += geometry.cells(size.width) + gap_cells
                height, width = (
                    max(height, p.top + p.height),
                    max(width, p.left + p.width),
                )
            top += max(geometry.cells(s.height) for s in shelf) + gap_cells
    return Layout(Canvas(2, round_up(height, 4), round_up(width, 4)), tuple(placements))


def put_on_canvas(layout, geometry, images, masks, kind, loss_at):
    pixels = images[0].new_zeros(layout.canvas.slots, 3, *layout.canvas[1:])
    labels = target_canvas(layout.canvas, geometry, loss_at)
    shape = (labels.slots, NUM_CLASSES) if kind == "multilabel" else (labels.slots,)
    target = torch.full((*shape, *labels[1:]), IGNORE, dtype=torch.int64)
    for p, image, mask in zip(layout.placements, images, masks, strict=True):
        pixels[p.slot, :, p.top : p.top + p.height, p.left : p.left + p.width] = image[0]
        if loss_at == "grid":
            mask = mask[..., grid_centres(p.height, geometry), :]
            mask = mask[..., grid_centres(p.width, geometry)]
        r = target_rect(p, geometry, loss_at)
        target[r.slot, ..., r.top : r.top + r.height, r.left : r.left + r.width] = mask
    return pixels, target


def run_on_canvases(model, layouts, images, masks, kind, loss_at):
    """Logits of each image, loss of the step, gradients: what training does."""
    geometry = model.geometry
    logits, batches = [None] * len(images), []
    for layout, which in layouts:
        own = [images[i] for i in which], [masks[i] for i in which]
        batches.append((layout, which, *put_on_canvas(layout, geometry, *own, kind, loss_at)))
    count = sum(int((target != IGNORE).sum()) for *_, target in batches)
    loss = 0.0
    model.zero_grad()
    for layout, which, pixels, target in batches:
        out = model(pixels, layout)
        for i, p in zip(which, layout.placements, strict=True):
            r = coarse_rect(p, geometry)
            rows = slice(2 * r.top, 2 * (r.top + r.height))
            columns = slice(2 * r.left, 2 * (r.left + r.width))
            logits[i] = out[r.slot : r.slot + 1, :, rows, columns].detach()
        if loss_at == "full":
            out = upsample(out, layout, geometry)
        batch = Batch(
            pixels=pixels,
            target=target,
            layout=layout,
            stems=(),
            geometry=geometry,
            loss_at=loss_at,
        )
        part = LOSSES[kind].sum(out, batch) / count
        part.backward()
        loss += float(part.detach())
    return logits, loss, {n: p.grad.clone() for n, p in model.named_parameters()}


def run_alone(model, images, masks, kind, loss_at, *, trained=False, system="slim"):
    names = dict(model.named_parameters())
    params = {n: t.detach().clone() for n, t in model.state_dict().items()}
    params.update({n: params[n].requires_grad_() for n in names})
    net = Reference(params, UNITS, model.geometry.output_stride, trained=trained, system=system)
    logits = net.logits(images)
    loss = reference_loss(logits, masks, kind, loss_at, model.geometry)
    loss.backward()
    return [x.detach() for x in logits], float(loss.detach()), {n: params[n].grad for n in names}


def errors(ours, theirs):
    """Largest relative differences of outputs, loss and gradients."""
    scale = max(float(b.abs().max()) for b in theirs[0])
    outputs = max(
        float((a - b).abs().max()) / scale for a, b in zip(ours[0], theirs[0], strict=True)
    )
    loss = abs(ours[1] - theirs[1]) / abs(theirs[1])
    # A norm whose input hardly varies has a gradient that cancels to nothing; float64 has no twelve
    # digits of it, so a parameter's scale is at least 1e-4 of the largest gradient of all.
    largest = max(float(g.abs().max()) for g in theirs[2].values())
    gradients = max(
        float((ours[2][n] - g).abs().max()) / max(float(g.abs().max()), 1e-4 * largest)
        for n, g in theirs[2].items()
    )
    return outputs, loss, gradients


def prove(output_stride, layout, norm, kind, loss_at, dtype=torch.float64, sizes=SIZES, **rules):
    model = build(output_stride, norm=norm, loss_at=loss_at, dtype=dtype, **rules)
    images, masks = draw_images(sizes, kind, dtype)
    layouts = list(layouts_of(layout, sizes, model.geometry))
    for one, _ in layouts:
        check_layout(one, model.geometry)
    ours = run_on_canvases(model, layouts, images, masks, kind, loss_at)
    return errors(ours, run_alone(model, images, masks, kind, loss_at, trained=norm == "trained"))


CASES = [(kind, loss_at) for kind in ("multiclass", "multilabel") for loss_at in ("grid", "full")]


@pytest.mark.parametrize("output_stride", [8, 16, 32])
@pytest.mark.parametrize("layout", ["single", "batch", "mosaic"])
@pytest.mark.parametrize(("kind", "loss_at"), CASES)
def test_frozen_norm_is_exact(output_stride, layout, kind, loss_at):
    assert max(prove(output_stride, layout, "frozen", kind, loss_at)) < 1e-12


@pytest.mark.parametrize("output_stride", [8, 16, 32])
@pytest.mark.parametrize("layout", ["single", "batch", "mosaic"])
@pytest.mark.parametrize(("kind", "loss_at"), CASES)
def test_trained_norm_is_exact(output_stride, layout, kind, loss_at):
    if layout != "single":
        assert max(prove(output_stride, layout, "trained", kind, loss_at)) < 1e-12
        return
    # Statistics are those of one canvas, so every padded single is a step of its own; at the
    # coarsest stride it needs more than a handful of cells for its variance to mean anything.
    more = 6 * output_stride
    for size in SIZES[:16]:
        larger = Size(size.height + more, size.width + more)
        assert max(prove(output_stride, layout, "trained", kind, loss_at, sizes=[larger])) < 1e-12


@pytest.mark.parametrize("output_stride", [8, 16, 32])
@pytest.mark.parametrize("layout", ["batch", "mosaic"])
@pytest.mark.parametrize("norm", ["frozen", "trained"])
@pytest.mark.parametrize(("kind", "loss_at"), CASES[1:3])
def test_basic_units_are_exact(output_stride, layout, norm, kind, loss_at):
    assert max(prove(output_stride, layout, norm, kind, loss_at, basic_units=True)) < 1e-12


@pytest.mark.parametrize("output_stride", [8, 16, 32])
@pytest.mark.parametrize("layout", ["single", "batch", "mosaic"])
@pytest.mark.parametrize("norm", ["frozen", "trained"])
def test_float32_is_close(output_stride, layout, norm):
    """Against the reference in float64; the gradient of all parameters taken as one vector.

    One float32 net against another would not do: where a value next to zero falls on the other side
    of a ReLU, the reference itself is 1e-2 off.
    """
    sizes = SIZES[::5] + SIZES[-1:] if layout != "single" else [Size(125, 158)]
    images, masks = draw_images(sizes, "multiclass")
    exact = build(output_stride, norm=norm, loss_at="full")
    theirs = run_alone(exact, images, masks, "multiclass", "full", trained=norm == "trained")
    model = build(output_stride, norm=norm, loss_at="full", dtype=torch.float32)
    layouts = list(layouts_of(layout, sizes, model.geometry))
    images = [i.float() for i in images]
    ours = run_on_canvases(model, layouts, images, masks, "multiclass", "full")
    outputs, loss, _ = errors(ours, theirs)
    difference = torch.cat([(ours[2][n] - g).flatten() for n, g in theirs[2].items()])
    gradient = torch.cat([g.flatten() for g in theirs[2].values()])
    assert outputs < 1e-5
    assert loss < 1e-5
    assert float(difference.norm() / gradient.norm()) < 1e-5


@pytest.mark.parametrize("output_stride", [8, 16, 32])
@pytest.mark.parametrize(
    ("system", "rules"),
    [
        ("caffe", {"pool_padding": "caffe", "stride_position": "first_1x1"}),
        ("torchvision", TORCHVISION),
        ("torchvision", {**TORCHVISION, "basic_units": True}),
    ],
)
@pytest.mark.parametrize("loss_at", ["grid", "full"])
def test_rules_of_the_other_systems_are_exact(output_stride, system, rules, loss_at):
    # Caffe's pooling leaves nothing of an image below three pixels.
    sizes = [s for s in SIZES if min(s) >= 3]
    model = build(output_stride, loss_at=loss_at, **rules)
    images, masks = draw_images(sizes, "multiclass")
    theirs = run_alone(model, images, masks, "multiclass", loss_at, system=system)
    for layout in ("single", "batch", "mosaic"):
        layouts = list(layouts_of(layout, sizes, model.geometry))
        ours = run_on_canvases(model, layouts, images, masks, "multiclass", loss_at)
        assert max(errors(ours, theirs)) < 1e-12
    wrong = run_alone(model, images, masks, "multiclass", loss_at, system="slim")
    same_shapes = all(a.shape == b.shape for a, b in zip(ours[0], wrong[0], strict=True))
    assert not same_shapes or max(errors(ours, wrong)) > 1e-4


@pytest.mark.parametrize("output_stride", [8, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_neighbours_do_not_change_a_bit(output_stride, dtype):
    """The same kernels run with and without neighbours, so nothing at all may differ."""
    model = build(output_stride, dtype=dtype)
    geometry = model.geometry
    images, masks = draw_images(SIZES, "multiclass", dtype)
    layout = mosaic(SIZES, geometry, geometry.gutter_cells)
    pixels, _ = put_on_canvas(layout, geometry, images, masks, "multiclass", "grid")
    together = model(pixels, layout)
    for image, mask, p in zip(images, masks, layout.placements, strict=True):
        one = Layout(layout.canvas, (p,))
        pixels, _ = put_on_canvas(one, geometry, [image], [mask], "multiclass", "grid")
        alone = model(pixels, one)
        r = coarse_rect(p, geometry)
        own = (
            r.slot,
            slice(None),
            slice(2 * r.top, 2 * (r.top + r.height)),
            slice(2 * r.left, 2 * (r.left + r.width)),
        )
        assert torch.equal(alone[own], together[own])


def test_activation_checkpointing_changes_nothing():
    images, masks = draw_images(SIZES, "multiclass")
    found = []
    for switch in (False, True):
        model = build(16, norm="trained", activation_checkpointing=switch)
        layouts = list(layouts_of("mosaic", SIZES, model.geometry))
        run = run_on_canvases(model, layouts, images, masks, "multiclass", "grid")
        ops.update_moving_statistics(model)
        found.append((run, model.state_dict()))
    (plain, plain_state), (recomputed, recomputed_state) = found
    assert plain[1] == recomputed[1]
    for name, gradient in plain[2].items():
        assert torch.equal(gradient, recomputed[2][name])
    for name, tensor in plain_state.items():
        assert torch.equal(tensor, recomputed_state[name])


def test_moving_statistics_are_those_of_the_valid_pixels():
    model = build(16, norm="trained")
    images, masks = draw_images(SIZES, "multiclass")
    before = model.body.conv1.moving_variance.clone()
    layouts = list(layouts_of("mosaic", SIZES, model.geometry))
    run_on_canvases(model, layouts, images, masks, "multiclass", "grid")
    ops.update_moving_statistics(model)
    outputs = [
        F.conv2d(F.pad(x, (3, 3, 3, 3)), model.body.conv1.weights, stride=2).flatten(2)
        for x in images
    ]
    variance = torch.cat(outputs, dim=2)[0].var(1)
    expected = 0.997 * before + 0.003 * variance
    torch.testing.assert_close(model.body.conv1.moving_variance, expected, rtol=1e-12, atol=0)


# Controls: each breaks one rule, and the proof above must see it.


def broken(output_stride, layouts, *, norm="frozen", loss_at="grid", **rules):
    model = build(output_stride, norm=norm, loss_at=loss_at, **rules)
    images, masks = draw_images(SIZES, "multiclass")
    ours = run_on_canvases(model, layouts, images, masks, "multiclass", loss_at)
    theirs = run_alone(model, images, masks, "multiclass", loss_at, trained=norm == "trained")
    return errors(ours, theirs)


@pytest.mark.parametrize(
    ("basic", "output_stride", "left_out"),
    [(False, stride, i) for stride in (8, 16, 32) for i in range(2 + sum(UNITS))]
    + [(True, 16, i) for i in range(2 + 2 * sum(UNITS))],
)
def test_control_one_mask_left_out(monkeypatch, output_stride, basic, left_out):
    calls = []

    def forgetful(x, mask):
        calls.append(1)
        if len(calls) == left_out + 1:
            return torch.relu(x)
        return ops.masked_relu(x, mask)

    monkeypatch.setattr(resnet_v1, "masked_relu", forgetful)
    geometry = NetGeometry(output_stride)
    layouts = [(mosaic(SIZES, geometry, geometry.gutter_cells), list(range(len(SIZES))))]
    outputs, _, gradients = broken(output_stride, layouts, basic_units=basic)
    assert len(calls) == 2 + (2 if basic else 1) * sum(UNITS)
    assert outputs > 1e-6
    assert gradients > 1e-6


@pytest.mark.parametrize("output_stride", [8, 16, 32])
def test_control_a_gutter_of_16_pixels(output_stride):
    geometry = NetGeometry(output_stride)
    layout = mosaic(SIZES, geometry, 16 // output_stride)
    with pytest.raises(ShapeError, match="closer than"):
        check_layout(layout, geometry)
    outputs, _, gradients = broken(output_stride, [(layout, list(range(len(SIZES))))])
    assert outputs > 1e-6
    assert gradients > 1e-6


@pytest.mark.parametrize("output_stride", [8, 16, 32])
@pytest.mark.parametrize(("down", "right"), [(2, 0), (0, 2)])
def test_control_the_wrong_origin_parity(output_stride, down, right):
    geometry = NetGeometry(output_stride)
    right_one = mosaic(SIZES, geometry, geometry.gutter_cells)
    canvas = Canvas(2, right_one.canvas.height + 4, right_one.canvas.width + 4)
    moved = tuple(p._replace(top=p.top ^ down, left=p.left ^ right) for p in right_one.placements)
    layout = Layout(canvas, moved)
    with pytest.raises(ShapeError, match="must start at"):
        check_layout(layout, geometry)
    outputs, _, gradients = broken(output_stride, [(layout, list(range(len(SIZES))))])
    assert outputs > 1e-6
    assert gradients > 1e-6


def test_control_statistics_of_the_whole_canvas(monkeypatch):
    monkeypatch.setattr(
        ops.LevelMask,
        "__init__",
        lambda self, canvas, rects: (
            setattr(self, "strips", outside(canvas, rects)),
            setattr(self, "num_valid", canvas.pixels),
        )[0],
    )
    geometry = NetGeometry(16)
    layouts = [(mosaic(SIZES, geometry, 2), list(range(len(SIZES))))]
    assert max(broken(16, layouts, norm="trained")) > 1e-3


def test_control_upsampling_that_reads_the_canvas(monkeypatch):
    monkeypatch.setattr(ops, "logits_rects", lambda *_: [])
    geometry = NetGeometry(16)
    layouts = [(mosaic(SIZES, geometry, 2), list(range(len(SIZES))))]
    model = build(16)
    images, masks = draw_images(SIZES, "multiclass")
    pixels, _ = put_on_canvas(layouts[0][0], geometry, images, masks, "multiclass", "full")
    with torch.no_grad():
        monkeypatch.undo()
        logits = model(pixels, layouts[0][0])
        clamped = upsample(logits, layouts[0][0], geometry)
        monkeypatch.setattr(ops, "logits_rects", lambda *_: [])
        unclamped = upsample(logits, layouts[0][0], geometry)
    p = layouts[0][0].placements[0]
    r = target_rect(p, geometry, "full")
    own = (r.slot, slice(None), slice(r.top, r.top + r.height), slice(r.left, r.left + r.width))
    assert float((clamped[own] - unclamped[own]).abs().max()) > 1e-3


def test_control_a_mean_of_means():
    model = build(16)
    images, masks = draw_images([Size(9, 9), Size(120, 121)], "multiclass")
    logits, loss, _ = run_alone(model, images, masks, "multiclass", "grid")
    means = [
        float(reference_loss([x], [m], "multiclass", "grid", model.geometry))
        for x, m in zip(logits, masks, strict=True)
    ]
    assert abs(sum(means) / len(means) - loss) / loss > 1e-2
