"""A process that compiles ahead for devices emulated on the CPU: it runs when training leaves the CPU idle.

Layer 3. `ProcessWorker` starts it and talks to it: topologies come on its standard input as JSON, a line each, and it
writes a line for each program. It ends when its standard input does, and so with the process that started it.
"""

import argparse
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import final

import jax

from ntpjax.ahead import compile_ahead, take_all, work
from ntpjax.mesh import emulate_cpu_devices
from ntpjax.program import load_blueprint
from ntpjax.topology import Topology

_RUN_S, _STOP_S = 1.0, 0.5


@final
class ProcessWorker:
    """Compiles in a process of its own, which is started when there is something to do.

    Args:
      program, config: the training program, and the configuration of the run.
      identity: of the program store of the run.
      process_of: the training process of each device, by number.
      log: file for what the process says of errors.
    """

    def __init__(self, program: Path, config: Path, identity: str, process_of: Sequence[int], log: Path) -> None:
        self._command = [sys.executable, "-m", "ntpjax.ahead_process", str(program), str(config), identity]
        self._command.append(json.dumps(process_of))
        self._log = log
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._process: subprocess.Popen[str] | None = None

    def begin(self, topology: Topology) -> None:
        self._process = self._process or self._start()
        assert self._process.stdin is not None
        # It may have ended: `failure` tells.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(asdict(topology)) + "\n")
            self._process.stdin.flush()

    def take_lines(self) -> list[str]:
        return take_all(self._lines)

    def failure(self) -> str | None:
        if self._process is None or self._process.poll() is None:
            return None
        said = self._log.read_text().splitlines() or ["nothing"]
        return f"its process ended with exit code {self._process.returncode} and said '{said[-1]}' (see {self._log})"

    def close(self) -> None:
        if self._process is None:
            return
        # Its files get their names when they are whole.
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _start(self) -> subprocess.Popen[str]:
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "JAX_ENABLE_X64": str(int(jax.config.read("jax_enable_x64"))),
        }
        with self._log.open("w") as log:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | environment,
                text=True,
                # Ctrl-C is for the training process, which closes this one. In a session of its own it would not be
                # ended by the system if it is stopped when the training process is killed.
                process_group=0,
            )
        _yield_cpu(process.pid)
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        threading.Thread(target=_pace, args=(process,), daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._lines.put(line.rstrip())


def _yield_cpu(pid: int) -> None:
    """Lets a process run only when nothing else wants to. A process may always do less."""
    if sys.platform == "linux":
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.setpriority(os.PRIO_PROCESS, pid, 19)


def _pace(process: subprocess.Popen[str]) -> None:
    """Stops the process part of the time: steps on all cores suffer from whatever runs between them."""
    while process.poll() is None:
        time.sleep(_RUN_S)
        process.send_signal(signal.SIGSTOP)
        time.sleep(_STOP_S)
        process.send_signal(signal.SIGCONT)


def main() -> None:
    """Compiles for the topologies on standard input."""
    parser = argparse.ArgumentParser(prog="python -m ntpjax.ahead_process", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("config", type=Path)
    parser.add_argument("identity")
    parser.add_argument("process_of", type=json.loads)
    args = parser.parse_args()
    topologies: SimpleQueue[Topology | None] = SimpleQueue()
    threading.Thread(target=_read, args=(topologies,), daemon=True).start()
    emulate_cpu_devices(len(args.process_of))
    plan = load_blueprint(args.program, args.config, [])
    assert plan.training_on is not None and plan.num_rows is not None
    training, num_rows = plan.training_on(jax.devices()), plan.num_rows
    if training.store.identity != args.identity:
        sys.exit("the code is not that with which training was started")
    compile_next = functools.partial(
        compile_ahead,
        training,
        plan.row,
        lambda after: num_rows(after.degrees),
        plan.tp_min,
        args.process_of,
        sorted(set(args.process_of)),
    )
    work(topologies, compile_next, functools.partial(print, flush=True))


def _read(topologies: "SimpleQueue[Topology | None]") -> None:
    for line in sys.stdin:
        topology = json.loads(line)
        replicas, lost = (tuple(map(tuple, topology[name])) for name in ("replicas", "lost"))
        topologies.put(Topology(topology["nominal_tp"], replicas, tuple(topology["spares"]), lost))
    # Not when the program at hand is compiled, but now.
    os._exit(0)


if __name__ == "__main__":
    main()
