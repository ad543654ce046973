"""Programs compiled ahead: in the background, for the topologies that may come next.

Layer 2. `Ahead` is what the trainer calls between steps; a worker does the compiling. Threads of the training process
are one (`ThreadWorker`). Where the devices are the CPU that compiles as well, threads would slow every step, and
`ntpjax.ahead_process` has another one.
"""

import functools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Protocol, final

from ntpjax.records import Note, Record
from ntpjax.topology import Topology, format_degrees
from ntpjax.training import Training

CompileNext = Callable[[Topology], Iterator[str]]


class Worker(Protocol):
    """Compiles what may follow a topology."""

    def begin(self, topology: Topology) -> None:
        """Forget about an earlier topology, and compile what may follow this one."""
        ...

    def take_lines(self) -> list[str]:
        """What was compiled since the last call, a text for the user each."""
        ...

    def failure(self) -> str | None:
        """Why nothing is compiled any more, if so."""
        ...

    def close(self) -> None: ...


@final
class Ahead:
    """Called after every committed step, off the devices: it returns at once."""

    def __init__(self, worker: Worker, emit: Callable[[Record], None]) -> None:
        self._worker = worker
        self._emit = emit
        self._begun: Topology | None = None
        self._has_failed = False

    def between_steps(self, step: int, topology: Topology) -> None:
        """Says what the live devices are, and reports what was compiled since the last step."""
        for line in self._worker.take_lines():
            self._emit(Note(step, line, "info"))
        failure = None if self._has_failed else self._worker.failure()
        if failure is not None:
            self._has_failed = True
            text = f"nothing is compiled ahead any more: {failure}; training goes on, and compiles when it must"
            self._emit(Note(step, text, "warning"))
        if topology != self._begun and not self._has_failed:
            self._begun = topology
            self._worker.begin(topology)

    def close(self) -> None:
        self._worker.close()


def compile_ahead(
    training: Training,
    row: Any,
    num_rows: Callable[[Topology], Sequence[int]],
    tp_min: int,
    process_of: Sequence[int],
    processes: Collection[int],
    topology: Topology,
) -> Iterator[str]:
    """Compiles what may be needed after `topology`, the likeliest first, for the store of `training`.

    Replicas of equal degree share a program, and so do all losses of one replica, whichever device it is.

    Args:
      row: shapes and types of one row of a batch.
      num_rows: a topology to the rows of each replica.
      tp_min: with a smaller degree training does not go on.
      process_of: the process of each device, by number.
      processes: those that are compiled for.

    Yields:
      A text for each topology and process for which a program was not there, and one at the end.
    """
    for after in topology.next_topologies():
        if min(after.degrees) < tp_min:
            continue
        for process in processes:
            own_devices = [number for number, holder in enumerate(process_of) if holder == process]
            generation, started = training.on(after, own_devices, process_of), time.monotonic()
            if not generation.flat.own_positions:
                continue
            rows = num_rows(after)
            was_compiled = generation.is_compiled(row, rows)
            generation.compile_ahead(row, rows, training.on(topology, own_devices, process_of))
            if not was_compiled:
                yield f"compiled ahead for TP {format_degrees(after.degrees)}, in {time.monotonic() - started:.1f} s"
    yield f"all that may follow TP {format_degrees(topology.degrees)} is compiled"


def work(topologies: "SimpleQueue[Topology | None]", compile_next: CompileNext, tell: Callable[[str], None]) -> None:
    """Compiles for each topology of the queue, until the next one is there; None ends it."""
    while (topology := topologies.get()) is not None:
        for line in compile_next(topology):
            tell(line)
            if not topologies.empty():
                break


@final
class ThreadWorker:
    """A thread of this process, for devices that do not need the CPU."""

    def __init__(self, compile_next: CompileNext) -> None:
        self._topologies: SimpleQueue[Topology | None] = SimpleQueue()
        self._lines: SimpleQueue[str] = SimpleQueue()
        target = functools.partial(work, self._topologies, compile_next, self._lines.put)
        # XLA's threads may not outlive the interpreter: not a daemon, and `close` waits for the program at hand.
        self._thread = threading.Thread(target=target, name="compile-ahead")
        self._thread.start()

    def begin(self, topology: Topology) -> None:
        self._topologies.put(topology)

    def take_lines(self) -> list[str]:
        return take_all(self._lines)

    def failure(self) -> str | None:
        return None if self._thread.is_alive() else "its thread has ended with the error above"

    def close(self) -> None:
        self._topologies.put(None)
        self._thread.join()


def take_all(lines: "SimpleQueue[str]") -> list[str]:
    """All that is in the queue now."""
    return [lines.get() for _ in range(lines.qsize())]
