"""A GPU that cannot compute as the settings ask is refused before anything is moved to it."""

import pytest
import torch
from tests.flow.runs import run

from anysize.errors import DeviceError


def test_bf16_on_an_old_gpu_is_refused_before_the_net_is_moved(workspace, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(DeviceError, match=r"Tesla T4 has compute capability 7\.5; bf16 needs 8"):
        run(workspace, "train.device=auto", "train.precision=bf16")
