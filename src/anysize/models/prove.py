"""Whether a net on canvases is the net alone: outputs and gradients in float64, by module."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anysize.errors import ShapeError, UnsupportedNetError
from anysize.geometry import Canvas, Layout, NetGeometry, Placement, Size, round_up
from anysize.models.field import Field, field_of
from anysize.models.on_canvas import OnCanvas, OutputKey, chosen_output, geometry_of_net, on_canvas

EXACT = 1e-10
"""Largest relative difference that float64 is allowed."""

SIZES = (Size(96, 64), Size(64, 128), Size(70, 51))
Gradients = dict[str, Tensor | None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One way of placing images, in one mode, against every image alone.

    Attributes:
        name: Such as "padded batch, eval".
        outputs: Largest difference, relative to the largest output.
        gradients: Largest difference, relative to the largest gradient of a parameter.
        modules: Largest relative difference of each module's outputs, in the order they ran.
    """

    name: str
    outputs: float
    gradients: float
    modules: dict[str, float]

    @property
    def exact(self) -> bool:
        """Whether outputs and gradients are those of the images alone."""
        return self.outputs <= EXACT and self.gradients <= EXACT

    @property
    def first_different(self) -> str | None:
        """The first module whose output differs."""
        return next((n for n, d in self.modules.items() if not d <= EXACT), None)


@dataclass(frozen=True, slots=True)
class Proof:
    """What `prove` found.

    Attributes:
        geometry: Of the net.
        sizes: Of the images, with the padding that the net demands.
        comparisons: On canvases, against alone.
        control: The plain net on a padded batch, against alone; it must not be exact.
    """

    geometry: NetGeometry
    sizes: tuple[Size, ...]
    comparisons: tuple[Comparison, ...]
    control: Comparison

    @property
    def exact(self) -> bool:
        """Whether every comparison is exact and the control, which must fail, does."""
        return all(c.exact for c in self.comparisons) and not self.control.exact

    @property
    def summary(self) -> str:
        """One line: what a user may rely on."""
        worst = max(max(c.outputs, c.gradients) for c in self.comparisons)
        if not self.exact:
            different = next((c for c in self.comparisons if not c.exact), None)
            if different is None:
                return "Nothing was proven: plain padding is exact too; take images of other sizes."
            at = different.first_different or "the gradients"
            return f"Not exact: {different.name} differs by {worst:.1e}, first in {at}."
        where = "padded batches and mosaics" if self.geometry.mosaic else "padded batches"
        multiple = self.geometry.size_multiple
        demand = (
            f", each padded with zeros to a multiple of {multiple} pixels, as the net demands alone"
            if multiple > 1
            else ""
        )
        return (
            f"Exact to {worst:.0e} on {where} of images of any size{demand}; plain padding is off "
            f"by {self.control.outputs:.0%}."
        )


