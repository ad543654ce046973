"""The training loop: a step at a time, over whatever devices there are.

A step is done when its sums have arrived on every device (commit). If devices were lost by then, nothing of it is applied: the
state is laid out on the devices that are left, and the same global batch is done again. Devices that come back join between two
steps. No committed step is lost as long as every unit has a live holder; else the newest checkpoint is taken.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ntpjax.boost import BoostHook
from ntpjax.checkpoint import CheckpointError, Checkpoints
from ntpjax.data import Batch, BatchStream, SampleOrder, batch_at
from ntpjax.exit_codes import ExitCode
from ntpjax.mesh import FlatMesh, flat_mesh
from ntpjax.packing import Families, pack, unpack
from ntpjax.plan import NoHolderError
from ntpjax.policy import BatchPolicy, split_batch
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
from ntpjax.recovery import DevicesLostError, Moved, move_state
from ntpjax.schedule import FailureSource
from ntpjax.step import Model, StepSums, make_apply_step, make_eval_step, make_grad_step, make_init, make_optimizer_init
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
      model, partitions, families: the model, how its parameters are cut, and the unit families.
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
    families: Families
    optimizer: optax.GradientTransformation
    opt_partitions: PyTree
    schedule: optax.Schedule
    clip_norm: float | None
    devices: tuple[jax.Device, ...]
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
        units = {name: jax.ShapeDtypeStruct((family.num_units,), jnp.int32) for name, family in self.families.items()}
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


@dataclass(frozen=True)
class Tally:
    """Counts for the closing summary."""

    started: float
    losses: tuple[float, ...] = ()
    num_losses: int = 0
    num_returns: int = 0
    num_lost_steps: int = 0
    num_tokens: int = 0


class TrainingStopped(Exception):
    """Training cannot go on. Attributes `reason` (for the user) and `exit_code`."""

    def __init__(self, reason: str, exit_code: ExitCode) -> None:
        super().__init__(reason)
        self.reason = reason
        self.exit_code = exit_code


def fresh_state(job: Job, topology: Topology) -> TrainState:
    """The state before the first step."""
    flat = flat_mesh(topology, job.devices)
    params = make_init(job.model.init, flat, job.families)(jax.random.key(job.seed))
    return TrainState(0, 0, flat, params, make_optimizer_init(job.optimizer, flat)(params))


def restored_state(job: Job, topology: Topology, checkpoints: Checkpoints, step: int) -> TrainState:
    """The state of a checkpoint, laid out on `topology`.

    Raises:
      CheckpointError: if the checkpoint does not fit the job.
    """
    flat, meta = flat_mesh(topology, job.devices), checkpoints.meta(step)
    trees = pack(checkpoints.restore(step, job.state_shapes()), job.state_partitions, job.families, flat)
    return TrainState(meta["step"], meta["samples_seen"], flat, **trees)


def train(job: Job, state: TrainState, services: Services, *, resumed_from: str | None = None) -> RunEnded:
    """Trains from `state` to `job.num_steps` and returns the summary, which was also emitted.

    Saves at the end, and before it stops for a reason that leaves the state whole.
    """
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(job.state_shapes()["params"]))
    topology = state.flat.topology
    services.emit(
        RunStarted(state.step, job.num_steps, topology.degrees, topology.nominal_tp, num_parameters, resumed_from)
    )
    tally, generation = Tally(time.monotonic()), None
    reason, exit_code = "all steps done", ExitCode.DONE
    try:
        generation = _start_generation(job, state, services)
        while state.step < job.num_steps:
            state, generation, tally = _advance(job, state, generation, tally, services)
        _report_saved(services, services.checkpoints.wait())
        if services.checkpoints.latest_step() != state.step:
            _save(job, state, services)
            _report_saved(services, services.checkpoints.wait())
    except TrainingStopped as stop:
        reason, exit_code = stop.reason, stop.exit_code
    except CheckpointError as error:
        reason, exit_code = f"{error}; free or repair that folder and start again", ExitCode.CHECKPOINT_FAILED
    finally:
        if generation is not None:
            generation.stream.close()
    ended = _summary(job, state, tally, reason, exit_code)
    services.emit(ended)
    return ended


def _advance(
    job: Job, state: TrainState, generation: Generation, tally: Tally, services: Services
) -> tuple[TrainState, Generation, Tally]:
    """One step done, or one failure dealt with."""
    returned = services.failures.returned(state.step + 1)
    if returned:
        state, generation = _take_back(job, state, generation, returned, services)
        tally = replace(tally, num_returns=tally.num_returns + len(returned))
    try:
        state, done, step_times_s = _train_step(job, state, generation, services)
    except DevicesLostError as failure:
        step = state.step
        state, generation = _recover(job, state, generation, failure, services)
        lost_steps = tally.num_lost_steps + step - state.step
        return state, generation, replace(tally, num_losses=tally.num_losses + len(failure.lost), num_lost_steps=lost_steps)
    services.emit(done)
    services.hook.between_steps(state.step, state.flat.topology, step_times_s)
    if _due(job.eval_every, state.step, job.num_steps):
        services.emit(_evaluate(job, state, generation))
    _report_saved(services, services.checkpoints.saved())
    if job.checkpoint_every and state.step % job.checkpoint_every == 0:
        _save(job, state, services)
    tally = replace(tally, losses=(*tally.losses[:1], done.loss), num_tokens=tally.num_tokens + done.num_tokens)
    return state, generation, tally


def _due(every: int, step: int, num_steps: int) -> bool:
    return bool(every) and (step % every == 0 or step == num_steps)


def _train_step(
    job: Job, state: TrainState, generation: Generation, services: Services
) -> tuple[TrainState, StepDone, dict[int, float]]:
    """Local gradients and their sums, commit, update."""
    started = time.monotonic()
    batch = next(generation.stream)
    grads, sums = generation.grad_step(state.params, _on_devices(state.flat, batch))
    step_times_s = _wait(state.flat, sums, started)
    lost = services.failures.lost(state.step + 1)
    if lost:
        raise DevicesLostError(lost)
    if not (np.isfinite(sums.loss) and np.isfinite(sums.squared_norm)):
        _save(job, state, services)
        raise TrainingStopped(
            f"loss ({sums.mean_loss()}) or gradients of step {state.step + 1} are not finite, so it was not applied; "
            "lower optimizer.learning_rate, or look at the text of that batch",
            ExitCode.BAD_NUMBERS,
        )
    params, opt_state = generation.apply_step(state.params, state.opt_state, grads, sums)
    done = StepDone(
        step=state.step + 1,
        loss=sums.mean_loss(),
        grad_norm=sums.grad_norm(),
        learning_rate=float(job.schedule(state.step)),
        num_tokens=int(sums.weight),
        samples_seen=batch.samples_seen_after,
        step_time_s=time.monotonic() - started,
        degrees=state.flat.topology.degrees,
        rows=generation.rows,
        sample_ids=batch.sample_ids,
    )
    return TrainState(state.step + 1, batch.samples_seen_after, state.flat, params, opt_state), done, step_times_s


def _wait(flat: FlatMesh, sums: StepSums, started: float) -> dict[int, float]:
    """Waits until the sums are on every device: the commit. Returns for each replica how long its rank 0 took, in s."""
    shards = {shard.device: shard.data for shard in sums.loss.addressable_shards}
    step_times_s = {}
    for replica, group in zip(flat.topology.order, flat.tp_groups, strict=True):
        jax.block_until_ready(shards[flat.mesh.devices[group[0]]])
        step_times_s[replica] = time.monotonic() - started
    jax.block_until_ready(sums)
    return step_times_s


def _on_devices(flat: FlatMesh, batch: Batch) -> dict[str, jax.Array]:
    """The batch on the flat mesh: every device has its replica's rows, and a weight for each token."""
    weights = np.repeat(batch.weights[..., None], batch.tokens.shape[-1] - 1, axis=-1)
    return {
        "tokens": flat.place([batch.tokens[replica] for replica in flat.replica_of]),
        "weights": flat.place([weights[replica] for replica in flat.replica_of]),
    }


