"""What happens when devices are lost or come back.

Survivors keep what they hold, missing units come from a replica that has them, and the step that failed is done again
with the same global batch. When some unit has no live holder, the newest checkpoint is laid out on what is left. When a
replica is too small to go on with, the state is saved and training stops.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from ntpjax.exit_codes import ExitCode
from ntpjax.job import Job, Running, Services, TrainState, restored_state, save_and_wait, start_running
from ntpjax.move import Moved
from ntpjax.plan import NoHolderError
from ntpjax.records import TopologyChanged
from ntpjax.topology import Topology


class DevicesLostError(RuntimeError):
    """Devices failed during a step. Attribute `lost` has (replica, rank) of each, in the order in which they failed."""

    def __init__(self, lost: tuple[tuple[int, int], ...]) -> None:
        super().__init__("lost " + ", ".join(f"rank {rank} of replica {replica}" for replica, rank in lost))
        self.lost = lost


class TrainingStoppedError(Exception):
    """Training cannot go on. Attributes `reason` (for the user) and `exit_code`."""

    def __init__(self, reason: str, exit_code: ExitCode) -> None:
        super().__init__(reason)
        self.reason = reason
        self.exit_code = exit_code


def take_back(
    job: Job, state: TrainState, running: Running, returned: tuple[int, ...], services: Services
) -> tuple[TrainState, Running]:
    """Lost devices are part of their replicas again."""
    topology, changes = state.topology, []
    for replica in returned:
        before, topology = topology, topology.restore(replica).use_spares()
        (device,) = {device for _, device in before.lost} - {device for _, device in topology.lost}
        place = next(
            (f"rank {held.index(device)} of replica {r}" for r, held in enumerate(topology.replicas) if device in held),
            "a spare",
        )
        changes.append(f"device {device} is back as {place}")
    return _change(job, state, running, topology, "return", changes, services)


def recover(
    job: Job, state: TrainState, running: Running, failure: DevicesLostError, services: Services
) -> tuple[TrainState, Running]:
    """The state on the devices that are left; the step that failed was not applied and is done again."""
    topology, changes = state.topology, []
    for replica, rank in failure.lost:
        changes.append(f"replica {replica} lost rank {rank} (device {topology.replicas[replica][rank]})")
        topology = topology.lose(replica, rank).use_spares()
    short = [r for r, degree in enumerate(topology.degrees) if degree < job.tp_min]
    if short or not any(topology.degrees):
        saved = _save_survivors(job, state, topology, services)
        raise TrainingStoppedError(
            f"{'; '.join(changes)}: TP {topology.degrees} is below topology.tp_min (={job.tp_min}); {saved}; "
            "start again with more devices or a lower tp_min",
            ExitCode.BELOW_TP_MIN,
        )
    return _change(job, state, running, topology, "loss", changes, services)


def _change(
    job: Job,
    state: TrainState,
    running: Running,
    topology: Topology,
    reason: Literal["loss", "return"],
    changes: list[str],
    services: Services,
) -> tuple[TrainState, Running]:
    """State and programs on another topology: from live devices, or else from the newest checkpoint."""
    running.stream.close()
    phases_s: dict[str, float] = {}
    old, generation, step = state.topology, job.training.on(topology), state.step + 1
    if generation.flat.own_positions:
        generation.begin_loading(job.row, job.num_rows(topology))
    rolled_back_to = None
    try:
        with _timed(phases_s, "reshard"):
            arrays, moved = generation.take(state.arrays, state.generation)
            state = replace(state, arrays=arrays, generation=generation)
    except NoHolderError as error:
        with _timed(phases_s, "restore"):
            state = _newest_checkpoint(job, topology, changes, error, services)
            moved, rolled_back_to = Moved(0, 0, "checkpoint"), state.step
    with _timed(phases_s, "load" if job.is_compiled(state.generation) else "compile"):
        running = start_running(job, state, services)
    services.emit(
        TopologyChanged(
            step=step,
            reason=reason,
            changes=tuple(changes),
            degrees_before=old.degrees,
            degrees_after=topology.degrees,
            num_units_moved=moved.num_units,
            num_bytes_moved=moved.num_bytes,
            source=moved.source,
            phases_s=phases_s,
            rolled_back_to=rolled_back_to,
        )
    )
    return state, running


@contextmanager
def _timed(phases_s: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    phases_s[name] = time.monotonic() - started


def _newest_checkpoint(
    job: Job, topology: Topology, changes: list[str], error: NoHolderError, services: Services
) -> TrainState:
    # What the leader sees: to others its newest checkpoint may appear later.
    leader = job.training.on(topology).flat.leader
    newest = json.loads(services.processes.told_by(leader, json.dumps(services.checkpoints.latest_step())))
    if newest is None:
        raise TrainingStoppedError(
            f"{'; '.join(changes)}: {error}, and there is no checkpoint yet; set checkpoint.every, and start again",
            ExitCode.NO_COPY,
        ) from error
    return restored_state(job, topology, services.checkpoints, newest)


def _save_survivors(job: Job, state: TrainState, topology: Topology, services: Services) -> str:
    """Saves from the devices that are left, if they hold everything; returns what was done."""
    left = [position for position, device in enumerate(state.topology.devices) if device in topology.devices]
    try:
        save_and_wait(job, state, services, left)
    except NoHolderError as error:
        return f"the state after step {state.step} was not saved, because {error}"
    return f"the state after step {state.step} was saved"
