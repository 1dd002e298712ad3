"""Any convolutional net on a canvas: the same parameters, and a forward `(pixels, layout)`.

    model = anysize.on_canvas(net)
    logits = model(pixels, layout)

Outputs, loss and gradients of every image are those of the image alone. While the net runs, each
torch function it calls is given its exact rule (`anysize.models.canvas_rules`); a function without
one is refused with the module that called it.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from anysize.errors import AnysizeError, ShapeError, UnsupportedNetError
from anysize.geometry import Canvas, Layout, NetGeometry, Placement, ceil_div
from anysize.models.canvas_ops import Call
from anysize.models.canvas_rules import (
    POINTWISE,
    READS,
    REDUCTIONS,
    RULES,
    TAKES_EXTENTS,
    UNTAGGED_SPATIAL,
    WEIGHTED,
    plain_name,
    saved_tensors_hooks,
)
from anysize.models.extents import varies
from anysize.models.field import (
    ATTRIBUTE,
    Field,
    Trace,
    field_of,
    put,
    root_level,
    zero_fresh,
    zero_outside,
)
from anysize.ranks import Lockstep

OutputKey = str | int | None
_KEPT_LAYOUTS = 16
_MULTIPLES = (1, 2, 4, 8, 16, 32, 64)


class CanvasMode(TorchFunctionMode):
    """Gives each torch function that reads a tensor of the images its exact rule."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self._net = net
        self._grad = torch.is_grad_enabled()
        self._hooks = saved_tensors_hooks()

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """See the class."""
        del types
        kwargs = kwargs or {}
        name = plain_name(func)
        reads = name.removeprefix("get ") in READS or name.startswith("set ")
        if reads and name != "set data":
            return func(*args, **kwargs)
        given = [*args, *kwargs.values()]
        tagged = any(map(_has_field, given))
        call = Call(func, name, args, kwargs)
        why = self._refused(call, given) if tagged else None
        if name not in TAKES_EXTENTS and not (tagged and name in POINTWISE) and _vary(given):
            why = "an extent, which is not that of every image, as a plain number"
        if not tagged and name in UNTAGGED_SPATIAL:
            why = "a tensor whose origin was not seen on the canvas"
        rule = RULES.get(name)
        if tagged and rule is None:
            why = "an operation that is not known to keep to images"
        if why:
            raise _refusal(name, args, why)
        if not tagged or rule is None:
            return func(*args, **kwargs)
        try:
            return rule(call)
        except UnsupportedNetError as error:
            raise _refusal(name, args, str(error)) from error

    def _refused(self, call: Call, given: list[Any]) -> str | None:
        """Why an operation is refused here that its rule by itself would allow, if it is."""
        name = call.name
        stacked = any(f.stacked for t in _tensors(call.args) if (f := field_of(t)) is not None)
        if stacked and name not in REDUCTIONS:
            return "a stack along a new dimension 0, which only a reduction over it may follow"
        if name in WEIGHTED and (not _has_field(given[0]) or any(map(_has_field, given[1:]))):
            return "weights that were computed from the images"
        of_batch = name == "batch_norm" and call.kwargs.get("training", *call.args[5:6])
        if of_batch and not self._net.training:
            return "the statistics of a batch in evaluation (`track_running_stats=False`)"
        if not self._grad:
            return None
        hooks = saved_tensors_hooks()
        function = None if torch.is_grad_enabled() else _running_autograd_function()
        if function is CheckpointFunction or (
            hooks is not None and hooks != self._hooks and "_checkpoint_hook" in str(hooks[0])
        ):
            return (
                "activation checkpointing inside the net, which would be computed again without "
                "masks; turn it off, or put `checkpoint` around the whole of `on_canvas(net)`"
            )
        if function is not None and name not in POINTWISE:
            return f"the autograd function {function.__name__} has a backward pass of its own"
        return None