def _start_generation(job: Job, state: TrainState, services: Services) -> Generation:
    """Programs compiled for the state's flat mesh, and batches from where the state is."""
    flat = state.flat
    rows = split_batch(job.batch_policy, job.batch_size, flat.topology.degrees, flat.topology.nominal_tp)
    stream = BatchStream(job.order, samples_seen=state.samples_seen, rows=rows)
    batch = _on_devices(flat, batch_at(job.order, samples_seen=state.samples_seen, rows=rows))
    degrees = "|".join(map(str, flat.topology.degrees))
    services.emit(Note(state.step, f"compiling the step for TP {degrees}", "info"))
    grad_step = make_grad_step(job.model, flat, job.families, job.partitions).lower(state.params, batch).compile()
    apply_step = make_apply_step(job.optimizer, flat, job.clip_norm)
    eval_step = make_eval_step(job.model, flat, job.families, job.partitions)
    return Generation(rows, stream, grad_step, apply_step, eval_step)


def _take_back(
    job: Job, state: TrainState, generation: Generation, returned: tuple[int, ...], services: Services
) -> tuple[TrainState, Generation]:
    """Lost devices are part of their replicas again."""
    topology, changes = state.flat.topology, []
    for replica in returned:
        before = topology
        topology = topology.restore(replica)
        (device,) = {device for _, device in before.lost} - {device for _, device in topology.lost}
        rank = topology.replicas[replica].index(device) if device in topology.replicas[replica] else None
        where = f"as rank {rank} of" if rank is not None else "as a spare, beside"
        changes.append(f"device {device} is back {where} replica {replica}")
    return _change(job, state, generation, topology, "return", changes, services)


