"""Which torch functions a net may call on a canvas, and the rule of each by its name.

A function that is in no table mixes positions in a way that is not known, and is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from anysize.errors import UnsupportedNetError
from anysize.models import canvas_ops, canvas_resizing
from anysize.models.canvas_ops import Call, constant_level, mean_inside
from anysize.models.canvas_resizing import padded
from anysize.models.extents import Extent, of_canvas, varies
from anysize.models.field import (
    Field,
    field_of,
    filled_outside,
    is_clean,
    put,
    zero_outside,
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


READS = _names(
    """
    dim ndim dtype device requires_grad is_cuda is_cpu is_mps is_meta is_sparse is_quantized
    layout grad_fn grad is_leaf is_floating_point is_complex is_contiguous stride get_device
    names is_nested is_mkldnn is_xpu itemsize element_size _version __len__ is_inference
    requires_grad_ retain_grad register_hook output_nr is_same_size __hash__ __repr__
    __format__ type_ is_vulkan is_mtia is_maia is_ipu is_xla
    """
)
"""What tells nothing of the values, and gives no tensor."""

KEEPS_ZERO = _names(
    """
    relu relu6 hardtanh leaky_relu rrelu elu selu celu gelu silu mish hardswish tanh
    softsign tanhshrink hardshrink softshrink dropout dropout1d dropout2d feature_dropout
    alpha_dropout feature_alpha_dropout abs neg sign sqrt square sin tan asin atan sinh
    expm1 log1p erf relu_ prelu floor ceil round trunc contiguous to float double half
    bfloat16 type type_as clone detach data nan_to_num cuda cpu alias view_as_real
    zeros_like __neg__ positive identity logical_not_ threshold_
    """
)
"""Of one tensor; zero where it is zero."""

POINTWISE = KEEPS_ZERO | _names(
    """
    add sub mul div rsub rdiv true_divide floor_divide remainder pow rpow exp exp2 log log2
    log10 sigmoid hardsigmoid logsigmoid softplus cos acos cosh rsqrt reciprocal clamp
    clamp_min clamp_max clip maximum minimum where lerp addcmul addcdiv eq ne lt le gt ge
    logical_and logical_or logical_not masked_fill threshold ones_like full_like empty_like
    rand_like randn_like bernoulli zero fill copy multiply divide subtract isnan isfinite
    isinf dropout3d erfc atan2 fmod
    """
)
_ALIASES = {"__pow__": "pow", "__invert__": "logical_not"}

NEW = _names(
    """
    new_empty new_zeros new_ones new_full new_tensor
    """
)
ALONG = _names(
    """
    softmax log_softmax softmin cumsum normalize glu cumprod flip
    """
)
PARTS = _names(
    """
    chunk split tensor_split narrow split_with_sizes
    """
)
MOVES = _names(
    """
    permute transpose swapaxes swapdims movedim moveaxis unsqueeze squeeze
    """
)
SHAPES = _names(
    """
    view reshape flatten unflatten
    """
)
REDUCTIONS = _names(
    """
    mean sum amax norm vector_norm max argmax std var amin prod all any
    """
)
UNTAGGED_SPATIAL = _names(
    """
    conv2d conv1d conv3d conv_transpose2d max_pool2d avg_pool2d adaptive_avg_pool2d
    adaptive_max_pool2d interpolate group_norm instance_norm pixel_shuffle
    """
)
"""Refused of a tensor without a field: it lost it in something that was not seen."""


TAKES_EXTENTS = SHAPES | _names(
    """
    size pad interpolate upsample expand __getitem__ adaptive_avg_pool2d
    """
)
"""Whose rules know what to do with sizes that are each image's own; see also `_with_numbers`."""

WEIGHTED = _names(
    """
    conv2d conv_transpose2d conv1d batch_norm group_norm instance_norm layer_norm linear prelu
    """
)
"""Whose first argument is of the images, and no other may be."""


