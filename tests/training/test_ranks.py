"""Several ranks learn what one learns."""

import pytest
import torch
from tests.torchrun import torchrun
from tests.training import steps_of_ranks

from anysize.ranks import ALONE, join


@pytest.fixture(scope="module")
def alone():
    return {case: steps_of_ranks.learned(case, ALONE) for case in steps_of_ranks.CASES}


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)], ids=str)
def together(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks") / "learned.pt"
    torchrun(request.param, steps_of_ranks.__file__, out)
    return torch.load(out)


def difference(found, expected):
    """The largest of any weight or statistic, relative to the largest of its tensor."""
    assert found.keys() == expected.keys()
    return max(
        float((found[n] - t).abs().max() / t.abs().max().clamp(min=1e-30))
        for n, t in expected.items()
        if t.is_floating_point()
    )


def test_any_number_of_ranks_learns_the_same(alone, together):
    for case in steps_of_ranks.CASES:
        if case.startswith("control"):
            continue
        allowed = {"float32": 1e-3, "bf16": 0.1}.get(case.split()[0], 1e-12)
        assert difference(together[case], alone[case]) <= allowed, case


def test_a_count_or_statistics_of_ones_own_would_be_seen(alone, together):
    for case in steps_of_ranks.CASES:
        if case.startswith("control"):
            assert difference(together[case], alone[case]) > 1e-3, case


def test_without_torchrun_there_is_no_process_group():
    with join() as ranks:
        assert ranks is ALONE
        assert not torch.distributed.is_initialized()
