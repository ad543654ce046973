"""The training loop on eight CPU devices: every step once, evaluation, checkpoints, hooks, and clean ends.

Also here, for the other end-to-end tests: a tiny run and its parts. All of them share one model, text and number of
steps, so that few programs are compiled.
"""

import errno
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental.compilation_cache import compilation_cache

import train
from models.one_device import loss_sum
from models.transformer import TransformerFunctions
from ntpjax import trainer
from ntpjax.boost import BoostHook
from ntpjax.checkpoint import Checkpoints
from ntpjax.data import Batch
from ntpjax.job import Job, Services, TrainState, fresh_state, rows_of
from ntpjax.processes import Processes
from ntpjax.records import CheckpointSaved, Evaluated, Note, Record, RunEnded, RunStarted, StepDone, TopologyChanged
from ntpjax.schedule import FailureSource, Loss, Return, Schedule
from ntpjax.topology import Topology
from ntpjax.trainer import Trained

NUM_STEPS = 12
BATCH = 6
SEQ_LEN = 8
TEXT = "\n".join(f"{n} bottles of beer on the wall, {n} bottles of beer; one falls." for n in range(60, 20, -1))

# Compiling is slow on a busy machine.
pytestmark = pytest.mark.timeout(300)

RecordT = TypeVar("RecordT", bound=Record)


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Programs compiled once in a session are read from disk afterwards, by other test files too."""
    folder = tmp_path_factory.getbasetemp() / "compiled"
    settings = {"jax_compilation_cache_dir": str(folder), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in settings}
    for values in (settings, before):
        for name, value in values.items():
            jax.config.update(name, value)
        # JAX decides once whether there is a cache.
        compilation_cache.reset_cache()
        if values is settings:
            yield folder


def settings(folder: Path, tp: int | list[int], **changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A tiny run in `folder` as the mapping that a YAML file holds; `changes` are merged into its sections."""
    text = folder / "text.txt"
    folder.mkdir(parents=True, exist_ok=True)
    text.write_text(TEXT, encoding="utf-8")
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder), "steps": NUM_STEPS, "dtype": "float64", "compile_ahead": False},
        "topology": {"replicas": len(tp) if isinstance(tp, list) else 1, "tp": tp},
        "model": {
            "vocab_size": 257,
            "d_model": 16,
            "num_layers": 1,
            "num_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 2,
            "ffn_dim": 20,
            "ffn_unit": 2,
            "init_std": 0.2,
        },
        "data": {
            "source": "files",
            "files": [str(text)],
            "seq_len": SEQ_LEN,
            "cache_dir": str(folder / "cache"),
            "held_out": 0.1,
        },
        "batch": {"size": BATCH},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 3},
    }
    for section, values in changes.items():
        sections[section] = {**sections.get(section, {}), **values}
    return sections


def config_of(folder: Path, tp: int | list[int], **changes: Mapping[str, Any]) -> train.Config:
    return train.Config.model_validate(settings(folder, tp, **changes))


class Recorder:
    """A sink that keeps every record."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def emit(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass

    def of(self, kind: type[RecordT]) -> list[RecordT]:
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.of(StepDone)]

    @property
    def sample_ids(self) -> list[tuple[int, ...]]:
        return [step.sample_ids for step in self.of(StepDone)]


class CrashError(Exception):
    """What a test raises to end a run as a killed process would: without a last checkpoint."""


class CrashAfter(Recorder):
    """A recorder that ends the run once step `step` is done, before it can be saved."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def emit(self, record: Record) -> None:
        super().emit(record)
        if isinstance(record, StepDone) and record.step == self.step:
            raise CrashError


class Quiet:
    """A boost hook that does nothing."""

    def between_steps(self, step: int, topology: Topology, step_times_s: Mapping[int, float]) -> None:
        pass


def run(config: train.Config, recorder: Recorder | None = None) -> tuple[Trained, Recorder]:
    """`train.run`, as the command line does it."""
    recorder = recorder or Recorder()
    with jax.enable_x64(config.run.dtype == "float64"):
        return train.run(config, train.read_tokens(config.data, config.run.seed), Processes(), recorder), recorder


def job_of(config: train.Config) -> Job:
    with jax.enable_x64(config.run.dtype == "float64"):
        return train.make_job(config, train.read_tokens(config.data, config.run.seed))