def _running_autograd_function() -> Any:  # noqa: ANN401
    """The function of autograd whose forward pass is running, if one is."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.autograd.Function.apply.__func__.__code__:  # pyright: ignore
            return frame.f_locals["cls"]
        frame = frame.f_back
    return None


def _refusal(name: str, args: tuple[Any, ...], why: str) -> UnsupportedNetError:
    shapes = [tuple(a.shape) for a in _tensors(args)]
    return UnsupportedNetError(
        f"`{name}` of {shapes}: {why}. On a canvas this cannot be exact; run "
        "the net on one image at a time, or replace this part."
    )


def _located(net: nn.Module, error: UnsupportedNetError) -> UnsupportedNetError:
    """The error with the path of the innermost module of the net that was running."""
    names = {id(m): n or type(net).__name__ for n, m in net.named_modules()}
    found = type(net).__name__
    at = error.__traceback__
    while at is not None:
        module = at.tb_frame.f_locals.get("self")
        if id(module) in names:
            found = f"{names[id(module)]} ({type(module).__name__})"
        at = at.tb_next
    return UnsupportedNetError(f"{found}: {error}")


def _vary(values: Sequence[Any]) -> bool:
    return any(any(map(varies, v)) if isinstance(v, list | tuple) else varies(v) for v in values)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            found.extend(v for v in value if isinstance(v, Tensor))
    return found


def _has_field(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(hasattr(v, ATTRIBUTE) for v in value)
    return hasattr(value, ATTRIBUTE)


class OnCanvas(nn.Module):
    """A net with a forward `(pixels, layout)`; parameters, buffers and names are the net's own."""

    def __init__(self, net: nn.Module, output: OutputKey = None) -> None:
        self.__dict__["_net"] = net
        training = net.training
        super().__init__()
        net.training = training  # which the line above has set
        # Shared, not copied: the state dict is the net's, and what moves one moves the other.
        self._parameters = net._parameters
        self._buffers = net._buffers
        self._modules = net._modules
        self._non_persistent_buffers_set = net._non_persistent_buffers_set
        self.output = output
        self._levels: dict[Layout, Any] = {}
        self._multiple: int | None = None
        self.lockstep: Lockstep | None = None

    @property
    def net(self) -> nn.Module:
        """The net as it was."""
        return self.__dict__["_net"]

    @property
    def training(self) -> bool:  # pyright: ignore
        """The mode of the net itself, which is not among `modules()`."""
        return self.net.training

    @training.setter
    def training(self, mode: bool) -> None:  # pyright: ignore
        self.net.training = mode

    def train(self, mode: bool = True) -> OnCanvas:
        """Training or evaluation mode, by the net's own `train`."""
        self.net.train(mode)
        return self

    def forward(self, pixels: Tensor, layout: Layout) -> Tensor:
        """Runs the net.

        Args:
            pixels: `[slots, c, h, w]` on the layout's canvas; what lies outside the images is
                not read.
            layout: Of the images: each at a slot of its own in the upper left corner, or several
                in a slot where the net's geometry allows it.

        Returns:
            The net's output, zero outside the images and without a gradient there; of a dict its
            `out`. `layout.crop(output, i)` cuts out the part of an image.

        Raises:
            UnsupportedNetError: The net mixes positions in a way that is not known.
            ShapeError: The pixels are not of the layout's canvas, or images are misplaced.
        """
        canvas = layout.canvas
        if pixels.ndim != 4 or (pixels.shape[0], *pixels.shape[2:]) != tuple(canvas):
            raise ShapeError(
                f"Pixels of {tuple(pixels.shape)} are not of the canvas {canvas}. Give "
                f"[{canvas.slots}, c, {canvas.height}, {canvas.width}]."
            )
        found = Field(self._root(layout, pixels.shape[1]))
        x = pixels.clone()
        if self._multiple != 1:  # the padding to a multiple is read, and belongs to the image
            zero_fresh(x, Field(root_level(layout, Trace())))
        x = put(x, found)
        try:
            with CanvasMode(self.net):
                y = self.net(x)
        except UnsupportedNetError as error:
            raise _located(self.net, error) from error
        y = chosen_output(y, self.output)
        last = field_of(y)
        if last is None:
            raise UnsupportedNetError(
                f"The output of {type(self.net).__name__}, {tuple(y.shape)}, was not made of the "
                "images by operations that were seen on the canvas."
            )
        if not last.dims:
            return y
        y = zero_outside(y, last, own_gradient=False)
        return put(y, last)

    def _root(self, layout: Layout, num_channels: int) -> Any:  # noqa: ANN401
        if self._multiple is None:
            try:
                geometry = geometry_of_net(
                    self, num_channels=num_channels, output=self.output, describe_logits=False
                )
                self._multiple = geometry.size_multiple
            except (ShapeError, _DryRunError):
                self._multiple = 1  # the run on the canvas itself says what is wrong, and where
        level = self._levels.pop(layout, None)
        if level is None:
            level = root_level(layout, Trace(), self._multiple)
        level.trace.lockstep = self.lockstep
        self._levels[layout] = level
        if len(self._levels) > _KEPT_LAYOUTS:
            del self._levels[next(iter(self._levels))]
        return level

    def __deepcopy__(self, memo: dict[int, Any]) -> OnCanvas:
        return OnCanvas(copy.deepcopy(self.net, memo), self.output)

    def __getstate__(self) -> dict[str, Any]:
        return {"net": self.net, "output": self.output}

    def __setstate__(self, state: dict[str, Any]) -> None:
        OnCanvas.__init__(self, state["net"], state["output"])


