"""Records in plain words: the texts, and the forms of numbers in them, that every display shows.

Layer 3. TP degrees are written one a replica, by replica id: "4|3" is replica 0 with 4 devices and replica 1 with 3.
"""

import math

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
from ntpjax.topology import format_degrees


def describe(record: Record) -> str:
    """Returns `record` in plain words: one line, or several for `RunEnded`.

    >>> describe(Note(step=3, text="replica 1 is slow", level="warning"))
    'step 3  warning: replica 1 is slow'
    """
    if isinstance(record, RunEnded):
        rows = (f"  {label:<16}{value}" for label, value in summary_rows(record))
        return "\n".join(("run ended", *rows))
    return f"step {record.step}  {body(record)}"


def body(record: Record) -> str:
    """Returns `record` in plain words on one line, without its step."""
    match record:
        case RunStarted():
            origin = f"resumes from {record.resumed_from}" if record.resumed_from else "starts"
            size = f"{record.num_parameters:,} parameters, nominal TP {record.nominal_tp}"
            return f"run {origin}: {record.num_steps} steps, {size}, TP {format_degrees(record.degrees)}"
        case StepDone():
            return f"loss {record.loss:.4f}  TP {format_degrees(record.degrees)}"
        case Evaluated():
            cost = f"{record.num_tokens:,} tokens, {format_seconds(record.time_s)}"
            return f"held-out loss {record.loss:.4f} ({cost})"
        case CheckpointSaved():
            waited = f"is being written, training waited {format_seconds(record.blocking_s)}"
            return f"checkpoint {'is complete' if record.committed else waited}: {record.path}"
        case TopologyChanged():
            return _topology_body(record)
        case Note():
            return record.text if record.level == "info" else f"{record.level}: {record.text}"
        case RunEnded():
            return f"run ended: {record.reason}"


def _topology_body(record: TopologyChanged) -> str:
    """Returns what was lost or came back, what moved and from where, how long it took, and how training goes on."""
    before, after = format_degrees(record.degrees_before), format_degrees(record.degrees_after)
    parts = [f"{', '.join(record.changes)}: TP {before} -> {after}"]
    if record.num_units_moved == 0:
        parts.append("nothing moved")
    else:
        units = "1 unit" if record.num_units_moved == 1 else f"{record.num_units_moved:,} units"
        origins = {"own replica": "its own replica", "other replica": "another replica", "checkpoint": "the checkpoint"}
        origin = origins.get(record.source, record.source)
        parts.append(f"{units} ({format_bytes(record.num_bytes_moved)}) moved from {origin}")
    phases = dict(record.phases_s)
    if phases:
        phases.setdefault("total", sum(phases.values()))
        parts.append(", ".join(f"{name} {format_seconds(time_s)}" for name, time_s in phases.items()))
    if record.rolled_back_to is not None:
        back = record.rolled_back_to
        parts.append(f"rolled back to the checkpoint of step {back}; every step after {back} is done again")
    else:
        parts.append(f"step {record.step} is tried again, no step lost" if record.reason == "loss" else "no step lost")
    return "; ".join(parts)


def summary_rows(record: RunEnded) -> list[tuple[str, str]]:
    """Returns the closing summary as pairs (label, value); the exit code is in it only if the run failed."""
    losses = [loss for loss in (record.first_loss, record.last_loss) if loss is not None]
    lost = "no step lost" if record.num_lost_steps == 0 else f"{record.num_lost_steps:,} done again"
    rows = [
        ("reason", record.reason),
        ("steps done", f"{record.step:,}"),
        ("loss", " -> ".join(f"{loss:.4f}" for loss in losses) or "no step done"),
        ("tokens", f"{record.num_tokens:,}"),
        ("wall time", format_seconds(record.wall_time_s)),
        ("device losses", f"{record.num_losses:,}"),
        ("device returns", f"{record.num_returns:,}"),
        ("lost steps", lost),
        ("run folder", record.run_dir),
    ]
    if record.commit_gap is not None:
        rows.insert(-1, ("commit gap", f"{record.commit_gap:.2%} of the time of the steps"))
    return rows if record.exit_code == 0 else [*rows, ("exit code", str(record.exit_code))]


def format_bytes(num_bytes: int) -> str:
    """Returns a size in decimal units: "512 B", "1.4 MB"."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    size = num_bytes / 1000
    for unit in ("kB", "MB", "GB"):
        if size < 999.95:
            return f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def format_seconds(time_s: float) -> str:
    """Returns a duration with as many digits as matter: "0.21 s", "12.3 s", "4 min 05 s", "3 h 12 min"."""
    if not math.isfinite(time_s):
        return "unknown time"
    if time_s < 59.95:
        return f"{time_s:.2f} s" if time_s < 9.995 else f"{time_s:.1f} s"
    minutes, seconds = divmod(round(time_s), 60)
    return f"{minutes} min {seconds:02d} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02d} min"
