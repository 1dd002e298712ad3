"""Files of other people's programs: state dicts are read, everything else is refused unharmed."""

import argparse
import io
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from anysize.conversion.torch_file import is_torch_file, read_torch_file
from anysize.errors import WeightsError

HOW = r"torch\.save\(model\.state_dict\(\)"


def state():
    generator = torch.Generator().manual_seed(1)
    return OrderedDict(
        {
            "conv1.weight": torch.randn(4, 3, 7, 7, generator=generator),
            "bn1.running_var": torch.rand(4, generator=generator),
            "bn1.num_batches_tracked": torch.tensor(3),
        }
    )


def save(content, path, *, legacy=False):
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    return path


def tensors_of(path):
    return read_torch_file(path).tensors


def assert_is_state(tensors, prefix=""):
    assert list(tensors) == [prefix + n for n in state()]
    for name, tensor in state().items():
        assert np.array_equal(tensors[prefix + name], tensor.numpy())
        assert tensors[prefix + name].dtype == tensor.numpy().dtype


class Runs:
    """Unpickled by an ordinary reader, it makes a file."""

    def __init__(self, marker):
        self.command = f"touch {marker}"

    def __reduce__(self):
        return os.system, (self.command,)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_state_dict_is_read_in_both_formats_of_torch_save(tmp_path, legacy):
    path = save(state(), tmp_path / "w.pth", legacy=legacy)
    assert is_torch_file(path)
    assert_is_state(tensors_of(path))


def test_safetensors_are_read(tmp_path):
    path = tmp_path / "w.bin"
    save_file(state(), path)
    assert is_torch_file(path)
    tensors = tensors_of(path)
    assert_is_state({n: tensors[n] for n in state()})
    assert len(tensors) == len(state())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_other_precisions_become_float32(tmp_path, dtype, form):
    path = tmp_path / "w"
    tensor = torch.tensor([1.5, -2.25, 0.1]).to(dtype)
    if form == "safetensors":
        save_file({"a": tensor}, path)
    else:
        save({"a": tensor}, path, legacy=form == "legacy")
    read = tensors_of(path)["a"]
    assert read.dtype == np.float32
    assert np.array_equal(read, tensor.float().numpy())


def test_what_was_read_does_not_hang_on_the_file(tmp_path):
    path = save(state(), tmp_path / "w.pth")
    tensors = tensors_of(path)
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    assert_is_state(tensors)


def test_views_and_other_memory_orders_are_read_by_their_values(tmp_path):
    whole = torch.arange(24.0).view(2, 3, 4)
    turned = whole.permute(2, 0, 1)
    path = save({"a": whole[:, 1:], "b": turned, "c": nn.Parameter(whole[0])}, tmp_path / "w.pth")
    tensors = tensors_of(path)
    assert np.array_equal(tensors["a"], whole[:, 1:].numpy())
    assert np.array_equal(tensors["b"], turned.numpy())
    assert np.array_equal(tensors["c"], whole[0].numpy())


def test_tensors_that_share_memory_are_each_read(tmp_path):
    whole = torch.arange(24.0)
    tensors = tensors_of(save({str(i): whole for i in range(99)}, tmp_path / "many.pth"))
    assert len(tensors) == 99
    assert all(np.array_equal(t, whole.numpy()) for t in tensors.values())
    tensors = tensors_of(save({"a": torch.ones(1).expand(64)}, tmp_path / "expanded.pth"))
    assert np.array_equal(tensors["a"], np.ones(64))


@pytest.mark.parametrize("key", ["state_dict", "model", "student"])
@pytest.mark.parametrize("legacy", [False, True])
def test_the_entries_of_a_training_checkpoint_are_read_and_the_rest_named(tmp_path, key, legacy):
    others = {
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1, data="images"),
        "optimizer": {"state": {0: {"momentum_buffer": torch.ones(9)}}, "param_groups": []},
        "best": np.float64(0.5),
        "last": np.int64(3),
    }
    averaged = {"model_ema": {"n_averaged": torch.tensor(4), "version": 2}}
    path = save({**others, key: state(), **averaged}, tmp_path / "w.pth", legacy=legacy)
    found = read_torch_file(path)
    tensors = dict(found.tensors)
    assert tensors.pop("model_ema.n_averaged") == 4
    assert_is_state(tensors, f"{key}.")
    assert sorted(found.others) == sorted([*others, "model_ema.version"])


