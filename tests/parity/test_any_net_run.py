"""A run of someone's net learns what a plain loop over single images learns, in float64."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from rich.console import Console
from tests.models.small_nets import SmallUnet

from anysize.data.loader import load_steps, normalise
from anysize.models.any_net import AnyNet
from anysize.training.job import prepare
from anysize.training.loop import drawn_epoch
from anysize.training.settings import load_run_config, with_whole_paths

EPOCHS = 2


def job_of(workspace, norm, images_per_step):
    (workspace / "run.toml").write_text(
        f"""
[data]
root = "data"
[plan]
images_per_step = {images_per_step}
max_canvases = 2
[model]
net = "tests.models.small_nets:SmallUnet"
norm = "{norm}"
[model.arguments]
width = 4
[augment]
mirror = false
[optim]
lr = 0.05
[train]
precision = "float32"
channels_last = false
"""
    )
    config = load_run_config(workspace / "run.toml")
    config = with_whole_paths(config, workspace)
    quiet = Console(quiet=True)
    job = prepare(config, workspace / "run", resume=False, agrees=None, console=quiet)
    job.model.double()
    return job


def learned_by_a_run(job):
    """Trains on canvases; gives the stems of each step and the weights."""
    order = []
    for epoch in range(EPOCHS):
        steps, draws = drawn_epoch(job, epoch)
        loaded = load_steps(
            job.train_samples,
            steps,
            draws,
            classes=job.classes,
            geometry=job.model.geometry,
            loss_at=job.config.model.loss_at,
            pixels=job.pixels,
            num_threads=1,
            prefetch_steps=2,
        )
        with contextlib.closing(loaded):
            for step in loaded:
                batches = [dataclasses.replace(b, pixels=b.pixels.double()) for b in step.batches]
                assert not job.take_step(batches).skipped
                order.append([stem for batch in batches for stem in batch.stems])
    return order, job.model.state_dict()


def learned_alone(job, order, start):
    """The same images, one at a time, in a loop as its author would write it."""
    net = SmallUnet(3, width=4).double().train()
    net.load_state_dict(start)
    if job.config.model.norm == "frozen":
        for module in net.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
    decayed = [p for p in net.parameters() if p.ndim > 1]
    free = [p for p in net.parameters() if p.ndim == 1]
    config = job.config.optim
    optimizer = torch.optim.SGD(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": free}],
        lr=config.lr,
        momentum=config.momentum,
    )
    root = job.config.data.root
    for stems in order:
        pairs = []
        for stem in stems:
            image = np.array(Image.open(f"{root}/images/{stem}.png"))
            mask = np.array(Image.open(f"{root}/masks/{stem}.png"))
            pixels = torch.from_numpy(normalise(image, job.pixels)).permute(2, 0, 1).double()
            pairs.append((pixels[None], torch.from_numpy(mask).long()[None]))
        count = sum(int((target != 255).sum()) for _, target in pairs)
        for pixels, target in pairs:
            height, width = target.shape[1:]
            padded = F.pad(pixels, (0, -width % 4, 0, -height % 4))
            logits = net(padded)[:, :, :height, :width]
            summed = F.cross_entropy(logits, target, ignore_index=255, reduction="sum")
            (summed / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


def difference(ours, theirs):
    return max(float((ours[n] - theirs[n]).abs().max()) for n in theirs)


@pytest.mark.parametrize(("norm", "images_per_step"), [("frozen", 4), ("trained", 1)])
def test_weights_are_those_of_a_plain_loop(workspace, monkeypatch, norm, images_per_step):
    job = job_of(workspace, norm, images_per_step)
    start = {n: t.clone() for n, t in job.model.state_dict().items()}
    order, ours = learned_by_a_run(job)
    assert len(set(job.plan.canvases)) > 1
    theirs = learned_alone(job, order, start)
    assert difference(ours, theirs) < 1e-10
    assert difference(start, theirs) > 1e-2

    # The control: the same run without masks.
    monkeypatch.setattr(AnyNet, "forward", lambda self, pixels, layout: self.net(pixels))
    job = job_of(workspace, norm, images_per_step)
    _, unmasked = learned_by_a_run(job)
    assert difference(unmasked, theirs) > 1e-4
