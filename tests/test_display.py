"""Tests of `ntpjax.display`: what both displays show, plain lines in a log, and the live view on a terminal."""

import io
import math
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from ntpjax.describe import describe, summary_rows
from ntpjax.display import PlainDisplay, RichDisplay, make_display
from ntpjax.records import (
    CheckpointSaved,
    Evaluated,
    Note,
    Record,
    RunEnded,
    RunStarted,
    Sink,
    StepDone,
    TopologyChanged,
)

pytestmark = pytest.mark.timeout(60)

LOSS = TopologyChanged(
    step=30,
    reason="loss",
    changes=("replica 1 lost rank 2 (device 6)",),
    degrees_before=(4, 4),
    degrees_after=(4, 3),
    num_units_moved=21,
    num_bytes_moved=1_400_000,
    source="own replica",
    phases_s={"reshard": 0.21, "compile": 2.3},
    rolled_back_to=None,
)
STARTED = RunStarted(0, 100, (4, 4), 4, 1_000_000, None)
ENDED = RunEnded(100, "all steps done", 0, 5.0, 2.5, 1, 1, 0, 819_200, 75.0, "runs/demo")
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


@pytest.fixture(autouse=True)
def capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def _step(step: int, *, loss: float = 2.5, degrees: tuple[int, ...] = (4, 4), step_time_s: float = 0.5) -> StepDone:
    return StepDone(step, loss, 1.0, 0.1, 8192, 8 * step, step_time_s, degrees, degrees, ())


def _terminal(*, width: int = 100, height: int = 40) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=True, width=width, height=height), stream


def _emit_all(display: Sink, *records: Record) -> None:
    for record in records:
        display.emit(record)


def _on_screen(written: str) -> list[str]:
    """Returns the lines that a terminal of endless height shows after `written`."""
    lines, row = [""], 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token == "\x1b[2K":
            lines[row] = ""
        elif re.fullmatch(r"\x1b\[\d*A", token):
            row -= int(token[2:-1] or 1)
        elif token[0] not in "\x1b\r":
            lines[row] += token
    return [line.rstrip() for line in lines]


def _plain(*records: Record, num_steps: int = 100, clock: Callable[[], float] = lambda: 0.0) -> list[str]:
    stream = io.StringIO()
    _emit_all(PlainDisplay(num_steps=num_steps, console=Console(file=stream, width=40), clock=clock), *records)
    return stream.getvalue().splitlines()


def _rich(*records: Record, num_steps: int = 100, width: int = 100, height: int = 40) -> list[str]:
    console, stream = _terminal(width=width, height=height)
    display = RichDisplay(num_steps=num_steps, console=console)
    _emit_all(display, *records)
    display.close()
    return _on_screen(stream.getvalue())


# Both displays


@pytest.mark.parametrize("show", [_plain, lambda *records: _rich(*records, width=400)])
@pytest.mark.parametrize("record", [LOSS, replace(LOSS, reason="return"), Note(3, "slow", "warning")])
def test_an_event_is_shown_in_the_words_of_describe(show: Callable[..., list[str]], record: Record):
    assert describe(record) in "\n".join(show(STARTED, record))


@pytest.mark.parametrize("show", [_plain, _rich])
@pytest.mark.parametrize("record", [ENDED, replace(ENDED, exit_code=3, num_lost_steps=10)])
def test_the_summary_has_every_row(show: Callable[..., list[str]], record: RunEnded):
    text = "\n".join(show(record))
    for label, value in summary_rows(record):
        assert re.search(rf"{label} +{re.escape(value)}", text), label


# Plain lines


def test_off_a_terminal_lines_are_plain_and_whole():
    stream = io.StringIO()
    console = Console(file=stream, width=40)
    display = make_display(num_steps=100, console=console)
    note = Note(1, "[bold]a path/with [brackets] and :smile: on one long line of more than forty characters", "info")
    _emit_all(display, STARTED, _step(1), LOSS, note, ENDED)
    assert isinstance(display, PlainDisplay)
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()
    lines = stream.getvalue().splitlines()
    assert lines[1] == "step 1/100  loss 2.5000  16,384 tokens/s  49.5 s left  TP 4|4"
    assert lines[2:4] == [describe(LOSS), f"step 1  {note.text}"]


def test_plain_steps_are_shown_at_the_first_and_then_every_twentieth_of_the_run():
    lines = _plain(*(_step(step) for step in range(1, 101)))
    assert [int(line[5 : line.index("/")]) for line in lines] == [1, *range(5, 101, 5)]


