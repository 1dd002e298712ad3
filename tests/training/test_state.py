import pytest
import torch

from anysize.config import ModelConfig, OptimConfig
from anysize.errors import WeightsError
from anysize.models.build import build_model
from anysize.training.optim import build_optimizer
from anysize.training.state import load_latest_state, save_state

CONFIG = ModelConfig(units=(1, 1, 1, 1), base_depth=4)


def tiny(seed=0, config=CONFIG, num_classes=2):
    return build_model(config, num_classes, generator=torch.Generator().manual_seed(seed))


def stepped(kind):
    model = tiny()
    optimizer = build_optimizer(model, OptimConfig(kind=kind))
    for _ in range(3):
        for i, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, 0.1 * i)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_restored_state_steps_on_bit_for_bit(tmp_path, kind):
    model, optimizer = stepped(kind)
    save_state(tmp_path, step=3, made_of={"images": "d"}, model=model, optimizer=optimizer)
    other = tiny(seed=9)
    other_optimizer = build_optimizer(other, OptimConfig(kind=kind))
    state = load_latest_state(tmp_path)
    assert (state.step, state.made_of) == (3, {"images": "d"})
    state.restore(other, other_optimizer)
    for m, o in ((model, optimizer), (other, other_optimizer)):
        for i, p in enumerate(m.parameters()):
            p.grad = torch.full_like(p, 0.3 * i)
        o.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_all_state_of_the_optimiser_goes_to_the_device_of_its_parameter(tmp_path, kind):
    """Fused optimisers refuse a `step` that stayed on the CPU; "meta" stands for a GPU."""
    model, optimizer = stepped(kind)
    save_state(tmp_path, step=3, made_of={}, model=model, optimizer=optimizer)
    other = tiny().to("meta")
    restored = build_optimizer(other, OptimConfig(kind=kind))
    load_latest_state(tmp_path).restore(other, restored)
    tensors = [t for state in restored.state.values() for t in state.values()]
    assert len(tensors) >= len(list(other.parameters()))
    assert {t.device.type for t in tensors} == {"meta"}


def test_the_last_two_are_kept_and_the_older_is_taken_when_the_newest_is_damaged(tmp_path):
    model, optimizer = stepped("sgd")
    for step in (1, 2, 3):
        save_state(tmp_path, step=step, made_of={}, model=model, optimizer=optimizer)
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files == ["step-00000002.safetensors", "step-00000003.safetensors"]
    newest = tmp_path / files[1]
    data = bytearray(newest.read_bytes())
    data[-5] ^= 1
    newest.write_bytes(data)
    state = load_latest_state(tmp_path)
    assert state.step == 2
    assert "checksum" in state.damaged[0]
    (tmp_path / files[0]).write_bytes(b"")
    with pytest.raises(WeightsError, match="No checkpoint in"):
        load_latest_state(tmp_path)


def test_no_checkpoint_at_all_is_not_an_error(tmp_path):
    assert load_latest_state(tmp_path) is None


def test_the_checksum_covers_what_is_said_about_the_tensors(tmp_path):
    model, optimizer = stepped("sgd")
    path = save_state(
        tmp_path,
        step=3,
        made_of={"images": "d"},
        model=model,
        optimizer=optimizer,
        tally={"num_skipped": 1},
    )
    data = path.read_bytes()
    assert data.count(b"num_skipped") == 1
    path.write_bytes(data.replace(b"num_skipped", b"num_skippee"))
    with pytest.raises(WeightsError, match="checksum does not match"):
        load_latest_state(tmp_path)
    path.write_bytes(data)
    assert load_latest_state(tmp_path).tally == {"num_skipped": 1}
