"""To be imported before torchvision beside a CPU build of torch.

The compiled operators of torchvision are built for another torch build and do not load. Nets of
segmentation and classification use none of them, so that registering their shapes is passed over.
"""

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("torchvision", "DEF")
_register_fake = torch.library.register_fake


def _register_known(op: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:  # noqa: ANN401
    if isinstance(op, str) and op.startswith("torchvision::"):
        return lambda function: function
    return _register_fake(op, *args, **kwargs)


torch.library.register_fake = _register_known