def saved_tensors_hooks() -> Any:  # noqa: ANN401
    """What is called, at present, with each tensor that autograd keeps; None: nothing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore


def plain_name(function: Callable[..., Any]) -> str:
    """The name of a torch function without the signs of its in-place and operator forms."""
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__", "__delete__"):
        return f"{name[2:-2]} {getattr(function.__self__, '__name__', '?')}"  # pyright: ignore
    if name in _ALIASES:
        return _ALIASES[name]
    if name.startswith("__") and name.endswith("__"):
        inner = name[2:-2]
        for prefix in ("", "r", "i"):
            base = inner.removeprefix(prefix) if prefix else inner
            base = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder"}.get(
                base, base
            )
            if base in POINTWISE and (inner != base or prefix == ""):
                return base
        return name
    return name.removesuffix("_") if not name.startswith("_") else name


def pointwise(call: Call) -> Any:  # noqa: ANN401
    """Each cell by itself; tensors that are joined must have their images at the same cells."""
    if call.name in ("to", "type_as") and field_of(call.args[0]) is None:
        return call.run()  # the other tensor tells its kind and its device only
    if "out" in call.kwargs:
        raise UnsupportedNetError(f"`{call.name}` with out=")
    if any(varies(v) for v in (*call.args, *call.kwargs.values())):
        call = _with_numbers(call)
    tensors = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, Tensor)]
    tagged = [(t, f) for t in tensors if (f := field_of(t)) is not None]
    spatial = [(t, f) for t, f in tagged if f.dims and t.ndim]
    leader = max(spatial or tagged, key=lambda pair: (not pair[1].level.constant, pair[0].ndim))
    clean = all(is_clean(t, f) for t, f in tagged)
    for t in tensors[: 1 if call.name == "prelu" else None]:
        _check_joined(t, leader[0], leader[1])
    if call.name in KEEPS_ZERO or (call.name == "mul" and _finite_factor(call, leader[0])):
        zero = is_clean(*leader)
    elif call.name in ("add", "sub"):
        zero = clean and len(tagged) == 2
    else:
        zero = False
    y = call.run()
    if not isinstance(y, Tensor):
        return y
    if y.ndim != leader[0].ndim:
        raise UnsupportedNetError(f"`{call.name}` of {[tuple(t.shape) for t in tensors]}")
    # Hooks may have kept a copy of what is zeroed later.
    cut = call.name == "relu" and bool(leader[1].dims) and saved_tensors_hooks() is None
    return put(y, leader[1], clean=zero, cut=cut)


def _with_numbers(call: Call) -> Call:
    """The call with numbers computed from extents as tensors, which know those of each image."""
    x, found = next((v, f) for v in call.args if (f := field_of(v)) is not None)
    if call.name not in ("add", "sub", "mul", "div", "rsub", "true_divide") or any(
        varies(v) for v in call.kwargs.values()
    ):
        raise UnsupportedNetError("a number computed from extents")
    args = tuple(found.level.numbers(v, x) if varies(v) else v for v in call.args)
    return replace(call, args=args)


def _finite_factor(call: Call, leader: Tensor) -> bool:
    return all(
        isinstance(v, int | float) or v is leader or (isinstance(v, Tensor) and field_of(v) is None)
        for v in call.args
    )


def _check_joined(t: Tensor, leader: Tensor, of: Field) -> None:
    """Refuses a tensor that has no place beside the leader."""
    found = field_of(t)
    offset = leader.ndim - t.ndim
    places = [d - offset for d in of.dims]
    sizes = [t.shape[d] if 0 <= d < t.ndim else 1 for d in places]
    if found is None:
        slots = t.shape[0] if offset == 0 and t.ndim else 1
        if any(s != 1 for s in sizes) and not of.level.constant:
            raise UnsupportedNetError(
                f"a tensor of shape {tuple(t.shape)} that does not follow the images, such as a "
                "learned or computed map of positions"
            )
        if slots != 1 and t.numel() != slots:
            raise UnsupportedNetError(
                f"a tensor of shape {tuple(t.shape)} whose origin was not seen on the canvas"
            )
        return
    if offset != 0:
        raise UnsupportedNetError(f"tensors of {t.ndim} and {leader.ndim} dimensions")
    if not found.dims or found.level.canvas[1:] == (1, 1):
        if any(s != 1 for s in sizes) and not of.level.constant:
            raise UnsupportedNetError(f"shapes {tuple(t.shape)} and {tuple(leader.shape)}")
        return
    if not of.dims or found.dims != of.dims or not found.level.same_as(of.level):
        raise UnsupportedNetError(
            f"tensors whose images have other extents, {_own(found)} and {_own(of)}, though those "
            f"of the canvas are {tuple(t.shape)} and {tuple(leader.shape)}"
        )


def _own(found: Field) -> str:
    return ", ".join(f"{r.height}x{r.width}" for r in found.level.rects[:3])


def joined(call: Call) -> Tensor:
    """Concatenation along channels."""
    a = call.bound(tensors=(), dim=0)
    tensors, dim = list(a["tensors"]), a["dim"]
    fields = [field_of(t) for t in tensors]
    first = next(f for f in fields if f is not None)
    leader = tensors[fields.index(first)]
    stacked = call.name == "stack"
    dim = dim % (leader.ndim + stacked)
    through_space = dim in first.dims or (stacked and first.dims and 0 < dim <= max(first.dims))
    if through_space or (dim == 0 and not stacked):
        raise UnsupportedNetError(f"`{call.name}` along dimension {dim}")
    for t, f in zip(tensors, fields, strict=True):
        same = (
            f is not None and f.dims == first.dims and (not f.dims or f.level.same_as(first.level))
        )
        if not same:
            raise UnsupportedNetError(
                f"`{call.name}` of tensors whose images have other extents than each other, "
                f"{[tuple(t.shape) for t in tensors]}"
            )
    clean = all(f is not None and is_clean(t, f) for t, f in zip(tensors, fields, strict=True))
    if dim == 0:
        return put(call.run(), replace(first, stacked=True))
    return put(call.run(), first, clean=clean)


def shape(call: Call) -> Any:  # noqa: ANN401
    """Sizes, of which those of height and width know each image's."""
    x, found = call.args[0], field_of(call.args[0])
    assert found is not None
    sizes = list(torch.Tensor.size(x))
    for axis, d in enumerate(found.dims):
        sizes[d] = found.level.size(axis)
    rest = [*call.args[1:], *call.kwargs.values()] if call.name == "size" else []
    return sizes[rest[0]] if rest and rest[0] is not None else torch.Size(sizes)