def run_parts(
    config: train.Config, failures: FailureSource, hook: BoostHook | None = None, recorder: Recorder | None = None
) -> tuple[Trained, Recorder]:
    """A run from the start with another failure source and hook than `train.run` has; it writes no metrics."""
    recorder, job = recorder or Recorder(), job_of(config)
    with (
        jax.enable_x64(config.run.dtype == "float64"),
        closing(Checkpoints(config.run.dir / "checkpoints", keep_last=config.checkpoint.keep_last)) as checkpoints,
    ):
        services = Services(failures, hook or Quiet(), checkpoints, Processes(), recorder.emit)
        return trainer.train(job, fresh_state(job, config.start), services), recorder


def logical(state: TrainState, replica: int = 0) -> dict[str, Any]:
    """Parameters and optimizer state without layout, from the replica that is at place `replica` of the flat mesh."""
    return state.generation.gather(state.arrays, state.generation.flat.tp_groups[replica])


def saved_state(config: train.Config, step: int) -> dict[str, dict[str, np.ndarray]]:
    """The arrays of a checkpoint by name, read with plain Orbax."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(config.run.dir.absolute() / "checkpoints" / str(step) / "state")
    return jax.tree.map(np.asarray, found)


def assert_same_bits(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    left, right = jax.tree.leaves(left), jax.tree.leaves(right)
    assert [a.tobytes() for a in map(np.asarray, left)] == [b.tobytes() for b in map(np.asarray, right)]
    assert left


def grain_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")]


def assert_no_threads_left() -> None:
    for thread in grain_threads():
        thread.join(timeout=10)
    assert grain_threads() == []


# A run on one device, without any failure: what all others are compared with.


@pytest.fixture(scope="module")
def calm_config(tmp_path_factory: pytest.TempPathFactory) -> train.Config:
    return config_of(
        tmp_path_factory.mktemp("calm"),
        1,
        checkpoint={"every": 5, "keep_last": 9},
        eval={"every": 7, "samples": 8},
    )


@pytest.fixture(scope="module")
def calm(calm_config: train.Config) -> tuple[Trained, Recorder]:
    return run(calm_config)


def test_a_run_does_every_step_once_and_sums_up(calm_config: train.Config, calm: tuple[Trained, Recorder]) -> None:
    trained, recorder = calm
    steps, ended = recorder.of(StepDone), recorder.records[-1]
    assert [step.step for step in steps] == list(range(1, NUM_STEPS + 1))
    assert [step.samples_seen for step in steps] == [BATCH * step for step in range(1, NUM_STEPS + 1)]
    assert {(step.num_tokens, step.degrees, step.rows) for step in steps} == {(BATCH * SEQ_LEN, (1,), (BATCH,))}
    assert all(step.step_time_s > 0 for step in steps)
    ids = [sample for step in steps for sample in step.sample_ids]
    assert len(set(ids)) == NUM_STEPS * BATCH
    weights = 257 * 16 + 2 * (8 + 4) * 2 * 16 + 3 * 20 * 16 + 3 * 16  # embedding, attention, FFN, norms
    assert recorder.records[0] == RunStarted(0, NUM_STEPS, (1,), 1, weights, None)
    assert isinstance(ended, RunEnded) and trained.ended == ended
    assert (ended.step, ended.reason, ended.exit_code) == (NUM_STEPS, "all steps done", 0)
    assert (ended.first_loss, ended.last_loss) == (steps[0].loss, steps[-1].loss)
    assert (ended.num_losses, ended.num_returns, ended.num_lost_steps) == (0, 0, 0)
    assert (ended.num_tokens, ended.run_dir) == (NUM_STEPS * BATCH * SEQ_LEN, str(calm_config.run.dir))
    assert ended.wall_time_s > sum(step.step_time_s for step in steps)


def test_losses_are_those_of_plain_jax_on_one_device(calm_config: train.Config, calm: tuple[Trained, Recorder]) -> None:
    losses, _ = train_plainly(calm_config, NUM_STEPS)
    np.testing.assert_allclose(calm[1].losses, losses, rtol=0, atol=1e-12)
    assert losses[-1] < losses[0] - 1


def train_plainly(config: train.Config, num_steps: int) -> tuple[list[float], Any]:
    """Losses and parameters of steps on the same samples, on one device and without anything of ntpjax."""
    with jax.enable_x64(True):
        job, model = job_of(config), TransformerFunctions(config.model, jnp.dtype("float64"))
        optimizer = job.training.optimizer

        @jax.jit
        def step(params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
            def mean_loss(params: Any) -> jax.Array:
                return jnp.divide(*loss_sum(model, params, batch_of(tokens)))

            loss, grads = jax.value_and_grad(mean_loss)(params)
            norm = jnp.sqrt(sum(jnp.sum(grad**2) for grad in jax.tree.leaves(grads)))
            grads = jax.tree.map(lambda grad: grad * jnp.minimum(1, 1 / norm), grads)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        params = model.init(jax.random.key(config.run.seed))
        opt_state, losses = optimizer.init(params), []
        for number in range(num_steps):
            tokens = jnp.asarray(job.order.rows(number * BATCH, BATCH))
            params, opt_state, loss = step(params, opt_state, tokens)
            losses.append(float(loss))
        return losses, params


def batch_of(tokens: jax.Array) -> Any:
    return {"tokens": tokens, "weights": jnp.ones((tokens.shape[0], tokens.shape[1] - 1))}


def test_the_learning_rate_warms_up_and_then_falls_as_a_cosine(calm: tuple[Trained, Recorder]) -> None:
    warm_up = [1e-2 / 3, 2e-2 / 3, 1e-2]
    cosine = [1e-2 * (0.1 + 0.9 * (1 + np.cos(np.pi * step / 9)) / 2) for step in range(9)]
    found = [step.learning_rate for step in calm[1].of(StepDone)]
    np.testing.assert_allclose(found, warm_up + cosine, rtol=1e-6)


def test_checkpoints_are_made_every_k_steps_and_at_the_end_and_are_reported_complete(
    calm_config: train.Config, calm: tuple[Trained, Recorder]
) -> None:
    saved = calm[1].of(CheckpointSaved)
    folder = calm_config.run.dir / "checkpoints"
    assert [(save.step, save.committed) for save in saved] == [(k, done) for k in (5, 10, 12) for done in (False, True)]
    assert {save.path for save in saved} == {str(folder / str(step)) for step in (5, 10, 12)}
    assert sorted(path.name for path in folder.iterdir()) == ["10", "12", "5"]
    handed_over = [save for save in saved if not save.committed]
    order = [record.step for record in calm[1].records if isinstance(record, StepDone) or record in handed_over]
    assert order == sorted(order), "a state is handed over before the next step is done"


def test_the_last_checkpoint_holds_the_state_at_the_end(
    calm_config: train.Config, calm: tuple[Trained, Recorder]
) -> None:
    saved = saved_state(calm_config, NUM_STEPS)
    state = logical(calm[0].state)
    assert sorted(saved) == ["opt_state", "params"]
    assert_same_bits(saved["params"], named(state["params"]))
    assert saved["params"]["ends.embedding"].shape == (257, 16)
    counts = {name: int(leaf) for name, leaf in saved["opt_state"].items() if name.endswith("count")}
    assert set(counts.values()) == {NUM_STEPS} and counts


def named(tree: Any) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def held_out_loss(config: train.Config, params: Any, num_samples: int) -> float:
    """Mean loss over the first held-out samples, with plain JAX on one device."""
    with jax.enable_x64(True):
        model, job = TransformerFunctions(config.model, jnp.dtype("float64")), job_of(config)
        tokens = jnp.asarray(job.held_out.rows(0, num_samples))
        loss, weight = jax.jit(lambda params: loss_sum(model, params, batch_of(tokens)))(params)
        return float(loss) / float(weight)


def test_evaluation_is_the_mean_over_exactly_the_samples_that_were_asked_for(
    calm_config: train.Config, calm: tuple[Trained, Recorder]
) -> None:
    evaluations = calm[1].of(Evaluated)
    # Eight samples are one batch of six and a part of a second one.
    assert [(found.step, found.num_tokens) for found in evaluations] == [(7, 8 * SEQ_LEN), (12, 8 * SEQ_LEN)]
    params = logical(calm[0].state)["params"]
    assert evaluations[-1].loss == pytest.approx(held_out_loss(calm_config, params, 8), abs=1e-12)
    assert evaluations[-1].loss != pytest.approx(held_out_loss(calm_config, params, 7), abs=1e-3)


@pytest.mark.parametrize(("tp", "samples"), [([2, 1], 8), ([2, 1], 1), ([2, 1], 1000)])
def test_evaluation_does_not_depend_on_the_topology(tmp_path: Path, tp: list[int], samples: int) -> None:
    config = config_of(tmp_path, tp, eval={"every": 1, "samples": samples})
    recorder = CrashAfter(2)
    with pytest.raises(CrashError):
        run(config, recorder)
    (found,) = recorder.of(Evaluated)
    num_samples = min(samples, job_of(config).held_out.num_samples)
    assert found.num_tokens == num_samples * SEQ_LEN
    _, params = train_plainly(config, 1)
    assert found.loss == pytest.approx(held_out_loss(config, params, num_samples), abs=1e-12)


# The hook.


class Times:
    """A boost hook that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[int, ...], dict[int, float]]] = []

    def between_steps(self, step: int, topology: Topology, step_times_s: Mapping[int, float]) -> None:
        self.calls.append((step, topology.degrees, dict(step_times_s)))


