"""The metrics file: one line a record, valid JSON, each step once whatever happens to the process."""

import json
import math
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ntpjax.metrics import MetricsFile, read_metrics
from ntpjax.records import (
    CheckpointSaved,
    Evaluated,
    Note,
    Record,
    RunEnded,
    RunStarted,
    StepDone,
    TopologyChanged,
)

pytestmark = pytest.mark.timeout(60)

EVERY_KIND: dict[str, Record] = {
    "run_started": RunStarted(0, 10, (4, 4), 4, 1000, None),
    "step_done": StepDone(1, 2.5, 1.0, 0.1, 64, 8, 0.5, (4, 4), (2, 2), (3, 0, 2, 1)),
    "evaluated": Evaluated(1, 2.0, 64, 0.1),
    "checkpoint_saved": CheckpointSaved(1, "run/1", True, 0.1),
    "topology_changed": TopologyChanged(
        2, "loss", ("replica 1 lost rank 2",), (4, 4), (4, 3), 21, 84, "own replica", {"reshard": 0.5}, None
    ),
    "note": Note(2, "a text with a\nline break and a degree sign: °", "info"),
    "run_ended": RunEnded(10, "done", 0, 2.5, 1.5, 1, 0, 0, 640, 5.0, "run"),
}


def _step(step: int, *, loss: float = 2.5, sample_ids: tuple[int, ...] = (3, 0, 2, 1)) -> StepDone:
    return StepDone(step, loss, 1.0, 0.1, 64, 8 * step, 0.5, (4, 4), (2, 2), sample_ids)


def _change(step: int, *, rolled_back_to: int | None, reshard_s: float = 0.5) -> TopologyChanged:
    changes = ("replica 1 lost rank 2",)
    phases_s = {"reshard": reshard_s}
    return TopologyChanged(step, "loss", changes, (4, 4), (4, 3), 21, 84, "checkpoint", phases_s, rolled_back_to)


def _write(path: Path, *records: Record, resume_step: int | None = None) -> None:
    metrics = MetricsFile(path, resume_step=resume_step)
    for record in records:
        metrics.emit(record)
    metrics.close()


def _steps(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path) if line["kind"] == "step_done"]


def _crc32(sample_ids: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(sample_ids, dtype="<i8").tobytes())


def _strict(line: bytes) -> dict[str, object]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not valid JSON")

    return json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_record_comes_back_with_its_kind_its_fields_and_the_time(tmp_path: Path, kind: str):
    record = EVERY_KIND[kind]
    metrics = MetricsFile(tmp_path / "metrics.jsonl", clock=lambda: 1234.5)
    metrics.emit(record)
    expected = {"kind": kind, **vars(record), "time": 1234.5}
    if isinstance(record, StepDone):
        expected["sample_ids_crc32"] = _crc32(expected.pop("sample_ids"))
    as_json = json.loads(json.dumps(expected))
    # Read while the file is still open: each line is flushed.
    assert read_metrics(tmp_path / "metrics.jsonl") == [as_json]
    metrics.close()


