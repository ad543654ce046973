"""What a person sees of a run: a live view on a terminal, plain lines elsewhere (a log file, a pipe).

Layer 3. `make_display` chooses; both displays are sinks (`ntpjax.records.Sink`) and say the same words, which come from
`ntpjax.describe`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median
from typing import final

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ntpjax.describe import body, describe, format_seconds, summary_rows
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
from ntpjax.topology import format_degrees

_MAX_EVENTS = 8
_MAX_REPLICA_BARS = 8
_MAX_BAR_CELLS = 16
_NUM_RECENT_STEPS = 20
_PLAIN_INTERVAL_S = 10.0


def make_display(*, num_steps: int, console: Console | None = None) -> Sink:
    """Returns the live display if `console` (default: standard output) is a terminal, the plain one otherwise."""
    console = console or Console()
    if console.is_terminal and console.is_interactive:
        return RichDisplay(num_steps=num_steps, console=console)
    return PlainDisplay(num_steps=num_steps, console=console)


@dataclass(frozen=True)
class _Status:
    """Where the run is; `recent` holds the last steps since the topology changed."""

    num_steps: int
    step: int = 0
    nominal_tp: int = 0
    degrees: tuple[int, ...] = ()
    loss: float | None = None
    heldout_loss: float | None = None
    recent: tuple[StepDone, ...] = ()


def _advance(status: _Status, record: Record) -> _Status:
    match record:
        case RunStarted():
            return replace(status, step=record.step, degrees=record.degrees, nominal_tp=record.nominal_tp)
        case StepDone():
            recent = (*status.recent, record)[-_NUM_RECENT_STEPS:]
            return replace(status, step=record.step, degrees=record.degrees, loss=record.loss, recent=recent)
        case Evaluated():
            return replace(status, heldout_loss=record.loss)
        case TopologyChanged():
            step = status.step if record.rolled_back_to is None else record.rolled_back_to
            return replace(status, step=step, degrees=record.degrees_after, recent=())
        case _:
            return status


def _readings(status: _Status) -> list[str]:
    """Returns what is known of loss, held-out loss, speed and time left, each as a short text."""
    readings: list[str] = []
    if status.loss is not None:
        readings.append(f"loss {status.loss:.4f}")
    if status.heldout_loss is not None:
        readings.append(f"held-out loss {status.heldout_loss:.4f}")
    # Medians, because the first step of a generation may hold its compile time.
    step_time_s = median(step.step_time_s for step in status.recent) if status.recent else 0.0
    if step_time_s > 0:
        num_tokens = median(step.num_tokens for step in status.recent)
        readings.append(f"{num_tokens / step_time_s:,.0f} tokens/s")
        if status.step < status.num_steps:
            readings.append(f"{format_seconds(step_time_s * (status.num_steps - status.step))} left")
    return readings


@final
class PlainDisplay:
    """A sink that writes lines: every event at once, a step at most every 10 seconds or 5 % of the steps."""

    def __init__(self, *, num_steps: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._status = _Status(num_steps=num_steps)
        self._next_time_s = float("-inf")
        self._last_twentieth: int | None = None

    def emit(self, record: Record) -> None:
        """Writes the line of an event, or of a step when one is due."""
        self._status = _advance(self._status, record)
        if not isinstance(record, StepDone):
            self._write(describe(record))
        elif self._is_due(record.step):
            self._write(self._step_line())
        if isinstance(record, TopologyChanged):
            self._last_twentieth = None  # shows the first step that is done after a change

    def close(self) -> None:
        """Does nothing: every line is flushed when it is written."""

    def _is_due(self, step: int) -> bool:
        now_s = self._clock()
        twentieth = step * 20 // max(self._status.num_steps, 1)
        due = now_s >= self._next_time_s or twentieth != self._last_twentieth
        if due:
            self._next_time_s, self._last_twentieth = now_s + _PLAIN_INTERVAL_S, twentieth
        return due

    def _step_line(self) -> str:
        status = self._status
        tp = f"TP {format_degrees(status.degrees)}"
        return "  ".join((f"step {status.step}/{status.num_steps}", *_readings(status), tp))

    def _write(self, text: str) -> None:
        # `out` neither wraps, nor reads [markup] or :emoji: in a text; it flushes.
        self._console.out(text, highlight=False)


@final
class RichDisplay:
    """A sink that keeps a live view at the bottom of a terminal.

    From top to bottom: the last events, the progress of the run, a bar for each replica. An event that leaves the view
    is printed above it for good, and the last view stays when the run ends, so nothing is shown twice or lost.
    """

    def __init__(self, *, num_steps: int, console: Console) -> None:
        self._console = console
        self._status = _Status(num_steps=num_steps)
        self._events: tuple[Record, ...] = ()
        self._start_s = console.get_time()
        self._live = Live(console=console, get_renderable=lambda: self._view(self._events), refresh_per_second=4)

    def emit(self, record: Record) -> None:
        """Updates the view; the view starts with `RunStarted` and ends with `RunEnded`."""
        self._status = _advance(self._status, record)
        match record:
            case RunStarted():
                self._console.print(_event_rows((record,)))
                self._live.start()
            case RunEnded():
                self.close()
                self._console.print(_summary(record))
            case TopologyChanged() | Note() | CheckpointSaved(committed=True):
                self._log(record)
            case _:
                pass  # seen in the numbers of the next refresh

    def close(self) -> None:
        """Stops the live view and gives the terminal back as it was; closing twice does nothing."""
        self._live.stop()

    def _log(self, record: Record) -> None:
        """Adds an event to the view and prints those that no longer fit above it."""
        if not self._live.is_started:
            self._console.print(_event_rows((record,)))
            return
        events = (*self._events, record)
        num_out = next(num for num in range(len(events) + 1) if self._fits(events[num:]))
        self._events = events[num_out:]
        # Before printing: a print draws the view again as it was at its last refresh.
        self._live.refresh()
        if num_out > 0:
            self._console.print(_event_rows(events[:num_out]))

    def _fits(self, events: tuple[Record, ...]) -> bool:
        # The readings may need two lines more before the next event comes.
        num_lines = len(self._console.render_lines(self._view(events))) + 2
        return not events or (len(events) <= _MAX_EVENTS and num_lines <= self._console.height)

    def _view(self, events: tuple[Record, ...]) -> RenderableType:
        elapsed = str(timedelta(seconds=int(self._console.get_time() - self._start_s)))
        progress = _progress(self._status, elapsed=elapsed, ascii_only=self._console.options.ascii_only)
        if not events:
            return progress
        return Group(Panel(_event_rows(events), title="events", title_align="left", border_style="dim"), progress)


def _progress(status: _Status, *, elapsed: str, ascii_only: bool) -> RenderableType:
    """Returns the box with the bar over steps, the readings, and the bars of the replicas."""
    steps = Table.grid(padding=(0, 1), expand=True)
    for ratio in (None, 1, None):
        steps.add_column(ratio=ratio, no_wrap=True)
    percent = 100 * status.step // max(status.num_steps, 1)
    bar = ProgressBar(total=status.num_steps, completed=status.step, complete_style="cyan", finished_style="green")
    steps.add_row(Text(f"step {status.step:,}/{status.num_steps:,}", style="bold"), bar, f"{percent} %")
    readings = Columns([Text(reading) for reading in _readings(status)], padding=(0, 3))
    parts = [steps, readings, Text(), *_replica_bars(status, full_cell="#" if ascii_only else "█")]
    box = Panel(Group(*parts), title="ntpjax", title_align="left", border_style="cyan")
    box.subtitle, box.subtitle_align = f"{elapsed} elapsed", "right"
    return box


def _replica_bars(status: _Status, *, full_cell: str) -> list[RenderableType]:
    """Returns the bars of all replicas, or of the lowest degrees and a line for the others when there are many."""
    replicas = list(enumerate(status.degrees))
    if len(replicas) > _MAX_REPLICA_BARS:
        replicas.sort(key=lambda replica: replica[1])
    shown, hidden = replicas[:_MAX_REPLICA_BARS], replicas[_MAX_REPLICA_BARS:]
    bars = [_replica_bar(replica, degree, status.nominal_tp, full_cell=full_cell) for replica, degree in shown]
    num_full = sum(degree == status.nominal_tp for _, degree in hidden)
    counts = ((len(hidden) - num_full, "reduced"), (num_full, "at full degree"))
    rest = " and ".join(f"{count} more {word}" for count, word in counts if count)
    return [Columns(bars, padding=(0, 3), equal=True), *([Text(f"and {rest}", style="dim")] if rest else [])]


def _replica_bar(replica: int, degree: int, nominal_tp: int, *, full_cell: str) -> Text:
    num_cells = min(nominal_tp, _MAX_BAR_CELLS)
    num_full = degree * num_cells // nominal_tp
    style, word = ("green", "") if degree == nominal_tp else ("yellow", " reduced") if degree else ("red", " down")
    cells = (full_cell * num_full, style), ("-" if full_cell == "#" else "░") * (num_cells - num_full)
    return Text.assemble(f"replica {replica:<2} TP ", *cells, (f" {degree}/{nominal_tp}{word}", style))


def _event_rows(records: tuple[Record, ...]) -> RenderableType:
    """Returns one row an event: its step, then its text, indented where it wraps."""
    rows = Table.grid(padding=(0, 2))
    for record in records:
        text = Text(body(record), style=_style(record), overflow="fold")
        rows.add_row(Text(f"step {record.step}", style="bold", no_wrap=True), text)
    return rows


def _style(record: Record) -> str:
    match record:
        case Note(level="error") | TopologyChanged(reason="loss", rolled_back_to=int()):
            return "red"
        case Note(level="warning") | TopologyChanged(reason="loss"):
            return "yellow"
        case TopologyChanged(reason="return"):
            return "green"
        case _:
            return ""


def _summary(record: RunEnded) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    for label, value in summary_rows(record):
        rows.add_row(Text(label, style="dim", no_wrap=True), Text(value, overflow="fold"))
    style = "green" if record.exit_code == 0 else "red"
    return Panel(rows, title="run ended", title_align="left", border_style=style, expand=False)