def test_the_hook_is_called_after_every_step_with_the_time_of_each_active_replica(tmp_path: Path) -> None:
    hook = Times()
    config = config_of(tmp_path, [1, 1, 1, 1], topology={"tp_min": 0})
    failures = Schedule([Loss(3, 0, 0), Loss(3, 2, 0), Return(6, 0)])
    _, recorder = run_parts(config, failures, hook)
    steps = recorder.of(StepDone)
    assert [call[:2] for call in hook.calls] == [(step.step, step.degrees) for step in steps]
    active: dict[tuple[int, ...], set[int]] = {
        (1, 1, 1, 1): {0, 1, 2, 3},
        (0, 1, 0, 1): {1, 3},
        (1, 1, 0, 1): {0, 1, 3},
    }
    assert [set(times) for _, _, times in hook.calls] == [active[step.degrees] for step in steps]
    assert len({step.degrees for step in steps}) == 3
    for (_, _, times), step in zip(hook.calls, steps, strict=True):
        assert all(0 < time_s <= step.step_time_s for time_s in times.values())


def test_a_run_says_what_speed_up_a_reduced_replica_would_need(tmp_path: Path) -> None:
    config = config_of(tmp_path, [2, 2], schedule={"fail": ["step=3 replica=1 rank=1"]})
    _, recorder = run(config)
    (note,) = [note for note in recorder.of(Note) if "times as fast" in note.text]
    # All units of one rank more: twice the work.
    assert note.text.startswith("replica 1 (TP 1 of 2) would need devices 2.000 times as fast")
    assert (note.step, note.level) == (3, "info")