def test_two_entries_of_one_name_are_refused(tmp_path):
    path = save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"two entries called a\.b"):
        read_torch_file(path)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([torch.ones(2)], "holds a list"),
        (torch.ones(2), "holds a Tensor"),
        ({"epoch": 3, "lr": 0.1}, r"entries \(epoch, lr\)"),
        ({0: torch.ones(1)}, r"entries \(0\)"),
        ({}, r"entries \(nothing\)"),
        ({"state_dict": {}}, r"entries \(state_dict\)"),
    ],
)
@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_without_a_state_dict_is_refused(tmp_path, content, what, legacy):
    path = save(content, tmp_path / "w.pth", legacy=legacy)
    with pytest.raises(WeightsError, match=what) as caught:
        read_torch_file(path)
    assert "w.pth is not a state dict" in str(caught.value)


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle 2", "pickle 5"])
def test_code_in_a_file_is_not_run(tmp_path, form):
    marker, path = tmp_path / "marker", tmp_path / "w.pth"
    content = {**state(), "x": Runs(marker)}
    if form.startswith("pickle"):
        path.write_bytes(pickle.dumps({"x": Runs(marker)}, protocol=int(form[-1])))
    else:
        save(content, path, legacy=form == "legacy")
    assert is_torch_file(path)
    with pytest.raises(WeightsError, match="Nothing was executed") as caught:
        read_torch_file(path)
    assert "w.pth is not a state dict" in str(caught.value)
    assert HOW.replace("\\", "") in str(caught.value)
    assert not marker.exists()
    if form != "pickle 5":
        assert "posix.system" in str(caught.value)
    # The control: an ordinary reader runs it.
    if form.startswith("pickle"):
        pickle.loads(path.read_bytes())  # noqa: S301
        assert marker.exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_a_whole_module_is_refused_by_its_class(tmp_path, legacy):
    path = save(nn.Sequential(nn.Conv2d(3, 4, 3)), tmp_path / "w.pth", legacy=legacy)
    with pytest.raises(WeightsError, match=r"torch\.nn\.modules\.container\.Sequential") as caught:
        read_torch_file(path)
    assert "Nothing was executed" in str(caught.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_archive_is_refused(tmp_path):
    path = tmp_path / "w.pt"
    torch.jit.save(torch.jit.script(Net()), path)
    assert is_torch_file(path)
    with pytest.raises(WeightsError, match=rf"TorchScript archive.*Nothing was executed.*{HOW}"):
        read_torch_file(path)


def test_a_pickle_of_numpy_arrays_is_refused(tmp_path):
    path = tmp_path / "w.pkl"
    path.write_bytes(pickle.dumps({"conv1.weight": np.ones(3)}, protocol=2))
    assert is_torch_file(path)
    with pytest.raises(WeightsError, match=r"not a state dict.*numpy.*Nothing was executed"):
        read_torch_file(path)


def test_files_of_other_kinds_are_not_taken_for_ours(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones(3))
    np.save(tmp_path / "b.npy", np.ones(3))
    (tmp_path / "c.txt").write_text("conv1.weight")
    (tmp_path / "d").write_bytes(b"")
    with zipfile.ZipFile(tmp_path / "e.zip", "w") as archive:
        archive.writestr("readme.txt", "x")
    for path in sorted(tmp_path.iterdir()):
        assert not is_torch_file(path)
        with pytest.raises(WeightsError, match="no file of PyTorch or safetensors"):
            read_torch_file(path)
    assert not is_torch_file(tmp_path / "missing")
    assert not is_torch_file(tmp_path)


@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_a_file_cut_anywhere_is_named(tmp_path, form):
    path, cut = tmp_path / "whole", tmp_path / "cut.pth"
    if form == "safetensors":
        save_file(state(), path)
    else:
        save(state(), path, legacy=form == "legacy")
    whole = path.read_bytes()
    for length in {*range(64, len(whole), 97), len(whole) - 1}:
        cut.write_bytes(whole[:length])
        assert is_torch_file(cut)
        with pytest.raises(WeightsError, match=r"cut\.pth is (damaged|not a state dict)"):
            read_torch_file(cut)


@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_noise_in_a_file_never_gives_anything_but_a_message(tmp_path, form):
    path, bad = tmp_path / "whole", tmp_path / "bad.pth"
    if form == "safetensors":
        save_file(state(), path)
    else:
        save(state(), path, legacy=form == "legacy")
    whole = path.read_bytes()
    rng = np.random.default_rng(2)
    for _ in range(300):
        data = bytearray(whole)
        for at in rng.integers(0, min(len(data), 900), 3):
            data[at] = rng.integers(0, 256)
        bad.write_bytes(data)
        try:
            read_torch_file(bad)
        except WeightsError as error:
            assert "bad.pth" in str(error)  # noqa: PT017


def test_a_flipped_bit_in_a_tensor_is_found_by_the_checksum(tmp_path):
    path = save(state(), tmp_path / "w.pth")
    whole = bytearray(path.read_bytes())
    at = whole.find(state()["conv1.weight"].numpy().tobytes())
    whole[at + 9] ^= 1
    path.write_bytes(whole)
    with pytest.raises(WeightsError, match=r"w\.pth is damaged: the checksum of its record w/data"):
        read_torch_file(path)


def rewritten(path, *, compression=zipfile.ZIP_STORED, extra=()):
    """The same archive, written by another zip program."""
    with zipfile.ZipFile(path) as archive:
        records = [(n, archive.read(n)) for n in archive.namelist()]
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in [*records, *extra]:
            archive.writestr(name, content)
    return path


def test_an_archive_of_another_zip_program_is_read(tmp_path):
    assert_is_state(tensors_of(rewritten(save(state(), tmp_path / "w.pth"))))


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path):
    path = rewritten(
        save(state(), tmp_path / "w.pth"),
        compression=zipfile.ZIP_DEFLATED,
        extra=[("w/data/9", bytes(50_000_000))],
    )
    assert path.stat().st_size < 100_000
    with pytest.raises(WeightsError, match=r"w\.pth is damaged: .*compressed"):
        read_torch_file(path)