def test_a_step_has_a_checksum_that_tells_samples_and_their_order_apart(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    many = tuple(range(100_000))
    batches = [(1, 2, 3), (1, 2, 3), (1, 3, 2), (1, 2), (1, 2, 2**40), (), many]
    _write(path, *(_step(number, sample_ids=ids) for number, ids in enumerate(batches, start=1)))
    checksums = [line["sample_ids_crc32"] for line in read_metrics(path)]
    assert checksums == [_crc32(ids) for ids in batches]
    assert checksums[0] == checksums[1] and len(set(checksums)) == len(batches) - 1
    assert path.stat().st_size < 4000


def test_a_file_that_is_opened_again_goes_on_after_its_last_line(tmp_path: Path):
    path = tmp_path / "new" / "folder" / "metrics.jsonl"
    _write(path, _step(1), _step(2))
    _write(path, _step(3))
    assert _steps(path) == [1, 2, 3]


def test_a_last_line_cut_anywhere_is_left_out_and_removed_on_opening(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    _write(path, _step(1), _change(2, rolled_back_to=None))
    whole = path.read_bytes()
    first_line = whole[: whole.index(b"\n") + 1]
    for num_bytes in range(len(first_line) + 1, len(whole) - 1):
        path.write_bytes(whole[:num_bytes])
        assert len(read_metrics(path)) == 1
        _write(path)
        assert path.read_bytes() == first_line


def test_a_last_line_that_lacks_only_its_line_break_is_kept(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    _write(path, _step(1), _step(2))
    path.write_bytes(path.read_bytes()[:-1])
    _write(path, _step(3))
    assert _steps(path) == [1, 2, 3]


def test_a_resume_removes_later_steps_and_only_those(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    evaluated, note = Evaluated(4, 2.0, 64, 0.1), Note(4, "hello", "info")
    _write(path, EVERY_KIND["run_started"], _step(1), _step(2), _step(3), _step(4), evaluated, note)
    lines = path.read_bytes().splitlines(keepends=True)
    _write(path, resume_step=2)
    assert path.read_bytes() == b"".join(lines[:3] + lines[5:])
    _write(path, _step(3), _step(4), _step(5))
    assert sorted(_steps(path)) == [1, 2, 3, 4, 5]


def test_a_resume_at_step_zero_removes_every_step(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    _write(path, EVERY_KIND["run_started"], _step(1), _step(2))
    _write(path, resume_step=0)
    assert [line["kind"] for line in read_metrics(path)] == ["run_started"]


def test_a_rollback_in_the_middle_of_a_run_removes_the_steps_that_are_done_again(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    steps_again = (_step(3, loss=7.0), _step(4, loss=7.0))
    _write(path, *(_step(step) for step in (1, 2, 3, 4)), _change(5, rolled_back_to=2), *steps_again)
    kinds = [(line["kind"], line["step"]) for line in read_metrics(path)]
    assert kinds == [("step_done", 1), ("step_done", 2), ("topology_changed", 5), ("step_done", 3), ("step_done", 4)]
    assert [line["loss"] for line in read_metrics(path) if line["kind"] == "step_done"] == [2.5, 2.5, 7.0, 7.0]


def test_a_change_without_rollback_removes_nothing(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    _write(path, _step(1), _step(2), _change(2, rolled_back_to=None), _step(3))
    assert _steps(path) == [1, 2, 3]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_null_with_their_text(tmp_path: Path, value: float):
    path = tmp_path / "metrics.jsonl"
    _write(path, _step(1, loss=value), _change(2, rolled_back_to=None, reshard_s=value))
    step, change = (_strict(line) for line in path.read_bytes().splitlines())
    assert (step["loss"], step["loss_text"]) == (None, str(value))
    assert change["phases_s"] == {"reshard": None, "reshard_text": str(value)}
    assert "grad_norm_text" not in step


def test_a_kill_while_the_file_is_rewritten_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "metrics.jsonl"
    _write(path, _step(1), _step(2))
    before = path.read_bytes()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        MetricsFile(path, resume_step=1)
    assert path.read_bytes() == before
    monkeypatch.undo()
    _write(path, resume_step=1)
    assert _steps(path) == [1]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    _write(path, _step(1))
    path.write_bytes(path.read_bytes() + b'{"kind": "step_d\n' + path.read_bytes())
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"line 2 of .*metrics\.jsonl is not JSON; delete"):
        MetricsFile(path, resume_step=1)
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)
    assert path.read_bytes() == before


def test_closing_twice_is_harmless(tmp_path: Path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.close()
    metrics.close()


WRITE_FOR_EVER = """
import itertools, sys
from ntpjax.metrics import MetricsFile
from ntpjax.records import StepDone
metrics = MetricsFile(sys.argv[1])
for step in itertools.count(1):
    metrics.emit(StepDone(step, 2.5, 1.0, 0.1, 64, step, 0.5, (4, 4), (2, 2), (3, 0, 2, 1)))
"""


def test_a_process_killed_while_it_writes_leaves_every_step_once(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    root = Path(__file__).parent.parent
    process = subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, str(path)], cwd=root)
    try:
        while not path.exists() or path.stat().st_size < 100_000:
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    _write(path, _step(301), _step(302), resume_step=300)
    assert _steps(path) == list(range(1, 303))