# Batch policies.


@pytest.mark.parametrize(
    ("policy", "rows", "num_tokens"),
    [("keep_global", (4, 2), 48), ("shrink", (3, 1), 32), ("equal", (3, 3), 48)],
)
def test_a_reduced_replica_takes_the_rows_of_the_policy(
    tmp_path: Path, policy: str, rows: tuple[int, ...], num_tokens: int
) -> None:
    config = config_of(tmp_path, [2, 2], batch={"policy": policy}, schedule={"fail": ["step=3 replica=1 rank=1"]})
    _, recorder = run(config)
    steps = recorder.of(StepDone)
    assert [step.rows for step in steps] == [(3, 3)] * 2 + [rows] * (NUM_STEPS - 2)
    assert [step.num_tokens for step in steps] == [48] * 2 + [num_tokens] * (NUM_STEPS - 2)
    seen = [sample for step in steps for sample in step.sample_ids]
    assert seen == job_of(config).order.sample_ids(0, len(seen)).tolist()
    assert len(set(seen)) == len(seen) == steps[-1].samples_seen == sum(step.num_tokens for step in steps) // SEQ_LEN


# Numbers that are not finite.


@pytest.mark.parametrize("every", [0, 3])
def test_a_step_that_is_not_finite_in_one_replica_is_applied_in_none_and_the_state_before_it_is_saved(
    every: int, calm: tuple[Trained, Recorder], tmp_path: Path
) -> None:
    def rows_with_nan(batch: Batch) -> dict[str, np.ndarray]:
        rows = rows_of(batch)
        if batch.samples_seen_after == 4 * BATCH:
            rows["weights"][1, 0, 0] = np.nan
        return rows

    config = config_of(tmp_path, [2, 2], checkpoint={"every": every})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "rows_of", rows_with_nan)
        trained, recorder = run(config)
    assert (trained.ended.step, trained.ended.exit_code, trained.state.step) == (3, 5, 3)
    assert "loss (nan) or gradients of step 4 are not finite, so it was not applied" in trained.ended.reason
    assert [(save.step, save.committed) for save in recorder.of(CheckpointSaved)] == [(3, False), (3, True)]
    for replica in range(2):
        assert_same_bits(named(logical(trained.state, replica)["params"]), saved_state(config, 3)["params"])
    _, rest = run(config)
    np.testing.assert_allclose(recorder.losses + rest.losses, calm[1].losses, rtol=0, atol=1e-9)