def test_plain_steps_are_shown_every_ten_seconds_when_that_is_sooner():
    times = iter(range(0, 400, 4))
    lines = _plain(*(_step(step) for step in range(1, 9)), num_steps=10_000, clock=lambda: next(times))
    assert [line.split("/")[0] for line in lines] == ["step 1", "step 4", "step 7"]


def test_the_first_plain_step_after_a_loss_is_shown():
    lines = _plain(_step(1), _step(2), LOSS, _step(3, degrees=(4, 3)), _step(4, degrees=(4, 3)), num_steps=10_000)
    assert [line.split("  ")[0] for line in lines] == ["step 1/10000", "step 30", "step 3/10000"]
    assert lines[-1].endswith("TP 4|3")


def test_every_plain_line_is_flushed():
    class Stream(io.StringIO):
        unflushed = ""

        def write(self, text: str) -> int:
            self.unflushed += text
            return super().write(text)

        def flush(self) -> None:
            self.unflushed = ""

    stream = Stream()
    display = PlainDisplay(num_steps=100, console=Console(file=stream))
    for record in (STARTED, _step(1), LOSS, ENDED):
        display.emit(record)
        assert stream.getvalue() and not stream.unflushed


def test_speed_forgets_a_slow_first_step_and_what_was_before_a_change():
    steps = [_step(1, step_time_s=90.0), *(_step(step) for step in range(2, 6))]
    assert "16,384 tokens/s" in _plain(*steps)[-1]
    assert "8,192 tokens/s" in _plain(*steps, LOSS, _step(30, step_time_s=1.0))[-1]


# The live view


def test_on_a_terminal_the_view_is_live():
    console, stream = _terminal()
    display = make_display(num_steps=100, console=console)
    _emit_all(display, STARTED, _step(42), Evaluated(42, 2.75, 64, 0.1))
    display.close()
    assert isinstance(display, RichDisplay)
    text = "\n".join(_on_screen(stream.getvalue()))
    for words in ["step 42/100", "42 %", "loss 2.5000", "held-out loss 2.7500", "16,384 tokens/s", "29.0 s left"]:
        assert words in text


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(num_steps=1, console=_terminal()[0]), PlainDisplay)


def test_a_reduced_replica_is_marked_with_a_word_too():
    lines = _rich(STARTED, LOSS, _step(30, degrees=(4, 3)))
    (bars,) = [line for line in lines if "replica 0" in line]
    assert "replica 0  TP ████ 4/4   " in bars and "replica 1  TP ███░ 3/4 reduced" in bars


@pytest.mark.parametrize("height", [12, 25, 80])
def test_every_event_is_on_the_screen_once_at_any_time(height: int):
    console, stream = _terminal(height=height)
    display = RichDisplay(num_steps=100, console=console)
    display.emit(STARTED)
    for number in range(1, 31):
        display.emit(Note(number, f"note number {number} ends here", "info"))
        text = "\n".join(_on_screen(stream.getvalue()))
        assert [int(shown) for shown in re.findall(r"number (\d+) ends", text)] == list(range(1, number + 1))
    display.emit(ENDED)
    assert "\n".join(_on_screen(stream.getvalue())).count("ends here") == 30


def test_the_view_keeps_the_last_eight_events_and_never_fills_the_terminal():
    notes = [Note(step, f"note {step}", "info") for step in range(1, 21)]
    for height, num_kept in ((80, 8), (15, 6)):
        lines = _rich(STARTED, *notes, Evaluated(20, 2.0, 64, 0.1), _step(21), width=60, height=height)
        box = lines[next(row for row, line in enumerate(lines) if "events" in line) :]
        kept = [line for line in box if "note" in line]
        assert len(kept) == num_kept and "note 20" in kept[-1]
        assert len([line for line in box if line]) <= height


def test_checkpoints_are_events_once_they_are_complete():
    text = "\n".join(_rich(STARTED, CheckpointSaved(5, "run/5", False, 0.1), CheckpointSaved(5, "run/5", True, 0.1)))
    assert text.count("run/5") == 1 and "checkpoint is complete" in text


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("num_replicas", [1, 2, 64])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_cut_off(width: int, num_replicas: int):
    degrees = (4,) * (num_replicas - 1) + (3,)
    started = replace(STARTED, degrees=degrees, num_steps=1_000_000, resumed_from="a/long/path" * 10)
    change = replace(LOSS, degrees_before=(4,) * num_replicas, degrees_after=degrees)
    step = _step(987_654, degrees=degrees, step_time_s=1e-4)
    ended = replace(ENDED, reason="a long reason " * 10, run_dir="another/folder" * 10)
    lines = _rich(started, change, Evaluated(3, 2.0, 64, 0.1), step, ended, width=width, num_steps=1_000_000)
    assert max(cell_len(line) for line in lines) <= width
    without_layout = re.sub(r"[\s│]", "", "".join(lines))
    texts = (record.partition("  ")[2] for record in map(describe, (started, change)))
    for words in ("987,654/1,000,000", "2.0000", *texts, ended.reason, ended.run_dir):
        assert words.replace(" ", "") in without_layout