def reshaped(call: Call) -> Tensor:
    """A new shape that leaves batch, height and width as they are."""
    x, found = call.args[0], field_of(call.args[0])
    assert found is not None
    y = call.run()
    if not isinstance(y, Tensor) or y.ndim == 0 or y.shape[0] != x.shape[0]:
        raise _refused_shape(call, x, y)
    if not found.dims:
        return put(y, found)
    first, last = min(found.dims), max(found.dims)
    moved_by = y.ndim - x.ndim
    if first + moved_by > 0 and tuple(y.shape[first + moved_by :]) == tuple(x.shape[first:]):
        rows, columns = (d + moved_by for d in found.dims)
        return put(y, replace(found, dims=(rows, columns)), clean=is_clean(x, found))
    if tuple(y.shape[: last + 1]) == tuple(x.shape[: last + 1]):
        return put(y, found, clean=is_clean(x, found))
    if found.level.constant:
        return put(y, replace(found, dims=()))
    raise _refused_shape(call, x, y)


def _refused_shape(call: Call, x: Tensor, y: Any) -> UnsupportedNetError:  # noqa: ANN401
    to = tuple(y.shape) if isinstance(y, Tensor) else y
    return UnsupportedNetError(
        f"`{call.name}` from {tuple(x.shape)} to {to}, which takes height and width apart"
    )