def on_canvas(net: nn.Module, *, output: OutputKey = None) -> OnCanvas:
    """Gives a net a second forward, `(pixels, layout)`, that is exact for every image.

    Args:
        net: Any module that maps `[n, c, h, w]` to a tensor, or to a dict with "out".
        output: Which entry of a dict or list the net's output is.

    Raises:
        UnsupportedNetError: `net` is not a module, or was compiled with TorchScript.
    """
    if not isinstance(net, nn.Module):
        raise UnsupportedNetError(
            f"{type(net).__name__} is not a torch.nn.Module. Give the net itself, built."
        )
    for name, module in net.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedNetError(
                f"{name or 'The net'} is compiled with TorchScript, whose operations cannot be "
                "seen. Give the net as it was before `torch.jit`."
            )
    return net if isinstance(net, OnCanvas) else OnCanvas(net, output)


def chosen_output(y: Any, key: OutputKey) -> Tensor:  # noqa: ANN401
    """The one tensor of what a net returned.

    Raises:
        UnsupportedNetError: It is not clear which.
    """
    if key is None and isinstance(y, Mapping) and "out" in y:
        key = "out"
    if key is not None:
        try:
            y = y[key]
        except (KeyError, IndexError, TypeError) as error:
            raise UnsupportedNetError(f"The net's output has no entry {key!r}.") from error
    if isinstance(y, Tensor):
        return y
    if isinstance(y, Mapping):
        raise UnsupportedNetError(
            f"The net returns a dict with {sorted(map(str, y))}, without 'out'. Name its entry: "
            "on_canvas(net, output=...)."
        )
    if isinstance(y, list | tuple):
        raise UnsupportedNetError(
            f"The net returns {len(y)} values. Say which is the output: on_canvas(net, output=0)."
        )
    raise UnsupportedNetError(f"The net returns {type(y).__name__}, not a tensor.")


class _DryRunError(UnsupportedNetError):
    """The net itself fails on all images of a dry run, which says nothing of others."""


