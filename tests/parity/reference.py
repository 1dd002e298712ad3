"""An independent net: each image alone at its own size, layer by layer as TF-Slim states it.

It shares no code with `anysize.models`: paddings are explicit, convolutions are VALID, the norm is
its formula. Trained statistics are taken over the pixels of all images together, which is what one
step means. Parameters come by name from an `anysize` state dict.
"""

import torch
import torch.nn.functional as F

EPSILON = 1e-5


class Reference:
    def __init__(self, params, units, output_stride, *, trained=False, system="slim"):
        self.params = params
        self.units = units
        self.output_stride = output_stride
        self.trained = trained
        self.system = system

    def norm(self, name, xs):
        p = self.params
        if self.trained:
            columns = torch.cat([x.flatten(2) for x in xs], dim=2)[0]
            mean = columns.mean(1)
            variance = ((columns - mean[:, None]) ** 2).mean(1)
        else:
            mean, variance = p[name + ".moving_mean"], p[name + ".moving_variance"]
        gamma, beta = p[name + ".gamma"], p[name + ".beta"]

        def one(x):
            x = (x - mean[:, None, None]) / torch.sqrt(variance + EPSILON)[:, None, None]
            return x * gamma[:, None, None] + beta[:, None, None]

        return [one(x) for x in xs]

    def conv(self, name, xs, stride=1, rate=1):
        """conv2d_same, then the norm."""
        w = self.params[name + ".weights"]
        k = w.shape[2]
        effective = k + (k - 1) * (rate - 1)
        begin = (effective - 1) // 2
        end = effective - 1 - begin
        xs = [F.pad(x, (begin, end, begin, end)) for x in xs]
        return self.norm(name, [F.conv2d(x, w, stride=stride, dilation=rate) for x in xs])

    def pool(self, x):
        h, w = x.shape[2:]
        if self.system == "caffe":
            out = [-(-(n - 3) // 2) + 1 for n in (h, w)]
            x = F.pad(x, (0, 2, 0, 2), value=-torch.inf)
        elif self.system == "torchvision":
            out = [(n + 2 - 3) // 2 + 1 for n in (h, w)]
            x = F.pad(x, (1, 1, 1, 1), value=-torch.inf)
        else:
            out = [-(-n // 2) for n in (h, w)]
            total = [max((o - 1) * 2 + 3 - n, 0) for o, n in zip(out, (h, w), strict=True)]
            top, left = total[0] // 2, total[1] // 2
            x = F.pad(x, (left, total[1] - left, top, total[0] - top), value=-torch.inf)
        return F.max_pool2d(x, 3, 2)[:, :, : out[0], : out[1]]

    def blocks(self):
        """(name, stride in the first 1x1, stride in the 3x3, rate, rate of the second 3x3)."""
        current, rate = 4, 1
        if self.system == "slim":
            for b, (n, block_stride) in enumerate(zip(self.units, (2, 2, 2, 1), strict=True), 1):
                for u in range(1, n + 1):
                    stride = block_stride if u == n else 1
                    name = f"body.units.block{b}_unit{u}"
                    if current == self.output_stride:
                        yield name, 1, 1, rate, rate
                        rate *= stride
                    else:
                        yield name, 1, stride, rate, rate
                        current *= stride
            return
        for b, n in enumerate(self.units, 1):
            previous, stride = rate, 1 if b == 1 else 2
            if stride == 2 and current == self.output_stride:
                rate, stride = rate * 2, 1
            current *= stride
            for u in range(1, n + 1):
                name = f"body.units.block{b}_unit{u}"
                s = stride if u == 1 else 1
                if self.system == "caffe":
                    yield name, s, 1, rate, rate
                else:
                    yield name, 1, s, previous if u == 1 else rate, rate

    def logits(self, images):
        xs = [F.relu(x) for x in self.conv("body.conv1", images, stride=2)]
        xs = [self.pool(x) for x in xs]
        for name, stride1, stride3, rate, rate2 in self.blocks():
            stride = stride1 * stride3
            if name + ".shortcut.weights" in self.params:
                shortcuts = self.conv(name + ".shortcut", xs, stride=stride)
            else:
                shortcuts = [x[:, :, ::stride, ::stride] for x in xs]
            if name + ".conv3.weights" in self.params:
                ys = [F.relu(y) for y in self.conv(name + ".conv1", xs, stride=stride1)]
                ys = [F.relu(y) for y in self.conv(name + ".conv2", ys, stride=stride3, rate=rate)]
                ys = self.conv(name + ".conv3", ys)
            else:  # two 3x3: ResNet-18 and 34
                ys = [F.relu(y) for y in self.conv(name + ".conv1", xs, stride=stride, rate=rate)]
                ys = self.conv(name + ".conv2", ys, rate=rate2)
            xs = [F.relu(s + y) for s, y in zip(shortcuts, ys, strict=True)]
        return [self.upconv(x) for x in xs]

    def upconv(self, x):
        """Each input cell spreads its 3x3 patch; what falls beyond twice the extent is cut."""
        w, b = self.params["head.weights"], self.params["head.biases"]
        h, wd = x.shape[2:]
        out = x.new_zeros(1, w.shape[1], 2 * h + 1, 2 * wd + 1)
        for i in range(3):
            for j in range(3):
                patch = torch.einsum("nchw,ck->nkhw", x, w[:, :, i, j])
                grown = torch.zeros_like(out)
                grown[:, :, i : i + 2 * h : 2, j : j + 2 * wd : 2] = patch
                out = out + grown
        return out[:, :, : 2 * h, : 2 * wd] + b[:, None, None]


def full_resolution(logits, size, head_stride):
    """Bilinear with half-pixel centres, clamped at the image's border, as two matrix products."""

    def matrix(n, extent):
        m = torch.zeros(extent, n, dtype=logits.dtype)
        for y in range(extent):
            source = min(max((y + 0.5) / head_stride - 0.5, 0.0), n - 1.0)
            low = int(source)
            high = min(low + 1, n - 1)
            m[y, low] += 1 - (source - low)
            m[y, high] += source - low
        return m

    rows = matrix(logits.shape[2], size[0])
    columns = matrix(logits.shape[3], size[1])
    return torch.einsum("yh,nkhw,xw->nkyx", rows, logits, columns)