def moved(call: Call) -> Tensor:
    """Dimensions in another order, or of size 1 put in or left out; followed on a marked tensor."""
    x, found = call.args[0], field_of(call.args[0])
    assert found is not None
    kept = {0, *found.dims}
    marks = [d + 2 if d in kept or n != 1 else 1 for d, n in enumerate(x.shape)]
    with torch._C.DisableTorchFunctionSubclass():
        probe = call.function(torch.empty(marks, device="meta"), *call.args[1:], **call.kwargs)
    y = call.run()
    to = [list(probe.shape).index(d + 2) if d + 2 in probe.shape else -1 for d in (0, *found.dims)]
    if y.ndim != probe.ndim:
        if not found.level.constant or y.shape[0] != x.shape[0]:
            raise UnsupportedNetError(f"`{call.name}` of {tuple(x.shape)} drops a dimension")
        return put(y, replace(found, dims=()))
    if to[0] != 0 or any(d < 0 for d in to):
        raise UnsupportedNetError(f"`{call.name}` of {tuple(x.shape)} moves the batch")
    if not found.dims:
        return put(y, found)
    return put(y, replace(found, dims=(to[1], to[2])), clean=is_clean(x, found))


def along(call: Call) -> Any:  # noqa: ANN401
    """Along one dimension that is not of space or of the batch."""
    x, found = call.args[0], field_of(call.args[0])
    assert found is not None
    default = {"normalize": 1, "glu": -1}.get(call.name)
    position = 2 if call.name == "normalize" else 1
    given = call.args[position] if len(call.args) > position else default
    dim = call.kwargs.get("dim", given)
    if call.name == "flip":
        dim = call.kwargs.get("dims", call.args[1:] if isinstance(given, int) else given)
    dims = [d % x.ndim for d in (dim if isinstance(dim, Sequence) else [dim]) if d is not None]
    if not dims or 0 in dims or any(d in found.dims for d in dims):
        raise UnsupportedNetError(f"`{call.name}` along dimension {dim}")
    y = call.run()
    if not isinstance(y, Tensor):
        raise UnsupportedNetError(f"`{call.name}`")
    return put(y, found)


def parts(call: Call) -> Any:  # noqa: ANN401
    """Cut into parts along channels."""
    x, found = call.args[0], field_of(call.args[0])
    assert found is not None
    position = 1 if call.name == "narrow" else 2
    given = call.args[position] if len(call.args) > position else 0
    dim = call.kwargs.get("dim", given) % x.ndim
    if dim == 0 or dim in found.dims:
        raise UnsupportedNetError(f"`{call.name}` along dimension {dim}")
    y = call.run()
    for part in y if isinstance(y, Sequence) else [y]:
        put(part, found, clean=is_clean(x, found))
    return y


def reduced(call: Call) -> Any:  # noqa: ANN401
    """Mean, sum, largest or norm over channels, or over the whole of each image."""
    x, found = call.args[0], field_of(call.args[0])
    assert found is not None
    position = 2 if call.name in ("norm", "vector_norm") else 1
    given = call.args[position] if len(call.args) > position else None
    dim = call.kwargs.get("dim", call.kwargs.get("axis", given))
    wanted = dim if isinstance(dim, Sequence) else [dim]
    if dim is None or any(not isinstance(d, int) for d in wanted):
        raise UnsupportedNetError(f"`{call.name}` over all of {tuple(x.shape)}, the batch too")
    dims = sorted(d % x.ndim for d in wanted)
    if found.stacked and dims == [0]:
        y = call.run()
        for part in y if isinstance(y, tuple) else [y]:
            put(part, replace(found, stacked=False))
        return y
    if 0 in dims or found.stacked:
        raise UnsupportedNetError(f"`{call.name}` over the batch")
    over = [d for d in dims if d in found.dims]
    if not over:
        y = call.run()
        keep = (y[0] if isinstance(y, tuple) else y).ndim == x.ndim
        before = [0 if keep else sum(e < d for e in dims) for d in found.dims]
        new = tuple(d - b for d, b in zip(found.dims, before, strict=True))
        for part in y if isinstance(y, tuple) else [y]:
            put(part, replace(found, dims=new))
        return y
    if len(over) == 1 and not found.level.constant:
        raise UnsupportedNetError(f"`{call.name}` over dimension {over[0]} of height and width")
    y = _over_images(call, x, found, dims)
    keep = y.ndim == x.ndim
    new = constant_level(found.level, (1, 1))
    return put(y, Field(new, found.dims if keep and len(over) == 2 else ()))