def _recover(
    job: Job, state: TrainState, generation: Generation, failure: DevicesLostError, services: Services
) -> tuple[TrainState, Generation]:
    """The state on the devices that are left; the step that failed was not applied and is done again."""
    topology, changes = state.flat.topology, []
    for replica, rank in failure.lost:
        changes.append(f"replica {replica} lost rank {rank} (device {topology.replicas[replica][rank]})")
        topology = topology.lose(replica, rank)
    topology = topology.use_spares()
    short = [r for r, degree in enumerate(topology.degrees) if degree < job.tp_min]
    if short or not any(topology.degrees):
        saved = _save_survivors(job, state, topology, services)
        raise TrainingStopped(
            f"{'; '.join(changes)}: TP {topology.degrees} is below topology.tp_min (={job.tp_min}); {saved}; "
            "start again with more devices or a lower tp_min",
            ExitCode.BELOW_TP_MIN,
        )
    return _change(job, state, generation, topology, "loss", changes, services)


def _change(
    job: Job,
    state: TrainState,
    generation: Generation,
    topology: Topology,
    reason: Any,
    changes: list[str],
    services: Services,
) -> tuple[TrainState, Generation]:
    """State and generation on another topology: from live devices, or else from the newest checkpoint."""
    generation.stream.close()
    phases_s: dict[str, float] = {}
    old, flat, step = state.flat, flat_mesh(topology, job.devices), state.step + 1
    rolled_back_to = None
    try:
        with _timed(phases_s, "reshard"):
            trees, moved = move_state(state.trees(), job.state_partitions, job.families, old, flat)
            state = replace(state, flat=flat, **trees)
    except NoHolderError as error:
        with _timed(phases_s, "restore"):
            state = _newest_checkpoint(job, topology, changes, error, services)
            moved, rolled_back_to = Moved(0, 0, "checkpoint"), state.step
    with _timed(phases_s, "compile"):
        generation = _start_generation(job, state, services)
    services.emit(
        TopologyChanged(
            step=step,
            reason=reason,
            changes=tuple(changes),
            degrees_before=old.topology.degrees,
            degrees_after=topology.degrees,
            num_units_moved=moved.num_units,
            num_bytes_moved=moved.num_bytes,
            source=moved.source,
            phases_s=phases_s,
            rolled_back_to=rolled_back_to,
        )
    )
    return state, generation


@contextmanager
def _timed(phases_s: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    phases_s[name] = time.monotonic() - started


def _newest_checkpoint(
    job: Job, topology: Topology, changes: list[str], error: NoHolderError, services: Services
) -> TrainState:
    newest = services.checkpoints.latest_step()
    if newest is None:
        raise TrainingStopped(
            f"{'; '.join(changes)}: {error}, and there is no checkpoint yet; set checkpoint.every, and start again",
            ExitCode.NO_COPY,
        ) from error
    return restored_state(job, topology, services.checkpoints, newest)


def _evaluate(job: Job, state: TrainState, generation: Generation) -> Evaluated:
    """Mean loss over the first `eval_samples` held-out samples of their fixed order."""
    started = time.monotonic()
    num_samples, chunk = min(job.eval_samples, job.held_out.num_samples), sum(generation.rows)
    loss = weight = 0.0
    for start in range(0, num_samples, chunk):
        batch = batch_at(job.held_out, samples_seen=start, rows=generation.rows)
        # The last chunk may be too long: what is beyond counts nothing.
        counted = np.zeros_like(batch.weights)
        counted.ravel()[np.flatnonzero(batch.weights)[: num_samples - start]] = 1
        sums = generation.eval_step(state.params, _on_devices(state.flat, replace(batch, weights=counted)))
        loss, weight = loss + float(sums[0]), weight + float(sums[1])
    return Evaluated(state.step, loss / weight, int(weight), time.monotonic() - started)


def _save(job: Job, state: TrainState, services: Services, positions: list[int] | None = None) -> None:
    """Hands the state to the checkpoint writer, read from the devices at `positions` (by default one whole replica)."""
    _report_saved(services, services.checkpoints.wait())
    started = time.monotonic()
    trees = unpack(state.trees(), job.state_partitions, job.families, state.flat, positions)
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


def _report_saved(services: Services, step: int | None) -> None:
    if step is not None:
        services.emit(CheckpointSaved(step, str(services.checkpoints.path(step)), committed=True, blocking_s=0.0))


def _save_survivors(job: Job, state: TrainState, topology: Topology, services: Services) -> str:
    """Saves from the devices that are left, if they hold everything; returns what was done."""
    left = [position for position, device in enumerate(state.flat.topology.devices) if device in topology.devices]
    try:
        _save(job, state, services, left)
    except NoHolderError as error:
        return f"the state after step {state.step} was not saved, because {error}"
    _report_saved(services, services.checkpoints.wait())
    return f"the state after step {state.step} was saved"


def _summary(job: Job, state: TrainState, tally: Tally, reason: str, exit_code: ExitCode) -> RunEnded:
    return RunEnded(
        step=state.step,
        reason=reason,
        exit_code=int(exit_code),
        first_loss=tally.losses[0] if tally.losses else None,
        last_loss=tally.losses[-1] if tally.losses else None,
        num_losses=tally.num_losses,
        num_returns=tally.num_returns,
        num_lost_steps=tally.num_lost_steps,
        num_tokens=tally.num_tokens,
        wall_time_s=time.monotonic() - tally.started,
        run_dir=job.run_dir,
    )
