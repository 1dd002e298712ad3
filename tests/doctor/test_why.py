"""`anysize why` on scripts that do what scripts do; nothing here depends on how long it takes."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from anysize.doctor import why
from anysize.doctor.findings import DoctorError
from anysize.doctor.why import explain, watch
from anysize.errors import ConfigError

TRAINING = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters())


def train_step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train(num_steps):
    for _ in range(num_steps):
        train_step(torch.randn(16, 8))

"""


def written(folder, text):
    script = folder / "script.py"
    script.write_text(TRAINING + textwrap.dedent(text))
    return script


def run_why(*arguments, **more):
    code = "import sys; from anysize.cli import main; sys.exit(main())"
    environment = {**os.environ, "TMPDIR": str(more.get("cwd", "/tmp"))}  # noqa: TID251
    return subprocess.run(
        [sys.executable, "-c", code, "why", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=300, env=environment, **more,
    )  # fmt: skip


def test_a_script_that_is_not_there_is_an_error_before_anything_runs(tmp_path):
    done = run_why(tmp_path / "no.py")
    assert done.returncode == 2
    assert "no.py is not there" in done.stderr
    with pytest.raises(ConfigError, match="at least 2 steps"):
        watch(written(tmp_path, ""), num_steps=1)
    done = run_why("--json", tmp_path / "no" / "a.json", written(tmp_path, ""))
    assert (done.returncode, done.stdout) == (2, "")
    assert "its folder is not there" in done.stderr


def test_a_script_that_never_imports_pytorch_keeps_its_exit_code(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('hello')\nsys.exit('no good')\n")
    done = run_why(script)
    assert (done.returncode, done.stdout) == (1, "hello\n")
    assert done.stderr.startswith("no good\n")
    assert "Seen: no optimiser step, no backward call, no DataLoader" in done.stderr


def test_a_script_that_fails_at_import_shows_its_own_traceback_first(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("x = 1\nimport no_such_module_at_all\n")
    done = run_why(script)
    assert done.returncode == 1
    shown, said = done.stderr.split("anysize: ")
    assert shown.startswith('Traceback (most recent call last):\n  File "')
    assert "line 2, in <module>" in shown
    assert "probe.py" not in shown
    assert "nothing to measure" in said


def test_a_syntax_error_is_shown(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("for\n")
    done = run_why(script)
    assert done.returncode == 1
    assert "SyntaxError" in done.stderr


def test_a_script_that_raises_in_step_three_is_judged_by_what_was_seen(tmp_path):
    script = written(tmp_path, "train(3)\nraise RuntimeError('in step three')\n")
    done = run_why(script)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: in step three")
    assert "probe.py" not in done.stderr
    assert "2 steps" in done.stdout
    assert "ended by itself, exit code 1" in done.stdout


def test_a_script_that_trains_no_optimiser_is_told_what_was_seen(tmp_path):
    script = written(tmp_path, "model(torch.zeros(1, 8)).sum().backward()\nsys.exit(3)\n")
    watched = watch(script)
    assert watched.code == 3
    with pytest.raises(DoctorError, match="backward call"):
        explain(watched)


def test_weights_are_the_same_bit_for_bit_with_and_without_the_probe(tmp_path):
    end = """
    try:
        train(12)
    finally:
        with open(sys.argv[1], "wb") as file:
            file.write(b"".join(t.numpy().tobytes() for t in model.state_dict().values()))
        print(torch.rand(1).item())
    """
    script = written(tmp_path, end)
    with_probe, without = tmp_path / "with.pt", tmp_path / "without.pt"
    done = run_why("--steps", 12, script, with_probe)
    plain = subprocess.run(
        [sys.executable, script, without], check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "stopped at the end of a step" in done.stdout
    assert without.read_bytes() == with_probe.read_bytes()
    # The random state is where it was as well, and the control: another number of steps differs.
    assert done.stdout.splitlines()[0] == plain.stdout.strip()
    run_why("--steps", 11, script, with_probe)
    assert without.read_bytes() != with_probe.read_bytes()


BUSY = """
import argparse, json, multiprocessing, os
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        print("fetched", file=sys.stderr)
        return torch.full((8,), float(index))


def double(x):
    return 2 * x


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    parser.add_argument("folder")
    arguments = parser.parse_args()
    typed = input("name? ")
    os.chdir(arguments.folder)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        four = pool.map(double, [2])
    try:
        for x in DataLoader(Numbers(), batch_size=4, num_workers=2):
            train_step(x)
    finally:
        print(json.dumps([typed, arguments.lr, four, __file__, sys.argv[0], sys.path[0]]))
"""


def test_a_script_with_workers_stdin_spawn_arguments_and_a_folder_of_its_own(tmp_path):
    script = written(tmp_path, BUSY)
    (tmp_path / "elsewhere").mkdir()
    done = run_why(
        "--steps", 9, "--json", "why.json", "--html", "why.html", "script.py", "--lr", "0.5",
        "elsewhere", cwd=tmp_path, input="me\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[0].removeprefix("name? ")
    assert json.loads(line) == ["me", 0.5, [4], str(script), "script.py", str(tmp_path)]
    # PyTorch makes its own empty folder of a compiler's cache, with the probe and without.
    made = {path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")}
    assert made == {
        "script.py", "elsewhere", "why.json", "why.html",
    }  # fmt: skip
    assert not list((tmp_path / "elsewhere").iterdir())
    report = json.loads((tmp_path / "why.json").read_text())
    assert len(report["steps"]) == 8
    assert report["facts"]["loaders"][0]["num_workers"] == 2
    assert all(step["shape"] == [4, 8] for step in report["steps"])
    stages = report["verdict"]["stages"]
    assert sum(s for _, s in stages) == pytest.approx(report["verdict"]["wall_s"])
    page = (tmp_path / "why.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "http" not in page.replace("http-equiv", "")


def test_a_script_that_swallows_everything_is_ended(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(why, "GRACE_S", 0.5)
    loop = """
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        try:
            train(1)
        except BaseException:
            pass
    """
    watched = watch(written(tmp_path, loop), num_steps=6, controls=False)
    assert (watched.ended, watched.code) == ("killed", 0)
    assert len(watched.record.steps) == 5
    assert explain(watched).wall_s > 0


def test_a_script_whose_process_dies_gives_what_was_written(tmp_path):
    watched = watch(written(tmp_path, "train(5)\nimport os\nos._exit(7)\n"))
    assert (watched.code, len(watched.record.steps)) == (7, 4)
    explain(watched)
    watched = watch(written(tmp_path, "train(5)\nimport os\nos.kill(os.getpid(), 9)\n"))
    assert watched.code == 128 + 9


def test_the_environment_a_script_sets_is_set_before_pytorch_is_imported(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nassert 'torch' not in sys.modules\nos.environ['OMP_NUM_THREADS'] = '1'\n"
        "import torch\nassert torch.__spec__.loader.__class__.__name__ == 'SourceFileLoader'\n"
        "sys.exit(6 + torch.get_num_threads())\n"
    )
    assert watch(script).code == 7


def test_scripts_that_are_planted_are_the_ones_that_are_tested():
    planted = {path.stem for path in (Path(__file__).parent / "scripts").glob("*.py")}
    assert len(planted) >= 16