def _over_images(call: Call, x: Tensor, found: Field, dims: list[int]) -> Tensor:
    if found.level.constant:
        return call.run()
    found.level.one_per_slot(f"{call.name} over height and width")
    rest = call.args[1:]
    if call.name == "mean" and dims == sorted(found.dims) and "dtype" not in call.kwargs:
        keep = call.args[2] if len(call.args) > 2 else call.kwargs.get("keepdim", False)
        return mean_inside(x, found, keepdim=keep)
    order = [*call.args[1:2], *(call.kwargs[k] for k in ("p", "ord") if k in call.kwargs)]
    grows = order in ([], ["fro"]) or (isinstance(order[0], int | float) and order[0] > 0)
    if call.name == "sum" or (call.name in ("norm", "vector_norm") and grows):
        return call.function(zero_outside(x, found, own_gradient=False), *rest, **call.kwargs)
    if call.name == "amax":
        y = call.function(filled_outside(x, found, -math.inf), *rest, **call.kwargs)
        y.data[y.data == -math.inf] = 0  # slots without an image
        return y
    raise UnsupportedNetError(f"`{call.name}` over height and width")


def created(call: Call) -> Tensor:
    """A tensor made beside another; it follows no image, and may have one number per image."""
    return call.run()


def expanded(call: Call) -> Tensor:
    """A tensor of one cell per image spread over another's cells."""
    x, found = call.args[0], field_of(call.args[0])
    y = call.run()
    if call.name == "expand_as":
        to = field_of(call.args[1])
        if found is None and x.ndim and x.shape[0] not in (1, y.shape[0]):
            raise UnsupportedNetError("`expand_as` of a tensor that follows no image")
        if to is None:
            raise UnsupportedNetError("`expand_as` another that follows no image")
        _check_joined(x, call.args[1], to)
        return put(y, to)
    assert found is not None
    sizes = call.args[1] if isinstance(call.args[1], Sequence) else call.args[1:]
    if len(sizes) != x.ndim or y.shape[0] != x.shape[0]:
        raise UnsupportedNetError(f"`expand` of {tuple(x.shape)} to {tuple(y.shape)}")
    same = [of_canvas(y.shape[d]) == x.shape[d] for d in found.dims]
    if found.dims and all(same):
        return put(y, found)
    if not found.level.constant:
        raise UnsupportedNetError(f"`expand` of {tuple(x.shape)}")
    height, width = sizes[-2:]
    if isinstance(height, Extent) and isinstance(width, Extent) and x.ndim == 4:
        return put(y, Field(found.level.resized(height, width)))
    if any(isinstance(s, Extent) for s in sizes):
        raise UnsupportedNetError(f"`expand` of {tuple(x.shape)} to {tuple(y.shape)}")
    return put(y, replace(found, dims=()))


def indexed(call: Call) -> Tensor:
    """Slices: channels as they are, height and width from a fixed cell on, or by steps."""
    x, index = call.args
    found = field_of(x)
    if found is None:
        raise UnsupportedNetError("an index that follows the images")
    items = list(index) if isinstance(index, tuple) else [index]
    lists = [i for i in items if not isinstance(i, int | slice | type(None) | type(Ellipsis))]
    if len(lists) > 1 or any(torch.as_tensor(i).ndim != 1 for i in lists):
        raise UnsupportedNetError("an index by several lists, or by a table")
    named = sum(i is not None and i is not Ellipsis for i in items)
    if Ellipsis in [i for i in items if not isinstance(i, Tensor)]:
        at = next(k for k, i in enumerate(items) if i is Ellipsis)
        items[at : at + 1] = [slice(None)] * (x.ndim - named)
    items += [slice(None)] * (x.ndim - sum(i is not None for i in items))
    place, old, to = 0, 0, {}
    cuts: dict[int, slice] = {}
    plain: list[Any] = []
    for item in items:
        if item is None:
            plain.append(None)
            place += 1
            continue
        special = old == 0 or old in found.dims
        if special and not (isinstance(item, slice) and (old or item == slice(None))):
            raise UnsupportedNetError(f"an index into dimension {old} of {tuple(x.shape)}")
        if special and old:
            cuts[old] = item
            item = slice(None)
        plain.append(item)
        to[old] = place
        place += not isinstance(item, int)
        old += 1
    y = torch.Tensor.__getitem__(x, tuple(plain))
    if not found.dims:
        return put(y, found)
    new = replace(found, dims=(to[found.dims[0]], to[found.dims[1]]))
    put(y, new, clean=is_clean(x, found))
    for d, cut in cuts.items():
        if cut != slice(None):
            y = _cut_out(y, d, to[d], cut, found.dims.index(d))
    return y


