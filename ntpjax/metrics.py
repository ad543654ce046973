"""The metrics file of a run: one JSON object a line, `metrics.jsonl`.

Layer 1, standard library only. A line is written and flushed for every record:

    {"kind": "step_done", "step": 12, "loss": 3.21, ..., "time": 1767225600.0}

`kind` is the record's class name in snake case, `time` is in Unix seconds, the rest are the record's fields. JSON has
no NaN or infinity: such a field is null and a second one holds its text, `{"loss": null, "loss_text": "nan"}`. In place
of the `sample_ids` of a step stands their CRC-32, `sample_ids_crc32`: the file stays small, and two runs can still be
compared, since a step has another checksum if it had other samples or another order (but for chance, 1 in 2**32).

A run that goes back to an earlier step does some steps again. Their lines are removed first, so that the file always
holds each step once. Example: the file holds steps 1 to 34, the checkpoint is of step 30; opening the file with
`resume_step=30` leaves steps 1 to 30, and the run goes on to write step 31. Lines of other kinds stay: what happened
did happen.
"""

import json
import math
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO, final

from ntpjax.records import Record, StepDone, TopologyChanged


@final
class MetricsFile:
    """A sink that appends every record to a JSON lines file, flushed line by line."""

    def __init__(
        self, path: Path | str, *, resume_step: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """Opens `path` for appending; makes its folder if it is missing.

        A torn last line, left by a process that was killed, is removed.

        Args:
          path: the file, usually `metrics.jsonl` in the run folder.
          resume_step: the step that the run resumes from; `step_done` lines of later steps are removed. None keeps all.
          clock: seconds since 1970.

        Raises:
          ValueError: a line other than the last one is not a JSON object.
        """
        # The working directory may change later.
        self._path = Path(path).absolute()
        self._clock = clock
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            _rewrite(self._path, last_step=math.inf if resume_step is None else resume_step)
        self._file = _open_for_append(self._path)

    def emit(self, record: Record) -> None:
        """Appends `record`; a change with `rolled_back_to` set removes the later steps first."""
        if isinstance(record, TopologyChanged) and record.rolled_back_to is not None:
            self.truncate_after(record.rolled_back_to)
        self._file.write(_to_line(record, time_s=self._clock()))
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Removes the `step_done` lines of steps after `step`, which are about to be done again."""
        self._file.close()
        _rewrite(self._path, last_step=step)
        self._file = _open_for_append(self._path)

    def close(self) -> None:
        """Closes the file; closing twice does nothing."""
        self._file.close()


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Returns the lines of a metrics file in order; a torn last line is left out.

    Raises:
      ValueError: a line other than the last one is not a JSON object.
    """
    return [line for _, line in _complete_lines(Path(path))]


def _open_for_append(path: Path) -> TextIO:
    return path.open("a", encoding="utf-8")


def _to_line(record: Record, *, time_s: float) -> str:
    kind = re.sub(r"(?<!^)(?=[A-Z])", "_", type(record).__name__).lower()
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    if isinstance(record, StepDone):
        del values["sample_ids"]
        values["sample_ids_crc32"] = _checksum(record.sample_ids)
    return json.dumps({"kind": kind, **_finite(values), "time": time_s}, allow_nan=False) + "\n"


def _checksum(sample_ids: Sequence[int]) -> int:
    """Returns the CRC-32 of the ids as little-endian int64 bytes.

    It is written in place of the ids: the file stays small and two runs can still be compared, step by step.
    """
    return zlib.crc32(struct.pack(f"<{len(sample_ids)}q", *sample_ids))


def _finite(values: Mapping[str, object]) -> dict[str, object]:
    """Returns `values` with each non-finite float as None and its text under `<name>_text`, in nested mappings too."""
    result: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            result |= {name: None, f"{name}_text": str(value)}
        else:
            result[name] = _finite(value) if isinstance(value, Mapping) else value
    return result


def _complete_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each whole line as bytes (newline included) and as the object it holds."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                # A cut line never parses: its closing brace is its last character.
                line = json.loads(raw.decode("utf-8"))
            except ValueError as error:
                if file.read(1):
                    remedy = "delete that line, or move the file away"
                    raise ValueError(f"line {number} of {path} is not JSON; {remedy}") from error
                return
            yield raw.rstrip(b"\n") + b"\n", line


def _rewrite(path: Path, *, last_step: float) -> None:
    """Replaces the file in one move by one without a torn last line and without steps after `last_step`."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        for raw, line in _complete_lines(path):
            if line["kind"] != "step_done" or line["step"] <= last_step:
                file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
