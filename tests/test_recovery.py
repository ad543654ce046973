"""Losses and returns while training: nothing is lost, and lost buffers are never read.

In every run here the buffers of a lost device are destroyed at the moment of its loss.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_trainer import (
    BATCH,
    NUM_STEPS,
    CrashAfter,
    CrashError,
    Recorder,
    assert_no_threads_left,
    assert_same_bits,
    compiled,  # noqa: F401 - works in this file too
    config_of,
    logical,
    run,
    run_parts,
    saved_state,
)

import train
from ntpjax import trainer
from ntpjax.job import TrainState
from ntpjax.metrics import read_metrics
from ntpjax.records import CheckpointSaved, RunStarted, StepDone, TopologyChanged
from ntpjax.recovery import DevicesLostError
from ntpjax.schedule import Loss, Schedule
from ntpjax.trainer import Trained

Lost = tuple[tuple[int, int], ...]


# Compiling is slow on a busy machine.
pytestmark = pytest.mark.timeout(300)


@dataclass
class Script:
    """A failure source. `losses[step]` has what is lost at each attempt of the step, so a retry can be hit too."""

    losses: Mapping[int, Sequence[Lost]]
    returns: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)

    def returned(self, step: int) -> tuple[int, ...]:
        return self.returns.get(step, ()) if step not in self.attempts else ()

    def lost(self, step: int) -> Lost:
        attempt = self.attempts.get(step, 0)
        self.attempts[step] = attempt + 1
        attempts = self.losses.get(step, ())
        return attempts[attempt] if attempt < len(attempts) else ()


@contextmanager
def destroying_lost_buffers() -> Iterator[list[int]]:
    """Within it, parameters and moments on a lost device are destroyed when the trainer learns of the loss.

    Gives the numbers of the lost devices, which grow as the run goes on.
    """
    devices: list[int] = []
    recover = trainer.recover

    def lose_and_recover(job: Any, state: TrainState, running: Any, failure: DevicesLostError, services: Any) -> Any:
        topology, lost = state.topology, []
        for replica, rank in failure.lost:
            lost.append(topology.replicas[replica][rank])
            topology = topology.lose(replica, rank).use_spares()
        devices.extend(lost)
        return recover(job, without_buffers(state, lost), running, failure, services)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "recover", lose_and_recover)
        yield devices


@pytest.fixture
def destroyed() -> Iterator[list[int]]:
    with destroying_lost_buffers() as devices:
        yield devices


def without_buffers(state: TrainState, lost: Sequence[int]) -> TrainState:
    """The state after its buffers on lost devices are gone.

    JAX takes an array for deleted if its first buffer is, so that one gets garbage: NaN, or -7 in a counter.
    """
    in_use = state.topology.devices
    positions = [in_use.index(device) for device in lost if device in in_use]
    flat = state.generation.flat

    def destroy(array: jax.Array) -> jax.Array:
        buffers = [shard.data for shard in sorted(array.addressable_shards, key=lambda s: s.index[0].start or 0)]
        if 0 in positions:
            garbage = np.full(buffers[0].shape, np.nan if np.issubdtype(array.dtype, np.floating) else -7, array.dtype)
            buffers[0] = jax.device_put(garbage, flat.mesh.devices[0])
            array = flat.assemble(buffers)
            buffers = [shard.data for shard in sorted(array.addressable_shards, key=lambda s: s.index[0].start or 0)]
        for position in positions:
            if position:
                buffers[position].delete()
        return array

    return replace(state, arrays=jax.tree.map(destroy, state.arrays))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """The run without failures, on one device."""
    return run(config_of(tmp_path_factory.mktemp("calm"), 1))[1]


def assert_equals_calm_run(trained: Trained, recorder: Recorder, calm: Recorder) -> None:
    """The same steps, samples and losses, and all replicas alike in every bit."""
    assert [step.step for step in recorder.of(StepDone)] == list(range(1, NUM_STEPS + 1))
    assert recorder.sample_ids == calm.sample_ids
    np.testing.assert_allclose(recorder.losses, calm.losses, rtol=0, atol=1e-9)
    # One replica's values, laid out anew: every copy of them is the same, and the padding is zero.
    expected = logical(trained.state)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
    with jax.enable_x64(True):
        assert_same_bits(trained.state.arrays, trained.state.generation.place(expected))


@dataclass(frozen=True)
class Drill:
    """`tp` at the start, what happens, and the TP degrees that this leads to, one change after the other."""

    tp: list[int]
    script: Script
    degrees: list[tuple[int, ...]]
    spares: int = 0
    tp_min: int = 1


DRILLS = {
    "one by one, and back": Drill(
        [4, 4],
        Script({2: [((1, 3),)], 4: [((0, 1),)], 6: [((1, 0),)]}, {8: (1,), 10: (0,)}),
        [(4, 3), (3, 3), (3, 2), (3, 3), (4, 3)],
    ),
    "at the first and the last step, with a return, and in a step that is done again": Drill(
        [2, 2],
        Script({1: [((1, 1),)], 4: [((0, 0),)], 8: [((1, 0),), ((0, 0),)], 12: [((0, 0),)]}, {4: (1,), 10: (0,)}),
        [(2, 1), (2, 2), (1, 2), (1, 1), (0, 1), (1, 1), (0, 1)],
        tp_min=0,
    ),
    "two in one step": Drill([2, 2], Script({3: [((0, 0), (1, 1))]}), [(1, 1)]),
    "four replicas to two and back, then to three": Drill(
        [1, 1, 1, 1],
        Script({3: [((0, 0), (2, 0))], 9: [((2, 0),)]}, {6: (2, 0)}),
        [(0, 1, 0, 1), (1, 1, 1, 1), (1, 1, 0, 1)],
        tp_min=0,
    ),
    "spares take over, one of them only to be lost in the same step": Drill(
        [2, 2], Script({3: [((1, 1), (1, 1))], 5: [((1, 1),)]}), [(2, 2), (2, 1)], spares=2
    ),
}


@dataclass(frozen=True)
class Drilled:
    trained: Trained
    recorder: Recorder
    lost_devices: list[int]


@pytest.fixture(scope="module")
def drilled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Drilled]:
    """Runs a drill, once."""

    @functools.cache
    def run_drill(name: str) -> Drilled:
        drill, folder = DRILLS[name], tmp_path_factory.mktemp("drill")
        config = config_of(folder, drill.tp, topology={"spares": drill.spares, "tp_min": drill.tp_min})
        with destroying_lost_buffers() as devices:
            return Drilled(*run_parts(config, replace(drill.script, attempts={})), devices)

    return run_drill


@pytest.mark.parametrize("name", DRILLS)
def test_a_run_with_losses_and_returns_equals_the_calm_run(
    name: str, calm: Recorder, drilled: Callable[[str], Drilled]
) -> None:
    found = drilled(name)
    assert_equals_calm_run(found.trained, found.recorder, calm)
    assert_no_threads_left()


@pytest.mark.parametrize("name", DRILLS)
def test_every_change_is_told_and_counted(name: str, drilled: Callable[[str], Drilled]) -> None:
    drill, found = DRILLS[name], drilled(name)
    changes = found.recorder.of(TopologyChanged)
    assert [change.degrees_after for change in changes] == drill.degrees
    assert [change.degrees_before for change in changes] == [tuple(drill.tp), *drill.degrees[:-1]]
    for change in changes:
        assert change.rolled_back_to is None
        # What was there before is loaded.
        assert list(change.phases_s) in (["reshard", "compile"], ["reshard", "load"])
        assert min(change.phases_s.values()) > 0
    losses = [loss for attempts in drill.script.losses.values() for attempt in attempts for loss in attempt]
    returned = [replica for replicas in drill.script.returns.values() for replica in replicas]
    assert len(found.lost_devices) == len(losses)
    ended = found.trained.ended
    assert (ended.exit_code, ended.num_losses, ended.num_returns) == (0, len(losses), len(returned))
    assert (ended.step, ended.num_lost_steps) == (NUM_STEPS, 0)
    assert found.trained.state.topology.degrees == drill.degrees[-1]


def test_a_change_says_which_device_went_or_came_and_when(drilled: Callable[[str], Drilled]) -> None:
    changes = drilled("one by one, and back").recorder.of(TopologyChanged)
    assert [(change.step, change.reason, change.changes) for change in changes] == [
        (2, "loss", ("replica 1 lost rank 3 (device 7)",)),
        (4, "loss", ("replica 0 lost rank 1 (device 1)",)),
        (6, "loss", ("replica 1 lost rank 0 (device 4)",)),
        (8, "return", ("device 7 is back as rank 2 of replica 1",)),
        (10, "return", ("device 1 is back as rank 3 of replica 0",)),
    ]
    (change,) = drilled("two in one step").recorder.of(TopologyChanged)
    assert change.changes == ("replica 0 lost rank 0 (device 0)", "replica 1 lost rank 1 (device 3)")
    spares = drilled("spares take over, one of them only to be lost in the same step")
    assert [change.changes for change in spares.recorder.of(TopologyChanged)] == [
        ("replica 1 lost rank 1 (device 3)", "replica 1 lost rank 1 (device 4)"),
        ("replica 1 lost rank 1 (device 5)",),
    ]
    assert spares.lost_devices == [3, 4, 5]


def test_a_change_says_what_moved_and_from_where(drilled: Callable[[str], Drilled]) -> None:
    changes = drilled("one by one, and back").recorder.of(TopologyChanged)
    # When the last rank is lost, its units go to the ranks that are left: 2 query heads, 2 FFN blocks, 64 rows of the
    # vocabulary, and KV heads that are not there yet. Another rank's are replaced by those of the last one.
    assert [change.source for change in changes] == [
        "other replica",
        *["own and other replica"] * 2,
        *["own replica"] * 2,
    ]
    assert 2 + 2 + 64 <= changes[0].num_units_moved <= 2 + 2 + 64 + 2
    assert changes[1].num_units_moved > changes[0].num_units_moved
    assert changes[0].num_bytes_moved >= 3 * 8 * (2 * 2 * 2 * 16 + 2 * 3 * 2 * 16 + 64 * 16)


# The last copy is lost.


LAST_COPY = {"fail": ["step=6 replica=0 rank=1", "step=6 replica=1 rank=1"]}


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> tuple[train.Config, Drilled]:
    """A run that loses the last copies in step 6, when its newest checkpoint is of step 3."""
    folder = tmp_path_factory.mktemp("rolled_back")
    config = config_of(folder, [2, 2], checkpoint={"every": 3}, schedule=LAST_COPY)
    with destroying_lost_buffers() as devices:
        return config, Drilled(*run(config), devices)


def test_when_the_last_copy_is_lost_the_newest_checkpoint_is_taken(
    calm: Recorder, rolled_back: tuple[train.Config, Drilled]
) -> None:
    found = rolled_back[1]
    steps = found.recorder.of(StepDone)
    assert [step.step for step in steps] == [1, 2, 3, 4, 5, *range(4, NUM_STEPS + 1)]
    again = steps[:3] + steps[5:]
    assert [step.sample_ids for step in again] == calm.sample_ids
    assert [step.samples_seen for step in again] == [BATCH * step for step in range(1, NUM_STEPS + 1)]
    np.testing.assert_allclose([step.loss for step in again], calm.losses, rtol=0, atol=1e-9)
    (change,) = found.recorder.of(TopologyChanged)
    assert (change.step, change.degrees_after, change.source) == (6, (1, 1), "checkpoint")
    assert (change.rolled_back_to, change.num_units_moved, change.num_bytes_moved) == (3, 0, 0)
    assert list(change.phases_s)[-2:] == ["restore", "compile"] and min(change.phases_s.values()) > 0
    ended = found.trained.ended
    assert (ended.exit_code, ended.num_losses, ended.num_lost_steps) == (0, 2, 2)
    assert found.lost_devices == [1, 3]


def test_after_a_roll_back_the_metrics_file_has_each_step_once(
    calm: Recorder, rolled_back: tuple[train.Config, Drilled]
) -> None:
    metrics = read_metrics(rolled_back[0].run.dir / "metrics.jsonl")
    lines = [line for line in metrics if line["kind"] == "step_done"]
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert [line["degrees"] for line in lines] == [[2, 2]] * 3 + [[1, 1]] * 9
    np.testing.assert_allclose([line["loss"] for line in lines], calm.losses, rtol=0, atol=1e-9)


@pytest.mark.usefixtures("destroyed")
def test_when_the_last_copy_is_lost_and_there_is_no_checkpoint_training_ends_with_exit_code_3(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, [2, 2], schedule=LAST_COPY)
    trained, recorder = run(config)
    assert (trained.ended.step, trained.ended.exit_code) == (5, 3)
    assert trained.ended.reason.startswith(
        "replica 0 lost rank 1 (device 1); replica 1 lost rank 1 (device 3): no live device holds units "
    )
    assert trained.ended.reason.endswith("there is no checkpoint yet; set checkpoint.every, and start again")
    assert recorder.of(CheckpointSaved) == []
    assert_no_threads_left()


# Too small to go on.


@pytest.mark.parametrize("every", [0, 3, 4])
def test_below_tp_min_the_state_is_saved_and_a_lower_tp_min_resumes_it(
    every: int,
    calm: Recorder,
    destroyed: list[int],
    tmp_path: Path,
) -> None:
    changes = {"checkpoint": {"every": every}, "schedule": {"fail": ["step=5 replica=0 rank=0"]}}
    trained, recorder = run(config_of(tmp_path, [2, 2], topology={"tp_min": 2}, **changes))
    assert (trained.ended.step, trained.ended.exit_code, destroyed) == (4, 4, [0])
    assert trained.ended.reason == (
        "replica 0 lost rank 0 (device 0): TP (1, 2) is below topology.tp_min (=2); the state after step 4 was saved; "
        "start again with more devices or a lower tp_min"
    )
    assert [save.step for save in recorder.of(CheckpointSaved) if save.committed][-1] == 4
    saved = saved_state(config_of(tmp_path, 1), 4)
    assert all(np.isfinite(leaf).all() and (leaf != -7).all() for leaf in jax.tree.leaves(saved))
    config = config_of(tmp_path, [2, 2], topology={"tp_min": 1}, **changes)
    resumed, rest = run(config)
    assert rest.of(RunStarted)[0].resumed_from == str(tmp_path / "checkpoints" / "4")
    assert resumed.ended.exit_code == 0
    assert recorder.sample_ids + rest.sample_ids == calm.sample_ids
    np.testing.assert_allclose(recorder.losses + rest.losses, calm.losses, rtol=0, atol=1e-9)


@pytest.mark.usefixtures("destroyed")
def test_below_tp_min_without_a_whole_state_nothing_is_saved_and_that_is_said(
    tmp_path: Path,
) -> None:
    trained, recorder = run(config_of(tmp_path, [2, 2], topology={"tp_min": 2}, schedule=LAST_COPY))
    assert (trained.ended.step, trained.ended.exit_code) == (5, 4)
    assert "the state after step 5 was not saved, because no live device holds units" in trained.ended.reason
    assert recorder.of(CheckpointSaved) == []


def test_when_every_device_is_lost_training_ends_with_exit_code_4(tmp_path: Path) -> None:
    config = config_of(tmp_path, [1, 1], topology={"tp_min": 0})
    trained, _ = run_parts(config, Schedule([Loss(3, 0, 0), Loss(3, 1, 0)]))
    assert (trained.ended.step, trained.ended.exit_code) == (2, 4)
    assert "TP (0, 0) is below topology.tp_min" in trained.ended.reason


# Resumed in the midst of a schedule.


@pytest.mark.usefixtures("destroyed")
def test_a_run_that_resumes_goes_on_with_its_schedule_and_lost_devices_stay_lost(
    calm: Recorder,
    tmp_path: Path,
) -> None:
    schedule = {"fail": ["step=3 replica=1 rank=1", "step=9 replica=0 rank=0"], "restore": ["step=8 replica=1"]}
    config = config_of(tmp_path, [2, 2], checkpoint={"every": 2}, schedule=schedule)
    first = CrashAfter(5)
    with pytest.raises(CrashError):
        run(config, first)
    trained, second = run(config)
    assert second.of(RunStarted)[0].step == 4
    assert [step.degrees for step in second.of(StepDone)] == [(2, 1)] * 3 + [(2, 2)] + [(1, 2)] * 4
    assert first.sample_ids[:4] + second.sample_ids == calm.sample_ids
    np.testing.assert_allclose(first.losses[:4] + second.losses, calm.losses, rtol=0, atol=1e-9)
    assert (trained.ended.num_losses, trained.ended.num_returns) == (1, 1)
