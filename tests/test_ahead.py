"""Programs compiled ahead: a foreseen loss compiles nothing, whichever device it is, and nobody waits."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax
import pytest
import yaml

import train
from ntpjax.ahead import Ahead, ThreadWorker, compile_ahead, work
from ntpjax.ahead_process import ProcessWorker
from ntpjax.job import Job
from ntpjax.records import Record, StepDone, TopologyChanged
from ntpjax.schedule import Loss, Return, Schedule
from ntpjax.topology import Topology
from tests.test_trainer import config_of, job_of, run_parts, settings

# Compiling is slow on a busy machine.
pytestmark = pytest.mark.timeout(300)

HEALTHY = Topology.of_degrees((4, 4))


@pytest.fixture
def num_compiled() -> Iterator[Callable[[], int]]:
    """How many programs this process has compiled by now."""
    count = 0

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        nonlocal count
        count += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: count
    jax.monitoring.unregister_event_duration_listener(listen)


def compile_next(job: Job, topology: Topology) -> list[str]:
    process_of = [0] * len(job.training.devices)
    return list(compile_ahead(job.training, job.row, job.num_rows, job.tp_min, process_of, [0], topology))


class Drill:
    """A failure source that follows a list, and compiles before each event what may come next, if it `foresees`.

    A sink too: it counts what is compiled from each event to the end of the next step.
    """

    def __init__(self, job: Job, num_compiled: Callable[[], int], *, foresees: bool) -> None:
        self.found: list[int] = []
        self.phases: list[tuple[str, ...]] = []
        self._schedule, self._job, self._foresees = Schedule(EVENTS), job, foresees
        self._num_compiled, self._before = num_compiled, None
        self._topology = HEALTHY

    def returned(self, step: int) -> tuple[int, ...]:
        returned = self._schedule.returned(step)
        for replica in returned:
            self._begin(self._topology.restore(replica))
        return returned

    def lost(self, step: int) -> tuple[tuple[int, int], ...]:
        lost = self._schedule.lost(step)
        for replica, rank in lost:
            self._begin(self._topology.lose(replica, rank))
        return lost

    def emit(self, record: Record) -> None:
        if isinstance(record, TopologyChanged):
            self.phases.append(tuple(record.phases_s))
        if isinstance(record, StepDone) and self._before is not None:
            self.found.append(self._num_compiled() - self._before)
            self._before = None

    def _begin(self, topology: Topology) -> None:
        if self._foresees:
            compile_next(self._job, self._topology)
        self._topology, self._before = topology, self._num_compiled()


EVENTS = (Loss(2, 1, 1), Return(4, 1), Loss(5, 0, 3), Loss(6, 1, 0))


@pytest.mark.parametrize("foresees", [True, False])
def test_a_foreseen_change_compiles_nothing(tmp_path: Path, num_compiled: Callable[[], int], foresees: bool):
    config = config_of(tmp_path, [4, 4], run={"steps": 7}, eval={"every": 1, "samples": 8})
    drill = Drill(job_of(config), num_compiled, foresees=foresees)
    trained, _ = run_parts(config, drill, recorder=drill)  # type: ignore[reportArgumentType]
    assert trained.ended.reason == "all steps done"
    if foresees:
        assert drill.found == [0] * len(EVENTS)
        assert drill.phases == [("reshard", "load")] * len(EVENTS)
    else:
        # The second time, 4|4 and 3|4 are there, but not what moves when a last rank is lost.
        assert drill.found[0] > drill.found[2] > 0
        assert [phases[-1] for phases in drill.phases] == ["compile", "load", "load", "compile"]


def test_one_compilation_serves_every_device_and_processes_compile_their_own(tmp_path: Path):
    job = job_of(config_of(tmp_path, [4, 4]))
    with jax.enable_x64(True):
        lines = compile_next(job, HEALTHY)
        assert [line.split(",")[0] for line in lines] == [
            "compiled ahead for TP 3|4",
            "all that may follow TP 4|4 is compiled",
        ]
        num_files = len(list((tmp_path / "programs").iterdir()))
        for replica in (0, 1):
            for rank in range(4):
                after = job.training.on(HEALTHY.lose(replica, rank))
                assert job.is_compiled(after)
                after.compile_ahead(job.row, job.num_rows(after.topology), job.training.on(HEALTHY))
        assert len(list((tmp_path / "programs").iterdir())) == num_files
        # Of two processes with a replica each, one computes with TP 3 only and one with TP 4 only.
        process_of = [0] * 4 + [1] * 4
        lines = list(compile_ahead(job.training, job.row, job.num_rows, 1, process_of, [0, 1], HEALTHY))
        assert [line.split(",")[0] for line in lines[:-1]] == ["compiled ahead for TP 3|4"] * 2
        after = HEALTHY.lose(1, 2)
        for own_devices in (range(4), range(4, 8)):
            assert job.is_compiled(job.training.on(after, own_devices, process_of))


def test_a_degree_below_tp_min_is_not_compiled(tmp_path: Path):
    job = job_of(config_of(tmp_path, [4, 4], topology={"tp_min": 4}))
    assert compile_next(job, HEALTHY) == ["all that may follow TP 4|4 is compiled"]
    assert not (tmp_path / "programs").exists()


def test_next_topologies_are_a_loss_of_each_degree_and_a_return():
    reduced = HEALTHY.lose(1, 0)
    found = [topology.degrees for topology in reduced.next_topologies()]
    # The likeliest: the last rank of a replica of each degree, and the device that is back; then other ranks.
    assert found[:3] == [(3, 3), (4, 2), (4, 4)]
    assert set(found[3:]) == {(3, 3), (4, 2)}
    assert [t.degrees for t in Topology.of_degrees((2, 2), spares=1).next_topologies()] == [(2, 2)] * 2
    assert [t.degrees for t in Topology.of_degrees((1,)).next_topologies()] == []


class FakeWorker:
    def __init__(self) -> None:
        self.begun: list[Topology] = []
        self.lines: list[str] = []
        self.reason: str | None = None

    def begin(self, topology: Topology) -> None:
        self.begun.append(topology)

    def take_lines(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines

    def failure(self) -> str | None:
        return self.reason

    def close(self) -> None:
        pass


def test_a_worker_is_told_of_each_topology_once_and_its_end_is_reported_once():
    worker, records = FakeWorker(), []
    ahead = Ahead(worker, records.append)
    reduced = HEALTHY.lose(0, 0)
    for step, topology in enumerate((HEALTHY, HEALTHY, reduced, reduced), start=1):
        ahead.between_steps(step, topology)
    assert worker.begun == [HEALTHY, reduced]
    worker.lines = ["compiled"]
    worker.reason = "it broke"
    ahead.between_steps(5, HEALTHY)
    ahead.between_steps(6, HEALTHY)
    assert [(record.step, record.level) for record in records] == [(5, "info"), (5, "warning")]
    assert "it broke" in records[1].text and "training goes on" in records[1].text
    assert worker.begun == [HEALTHY, reduced]


def test_work_leaves_a_topology_for_a_newer_one():
    topologies: SimpleQueue[Topology | None] = SimpleQueue()
    told: list[str] = []

    def compile_two(topology: Topology) -> Iterator[str]:
        yield f"{topology.degrees} first"
        yield f"{topology.degrees} second"

    for topology in (HEALTHY, HEALTHY.lose(0, 0), None):
        topologies.put(topology)
    # None too is something newer.
    work(topologies, compile_two, told.append)
    assert told == ["(4, 4) first", "(3, 4) first"]


def test_a_thread_compiles_while_the_caller_goes_on():
    release = threading.Event()

    def compile_slowly(topology: Topology) -> Iterator[str]:
        release.wait(60)
        yield f"TP {topology.degrees}"

    worker = ThreadWorker(compile_slowly)
    worker.begin(HEALTHY)
    assert worker.take_lines() == [] and worker.failure() is None
    release.set()
    assert wait_for(worker.take_lines) == ["TP (4, 4)"]
    worker.close()
    assert not worker._thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_fails_says_so():
    def fail(topology: Topology) -> Iterator[str]:
        raise RuntimeError("no memory")

    worker = ThreadWorker(fail)
    worker.begin(HEALTHY)
    assert "ended" in str(wait_for(worker.failure))
    worker.close()


def wait_for(look: Callable[[], Any], timeout_s: float = 200) -> Any:
    """What `look` returns as soon as it is something."""
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.05)
    return found


def worker_of(tmp_path: Path, identity: str | None = None) -> tuple[ProcessWorker, Job]:
    config = config_of(tmp_path, [2, 2])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings(tmp_path, [2, 2])), encoding="utf-8")
    job = job_of(config)
    with jax.enable_x64(True):
        worker = ProcessWorker(
            program=Path(train.__file__),
            config=tmp_path / "config.yaml",
            identity=identity or job.training.store.identity,
            process_of=[0] * 4,
            log=tmp_path / "compile_ahead.log",
        )
        worker.begin(Topology.of_degrees((2, 2)))
    return worker, job


def test_a_process_compiles_what_this_one_finds(tmp_path: Path):
    worker, job = worker_of(tmp_path)
    lines: list[str] = []
    try:
        wait_for(lambda: lines.extend(worker.take_lines()) or "all that may follow TP 2|2 is compiled" in lines)
    finally:
        worker.close()
    assert worker.failure() is not None  # closed
    with jax.enable_x64(True):
        after = job.training.on(Topology.of_degrees((2, 2)).lose(1, 0))
        assert job.is_compiled(after)


def test_a_process_with_other_code_compiles_nothing(tmp_path: Path):
    worker, _ = worker_of(tmp_path, identity="of yesterday")
    try:
        assert "the code is not that with which training was started" in wait_for(worker.failure)
    finally:
        worker.close()
    assert not (tmp_path / "programs").exists()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_process_ends_with_the_training_process(tmp_path: Path, is_stopped: bool):
    script = (
        "import sys, time; from pathlib import Path; from ntpjax.ahead_process import ProcessWorker\n"
        "from ntpjax.topology import Topology\n"
        f"worker = ProcessWorker(Path('none.py'), Path('none.yaml'), '', [0], Path({str(tmp_path / 'log')!r}))\n"
        "worker.begin(Topology.of_degrees((1,)))\n"
        "print(worker._process.pid, flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
    wait_for(functools.partial(has_ended, pid), timeout_s=30)


def has_ended(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
