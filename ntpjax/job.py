"""What a run is made of: the job, which stays the same, the state, which a step turns into the next one, and the
running programs and batches, which are made anew when the live devices change.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from ntpjax.ahead import Ahead
from ntpjax.boost import BoostHook
from ntpjax.checkpoint import Checkpoints
from ntpjax.data import Batch, BatchStream, SampleOrder
from ntpjax.policy import BatchPolicy, split_batch
from ntpjax.processes import Processes
from ntpjax.records import CheckpointSaved, Note, Record
from ntpjax.schedule import FailureSource
from ntpjax.topology import Topology, format_degrees
from ntpjax.training import Generation, Init, State, Training

PyTree = Any


@dataclass(frozen=True)
class Job:
    """What stays the same during a run.

    Attributes:
      training: the model and how it is trained.
      init: draws the initial parameters, see `Generation.draw`.
      row: shapes and types of one row of a batch.
      schedule: the learning rate over steps, for the records.
      order, held_out: samples to train on and to evaluate on.
      batch_size, batch_policy: samples of a global step, and how replicas of unequal degree share them.
      num_steps, eval_every, eval_samples, checkpoint_every: in steps and samples; 0 for never.
      tp_min: training stops when a replica has fewer devices.
      seed: of the initial parameters.
      config: saved with every checkpoint.
      run_dir: named in the summary.
    """

    training: Training
    init: Init
    row: PyTree
    schedule: optax.Schedule
    order: SampleOrder
    held_out: SampleOrder
    batch_size: int
    batch_policy: BatchPolicy
    num_steps: int
    eval_every: int
    eval_samples: int
    checkpoint_every: int
    tp_min: int
    seed: int
    config: Mapping[str, Any]
    run_dir: str

    def num_rows(self, topology: Topology) -> tuple[int, ...]:
        """Rows of a global batch for each replica."""
        return split_batch(self.batch_policy, self.batch_size, topology.degrees, topology.nominal_tp)

    def is_compiled(self, generation: Generation) -> bool:
        """Whether the programs for a topology are there, so that they need not be compiled."""
        return generation.is_compiled(self.row, self.num_rows(generation.topology))


@dataclass(frozen=True)
class Services:
    """What a run talks to: the failure source, the boost hook, the checkpoints, the other processes, who takes its
    records, and who compiles ahead, if anybody does.
    """

    failures: FailureSource
    hook: BoostHook
    checkpoints: Checkpoints
    processes: Processes
    emit: Callable[[Record], None]
    ahead: Ahead | None = None


@dataclass(frozen=True)
class TrainState:
    """The state after `step` committed steps; its arrays lie on `generation.flat` in the compute layout."""

    step: int
    samples_seen: int
    arrays: State
    generation: Generation

    @property
    def topology(self) -> Topology:
        return self.generation.topology


@dataclass(frozen=True)
class Running:
    """What is made anew when the live devices change: compiled programs, and the stream of batches for `rows`."""

    programs: Generation
    rows: tuple[int, ...]
    stream: BatchStream


def fresh_state(job: Job, topology: Topology) -> TrainState:
    """The state before the first step."""
    generation = job.training.on(topology)
    return TrainState(0, 0, generation.draw(job.init, jax.random.key(job.seed)), generation)


def restored_state(job: Job, topology: Topology, checkpoints: Checkpoints, step: int) -> TrainState:
    """The state of a checkpoint, laid out on `topology`.

    Raises:
      CheckpointError: if the checkpoint does not fit the job.
    """
    generation, meta = job.training.on(topology), checkpoints.meta(step)
    arrays = generation.place(checkpoints.restore(step, job.training.shapes))
    return TrainState(meta["step"], meta["samples_seen"], arrays, generation)


def start_running(job: Job, state: TrainState, services: Services) -> Running:
    """Programs for the state's topology, compiled ahead or now, and batches from where the state is."""
    generation, topology = state.generation, state.topology
    rows = job.num_rows(topology)
    stream = BatchStream(job.order, samples_seen=state.samples_seen, rows=rows)
    doing = "loading the compiled step" if job.is_compiled(generation) else "compiling the step"
    services.emit(Note(state.step, f"{doing} for TP {format_degrees(topology.degrees)}", "info"))
    programs = generation.compiled(job.row, rows) if generation.flat.own_positions else generation
    if services.processes.count > 1:
        services.processes.require_equal("sums over replicas", programs.sums)
    return Running(programs, rows, stream)


def row_shapes(seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and types of one row of `rows_of`."""
    return {
        "tokens": jax.ShapeDtypeStruct((seq_len + 1,), np.int32),
        "weights": jax.ShapeDtypeStruct((seq_len,), np.float32),
    }


def rows_of(batch: Batch) -> dict[str, np.ndarray]:
    """The batch as the model takes it: rows of each replica, and a weight for each token."""
    weights = np.repeat(batch.weights[..., None], batch.tokens.shape[-1] - 1, axis=-1)
    return {"tokens": batch.tokens, "weights": weights}


def save(job: Job, state: TrainState, services: Services, positions: Sequence[int] | None = None) -> None:
    """Hands the state to the checkpoint writer, read from the devices at `positions` (by default one whole replica).

    A step that is on disk already is not saved again.
    """
    report_saved(services, services.checkpoints.wait())
    # Asked of the leader, that saves: to others a folder may appear later.
    complete = services.checkpoints.is_complete(state.step)
    if services.processes.told_by(state.generation.flat.leader, str(complete)) == "True":
        return
    started = time.monotonic()
    if not state.generation.flat.own_positions:
        return
    logical = state.generation.gather(state.arrays, positions, keep=state.generation.is_leader)
    if not state.generation.is_leader:
        return
    key = jax.random.key(job.seed)
    meta = {
        "step": state.step,
        "samples_seen": state.samples_seen,
        "rng": {"impl": str(jax.random.key_impl(key)), "data": jax.random.key_data(key).tolist()},
        "config": job.config,
    }
    services.checkpoints.save(state.step, logical, meta)
    path = str(services.checkpoints.path(state.step))
    services.emit(CheckpointSaved(state.step, path, committed=False, blocking_s=time.monotonic() - started))


def save_and_wait(job: Job, state: TrainState, services: Services, positions: Sequence[int] | None = None) -> None:
    """Like `save`, and returns when the checkpoint is complete on disk."""
    save(job, state, services, positions)
    report_saved(services, services.checkpoints.wait())


def report_saved(services: Services, step: int | None) -> None:
    if step is not None:
        services.emit(CheckpointSaved(step, str(services.checkpoints.path(step)), committed=True, blocking_s=0.0))