def test_records_that_overlap_are_refused(tmp_path):
    path = save(state(), tmp_path / "w.pth")
    data = bytearray(path.read_bytes())
    at = data.find(b"PK\x01\x02")
    struct.pack_into("<II", data, at + 20, 2_000_000_000, 2_000_000_000)
    path.write_bytes(data)
    with pytest.raises(WeightsError, match="larger than the file"):
        read_torch_file(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_records_of_one_name_are_refused(tmp_path):
    path = rewritten(save(state(), tmp_path / "w.pth"), extra=[("w/data/0", b"\0" * 2352)])
    with pytest.raises(WeightsError, match="same name"):
        read_torch_file(path)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_tensor_that_claims_more_than_the_file_holds_is_refused(tmp_path, legacy):
    huge = torch.ones(1).expand(10_000_000_000_000)
    path = save({"a": huge}, tmp_path / "w.pth", legacy=legacy)
    with pytest.raises(WeightsError, match="tensors claim 40,000,000,000,000, so they share"):
        read_torch_file(path)


def forged_pickle(body):
    """A pickle of the legacy format whose object is `body`."""
    buffer = io.BytesIO()
    for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}):
        pickle.dump(value, buffer, protocol=2)
    return buffer.getvalue() + b"\x80\x02" + body + b"."


def test_an_object_that_only_takes_memory_is_refused(tmp_path):
    call = b"cbuiltins\nbytearray\n\x8a\x05" + (200_000_000).to_bytes(5, "little") + b"\x85R"
    path = tmp_path / "w.pth"
    path.write_bytes(forged_pickle(call))
    with pytest.raises(WeightsError, match="holds a bytearray"):
        read_torch_file(path)
    path = save(state(), tmp_path / "z.pth")
    with zipfile.ZipFile(path) as archive:
        records = {n: archive.read(n) for n in archive.namelist()}
    records["z/data.pkl"] = b"\x80\x02" + call + b"."
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    with pytest.raises(WeightsError, match="holds a bytearray"):
        read_torch_file(path)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3).to_sparse(),
        torch.ones(3, dtype=torch.complex64),
        torch.empty(3, device="meta"),
    ],
    ids=["sparse", "complex", "meta"],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_tensor_that_is_not_plain_numbers_is_refused(tmp_path, tensor):
    path = save({"conv1.weight": tensor}, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"conv1.weight in .*w.pth is not a plain tensor"):
        read_torch_file(path)


def safetensors_file(path, header, data=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(start, end, shape):
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


DOUBLED = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32"}}'


@pytest.mark.parametrize(
    ("header", "length", "what"),
    [
        ({"a": entry(0, 4, [1])}, 2**63, "header is said to be 9223372036854775808 bytes"),
        ({"a": entry(0, 4, [1])}, 100, "header is said to be 100 bytes"),
        ({"a": entry(0, 4, [1])}, 9, "header is invalid"),
        ({"a": entry(0, 4_000_000_000, [1_000_000_000])}, None, "safetensors cannot read it"),
        ({"a": entry(0, 4, [1_000_000_000])}, None, "safetensors cannot read it"),
        ({"a": entry(0, 4, [2**62, 4])}, None, "safetensors cannot read it"),
        ({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, None, "safetensors cannot read it"),
        ({"a": entry(2, 6, [1])}, None, "safetensors cannot read it"),
        ({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, None, "cannot read it"),
        (DOUBLED, None, "'a' occurs twice"),
        (b'{"a":' + b"[" * 100_000, None, "header is invalid"),
        (b'{"a":\xff}', None, "header is invalid"),
    ],
)
def test_a_forged_safetensors_header_is_refused(tmp_path, header, length, what):
    path = safetensors_file(tmp_path / "w.safetensors", header, b"\0" * 4, length=length)
    assert is_torch_file(path)
    with pytest.raises(WeightsError, match=what) as caught:
        read_torch_file(path)
    assert "w.safetensors is damaged" in str(caught.value)


def test_a_file_of_our_own_needs_no_conversion(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file(state(), path, metadata={"format": "anysize-weights-1"})
    with pytest.raises(WeightsError, match="is a file of Anysize already"):
        read_torch_file(path)
    save_file(state(), path, metadata={"format": "pt"})
    assert len(tensors_of(path)) == 3
