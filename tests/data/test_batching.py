import numpy as np

from anysize.data.batching import epoch_steps
from anysize.geometry import Canvas, NetGeometry, Size
from anysize.planning.canvases import Plan
from anysize.planning.packing import Step


def sizes_and_plan() -> tuple[list[Size], Plan]:
    rng = np.random.default_rng(0)
    sizes = [Size(int(h), int(w)) for h, w in rng.integers(20, 120, (22, 2))]
    plan = Plan(
        geometry=NetGeometry(),
        images_per_step=4,
        max_pixels_per_step=256 * 256,
        canvases=(Canvas(4, 128, 128), Canvas(1, 256, 256), Canvas(2, 128, 128)),
    )
    return sizes, plan


def images_of(step: Step) -> list[int]:
    return [i for p in step.passes for i in p.images]


def test_each_image_is_in_exactly_one_step_and_the_ragged_one_is_last():
    sizes, plan = sizes_and_plan()
    for epoch in range(2):
        steps = epoch_steps(plan, sizes, seed=0, epoch=epoch)
        assert sorted(i for step in steps for i in images_of(step)) == list(range(22))
        assert [len(images_of(step)) for step in steps] == [4] * 5 + [2]


def test_the_order_depends_on_seed_and_epoch_only():
    sizes, plan = sizes_and_plan()

    def order(seed, epoch):
        return [images_of(s) for s in epoch_steps(plan, sizes, seed=seed, epoch=epoch)]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


def test_steps_are_shuffled_whatever_order_packing_gives(monkeypatch):
    sizes, plan = sizes_and_plan()
    packed = epoch_steps(plan, sizes, seed=0, epoch=0)
    monkeypatch.setattr("anysize.data.batching.pack", lambda *_: packed)
    shuffled = epoch_steps(plan, sizes, seed=0, epoch=0)
    assert shuffled != packed
    assert shuffled[-1] == packed[-1]
    assert {id(s) for s in shuffled} == {id(s) for s in packed}


def test_an_epoch_of_full_steps_has_no_ragged_one():
    sizes, plan = sizes_and_plan()
    steps = epoch_steps(plan, sizes[:8], seed=0, epoch=0)
    assert [len(images_of(step)) for step in steps] == [4, 4]
