import itertools

import pytest
import torch

from anysize.config import UNITS, ModelConfig
from anysize.geometry import Size, single
from anysize.models.build import build_model, geometry_of
from anysize.models.resnet_v1 import segments


@pytest.mark.parametrize("units", [*UNITS.values(), (1, 1, 1, 1), (2, 2, 7, 1)])
def test_segments_are_all_units_once_and_in_order(units):
    names = [f"block{b + 1}_unit{u + 1}" for b, n in enumerate(units) for u in range(n)]
    assert list(itertools.chain.from_iterable(segments(units))) == names


def test_long_blocks_keep_few_and_recompute_few():
    assert [len(s) for s in segments(UNITS[101])] == [1, 1, 1, 2, 2, 5, 5, 5, 5, 3, 2, 1]


def test_recomputed_activations_change_no_gradient():
    results = []
    for recompute in (False, True):
        config = ModelConfig(units=(2, 2, 5, 3), base_depth=4, activation_checkpointing=recompute)
        model = build_model(config, 3, generator=torch.Generator().manual_seed(0)).double()
        layout = single(Size(61, 47), geometry_of(config))
        pixels = torch.zeros(1, 3, layout.canvas.height, layout.canvas.width, dtype=torch.float64)
        p = layout.placements[0]
        inside = pixels[:, :, p.top : p.top + p.height, p.left : p.left + p.width]
        inside.normal_(generator=torch.Generator().manual_seed(1))
        model.train()(pixels, layout).square().sum().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(bool(g.any()) for g in results[0])