def test_a_weight_that_is_not_finite_in_one_replica_stops_all_before_the_step(tmp_path: Path) -> None:
    config, recorder = config_of(tmp_path, [2, 2]), Recorder()
    job = job_of(config)
    with (
        jax.enable_x64(True),
        closing(Checkpoints(tmp_path / "checkpoints", keep_last=3)) as checkpoints,
    ):
        state = fresh_state(job, config.start)
        good = logical(state)
        norm = state.arrays["params"]["ends"]["final_norm"]
        values = np.array(norm["scale"])
        values[3] = np.nan  # rank 1 of replica 1
        norm["scale"] = state.generation.flat.place(list(values).__getitem__)
        services = Services(Schedule([]), Quiet(), checkpoints, Processes(), recorder.emit)
        trained = trainer.train(job, state, services)
    assert (trained.ended.step, trained.ended.exit_code, recorder.losses) == (0, 5, [])
    assert "loss (nan) or gradients of step 1 are not finite" in trained.ended.reason
    for name, tree in logical(trained.state).items():
        assert_same_bits(named(tree), named(good[name]))
        assert_same_bits(saved_state(config, 0)[name], named(good[name]))


# Failures outside the devices.


class Fails(Recorder):
    """A sink that fails at the first record of one kind."""

    def __init__(self, kind: type[Record]) -> None:
        super().__init__()
        self.kind = kind

    def emit(self, record: Record) -> None:
        super().emit(record)
        if isinstance(record, self.kind):
            raise CrashError(f"no room for {type(record).__name__}")


@pytest.mark.parametrize("kind", [RunStarted, Note, StepDone, TopologyChanged, Evaluated, CheckpointSaved, RunEnded])
def test_a_sink_that_fails_ends_the_run_with_its_error_and_leaves_no_thread(tmp_path: Path, kind: type[Record]) -> None:
    config = config_of(
        tmp_path,
        [1, 1],
        topology={"tp_min": 0},
        schedule={"fail": ["step=3 replica=1 rank=0"]},
        eval={"every": 2, "samples": 2},
        checkpoint={"every": 2},
    )
    sink = Fails(kind)
    with pytest.raises(CrashError, match=f"^no room for {kind.__name__}$"):
        run(config, sink)
    assert isinstance(sink.records[-1], kind)
    assert_no_threads_left()


def test_a_hook_that_fails_ends_the_run_with_its_error_and_leaves_no_thread(tmp_path: Path) -> None:
    class Broken:
        def between_steps(self, step: int, topology: Topology, step_times_s: Mapping[int, float]) -> None:
            if step == 4:
                raise CrashError("the hook is broken")

    recorder = Recorder()
    config = config_of(tmp_path, [1, 1], topology={"tp_min": 0})
    with pytest.raises(CrashError, match=r"^the hook is broken$"):
        run_parts(config, Schedule([Loss(3, 1, 0)]), Broken(), recorder)
    assert [step.step for step in recorder.of(StepDone)] == [1, 2, 3, 4]
    assert_no_threads_left()


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_exit_code_6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Real failures of the disk are in tests of checkpoints.
    wait = ocp.CheckpointManager.wait_until_finished
    failed: list[int] = []

    def wait_and_fail(manager: ocp.CheckpointManager) -> None:
        wait(manager)
        if manager.latest_step() == 4 and not failed:
            failed.append(4)
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", wait_and_fail)
    trained, recorder = run(config_of(tmp_path, 1, checkpoint={"every": 2}))
    assert (trained.ended.exit_code, recorder.records[-1]) == (6, trained.ended)
    assert f"the checkpoint of step 4 in {tmp_path / 'checkpoints'} was not written" in trained.ended.reason
    assert "No space left on device; free or repair that folder and start again" in trained.ended.reason
    assert trained.ended.step in (4, 5, 6)
    assert [save.step for save in recorder.of(CheckpointSaved) if save.committed] == [2]
    assert_no_threads_left()


def test_the_summary_adds_up_the_commit_gaps(calm: tuple[Trained, Recorder]) -> None:
    trained, recorder = calm
    steps, found = recorder.of(StepDone), trained.ended.commit_gap
    assert found is not None and 0 < found < 0.5
    assert found == pytest.approx(sum(s.commit_gap_s for s in steps) / sum(s.step_time_s for s in steps))
