"""Images of mixed sizes in an ordinary DataLoader, and a loop of one's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import anysize
from anysize.errors import DataError

SIZES = [(20, 31), (33, 18), (24, 24), (17, 40), (29, 29), (20, 30), (12, 13)]


class Drawn(torch.utils.data.Dataset):
    def __len__(self):
        return len(SIZES)

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        image = torch.randn(3, *SIZES[i], generator=generator, dtype=torch.float64)
        return image, torch.randint(0, 2, SIZES[i], generator=generator)


class UNet(nn.Module):
    """Demands even sizes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.deep = nn.Conv2d(4, 4, 3, 2, 1)
        self.last = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x):
        x = F.silu(self.first(x))
        return self.last(torch.cat([x, F.interpolate(self.deep(x), scale_factor=2)], 1))


@pytest.mark.parametrize("from_sizes", [True, False])
def test_an_epoch_in_a_loop_of_ones_own_is_every_image_alone(from_sizes):
    net, dataset = UNet().double(), Drawn()
    geometry = anysize.geometry_of_net(net)
    assert geometry.size_multiple == 2
    batches = anysize.CanvasBatches(SIZES if from_sizes else dataset, geometry, images_per_batch=3)
    loader = DataLoader(dataset, batch_sampler=batches, collate_fn=batches.collate)
    model = anysize.on_canvas(net)
    total, seen = torch.zeros((), dtype=torch.float64), 0
    for pixels, target, layout in loader:
        logits = model(pixels, layout)
        loss = F.cross_entropy(logits, target, ignore_index=255, reduction="sum")
        for i in range(len(layout.placements)):
            own = layout.crop(pixels, i)
            alone = net(F.pad(own, (0, own.shape[2] % 2, 0, own.shape[1] % 2))[None])
            alone = alone[0, :, : own.shape[1], : own.shape[2]]
            torch.testing.assert_close(layout.crop(logits, i), alone, rtol=1e-12, atol=1e-12)
            part = F.cross_entropy(alone[None], layout.crop(target, i)[None], reduction="sum")
            loss = loss - part
            seen += 1
        total = total + loss.detach().abs()
    assert seen == len(SIZES)
    assert float(total) < 1e-9
    assert len(loader) == len(list(batches))


def test_epochs_have_an_order_each_and_every_image_once():
    batches = anysize.CanvasBatches(SIZES, anysize.geometry_of_net(UNet()), images_per_batch=2)
    orders = []
    for epoch in (0, 1):
        batches.set_epoch(epoch)
        orders.append(list(batches))
        assert sorted(i for batch in orders[-1] for i in batch) == list(range(len(SIZES)))
    assert orders[0] != orders[1]


def test_a_target_of_another_extent_is_refused():
    batches = anysize.CanvasBatches(SIZES, anysize.geometry_of_net(UNet()))
    with pytest.raises(DataError, match="same height and width"):
        batches.collate([(torch.zeros(3, 20, 30), torch.zeros(30, 20))])
