"""How long a loss stops training: `python benchmarks/failover.py`, on the demo's configuration.

Measured from the moment of a loss to the end of the next committed step: with the programs compiled ahead (A), without
(B), and when training stops with a checkpoint and a new process resumes, on the devices that are left and with the same
compiled programs (C).
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any, final

sys.path.insert(0, str(Path(__file__).parent.parent))

from ntpjax.config import load
from ntpjax.exit_codes import ExitCode
from ntpjax.records import Note, Record, StepDone
from train import Config, read_tokens, run, set_up_jax

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "demo.yaml"
NUM_LOSSES = 5
NUM_RESTARTS = 3
NUM_COLD = 2
NUM_QUIET_STEPS = 50
NO_EVENTS = ("schedule.fail=[]", "schedule.restore=[]", "eval.every=0", "run.steps=100000")


@final
class LossesWhenReady:
    """Loses a device of either replica in turn, when what may follow is compiled, and gives it back.

    A failure source and a sink. After the last failover it loses two devices at once: with `tp_min=3` training stops.
    """

    def __init__(self, num_losses: int, *, compiles_ahead: bool) -> None:
        self.failovers_s: list[float] = []
        self.steps_s: dict[bool, list[float]] = {False: [], True: []}  # by whether all is compiled
        self.lost_at = 0.0
        self._num_losses = num_losses
        self._is_ready = not compiles_ahead
        self._waits = compiles_ahead
        self._num_steps = 0  # on this topology, of which those count that are not slowed down
        self._is_reduced = False
        self._is_recovering = False

    def returned(self, step: int) -> tuple[int, ...]:
        if not self._is_reduced or self._num_steps < NUM_QUIET_STEPS:
            return ()
        self._begin(is_reduced=False)
        return ((len(self.failovers_s) - 1) % 2,)

    def lost(self, step: int) -> tuple[tuple[int, int], ...]:
        if self._is_reduced or self._num_steps < NUM_QUIET_STEPS:
            return ()
        self.lost_at, self._is_recovering = time.monotonic(), True
        self._begin(is_reduced=True)
        count = len(self.failovers_s)
        return ((0, 3), (0, 2)) if count == self._num_losses else ((count % 2, count % 4),)

    def emit(self, record: Record) -> None:
        if isinstance(record, Note):
            self._is_ready |= record.text.startswith("all that may follow TP 4|4")
        if not isinstance(record, StepDone):
            return
        if self._is_recovering:
            self.failovers_s.append(time.monotonic() - self.lost_at)
            self._is_recovering = False
        elif not self.failovers_s:
            self.steps_s[self._is_ready].append(record.step_time_s)
        self._num_steps += self._is_ready or self._is_reduced

    def close(self) -> None:
        pass

    def _begin(self, *, is_reduced: bool) -> None:
        self._num_steps, self._is_reduced, self._is_ready = 0, is_reduced, not self._waits


def settings_of(folder: Path) -> list[str]:
    return [f"run.dir={folder}", *NO_EVENTS]


def train_here(folder: Path, num_losses: int, *, compiles_ahead: bool) -> None:
    """Trains with losses until it stops below tp_min, and prints what it measured."""
    ahead = f"run.compile_ahead={str(compiles_ahead).lower()}"
    config = load(Config, CONFIG, [*settings_of(folder), ahead, "topology.tp_min=3"])
    tokens, processes = read_tokens(config.data, config.run.seed), set_up_jax(config.run)
    losses = LossesWhenReady(num_losses, compiles_ahead=compiles_ahead)
    trained = run(config, tokens, processes, losses, failures=losses)
    assert trained.ended.exit_code == ExitCode.BELOW_TP_MIN, trained.ended.reason
    print(json.dumps([losses.failovers_s, *losses.steps_s.values(), losses.lost_at]), flush=True)


def train_elsewhere(folder: Path, num_losses: int, *, compiles_ahead: bool) -> Any:
    """What `train_here` prints, in a process of its own."""
    command = [sys.executable, __file__, "--dir", str(folder), "--losses", str(num_losses)]
    done = subprocess.run([*command, *["--ahead"] * compiles_ahead], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def stop_and_restart(folder: Path) -> float:
    """Seconds from the loss that stops training to the first step of a new process, which has compiled programs."""
    *_, lost_at = train_elsewhere(folder, 0, compiles_ahead=False)
    settings = [*settings_of(folder), "run.cpu_devices=7", "topology.tp=[4,3]", "run.compile_ahead=false"]
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(CONFIG)]
    with subprocess.Popen(
        [*command, *(word for one in settings for word in ("--set", one))], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if re.match(r"step \d+/", line):
                break
        # This clock is the same in all processes.
        time_s = time.monotonic() - lost_at
        process.kill()
    said = "".join(lines)
    if "loading the compiled step" not in said or "resumes from" not in said:
        sys.exit(f"the restart did not resume with compiled programs:\n{said}")
    return time_s


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a loss stops training.")
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--losses", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ahead", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dir:
        train_here(args.dir, args.losses, compiles_ahead=args.ahead)
        return
    with tempfile.TemporaryDirectory() as folder:
        print(f"{NUM_LOSSES} losses compiled ahead ...", flush=True)
        ahead, compiling, quiet, _ = train_elsewhere(Path(folder, "ahead"), NUM_LOSSES, compiles_ahead=True)
        slowdown = mean(compiling[1:]) / mean(quiet)
        print(f"step while compiling ahead / quiet step = {slowdown:.2f} ({len(compiling)} and {len(quiet)} steps)")
        print("from loss to the next committed step, s:", *(f"{time_s:.2f}" for time_s in ahead))
        print(f"{NUM_RESTARTS} stops and restarts ...", flush=True)
        restarts = [stop_and_restart(Path(folder, "ahead")) for _ in range(NUM_RESTARTS)]
        print("from loss to the next committed step, s:", *(f"{time_s:.2f}" for time_s in restarts))
        print(f"{NUM_COLD} losses not compiled ahead ...", flush=True)
        cold = [train_elsewhere(Path(folder, f"cold{i}"), 1, compiles_ahead=False)[0][0] for i in range(NUM_COLD)]
    a, b, c = median(ahead), median(cold), median(restarts)
    print(f"failover_s {a:.2f} cold_s {b:.2f} restart_s {c:.2f} ratio {a / c:.3f}")


if __name__ == "__main__":
    main()
