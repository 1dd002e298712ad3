"""`anysize why` on scripts that do what scripts do; nothing here depends on how long it takes."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from anysize_why import why
from anysize_why.counts import counts_json
from anysize_why.findings import WhyError
from anysize_why.why import explain, watch

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
    code = "import sys; from anysize.cli.main import main; sys.exit(main())"
    environment = {**os.environ, "TMPDIR": str(more.get("cwd", "/tmp"))}  # noqa: TID251
    return subprocess.run(
        [sys.executable, "-c", code, "why", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=300, env=environment, **more,
    )  # fmt: skip


def test_a_script_that_is_not_there_is_an_error_before_anything_runs(tmp_path):
    done = run_why(tmp_path / "no.py")
    assert done.returncode == 2
    assert "no.py does not exist" in done.stderr
    with pytest.raises(WhyError, match="at least 2 steps"):
        watch(written(tmp_path, ""), num_steps=1)
    done = run_why("--json", tmp_path / "no" / "a.json", written(tmp_path, ""))
    assert (done.returncode, done.stdout) == (2, "")
    assert "its folder does not exist" in done.stderr


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
    with pytest.raises(WhyError, match="backward call"):
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


COUNTED = """
import os, threading
from torch import nn


class Wide(nn.Module):
    def forward(self, x):
        return x.double().contiguous(memory_format=torch.channels_last).float().contiguous().clone()


def write():
    for number in range(10**6):
        os.write(1, f"{number}\\n".encode())
        threading.Event().wait(0.0005)


threading.Thread(target=write, daemon=True).start()
net = nn.Sequential(nn.Conv2d(8, 16, 3), Wide(), nn.Conv2d(16, 8, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for number in range(100):
    net(torch.randn(8, 8, 24, 24 + number % 5)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_copies_and_primitives_are_counted_and_no_line_of_the_script_is_lost(tmp_path):
    done = run_why("--steps", 12, "--json", tmp_path / "why.json", written(tmp_path, COUNTED))
    assert done.returncode == 0, done.stderr
    assert "onednn_verbose" not in done.stdout + done.stderr
    # The numbers that a thread writes while oneDNN's log is read all come, and each once.
    lines = [int(line) for line in done.stdout.splitlines() if line.isdigit()]
    assert sorted(lines) == list(range(len(lines)))
    report = json.loads((tmp_path / "why.json").read_text())
    copies = report["controls"]["copies"]
    size = 8 * 16 * 22 * (22 + 11 % 5)
    # To double and back, and the same for the gradient.
    assert copies["dtype"]["calls"] == 4
    assert copies["dtype"]["bytes"] == 2 * size * (8 + 4)
    assert copies["memory format"]["calls"] >= 2
    assert copies["copies"]["calls"] >= 1
    assert copies["between devices"] == {"calls": 0, "bytes": 0}
    assert report["counts"]["conversions of dtype"]["calls"] == 4
    if torch.backends.mkldnn.is_available():
        again, new = (report["controls"][f"primitives {name}"] for name in ("again", "new"))
        assert again["made"] == 0
        assert again["from_cache"] > 0
        assert new["made"] > 0
        assert report["counts"]["primitives made, new shape"]["calls"] == new["made"]


def test_a_tool_that_is_missing_gives_fewer_counts_and_no_crash(tmp_path):
    no_log = """
    def broken(level):
        raise RuntimeError("no oneDNN here")

    torch.backends.mkldnn.verbose = broken
    train(100)
    """
    watched = watch(written(tmp_path, no_log), num_steps=9, seconds=4)
    found = explain(watched)
    if torch.backends.mkldnn.is_available():
        assert "not tried, primitives again: RuntimeError: no oneDNN here" in found.harmless
    names = set(counts_json(watched.record))
    assert "primitives made, shape seen before" not in names
    assert {"page faults", "conversions of dtype", "recompiles", "synchronisations"} <= names


def test_a_gpu_that_is_missing_is_the_scripts_own_error(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    done = run_why(written(tmp_path, "train(4)\nmodel.to('cuda')\n"))
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert "probe.py" not in done.stderr
    assert "3 steps" in done.stdout


ON_A_DEVICE = """
import queue, threading, time
from anysize_why import controls, probe, replay

work = queue.Queue()


def device():
    while True:
        time.sleep(work.get())
        work.task_done()


class Queued(torch.nn.Linear):
    def forward(self, x):
        work.put(0.1)
        return super().forward(x)


threading.Thread(target=device, daemon=True).start()
torch.cuda.synchronize = lambda device=None: work.join()
replay.works_ahead = controls.works_ahead = lambda tensor: True
probe.device_of = lambda model: "cuda"
net = Queued(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(50):
    began = time.perf_counter()
    net(torch.ones(1, 8)).square().mean().backward()
    optimizer.step()
    if "mended" in sys.argv:
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    torch.cuda.synchronize()
"""


@pytest.mark.parametrize("mended", [False, True])
def test_a_clock_that_does_not_wait_for_a_stand_in_of_a_device_is_found(tmp_path, mended):
    """The device is a thread that sleeps; on a real one this was never run."""
    script = written(tmp_path, ON_A_DEVICE)
    watched = watch(script, ["mended"] if mended else [], num_steps=12, seconds=4)
    waits = watched.record.facts["device_waits"]
    lines = {line for wait in waits for file, line in wait["places"] if file == str(script)}
    assert len(lines) == 1 + mended
    control = watched.record.controls["queued"]
    assert min(control["done"]) >= 0.1
    causes = [finding.cause for finding in explain(watched).findings]
    wrong = "the script's own clock is wrong: it does not wait for the device"
    assert (wrong in causes) != mended


def test_a_script_that_exits_after_some_steps_shows_its_own_words_before_the_verdict(tmp_path):
    script = written(tmp_path, "train(6)\nprint('done', file=sys.stderr)\nsys.exit(5)\n")
    script.write_text(script.read_text().replace("sys.exit(5)", "sys.exit('no more')"))
    code = "import sys; from anysize.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "why", script],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout.startswith("done\nno more\nanysize why")
    assert "5 steps" in done.stdout


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(5)", 5), ("", 0)])
def test_a_script_that_ends_early_keeps_its_exit_code(tmp_path, ending, code):
    watched = watch(written(tmp_path, f"train(4)\n{ending}\n"), controls=False)
    assert (watched.code, watched.ended, len(watched.record.steps)) == (code, "by itself", 3)
    explain(watched)


def test_a_script_that_forks_is_timed_in_its_own_process_only(tmp_path):
    forks = """
    import os
    for number in range(3):
        child = os.fork()
        if not child:
            train(7)
            print("child", number, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        train(2)
    if not os.fork():
        sys.exit(9)  # A child that ends as the script does.
    os.wait()
    print("parent", flush=True)
    """
    done = run_why("--json", tmp_path / "why.json", written(tmp_path, forks))
    said = done.stdout.splitlines()
    assert said[:4] == ["child 0", "child 1", "child 2", "parent"]
    assert done.returncode == 0
    assert len(json.loads((tmp_path / "why.json").read_text())["steps"]) == 5


def test_a_script_that_reads_more_than_there_is_fails_with_its_own_error(tmp_path):
    done = run_why(written(tmp_path, "train(4)\ninput()\n"), input="")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("EOFError: EOF when reading a line")
    assert "3 steps" in done.stdout


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
