"""How long a loss stops training: `python benchmarks/failover.py`, on the demo's configuration.

Measured from the moment of a loss to the end of the next committed step: with the programs compiled ahead (A), without
(B), and when training is killed and started again from its checkpoint by a new process, on the devices that are left
and with the same compiled programs (C). The step that C does first may be an earlier one: no repeated step counts.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import final

sys.path.insert(0, str(Path(__file__).parent.parent))

from ntpjax.config import load
from ntpjax.records import Note, Record, StepDone
from train import Config, read_tokens, run, set_up_jax

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "demo.yaml"
NUM_LOSSES = 5
NUM_RESTARTS = 3
NUM_COLD = 2
NUM_QUIET_STEPS = 100
CHECKPOINT_EVERY = 10
NO_EVENTS = ("schedule.fail=[]", "schedule.restore=[]", "eval.every=0", "run.steps=100000")


@final
class LossesWhenReady:
    """Loses a device of one replica when all that may follow is compiled, gives it back, and so on; then kills itself.

    A failure source and a sink.
    """

    def __init__(self, *, compiles_ahead: bool) -> None:
        self.failovers_s: list[float] = []
        self.steps_s: dict[bool, list[float]] = {False: [], True: []}  # by whether all is compiled
        self._is_ready = not compiles_ahead
        self._num_losses = NUM_LOSSES if compiles_ahead else 1
        self._num_steps = 0  # on this topology, with all compiled
        self._lost_at: float | None = None
        self._is_reduced = False

    def returned(self, step: int) -> tuple[int, ...]:
        if not self._is_due() or not self._is_reduced or self._lost_at:
            return ()
        self._is_reduced = False
        self._wait_again()
        return (len(self.failovers_s) % 2,)

    def lost(self, step: int) -> tuple[tuple[int, int], ...]:
        if not self._is_due() or self._is_reduced:
            return ()
        if len(self.failovers_s) == self._num_losses:
            print(json.dumps({"failovers_s": self.failovers_s, "steps_s": [*self.steps_s.values()]}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        self._is_reduced, self._lost_at = True, time.monotonic()
        self._wait_again()
        return ((1 - len(self.failovers_s) % 2, len(self.failovers_s) % 4),)

    def emit(self, record: Record) -> None:
        if isinstance(record, Note):
            self._is_ready |= record.text.startswith("all that may follow")
        if not isinstance(record, StepDone):
            return
        if self._lost_at is not None:
            self.failovers_s.append(time.monotonic() - self._lost_at)
            self._lost_at = None
        elif not self._is_reduced and not self.failovers_s:
            self.steps_s[self._is_ready].append(record.step_time_s)
        self._num_steps += self._is_ready

    def close(self) -> None:
        pass

    def _is_due(self) -> bool:
        return self._is_ready and self._num_steps >= NUM_QUIET_STEPS

    def _wait_again(self) -> None:
        self._num_steps, self._is_ready = 0, self._num_losses == 1


def settings_of(folder: Path) -> list[str]:
    return [f"run.dir={folder}", f"checkpoint.every={CHECKPOINT_EVERY}", *NO_EVENTS]


def train_here(folder: Path, *, compiles_ahead: bool) -> None:
    """Trains with losses until it kills itself."""
    config = load(Config, CONFIG, [*settings_of(folder), f"run.compile_ahead={str(compiles_ahead).lower()}"])
    tokens, processes = read_tokens(config.data, config.run.seed), set_up_jax(config.run)
    losses = LossesWhenReady(compiles_ahead=compiles_ahead)
    run(config, tokens, processes, losses, failures=losses)


def train_and_die(folder: Path, mode: str) -> dict[str, list]:
    """What `train_here` measured in a process of its own."""
    command = [sys.executable, __file__, "--train", mode, "--dir", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != -signal.SIGKILL:
        sys.exit(f"training ended with exit code {done.returncode}, and before it had measured")
    return json.loads(done.stdout.splitlines()[-1])


def restart(folder: Path) -> float:
    """Seconds until a new process, which has one device less, has done its first step; its programs were compiled."""
    settings = [*settings_of(folder), "run.cpu_devices=7", "topology.tp=[4,3]", "run.compile_ahead=false"]
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(CONFIG)]
    started = time.monotonic()
    with subprocess.Popen(
        [*command, *(word for one in settings for word in ("--set", one))], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if re.match(r"step \d+/", line):
                break
        time_s = time.monotonic() - started
        process.kill()
    said = "".join(lines)
    if "loading the compiled step" not in said or "resumes from" not in said:
        sys.exit(f"the restart did not resume with compiled programs:\n{said}")
    return time_s


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a loss stops training.")
    parser.add_argument("--train", choices=("ahead", "cold"), help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train_here(args.dir, compiles_ahead=args.train == "ahead")
        return
    with tempfile.TemporaryDirectory() as folder:
        print(f"{NUM_LOSSES} losses compiled ahead ...", flush=True)
        ahead = train_and_die(Path(folder, "ahead"), "ahead")
        compiling, quiet = ahead["steps_s"]
        slowdown = median(compiling[1:]) / median(quiet)
        print(f"step while compiling ahead / quiet step = {slowdown:.2f} ({len(compiling)} and {len(quiet)} steps)")
        print("from loss to the next committed step, s:", *(f"{time_s:.2f}" for time_s in ahead["failovers_s"]))
        print(f"{NUM_RESTARTS} restarts from the checkpoint ...", flush=True)
        restarts = [restart(Path(folder, "ahead")) for _ in range(NUM_RESTARTS)]
        print("from start to the first committed step, s:", *(f"{time_s:.2f}" for time_s in restarts))
        print(f"{NUM_COLD} losses not compiled ahead ...", flush=True)
        cold = [train_and_die(Path(folder, f"cold{i}"), "cold")["failovers_s"][0] for i in range(NUM_COLD)]
    a, b, c = median(ahead["failovers_s"]), median(cold), median(restarts)
    print(f"failover_s {a:.2f} cold_s {b:.2f} restart_s {c:.2f} ratio {a / c:.3f}")


if __name__ == "__main__":
    main()
