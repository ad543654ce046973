"""What a run reports: one frozen record for each kind of thing that happens.

The trainer emits records; sinks (the display, the metrics file) receive them. Layer 0: plain data, no JAX.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class RunStarted:
    """A run begins or resumes at `step`; `degrees[r]` is the TP degree of replica `r` (by id) of `nominal_tp`."""

    step: int
    num_steps: int
    degrees: tuple[int, ...]
    nominal_tp: int
    num_parameters: int
    resumed_from: str | None


@dataclass(frozen=True)
class StepDone:
    """Step `step` is committed and applied. `loss` is the mean over the `num_tokens` of the global batch, in nats.

    `sample_ids` are the ids of the samples of the global batch, in the global order. `commit_gap_s` is how long the
    devices had nothing to do: from the arrival of the sums, for which the host waits, to the start of the update.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    samples_seen: int
    step_time_s: float
    degrees: tuple[int, ...]
    rows: tuple[int, ...]
    sample_ids: tuple[int, ...]
    commit_gap_s: float = 0.0


@dataclass(frozen=True)
class Evaluated:
    """Mean loss in nats over `num_tokens` held-out tokens, with the parameters after `step` steps."""

    step: int
    loss: float
    num_tokens: int
    time_s: float


@dataclass(frozen=True)
class CheckpointSaved:
    """The state after `step` steps was handed to the writer (`committed=False`) or is complete on disk (`True`)."""

    step: int
    path: str
    committed: bool
    blocking_s: float


@dataclass(frozen=True)
class TopologyChanged:
    """Devices were lost or came back at `step`, and what the system did.

    Attributes:
      reason: "loss" or "return".
      changes: one text for each device, such as "replica 1 lost rank 2 (device 6)".
      degrees_before, degrees_after: TP degree of each replica, by replica id.
      num_units_moved, num_bytes_moved: what travelled between devices.
      source: where the moved units came from: "own replica", "other replica", "checkpoint", or "nothing moved".
      phases_s: seconds that each phase of the recovery took, in order.
      rolled_back_to: the step to which the run went back, if the state came from a checkpoint.
    """

    step: int
    reason: Literal["loss", "return"]
    changes: tuple[str, ...]
    degrees_before: tuple[int, ...]
    degrees_after: tuple[int, ...]
    num_units_moved: int
    num_bytes_moved: int
    source: str
    phases_s: Mapping[str, float]
    rolled_back_to: int | None


@dataclass(frozen=True)
class Note:
    """Something that the user should read: what happened, what the system did, what to do."""

    step: int
    text: str
    level: Literal["info", "warning", "error"]


@dataclass(frozen=True)
class RunEnded:
    """The closing summary. `num_lost_steps` counts committed steps that had to be done again.

    `commit_gap` is the part of the time of all steps in which the devices waited for the commit (`StepDone`).
    """

    step: int
    reason: str
    exit_code: int
    first_loss: float | None
    last_loss: float | None
    num_losses: int
    num_returns: int
    num_lost_steps: int
    num_tokens: int
    wall_time_s: float
    run_dir: str
    commit_gap: float | None = None


Record = RunStarted | StepDone | Evaluated | CheckpointSaved | TopologyChanged | Note | RunEnded


class Sink(Protocol):
    """Receives every record of a run, in order."""

    def emit(self, record: Record) -> None: ...

    def close(self) -> None: ...
