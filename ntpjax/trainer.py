"""The training loop: a step at a time, over whatever devices there are.

A step is done when its sums have arrived on every device (commit). If devices were lost by then, nothing of it is
applied: the state is laid out on the devices that are left, and the same global batch is done again. Devices that come
back join between two steps. No committed step is lost as long as every unit has a live holder.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from ntpjax.backward import StepSums
from ntpjax.checkpoint import CheckpointError
from ntpjax.data import batch_at
from ntpjax.exit_codes import ExitCode
from ntpjax.job import Job, Running, Services, TrainState, report_saved, rows_of, save, save_and_wait, start_running
from ntpjax.mesh import FlatMesh
from ntpjax.processes import Processes
from ntpjax.records import Evaluated, RunEnded, RunStarted, StepDone
from ntpjax.recovery import DevicesLostError, TrainingStoppedError, recover, take_back


@dataclass(frozen=True)
class Tally:
    """Counts for the closing summary."""

    started: float
    first_loss: float | None = None
    last_loss: float | None = None
    num_losses: int = 0
    num_returns: int = 0
    num_lost_steps: int = 0
    num_tokens: int = 0
    steps_s: float = 0.0
    commit_gaps_s: float = 0.0


class Trained(NamedTuple):
    """The state at the end of a run, and its summary."""

    state: TrainState
    ended: RunEnded


def train(job: Job, state: TrainState, services: Services, *, resumed_from: str | None = None) -> Trained:
    """Trains from `state` to `job.num_steps`; the summary that it returns was also emitted.

    Saves at the end, and before it stops for a reason that leaves the state whole.
    """
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(job.training.shapes["params"]))
    topology = state.topology
    services.emit(
        RunStarted(state.step, job.num_steps, topology.degrees, topology.nominal_tp, num_parameters, resumed_from)
    )
    tally, running = Tally(time.monotonic()), None
    reason, exit_code = "all steps done", ExitCode.DONE
    try:
        while state.step < job.num_steps:
            running = running or start_running(job, state, services)
            state, running, tally = _advance(job, state, running, tally, services)
        save_and_wait(job, state, services)
    except TrainingStoppedError as stop:
        reason, exit_code = stop.reason, stop.exit_code
    except CheckpointError as error:
        reason, exit_code = f"{error}; free or repair that folder and start again", ExitCode.CHECKPOINT_FAILED
    finally:
        if running is not None:
            running.stream.close()
    ended = _summary(job, state, tally, reason, exit_code)
    services.emit(ended)
    return Trained(state, ended)


def _advance(
    job: Job, state: TrainState, running: Running, tally: Tally, services: Services
) -> tuple[TrainState, Running, Tally]:
    """One step done, or one failure dealt with."""
    returned = services.failures.returned(state.step + 1)
    if returned:
        state, running = take_back(job, state, running, returned, services)
        tally = replace(tally, num_returns=tally.num_returns + len(returned))
    try:
        state, done, step_times_s = _train_step(job, state, running, services)
    except DevicesLostError as failure:
        step = state.step
        state, running = recover(job, state, running, failure, services)
        num_losses, num_lost_steps = tally.num_losses + len(failure.lost), tally.num_lost_steps + step - state.step
        return state, running, replace(tally, num_losses=num_losses, num_lost_steps=num_lost_steps)
    services.emit(done)
    services.hook.between_steps(state.step, state.topology, step_times_s)
    if services.ahead:
        services.ahead.between_steps(state.step, state.topology)
    if _due(job.eval_every, state.step, job.num_steps):
        services.emit(_evaluate(job, state, running, services))
    report_saved(services, services.checkpoints.saved())
    if job.checkpoint_every and state.step % job.checkpoint_every == 0:
        save(job, state, services)
    tally = replace(
        tally,
        first_loss=done.loss if tally.first_loss is None else tally.first_loss,
        last_loss=done.loss,
        num_tokens=tally.num_tokens + done.num_tokens,
        steps_s=tally.steps_s + done.step_time_s,
        commit_gaps_s=tally.commit_gaps_s + done.commit_gap_s,
    )
    return state, running, tally


def _due(every: int, step: int, num_steps: int) -> bool:
    return bool(every) and (step % every == 0 or step == num_steps)


def _train_step(
    job: Job, state: TrainState, running: Running, services: Services
) -> tuple[TrainState, StepDone, dict[int, float]]:
    """Local gradients and their sums, commit, update."""
    started = time.monotonic()
    programs, batch = running.programs, next(running.stream)
    grads = on_devices = None
    step_times_s = dict.fromkeys(programs.topology.order, 0.0)
    if programs.flat.own_positions:
        grads, on_devices = programs.grad_step(state.arrays["params"], programs.batch(rows_of(batch), running.rows))
        step_times_s = _wait(programs.flat, on_devices.loss, started)
    committing = time.monotonic()
    sums = StepSums(*_everywhere(programs.flat, services.processes, on_devices))
    lost = services.failures.lost(state.step + 1)
    if lost:
        raise DevicesLostError(lost)
    if not (np.isfinite(sums.loss) and np.isfinite(sums.squared_norm)):
        save_and_wait(job, state, services)
        raise TrainingStoppedError(
            f"loss ({sums.mean_loss()}) or gradients of step {state.step + 1} are not finite, so it was not applied; "
            "lower optimizer.learning_rate, or look at the text of that batch",
            ExitCode.BAD_NUMBERS,
        )
    arrays, commit_gap_s = state.arrays, time.monotonic() - committing
    if programs.flat.own_positions:
        params, opt_state = programs.apply_step(arrays["params"], arrays["opt_state"], grads, on_devices)
        arrays = {"params": params, "opt_state": opt_state}
    done = StepDone(
        step=state.step + 1,
        loss=sums.mean_loss(),
        grad_norm=sums.grad_norm(),
        learning_rate=float(np.asarray(job.schedule(state.step))),
        num_tokens=int(sums.weight),
        samples_seen=batch.samples_seen_after,
        step_time_s=time.monotonic() - started,
        degrees=state.topology.degrees,
        rows=running.rows,
        sample_ids=batch.sample_ids,
        commit_gap_s=commit_gap_s,
    )
    return TrainState(state.step + 1, batch.samples_seen_after, arrays, state.generation), done, step_times_s


def _wait(flat: FlatMesh, loss: jax.Array, started: float) -> dict[int, float]:
    """Waits until the sums are on every device: the commit. Returns for each replica how long its rank 0 took, in s.

    A replica of another process took as long as the sums did, which it is a part of.
    """
    shards = {shard.device: shard.data for shard in loss.addressable_shards}
    step_times_s = {}
    for replica, group in zip(flat.topology.order, flat.tp_groups, strict=True):
        if group[0] in flat.own_positions:
            jax.block_until_ready(shards[flat.mesh.devices[group[0]]])
            step_times_s[replica] = time.monotonic() - started
    jax.block_until_ready(loss)
    return dict.fromkeys(flat.topology.order, time.monotonic() - started) | step_times_s


def _everywhere(flat: FlatMesh, processes: Processes, values: Sequence[jax.Array] | None) -> list[np.ndarray]:
    """Numbers that are the same on all devices. A process without live devices (None) is told them by the leader."""
    told = None if values is None else [np.asarray(value) for value in values]
    if len(flat.processes) < processes.count:
        text = json.dumps(None if told is None else [float(value) for value in told])
        numbers = json.loads(processes.told_by(flat.leader, text))
        return [np.asarray(number) for number in numbers] if told is None else told
    assert told is not None
    return told


def _evaluate(job: Job, state: TrainState, running: Running, services: Services) -> Evaluated:
    """Mean loss over the first `eval_samples` held-out samples of their fixed order."""
    started = time.monotonic()
    num_samples, chunk = min(job.eval_samples, job.held_out.num_samples), sum(running.rows)
    loss = weight = 0.0
    for start in range(0, num_samples, chunk):
        batch = batch_at(job.held_out, samples_seen=start, rows=running.rows)
        # The last chunk may be too long: what is beyond counts nothing.
        counted = np.zeros_like(batch.weights)
        counted.ravel()[np.flatnonzero(batch.weights)[: num_samples - start]] = 1
        programs, sums = running.programs, None
        if programs.flat.own_positions:
            rows = programs.batch(rows_of(replace(batch, weights=counted)), running.rows)
            sums = programs.eval_step(state.arrays["params"], rows)
        loss_sum, weight_sum = _everywhere(programs.flat, services.processes, sums)
        loss, weight = loss + float(loss_sum), weight + float(weight_sum)
    return Evaluated(state.step, loss / weight, int(weight), time.monotonic() - started)


def _summary(job: Job, state: TrainState, tally: Tally, reason: str, exit_code: ExitCode) -> RunEnded:
    return RunEnded(
        step=state.step,
        reason=reason,
        exit_code=int(exit_code),
        first_loss=tally.first_loss,
        last_loss=tally.last_loss,
        num_losses=tally.num_losses,
        num_returns=tally.num_returns,
        num_lost_steps=tally.num_lost_steps,
        num_tokens=tally.num_tokens,
        wall_time_s=time.monotonic() - tally.started,
        run_dir=job.run_dir,
        commit_gap=tally.commit_gaps_s / tally.steps_s if tally.steps_s else None,
    )