def geometry_of_net(
    net: nn.Module,
    *,
    num_channels: int = 3,
    output: OutputKey = None,
    describe_logits: bool = True,
) -> NetGeometry:
    """What placements need to know of a net, found by running it once without computing.

    Images of all extents over a period of the net's stride lie in slots of their own; what each
    operation demands around them is noted.

    Args:
        net: Any convolutional net.
        num_channels: Of its pixels.
        output: See `on_canvas`.
        describe_logits: Whether `logits_per_cell` and `logits_cover` are needed; else they are
            those of one cell each, and nothing may rely on them.

    Raises:
        UnsupportedNetError: The net cannot run on a canvas, in any multiple up to 64, or the extent
            of its logits follows no rule that a plan can state.
    """
    if not isinstance(net, nn.Module):
        on_canvas(net)
    plain = net.net if isinstance(net, OnCanvas) else net
    model = on_canvas(copy.deepcopy(plain), output=output).to("meta").eval()
    model._multiple = 1
    last: Exception | None = None
    for multiple in _MULTIPLES:
        try:
            found = _run_dry(model, multiple, num_channels)
            return _described(found, multiple, describe_logits=describe_logits)
        except (AnysizeError, RuntimeError, ValueError, AssertionError) as error:
            last = error
    if isinstance(last, AnysizeError):
        raise last
    raise _DryRunError(
        f"The net fails on images of {num_channels} channels, whatever multiple of 1 to "
        f"{_MULTIPLES[-1]} pixels their extents are: {last}"
    ) from last


def _extents(multiple: int) -> tuple[list[int], list[int]]:
    """Heights and widths of the images of a dry run: all over a period of 64 pixels."""
    heights = [128 + multiple * i for i in range(64 // multiple + 1)]
    return heights, heights[1:] + heights[:1]


def _run_dry(model: OnCanvas, multiple: int, num_channels: int) -> tuple[Field, Trace]:
    extents = _extents(multiple)
    canvas = Canvas(len(extents[0]), 256, 256)
    placements = (Placement(i, 0, 0, *hw) for i, hw in enumerate(zip(*extents, strict=True)))
    layout = Layout(canvas, tuple(placements))
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    pixels = torch.empty(canvas.slots, num_channels, 256, 256, device="meta", dtype=dtype)
    with torch.no_grad():
        y = model(pixels, layout)
    found = field_of(y)
    assert found is not None
    return found, found.level.trace


def _described(run: tuple[Field, Trace], multiple: int, *, describe_logits: bool) -> NetGeometry:
    found, trace = run
    extents, stride, gutter = _extents(multiple), trace.stride, 0
    for scale, axis, reach in trace.gaps:
        gaps = (
            math.ceil(scale * r) - ceil_div(n, stride) * stride
            for r, n in zip(reach, extents[axis], strict=True)
        )
        gutter = max(gutter, *gaps)
    logits = (1, 0)
    if describe_logits:
        logits = _logits_rule(found, extents[0], stride, multiple)
    return NetGeometry(
        output_stride=stride,
        pool_padding="none",
        gutter=gutter,
        mosaic=not trace.one_per_slot,
        canvas_multiple=math.lcm(stride, multiple),
        size_multiple=multiple,
        logits_per_cell=logits[0],
        logits_cover=logits[1],
    )


def _logits_rule(
    found: Field, extents: Sequence[int], stride: int, multiple: int
) -> tuple[int, int]:
    """Cells of the logits per cell of the coarsest level, and what they cover."""
    if not found.dims or found.level.constant:
        return 1, 0
    heights = found.level.extents(0)
    scale = found.level.scale
    if scale.denominator == 1:
        step = scale.numerator
        if stride % step == 0 and all(
            h == ceil_div(n, step) for h, n in zip(heights, extents, strict=True)
        ):
            return stride // step, 0 if step == stride and multiple == 1 else step
        cells = [ceil_div(n, stride) for n in extents]
        if all(h == c * (stride // step) for h, c in zip(heights, cells, strict=True)):
            return stride // step, 0
    raise UnsupportedNetError(
        f"Images of {extents[:4]} pixels have logits of {heights[:4]} cells, which is neither "
        "their extent over a stride, rounded up, nor that of whole cells."
    )