def prove(
    net: nn.Module,
    sizes: Sequence[Size | tuple[int, int]] = SIZES,
    *,
    train: bool | None = None,
    num_channels: int = 3,
    output: OutputKey = None,
    wrap: Callable[..., OnCanvas] = on_canvas,
) -> Proof:
    """Compares a net on canvases with the net on each image alone, in float64.

    Dropout and stochastic depth are switched off. In training mode, batch norm's statistics of a
    batch are those of all its images, which no image alone has; so images are compared one at a
    time, each on a canvas larger than itself. The net itself is left as it is.

    Args:
        net: To be proven.
        sizes: Of images, as (height, width); rounded up where the net demands multiples.
        train: Training mode only, evaluation mode only, or both (None).
        num_channels: Of the pixels.
        output: See `on_canvas`.
        wrap: What gives the net its second forward; another for a control.

    Raises:
        UnsupportedNetError: The net cannot run on a canvas, or its state changes in evaluation.
    """
    geometry = geometry_of_net(net, num_channels=num_channels, output=output, describe_logits=False)
    plain = _prepared(net, num_channels, geometry)
    images = tuple(Size(*(geometry.padded(v) for v in size)) for size in sizes)
    if not images:
        raise ShapeError("There are no sizes to prove the net at. Give some, such as 64x96.")
    generator = torch.Generator().manual_seed(0)
    pixels = [
        torch.randn(1, num_channels, *s, dtype=torch.float64, generator=generator) for s in images
    ]
    found: list[Comparison] = []
    canvas = _canvas(images, geometry)
    batch = Layout(canvas, tuple(Placement(i, 0, 0, *s) for i, s in enumerate(images)))
    control: Comparison | None = None
    if train is not True:
        plain.eval()
        alone = _alone(plain, pixels, output)
        before = {k: v.clone() for k, v in plain.state_dict().items()}
        found.append(_compared("padded batch, eval", wrap, plain, batch, pixels, alone, output))
        if geometry.mosaic:
            mosaic = _mosaic(images, geometry)
            found.append(_compared("mosaic, eval", wrap, plain, mosaic, pixels, alone, output))
        if any(not torch.equal(v, before[k]) for k, v in plain.state_dict().items()):
            raise UnsupportedNetError(
                "The net changes its own state while it runs in evaluation mode, so that no two "
                "passes are comparable."
            )
        control = _compared("masks off", _Unmasked, plain, batch, pixels, alone, output)
    if train is not False:
        plain.train()
        for module in plain.modules():
            if (
                "drop" in type(module).__name__.lower()
                or "stochastic" in type(module).__name__.lower()
            ):
                module.eval()
        for i, own in enumerate(pixels):
            one = Layout(canvas._replace(slots=1), (Placement(0, 0, 0, *images[i]),))
            state = copy.deepcopy(plain.state_dict())
            try:
                alone = _alone(plain, [own], output)
            except ValueError:  # batch norm of a single value has no variance, alone neither
                plain.load_state_dict(state)
                continue
            moved = copy.deepcopy(plain.state_dict())
            plain.load_state_dict(state)
            result = _compared(f"{images[i]}, train", wrap, plain, one, [own], alone, output)
            apart = max(
                (_apart(plain.state_dict()[k].double(), v.double()) for k, v in moved.items()),
                default=0.0,
            )
            modules = result.modules | ({"moving statistics": apart} if apart > EXACT else {})
            found.append(
                Comparison(result.name, max(result.outputs, apart), result.gradients, modules)
            )
            plain.load_state_dict(state)
            if control is None:
                control = _compared("masks off", _Unmasked, plain, one, [own], alone, output)
                plain.load_state_dict(state)
    if control is None or not found:
        raise ShapeError("No image is large enough for batch norm in training mode. Take larger.")
    return Proof(geometry, images, tuple(found), control)


@contextlib.contextmanager
def _drawn_alike() -> Iterator[None]:
    """Without dropout; what else is drawn, such as stochastic depth, is the same each time."""
    with torch.random.fork_rng([]), _NoDropout():
        torch.set_rng_state(torch.Generator().manual_seed(0).get_state())
        yield


class _NoDropout(TorchFunctionMode):
    """Dropout gives what it is given."""

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:  # noqa: ANN001, ANN401
        """See the class."""
        if "dropout" in getattr(func, "__name__", ""):
            return args[0].clone() if args else (kwargs or {})["input"].clone()
        return func(*args, **(kwargs or {}))


class _Unmasked(nn.Module):
    """The plain net on a canvas: what padding does without masks."""

    def __init__(self, net: nn.Module, *, output: OutputKey = None) -> None:
        super().__init__()
        self.net = net
        self.output = output

    def forward(self, pixels: Tensor, layout: Layout) -> Tensor:
        del layout
        return chosen_output(self.net(pixels), self.output)


def _prepared(net: nn.Module, num_channels: int, geometry: NetGeometry) -> nn.Module:
    """A float64 copy whose biases are not 0 by chance, and whose norms have statistics of a batch.

    Statistics that fit no data let activations of deep nets grow until float64 has no digits left.
    """
    plain = copy.deepcopy(net.net if isinstance(net, OnCanvas) else net).double().cpu()
    plain.requires_grad_()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in plain.state_dict().items():
            if not tensor.is_floating_point() or tensor.ndim > 1:
                continue
            if name.endswith("bias"):
                drawn = torch.rand(tensor.shape, dtype=tensor.dtype, generator=generator)
                tensor.add_(0.5 * (drawn - 0.5))
        norms = [m for m in plain.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        momenta = [m.momentum for m in norms]
        for norm in norms:
            norm.momentum = 0.9
        side = round_up(128, geometry.size_multiple)
        shape = (2, num_channels, side, side)
        plain.train()(torch.randn(shape, dtype=torch.float64, generator=generator))
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return plain


def _canvas(images: Sequence[Size], geometry: NetGeometry) -> Canvas:
    more = 2 * geometry.output_stride
    height = max(s.height for s in images) + more
    width = max(s.width for s in images) + more
    multiple = geometry.canvas_multiple
    return Canvas(len(images), round_up(height, multiple), round_up(width, multiple))


def _mosaic(images: Sequence[Size], geometry: NetGeometry) -> Layout:
    """All images beside each other in one slot, no farther apart than they must be."""
    left, placements = 0, []
    for size in images:
        placements.append(Placement(0, geometry.output_stride, left, *size))
        left += geometry.step(size.width)
    height = geometry.output_stride + max(s.height for s in images)
    multiple = geometry.canvas_multiple
    return Layout(
        Canvas(1, round_up(height, multiple), round_up(left, multiple)), tuple(placements)
    )


@dataclass(frozen=True, slots=True)
class _Run:
    outputs: list[Tensor]
    gradients: Gradients
    modules: list[dict[str, Tensor]]
    weights: list[Tensor]


def _alone(net: nn.Module, pixels: Sequence[Tensor], output: OutputKey) -> _Run:
    outputs, modules = [], []
    for own in pixels:
        seen: dict[str, Tensor] = {}
        with _watched(net, seen), _drawn_alike():
            outputs.append(chosen_output(net(own.clone()), output))
        modules.append(seen)
    if not outputs[0].is_floating_point():
        raise UnsupportedNetError(
            f"The net returns {outputs[0].dtype}, which has no gradient. Prove it without the step "
            "that makes labels of logits."
        )
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(y.shape, dtype=y.dtype, generator=generator) for y in outputs]
    return _Run([y.detach() for y in outputs], _gradients(net, outputs, weights), modules, weights)


