"""What a run is made of: the job, which stays the same, the state, which a step turns into the next one, and the
generation, which is made anew when the live devices change.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ntpjax.boost import BoostHook
from ntpjax.checkpoint import Checkpoints
from ntpjax.data import Batch, BatchStream, SampleOrder, batch_at
from ntpjax.mesh import Device, FlatMesh, flat_mesh
from ntpjax.packing import pack, unpack
from ntpjax.partition import families_in
from ntpjax.policy import BatchPolicy, split_batch
from ntpjax.records import CheckpointSaved, Note, Record
from ntpjax.schedule import FailureSource
from ntpjax.step import Model, make_apply_step, make_eval_step, make_grad_step, make_init, make_optimizer_init
from ntpjax.topology import Topology

PyTree = Any


class TrainableModel(Model, Protocol):
    """A `Model` that can draw its own shards."""

    def init(self, key: jax.Array, units: Mapping[str, jax.Array]) -> PyTree:
        """A rank's parameters; `units` has the unit ids of its slots for each family, -1 for padding."""
        ...


@dataclass(frozen=True)
class Job:
    """What stays the same during a run.

    Attributes:
      model, partitions: the model, and how its parameters are cut.
      optimizer, opt_partitions, schedule, clip_norm: an elementwise optimizer, how its state is cut, its learning rate.
      devices: all devices; the topology's numbers count them.
      order, held_out: samples to train on and to evaluate on.
      batch_size, batch_policy: samples of a global step, and how replicas of unequal degree share them.
      num_steps, eval_every, eval_samples, checkpoint_every: in steps and samples; 0 for never.
      tp_min: training stops when a replica has fewer devices.
      seed: of the initial parameters.
      config: saved with every checkpoint.
      run_dir: named in the summary.
    """

    model: TrainableModel
    partitions: PyTree
    optimizer: optax.GradientTransformation
    opt_partitions: PyTree
    schedule: optax.Schedule
    clip_norm: float | None
    devices: tuple[Device, ...]
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

    def state_shapes(self) -> dict[str, PyTree]:
        """Logical shapes of what a checkpoint holds."""
        units = {
            family.name: jax.ShapeDtypeStruct((family.num_units,), jnp.int32) for family in families_in(self.partitions)
        }
        params = jax.eval_shape(self.model.init, jax.random.key(0), units)
        return {"params": params, "opt_state": jax.eval_shape(self.optimizer.init, params)}

    @property
    def state_partitions(self) -> dict[str, PyTree]:
        return {"params": self.partitions, "opt_state": self.opt_partitions}


@dataclass(frozen=True)
class Services:
    """What a run talks to: the failure source, the boost hook, the checkpoints, and whoever takes its records."""

    failures: FailureSource
    hook: BoostHook
    checkpoints: Checkpoints
    emit: Callable[[Record], None]


@dataclass(frozen=True)
class TrainState:
    """The state after `step` committed steps; arrays lie on `flat` in the compute layout."""

    step: int
    samples_seen: int
    flat: FlatMesh
    params: PyTree
    opt_state: PyTree

    def trees(self) -> dict[str, PyTree]:
        return {"params": self.params, "opt_state": self.opt_state}


@dataclass(frozen=True)
class Generation:
    """What is made anew when the live devices change: compiled programs, and the stream of batches."""

    rows: tuple[int, ...]
    stream: BatchStream
    grad_step: Callable[..., Any]
    apply_step: Callable[..., Any]
    eval_step: Callable[..., Any]


def fresh_state(job: Job, topology: Topology) -> TrainState:
    """The state before the first step."""
    flat = flat_mesh(topology, job.devices)
    params = make_init(job.model.init, flat, job.partitions)(jax.random.key(job.seed))
    return TrainState(0, 0, flat, params, make_optimizer_init(job.optimizer, flat)(params))


def restored_state(job: Job, topology: Topology, checkpoints: Checkpoints, step: int) -> TrainState:
    """The state of a checkpoint, laid out on `topology`.

    Raises:
      CheckpointError: if the checkpoint does not fit the job.
    """
    flat, meta = flat_mesh(topology, job.devices), checkpoints.meta(step)
    trees = pack(checkpoints.restore(step, job.state_shapes()), job.state_partitions, flat)
    return TrainState(meta["step"], meta["samples_seen"], flat, **trees)


def start_generation(job: Job, state: TrainState, services: Services) -> Generation:
    """Programs compiled for the state's flat mesh, and batches from where the state is."""
    flat = state.flat
    rows = split_batch(job.batch_policy, job.batch_size, flat.topology.degrees, flat.topology.nominal_tp)
    stream = BatchStream(job.order, samples_seen=state.samples_seen, rows=rows)
    batch = on_devices(flat, batch_at(job.order, samples_seen=state.samples_seen, rows=rows))
    degrees = "|".join(map(str, flat.topology.degrees))
    services.emit(Note(state.step, f"compiling the step for TP {degrees}", "info"))
    grad_step = make_grad_step(job.model, flat, job.partitions).lower(state.params, batch).compile()
    # Gradients have the shapes and shardings of their parameters.
    operands = (state.params, state.opt_state, state.params, grad_step.out_info[1])
    apply_step = make_apply_step(job.optimizer, flat, job.clip_norm).lower(*operands).compile()
    eval_step = make_eval_step(job.model, flat, job.partitions)
    return Generation(rows, stream, grad_step, apply_step, eval_step)


def on_devices(flat: FlatMesh, batch: Batch) -> dict[str, jax.Array]:
    """The batch on the flat mesh: every device has its replica's rows, and a weight for each token."""
    weights = np.repeat(batch.weights[..., None], batch.tokens.shape[-1] - 1, axis=-1)
    return {
        "tokens": flat.place([batch.tokens[replica] for replica in flat.replica_of]),
        "weights": flat.place([weights[replica] for replica in flat.replica_of]),
    }


def save(job: Job, state: TrainState, services: Services, positions: Sequence[int] | None = None) -> None:
    """Hands the state to the checkpoint writer, read from the devices at `positions` (by default one whole replica)."""
    report_saved(services, services.checkpoints.wait())
    started = time.monotonic()
    trees = unpack(state.trees(), job.state_partitions, state.flat, positions)
    key = jax.random.key(job.seed)
    meta = {
        "step": state.step,
        "samples_seen": state.samples_seen,
        "rng": {"impl": str(jax.random.key_impl(key)), "data": jax.random.key_data(key).tolist()},
        "config": job.config,
    }
    services.checkpoints.save(state.step, trees, meta)
    path = str(services.checkpoints.path(state.step))
    services.emit(CheckpointSaved(state.step, path, committed=False, blocking_s=time.monotonic() - started))


def save_and_wait(job: Job, state: TrainState, services: Services, positions: Sequence[int] | None = None) -> None:
    """Like `save`, and returns when the checkpoint is complete on disk."""
    save(job, state, services, positions)
    report_saved(services, services.checkpoints.wait())


def report_saved(services: Services, step: int | None) -> None:
    if step is not None:
        services.emit(CheckpointSaved(step, str(services.checkpoints.path(step)), committed=True, blocking_s=0.0))