def test_of_64_replicas_the_reduced_ones_are_shown_first():
    degrees = tuple(3 if replica in (20, 63) else 4 for replica in range(64))
    text = "\n".join(_rich(replace(STARTED, degrees=degrees)))
    shown = [int(replica) for replica in re.findall(r"replica (\d+)", text)]
    assert shown == [20, 63, 0, 1, 2, 3, 4, 5]
    assert "and 56 more at full degree" in text


def test_reduced_replicas_that_do_not_fit_are_counted():
    text = "\n".join(_rich(replace(STARTED, degrees=(3,) * 10 + (4,) * 54)))
    assert "and 2 more reduced and 54 more at full degree" in text


def test_a_replica_without_devices_is_down():
    assert "0/4 down" in "\n".join(_rich(replace(STARTED, degrees=(4, 0))))


def test_a_wide_group_has_a_bar_of_bounded_length():
    (line,) = [line for line in _rich(replace(STARTED, degrees=(71,), nominal_tp=72)) if "replica 0" in line]
    assert f"{'█' * 15}░ 71/72 reduced" in line


@pytest.mark.parametrize("show", [_plain, _rich])
def test_nan_losses_and_runs_of_zero_steps_are_shown(show: Callable[..., list[str]]):
    assert "loss nan" in "\n".join(show(STARTED, _step(1, loss=math.nan), num_steps=0))
    ended = replace(ENDED, step=0, first_loss=None, last_loss=None)
    assert "no step done" in "\n".join(show(replace(STARTED, num_steps=0), ended, num_steps=0))


@pytest.mark.parametrize("show", [_plain, _rich])
def test_events_before_the_start_and_after_the_end_are_shown_once(show: Callable[..., list[str]]):
    early, late = Note(0, "too early", "warning"), Note(100, "too late", "error")
    text = "\n".join(show(early, LOSS, STARTED, Note(1, "in time", "info"), ENDED, late))
    for words in ["too early", "in time", "too late", "device 6"]:
        assert text.count(words) == 1


def test_a_terminal_without_unicode_gets_bars_of_ascii():
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii")
    display = RichDisplay(num_steps=100, console=Console(file=stream, force_terminal=True, width=60, height=30))
    _emit_all(display, STARTED, LOSS, _step(30, degrees=(4, 3)), ENDED)
    stream.flush()
    assert b"TP ###- 3/4 reduced" in re.sub(rb"\x1b\[[0-9;]*m", b"", buffer.getvalue())


def test_an_exception_in_training_leaves_the_terminal_as_it_was():
    console, stream = _terminal()
    display = make_display(num_steps=100, console=console)
    stdout, num_threads = sys.stdout, threading.active_count()
    with pytest.raises(RuntimeError):
        try:
            _emit_all(display, STARTED, _step(1))
            raise RuntimeError("training failed")
        finally:
            display.close()
            display.close()
    written = stream.getvalue()
    assert HIDE_CURSOR in written and written.rindex(SHOW_CURSOR) > written.rindex(HIDE_CURSOR)
    assert sys.stdout is stdout
    while threading.active_count() > num_threads:  # rich tells its thread to end and does not wait for it
        time.sleep(0.01)


FAILING_RUN = """
from ntpjax.display import make_display
from ntpjax.records import RunStarted
display = make_display(num_steps=100)
try:
    display.emit(RunStarted(0, 100, (4, 4), 4, 1000, None))
    raise SystemExit(7)
finally:
    display.close()
    display.close()
"""


def test_a_failing_process_on_a_real_terminal_gives_the_cursor_back():
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", FAILING_RUN], stdout=theirs, cwd=Path(__file__).parent.parent)
    os.close(theirs)
    written = b""
    # Linux ends the reading of a terminal whose other side is closed with an error, not with an empty read.
    try:
        while chunk := os.read(ours, 65536):
            written += chunk
    except OSError:
        pass
    os.close(ours)
    assert process.wait() == 7
    text = written.decode()
    assert "replica 1" in text and text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