def _cut_out(y: Tensor, old: int, d: int, cut: slice, axis: int) -> Tensor:
    found = field_of(y)
    assert found is not None
    level, start, step = found.level, cut.start or 0, cut.step or 1
    extent = level.size(axis)
    if start < 0 or varies(start) or (step != 1 and (start or cut.stop is not None)):
        raise UnsupportedNetError(f"slice {cut} of dimension {old}")
    if step != 1:
        sizes = [list(level.extents(0)), list(level.extents(1))]
        sizes[axis] = [-(-n // step) for n in sizes[axis]]
        factor = [Fraction(1), Fraction(1)]
        factor[axis] = Fraction(step)
        z = torch.Tensor.__getitem__(y, (*[slice(None)] * d, slice(None, None, step))).clone()
        rows, columns = found.dims  # pyright: ignore[reportAssignmentType]
        new = level.derived(
            (z.shape[rows], z.shape[columns]),
            (sizes[0], sizes[1]),
            (factor[0], factor[1]),
            constant=level.constant,
        )
        return put(z, Field(new, found.dims))
    if cut.stop is None:
        end: Any = 0
    elif cut.stop < 0:
        end = cut.stop
    elif extent <= cut.stop:
        end = 0
    elif not isinstance(cut.stop, Extent) and not level.constant:
        raise UnsupportedNetError(f"slice {cut} of dimension {old}, which ends at a fixed cell")
    else:
        end = cut.stop - extent
    edges = [(0, 0), (0, 0)]
    edges[axis] = (-start, end)
    return padded(y, found, (edges[0], edges[1]), 0.0, level.constant)


RULES: dict[str, Callable[[Call], Any]] = {
    "conv2d": canvas_ops.conv2d,
    "conv_transpose2d": canvas_ops.conv_transpose2d,
    "max_pool2d": canvas_ops.max_pool2d,
    "avg_pool2d": canvas_ops.avg_pool2d,
    "adaptive_avg_pool2d": canvas_ops.adaptive_avg_pool2d,
    "adaptive_max_pool2d": canvas_ops.adaptive_max_pool2d,
    "batch_norm": canvas_ops.batch_norm,
    "group_norm": canvas_ops.group_norm,
    "instance_norm": canvas_ops.instance_norm,
    "layer_norm": canvas_ops.layer_norm,
    "linear": canvas_ops.linear,
    "pad": canvas_resizing.pad,
    "interpolate": canvas_resizing.interpolate,
    "upsample": canvas_resizing.interpolate,
    "pixel_shuffle": canvas_resizing.pixel_shuffle,
    "cat": joined,
    "concat": joined,
    "stack": joined,
    "get shape": shape,
    "size": shape,
    "get data": pointwise,
    "expand": expanded,
    "expand_as": expanded,
    "__getitem__": indexed,
    **dict.fromkeys(POINTWISE, pointwise),
    **dict.fromkeys(NEW, created),
    **dict.fromkeys(ALONG, along),
    **dict.fromkeys(PARTS, parts),
    **dict.fromkeys(MOVES, moved),
    **dict.fromkeys(SHAPES, reshaped),
    **dict.fromkeys(REDUCTIONS, reduced),
}


def conv1d_of_globals(call: Call) -> Tensor:
    """One-dimensional convolution over channels, of one vector per image."""
    found = field_of(call.args[0])
    if found is None or found.dims:
        raise UnsupportedNetError("a one-dimensional convolution over height or width")
    return put(call.run(), found)


RULES["conv1d"] = conv1d_of_globals