def _gradients(net: nn.Module, outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Gradients:
    parameters = dict(net.named_parameters())
    if not parameters:
        return {}
    total = torch.stack([(y * w).sum() for y, w in zip(outputs, weights, strict=True)]).sum()
    found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return dict(zip(parameters, found, strict=True))


def _compared(
    name: str,
    wrap: Callable[..., Any],
    net: nn.Module,
    layout: Layout,
    pixels: Sequence[Tensor],
    alone: _Run,
    output: OutputKey,
) -> Comparison:
    laid = torch.zeros(layout.canvas.slots, pixels[0].shape[1], *layout.canvas[1:]).double()
    for own, p in zip(pixels, layout.placements, strict=True):
        laid[p.slot, :, p.top : p.top + p.height, p.left : p.left + p.width] = own[0]
    modules: dict[str, float] = {}
    seen: dict[str, Tensor] = {}
    with _watched(net, seen), _drawn_alike():
        y = wrap(net, output=output)(laid, layout)
    for module, value in seen.items():
        found = field_of(value)
        if found is None:
            continue
        theirs = [own.get(module) for own in alone.modules]
        modules[module] = max(
            (_apart(_cropped(value, found, i), t) for i, t in enumerate(theirs) if t is not None),
            default=0.0,
        )
    found = field_of(y)
    ours = [
        _cropped(y, found, i) if found is not None else _corner(y, i, alone.outputs[i])
        for i in range(len(pixels))
    ]
    gradients = _gradients(net, ours, alone.weights)
    known = {n: g for n, g in alone.gradients.items() if g is not None}
    largest = max((float(g.abs().max()) for g in known.values()), default=0.0)
    differences = [
        math.inf if (own := gradients[n]) is None else _apart(own, g, largest)
        for n, g in known.items()
    ]
    outputs = max(_apart(a.detach(), b) for a, b in zip(ours, alone.outputs, strict=True))
    return Comparison(name, outputs, max(differences, default=0.0), modules)


def _cropped(y: Tensor, found: Field, i: int) -> Tensor:
    r = found.level.rects[i]
    y = y[r.slot : r.slot + 1]
    for d, start, extent in zip(found.dims, (r.top, r.left), (r.height, r.width), strict=False):
        y = y.narrow(d, start, extent)
    return y


def _corner(y: Tensor, i: int, like: Tensor) -> Tensor:
    y = y[i : i + 1]
    for d in range(1, y.ndim):
        y = y.narrow(d, 0, like.shape[d])
    return y


def _apart(ours: Tensor, theirs: Tensor, scale: float | None = None) -> float:
    """The largest difference over `scale`, or over the largest of theirs; infinite if undefined."""
    if ours.shape != theirs.shape:
        return math.inf
    if not theirs.numel():
        return 0.0
    scale = float(theirs.abs().max()) if scale is None else scale
    apart = float((ours - theirs).abs().max()) / max(scale, 1e-30)
    return apart if math.isfinite(apart) else math.inf


class _watched:  # noqa: N801
    """While open, keeps what each module of a net gave at its last call, by the module's path."""

    def __init__(self, net: nn.Module, seen: dict[str, Tensor]) -> None:
        self._net, self._seen = net, seen
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self._net.named_modules():
            if name:
                self._handles.append(module.register_forward_hook(self._keeper(name)))

    def _keeper(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: Any, y: Any) -> None:  # noqa: ANN401
            del module, inputs
            if isinstance(y, Tensor):
                # A copy: later modules may work in place.
                copied, found = y.detach().clone(), field_of(y)
                if found is not None:
                    copied._anysize_field = found  # pyright: ignore[reportAttributeAccessIssue]
                self._seen[name] = copied

        return keep

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
