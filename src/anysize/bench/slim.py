"""TF-Slim as an arm: a process of another Python that speaks lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from anysize.bench.arms import LEARNING_RATE, MOMENTUM, NUM_CLASSES, Arm, OptimiserStep
from anysize.bench.summary import BenchError
from anysize.bench.worker import died
from anysize.config import ModelConfig
from anysize.errors import ConfigError
from anysize.models.levels import has_basic_units, units_of

PEER = Path(__file__).with_name("slim_peer.py")


class SlimWorker:
    """The real tf_slim in a process of its own."""

    def __init__(self, arm: Arm, config: ModelConfig, python: Path) -> None:
        self.name = arm.name
        net = {
            "units": units_of(config),
            "output_stride": config.output_stride,
            "num_classes": NUM_CLASSES,
            "learning_rate": LEARNING_RATE,
            "momentum": MOMENTUM,
        }
        self._peak_bytes = 0
        # What TensorFlow says of itself is only of use when it dies.
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(python), "-W", "ignore", str(PEER), json.dumps(net)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            process_group=0,
        )

    def wait_until_ready(self) -> None:
        """Returns when its net is built.

        Raises:
            BenchError: It could not be built; the message has TensorFlow's last words.
        """
        self._answer()

    def step(self, layouts: OptimiserStep) -> float:
        """Seconds of a step, which is one image.

        Raises:
            BenchError: The process died.
        """
        sizes = [list(p.size) for layout in layouts for p in layout.placements]
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # The answer says that it died.
            self._process.stdin.write(json.dumps(sizes) + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        self._peak_bytes = answer["memory"]
        return sum(answer["seconds"])

    def peak_memory_bytes(self) -> int:
        """The most memory that it held so far."""
        return self._peak_bytes

    def close(self) -> None:
        """Ends it, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        try:
            return json.loads(line)
        except ValueError:
            self._process.kill()
            code = self._process.wait()
            self._said.seek(0)
            words = [text.strip() for text in self._said.read().splitlines() if text.strip()]
            last = f" It said: {words[-1][:300]}" if words else ""
            raise BenchError(f"{died(self.name, code)}{last}") from None


def require_peer(python: Path, config: ModelConfig) -> None:
    """Checks what can be checked before anything is measured.

    Raises:
        ConfigError: There is no such Python, it has no tf_slim, or the net is none of TF-Slim's.
    """
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise ConfigError(
            f"--peers is {python}, which is no program. Name the python of a venv that has "
            "TensorFlow and tf_slim; `make bench-peers` makes one."
        )
    if has_basic_units(config):
        raise ConfigError("--peers goes with --depth 50 and more: tf_slim has bottlenecks only.")
    if config.base_depth != 64:
        raise ConfigError("--peers goes with --base-depth 64: tf_slim's stem has 64 channels.")
    looks = "import importlib.util as u, sys; sys.exit(not (u.find_spec('tf_slim')))"
    try:
        done = subprocess.run([str(python), "-c", looks], capture_output=True, check=False)
    except OSError as error:
        raise ConfigError(f"--peers is {python}, which does not run: {error.strerror}.") from None
    if done.returncode:
        raise ConfigError(
            f"--peers is {python}, which has no tf_slim. `make bench-peers` makes a venv with it."
        )
