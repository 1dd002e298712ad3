"""Extents of a tensor on a canvas, as numbers that a net may compute with.

A net that asks for a tensor's height gets an `Extent`: the canvas's own height to every other
reader, with the height of each image beside it. Arithmetic is done on all of them, so that
`F.interpolate(x, size=skip.shape[-2:])`, or TensorFlow's padding rule, give each image what they
give it alone. A comparison whose answer is not the same for all images and the canvas would take
one way through the net for all of them, so it is refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from anysize.errors import UnsupportedNetError

Number = int | float


class Extent(int):
    """A whole number of cells of the canvas, and that of each image.

    Attributes:
        images: The number for each image, in the layout's order.
        source: The `Level` and axis whose extent this is, unless it was computed.
    """

    images: tuple[int, ...]
    source: tuple[object, int] | None

    def __new__(
        cls, canvas: int, images: tuple[int, ...], source: tuple[object, int] | None = None
    ) -> Extent:
        """See the class."""
        made = super().__new__(cls, canvas)
        made.images = images
        made.source = source
        return made

    def __int__(self) -> int:
        return _same_for_all(self, "int()")

    def __float__(self) -> float:
        return float(_same_for_all(self, "float()"))

    def __trunc__(self) -> Extent:
        return self

    __floor__ = __ceil__ = __pos__ = __trunc__

    def __round__(self, digits: Any = None) -> Extent:  # noqa: ANN401
        return self if digits is None else _lift(lambda v: round(v, digits), self)

    def __deepcopy__(self, memo: object) -> Extent:
        return self

    def __hash__(self) -> int:
        return hash(int.__int__(self))


class Ratio:
    """A fraction of extents: of the canvas, and of each image."""

    def __init__(self, canvas: float, images: tuple[float, ...]) -> None:
        self.canvas = canvas
        self.images = images

    def __int__(self) -> int:
        return _same_for_all(self, "int()")

    def __float__(self) -> float:
        return float(_same_for_all(self, "float()"))

    def __ceil__(self) -> Extent:
        return _lift(math.ceil, self)

    def __floor__(self) -> Extent:
        return _lift(math.floor, self)

    def __round__(self, digits: int | None = None) -> Any:  # noqa: ANN401
        return _lift(round, self) if digits is None else _lift(lambda v: round(v, digits), self)

    def __hash__(self) -> int:
        return hash(self.canvas)


def _parts(value: Any) -> tuple[Number, tuple[Number, ...] | None]:  # noqa: ANN401
    if isinstance(value, Extent):
        return int.__int__(value), value.images
    if isinstance(value, Ratio):
        return value.canvas, value.images
    return value, None


def _lift(function: Callable[..., Any], *values: Any) -> Any:  # noqa: ANN401
    """The function of the canvas's numbers, and of every image's."""
    parts = [_parts(v) for v in values]
    count = next(len(images) for _, images in parts if images is not None)
    canvas = function(*(c for c, _ in parts))
    images = tuple(
        function(*(c if own is None else own[i] for c, own in parts)) for i in range(count)
    )
    if isinstance(canvas, float):
        return Ratio(canvas, images)
    return Extent(canvas, images)


def _same_for_all(value: Extent | Ratio, what: str) -> Any:  # noqa: ANN401
    canvas, images = _parts(value)
    if any(i != canvas for i in images or ()):
        raise UnsupportedNetError(
            f"{what} of a tensor's extent would make the canvas's extent, {canvas}, a plain "
            f"number, where images have {sorted(set(images or ()))[:5]}. Compute with the extent "
            "as it is, or give sizes as `size=other.shape[-2:]`."
        )
    return canvas


def _compare(operation: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    def compared(self: Any, other: Any) -> Any:  # noqa: ANN401
        if not isinstance(other, int | float | Ratio):
            return NotImplemented
        (a, own), (b, theirs) = _parts(self), _parts(other)
        answer = operation(a, b)
        for i in range(len(own or ())):
            x = own[i] if own else a
            y = theirs[i] if theirs else b
            if operation(x, y) != answer:
                raise UnsupportedNetError(
                    f"The net decides by an extent ({operation.__name__} of {x} and {y} for an "
                    f"image, {a} and {b} for the canvas), and not all images of the batch give "
                    "the same answer. If it demands multiples of some number, plan canvases and "
                    "images in these multiples (`anysize prove` finds them)."
                )
        return answer

    return compared


def _binary(operation: Callable[[Any, Any], Any]) -> tuple[Callable, Callable]:
    def forward(self: Any, other: Any) -> Any:  # noqa: ANN401
        if isinstance(other, Tensor):
            return operation(_beside(self, other), other)
        if not isinstance(other, int | float | Ratio):
            return NotImplemented
        return _lift(operation, self, other)

    def reflected(self: Any, other: Any) -> Any:  # noqa: ANN401
        if isinstance(other, Tensor):
            return operation(other, _beside(self, other))
        if not isinstance(other, int | float):
            return NotImplemented
        return _lift(operation, other, self)

    return forward, reflected


def _beside(value: Any, tensor: Tensor) -> Tensor:  # noqa: ANN401
    """A number of each image as a tensor that may be joined with another of the same images."""
    found = getattr(tensor, "_anysize_field", None)
    if found is None:
        raise UnsupportedNetError("a number computed from an extent, with a tensor of no image")
    return found.level.numbers(value, tensor)


def _divmod(self: Any, other: Any) -> Any:  # noqa: ANN401
    return self // other, self % other


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
    *("and", "or", "xor", "lshift", "rshift"),
):
    _forward, _reflected = _binary(getattr(operator, _name + "_" * (_name in ("and", "or"))))
    for _kind in (Extent, Ratio):
        setattr(_kind, f"__{_name}__", _forward)
        setattr(_kind, f"__r{_name}__", _reflected)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    for _kind in (Extent, Ratio):
        setattr(_kind, f"__{_name}__", _compare(getattr(operator, _name)))
for _kind in (Extent, Ratio):
    setattr(_kind, "__divmod__", _divmod)  # noqa: B010
    setattr(_kind, "__neg__", lambda self: _lift(operator.neg, self))  # noqa: B010
    setattr(_kind, "__abs__", lambda self: _lift(abs, self))  # noqa: B010
    setattr(_kind, "__bool__", lambda self: self != 0)  # noqa: B010


def per_image(value: Any, count: int) -> tuple[Any, ...]:  # noqa: ANN401
    """The number for each of `count` images."""
    plain, images = _parts(value)
    return (plain,) * count if images is None else images


def of_canvas(value: Any) -> Any:  # noqa: ANN401
    """The canvas's number, plain."""
    return _parts(value)[0]


def varies(value: Any) -> bool:  # noqa: ANN401
    """Whether some image's number is another than the canvas's."""
    plain, images = _parts(value)
    return images is not None and any(i != plain for i in images)
