"""Starts the processes of a job on one machine: `python -m ntpjax.launch --processes 4 --config X`.

Each runs the training program, `train.py` by default, with the same arguments. When one of them ends with an error, the
others are ended too, and its exit code is returned.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ntpjax.exit_codes import ExitCode
from ntpjax.processes import Place

_POLL_S = 0.1
_GRACE_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code of the job: that of the first process that fails."""
    parser = argparse.ArgumentParser(prog="python -m ntpjax.launch", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, required=True, metavar="n", help="how many to start")
    parser.add_argument("--program", type=Path, default=Path("train.py"), help="what each of them runs")
    args, of_program = parser.parse_known_args(arguments)
    if args.processes < 1 or not args.program.is_file():
        wrong = f"--program {args.program} is not a file" if args.processes >= 1 else "--processes must be at least 1"
        print(f"error: {wrong}", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    coordinator = f"127.0.0.1:{free_port()}"
    command = [sys.executable, str(args.program), *of_program]
    places = [Place(index, args.processes, coordinator) for index in range(args.processes)]
    # A process of its own group: Ctrl-C reaches this one only, which passes it on.
    processes = [subprocess.Popen(command, env=os.environ | p.environment(), start_new_session=True) for p in places]
    try:
        return _wait(processes)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    finally:
        _end(processes)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits until all are done or one fails; returns its exit code."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [(index, code) for index, code in enumerate(codes) if code]
        if failed:
            index, code = failed[0]
            print(f"process {index} of {len(codes)} ended with exit code {code}; ending the others", file=sys.stderr)
            return code if code > 0 else 128 - code
        if None not in codes:
            return ExitCode.DONE
        time.sleep(_POLL_S)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
