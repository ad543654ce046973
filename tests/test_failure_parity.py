"""The benchmark that compares a run with failures to a calm one: it passes on a tiny run, and notices faults."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from test_trainer import (
    NUM_STEPS,
    compiled,  # noqa: F401 - works in this file too
    settings,
)

from benchmarks import failure_parity
from ntpjax import recovery
from ntpjax.data import BatchStream
from ntpjax.job import TrainState
from ntpjax.processes import Processes

# Compiling is slow on a busy machine.
pytestmark = pytest.mark.timeout(300)

LAST_LINE = r"max_loss_difference (\S+) lost_steps (\d+) sample_ids (identical|different)"
Benchmark = Callable[[], tuple[float, int, str]]


@pytest.fixture
def benchmark(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    x64: None,
) -> Benchmark:
    """Runs the benchmark on a tiny model with fewer steps; gives the three values of its last line."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings(tmp_path, [4, 4])), encoding="utf-8")
    monkeypatch.setattr(failure_parity, "NUM_STEPS", NUM_STEPS)
    monkeypatch.setattr(failure_parity, "LOSSES", ("step=2 replica=1 rank=3", "step=4 replica=0 rank=1"))
    monkeypatch.setattr(failure_parity, "RETURNS", ("step=8 replica=1",))
    # It would set 64 bits for all tests to come.
    monkeypatch.setattr(failure_parity, "set_up_jax", lambda run: Processes())
    monkeypatch.setattr("sys.argv", ["failure_parity.py", "--config", str(config)])

    def run() -> tuple[float, int, str]:
        code, printed = failure_parity.main(), capsys.readouterr()
        found = re.fullmatch(LAST_LINE, printed.out.splitlines()[-1])
        assert found is not None, printed.err
        difference, lost_steps, sample_ids = float(found[1]), int(found[2]), found[3]
        assert code == (0 if difference <= failure_parity.BOUND and sample_ids == "identical" else 1)
        return difference, lost_steps, sample_ids

    return run


def test_a_run_with_failures_equals_the_calm_one(benchmark: Benchmark) -> None:
    difference, lost_steps, sample_ids = benchmark()
    assert difference < 1e-9
    assert (lost_steps, sample_ids) == (0, "identical")


def after_recovery(change: Callable[[TrainState], TrainState]) -> Callable[..., Any]:
    """The recovery with a fault: `change` is made to the state that it gives."""
    recover = recovery.recover

    def faulty(*arguments: Any) -> Any:
        state, running = recover(*arguments)
        return change(state), running

    return faulty


def scaled(state: TrainState) -> TrainState:
    """A moment that is off by a thousandth, in all replicas alike."""
    return replace(state, arrays=jax.tree.map(lambda x: x * 1.001 if x.dtype == np.float64 else x, state.arrays))


def one_bit_off(state: TrainState) -> TrainState:
    """The last bit of one weight of the last replica is another one."""
    flat = state.generation.flat
    norm = state.arrays["params"]["ends"]["final_norm"]
    values = np.array(norm["scale"])
    position = flat.tp_groups[-1][0]
    values[position, 0] = np.nextafter(values[position, 0], 2)
    norm["scale"] = flat.place(list(values).__getitem__)
    return state


def test_wrong_numbers_after_a_recovery_are_noticed(benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntpjax.trainer.recover", after_recovery(scaled))
    difference, _, sample_ids = benchmark()
    assert difference > 1e-6
    assert sample_ids == "identical"


def test_replicas_that_differ_in_one_bit_are_noticed(benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntpjax.trainer.recover", after_recovery(one_bit_off))
    with pytest.raises(AssertionError, match="not bit-equal"):
        benchmark()


def test_a_sample_that_is_skipped_is_noticed(benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    def skipping(order: Any, *, samples_seen: int, rows: tuple[int, ...]) -> BatchStream:
        return BatchStream(order, samples_seen=samples_seen + (samples_seen > 0), rows=rows)

    monkeypatch.setattr("ntpjax.job.BatchStream", skipping)
    difference, _, sample_ids = benchmark()
    assert sample_ids == "different"
    assert difference > 1e-3
