"""The command line, and resuming: onto any topology, from any folder, and never into another run."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from test_trainer import (
    BATCH,
    NUM_STEPS,
    CrashAfter,
    CrashError,
    Recorder,
    assert_same_bits,
    compiled,  # noqa: F401 - works in this file too
    config_of,
    job_of,
    named,
    run,
    saved_state,
    settings,
    train_plainly,
)

import train
from ntpjax.checkpoint import Checkpoints
from ntpjax.config import ConfigError
from ntpjax.job import restored_state
from ntpjax.metrics import read_metrics
from ntpjax.records import Note, RunEnded, RunStarted, StepDone, TopologyChanged
from ntpjax.topology import Topology

# Compiling is slow on a busy machine.
pytestmark = pytest.mark.timeout(300)

ROOT = Path(train.__file__).parent
Main = Callable[..., int]


@pytest.fixture
def main() -> Iterator[Main]:
    """`train.main` in this process; what it sets for the whole process is put back."""
    x64, level = jax.config.read("jax_enable_x64"), logging.getLogger("absl").level
    yield lambda *arguments: train.main([str(argument) for argument in arguments])
    jax.config.update("jax_enable_x64", x64)
    logging.getLogger("absl").setLevel(level)


def write_config(folder: Path, sections: Mapping[str, Any]) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(dict(sections)), encoding="utf-8")
    return path


def step_lines(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run_dir / "metrics.jsonl") if line["kind"] == "step_done"]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """The run that is never stopped, on one device."""
    return run(config_of(tmp_path_factory.mktemp("calm"), 1))[1]


# Bad input: exit code 2 and one short message, before any device is touched.


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A configuration without a fault: 4|4, with a loss and a return on schedule."""
    schedule = {"fail": ["step=3 replica=1 rank=2"], "restore": ["step=5 replica=1"]}
    run_dir = tmp_path / "run"
    return write_config(tmp_path, settings(run_dir, [4, 4], run={"cpu_devices": 8}, schedule=schedule))


BAD_INPUT = {
    "an unknown key": (
        ["--set", "model.num_head=4"],
        ["model.num_head: is an unknown key (did you mean 'num_heads'?)"],
    ),
    "an unknown section": (["--set", "modle.num_heads=4"], ["modle: is an unknown key (did you mean 'model'?)"]),
    "a wrong type": (["--set", "run.steps=many"], ["run.steps: must be a whole number (got 'many')"]),
    "no heads": (["--set", "model.num_heads=0"], ["model.num_heads: must be greater than or equal to 1 (got 0)"]),
    "more TP than devices": (
        ["--set", "topology.tp=16"],
        ["topology: 2 replicas with TP [16, 16] and 0 spares need 32 devices, and there are 8; lower topology.tp"],
    ),
    "a missing text": (["--set", "data.files=[/nowhere/*.txt]"], ["data.files", "without a match: ['/nowhere/*.txt']"]),
    "a loss that is no event": (
        ["--fail", "step=3 replica=one"],
        ["command_line.fail[0]: 'replica' needs a whole number", "'rank' is missing; write 'step=<number> replica="],
    ),
    "a loss of a rank that does not exist": (
        ["--fail", "step=4 replica=0 rank=4"],
        ["schedule: loss at step 4: `rank` (=4) must be", "below the TP degree of replica 0 (=4)"],
    ),
    "a loss of a rank that does not exist any more": (
        ["--fail", "step=4 replica=1 rank=3"],
        ["schedule: loss at step 4: `rank` (=3) must be", "below the TP degree of replica 1 (=3)"],
    ),
    "a loss in a replica that does not exist": (
        ["--fail", "step=4 replica=2 rank=0"],
        ["schedule: loss at step 4: `replica` (=2) must be", "below the number of replicas (=2)"],
    ),
    "a return of nothing": (
        ["--restore", "step=4 replica=0"],
        ["schedule: return at step 4: replica 0 has lost no device (TP degree 4 of 4)"],
    ),
    "too small a vocabulary": (
        ["--set", "model.vocab_size=256"],
        ["model.vocab_size: must be at least 257", "got 256"],
    ),
    "no sample for anybody": (
        ["--set", "batch.policy=shrink", "--set", "topology.tp=[4,1]", "--set", "batch.size=0"],
        ["batch.size: must be greater than or equal to 1 (got 0)"],
    ),
    "faults everywhere": (
        ["--set", "run.steps=0", "--set", "model.num_heads=x", "--set", "batch.szie=3", "--fail", "now", "--set", "a"],
        [
            "5 problems",
            "run.steps: ",
            "model.num_heads: ",
            "batch.szie: ",
            "command_line.fail[0]: ",
            "--set a: must have",
        ],
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_gives_exit_code_2_and_one_short_message_with_the_key(
    name: str, good: Path, main: Main, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def touch(*_: object) -> None:
        pytest.fail("went on to the devices")

    monkeypatch.setattr(train, "set_up_jax", touch)
    arguments, texts = BAD_INPUT[name]
    assert main("--config", good, *arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert [part for part in texts if part not in message] == []
    assert "Traceback" not in message
    assert len(message.splitlines()) <= 1 + len(texts)
    assert not (good.parent / "run" / "checkpoints").exists()


def test_a_missing_or_broken_configuration_is_named(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("run: [1, 2")
    for path, reason in ((tmp_path / "nothing.yaml", "cannot be read (No such file or directory)"), (broken, "YAML")):
        assert main("--config", path) == 2
        message = capsys.readouterr().err
        assert str(path) in message and reason in message
        assert "Traceback" not in message


def test_a_place_among_processes_that_cannot_be_is_bad_input_too(
    good: Path, main: Main, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NTPJAX_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("NTPJAX_NUM_PROCESSES", "2")
    monkeypatch.delenv("NTPJAX_PROCESS", raising=False)
    assert main("--config", good) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: environment") and "NTPJAX_PROCESS" in message
    assert "Traceback" not in message


def test_more_devices_than_the_machine_has_are_refused(
    good: Path, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--set", "run.cpu_devices=null", "--set", "topology.tp=[8,8]"]
    assert main("--config", good, *arguments) == 2
    assert "need 16 devices, and there are 8" in capsys.readouterr().err


def train_py(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python train.py` as a process of its own."""
    command = [sys.executable, str(ROOT / "train.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=240)


def test_a_real_process_refuses_bad_input_without_starting_a_backend(good: Path) -> None:
    # With a platform that does not exist any use of a device fails.
    arguments = ["--config", good, "--set", "run.cpu_devices=null"]
    bad = [*arguments, "--set", "model.num_heads=0", "--fail", "step=3 replica=1 rank=9", "--set", "run.stpes=1"]
    refused = train_py(*bad, JAX_PLATFORMS="nonexistent")
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "model.num_heads: must be greater than or equal to 1 (got 0)" in refused.stderr
    assert "run.stpes: is an unknown key (did you mean 'steps'?)" in refused.stderr
    assert len(refused.stderr.splitlines()) == 3
    assert refused.stdout.strip() == ""
    started = train_py(*arguments, JAX_PLATFORMS="nonexistent")
    assert started.returncode not in (0, 2)
    assert "nonexistent" in started.stderr


def test_help_names_every_option(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main("--help")
    assert end.value.code == 0
    usage = capsys.readouterr().out
    assert [option for option in ("--config", "--set", "--fail", "--restore") if option not in usage] == []
    assert "step=30 replica=1 rank=2" in usage


# Good input.


def test_the_command_line_adds_events_to_the_schedule_and_changes_settings(
    calm: Recorder,
    tmp_path: Path,
    main: Main,
    capsys: pytest.CaptureFixture[str],
) -> None:
    schedule = {"fail": ["step=3 replica=1 rank=1"]}
    config = write_config(tmp_path, settings(tmp_path / "run", [2, 2], schedule=schedule))
    fail = ["--fail", "step=5 replica=0 rank=0", "--fail", "step=8 replica=1 rank=1"]
    restore = ["--restore", "step=7 replica=1", "--restore", "step=10 replica=1"]
    changes = ["--set", "checkpoint.every=5", "--set", "checkpoint.keep_last=1"]
    assert main("--config", config, *fail, *restore, *changes) == 0
    lines = step_lines(tmp_path / "run")
    degrees = {1: [2, 2], 3: [2, 1], 5: [1, 1], 7: [1, 2], 8: [1, 1], 10: [1, 2]}
    found = [line["degrees"] for line in lines]
    assert {
        step: found[step - 1] for step in range(1, 13) if step == 1 or found[step - 1] != found[step - 2]
    } == degrees
    np.testing.assert_allclose([line["loss"] for line in lines], calm.losses, rtol=0, atol=1e-9)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["12"]
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (saved["checkpoint"], saved["batch"]["size"]) == ({"every": 5, "keep_last": 1}, BATCH)
    output = capsys.readouterr()
    assert "replica 1 lost rank 1 (device 3)" in output.out
    assert output.err == ""


def test_a_finished_run_that_is_started_again_does_nothing(
    tmp_path: Path,
    main: Main,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = write_config(tmp_path, settings(tmp_path / "run", 1))
    assert main("--config", config) == 0
    lines, saved = step_lines(tmp_path / "run"), contents(tmp_path / "run" / "checkpoints")
    capsys.readouterr()
    assert main("--config", config) == 0
    assert step_lines(tmp_path / "run") == lines and len(lines) == NUM_STEPS
    assert contents(tmp_path / "run" / "checkpoints") == saved and saved
    assert "compiling" not in capsys.readouterr().out


LOSSES = {
    3: ["--fail", "step=3 replica=0 rank=1", "--fail", "step=3 replica=1 rank=1"],
    4: ["--fail", "step=3 replica=0 rank=1", "--set", "topology.tp_min=2"],
}


@pytest.mark.parametrize("exit_code", LOSSES)
def test_the_command_ends_with_the_exit_code_of_the_run(
    exit_code: int, tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, settings(tmp_path / "run", [2, 2]))
    assert main("--config", config, *LOSSES[exit_code]) == exit_code
    ended = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (ended["kind"], ended["exit_code"], ended["step"]) == ("run_ended", exit_code, 2)
    assert "replica 0 lost rank 1 (device 1)" in capsys.readouterr().out


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_after_an_interrupt_the_same_command_goes_on(
    request: pytest.FixtureRequest, tmp_path: Path, main: Main
) -> None:
    num_steps, run_dir = 300, tmp_path / "run"
    changes = {"run": {"steps": num_steps, "cpu_devices": 8}, "checkpoint": {"every": 10}}
    config = write_config(tmp_path, settings(run_dir, 1, **changes))
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(config)]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(request.getfixturevalue("compiled"))}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **cache})
    metrics = run_dir / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count('"step_done"') >= 25):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=120)
    assert process.returncode == 130
    # The compiler for CUDA of the extra `aot` says on its own that there is no GPU.
    own_lines = [line for line in message.splitlines() if "cudart_stub" not in line and "InitializeLog" not in line]
    assert own_lines == ["interrupted; the same command resumes from the newest checkpoint of the run"]
    assert step_lines(run_dir)[-1]["step"] < num_steps
    assert main("--config", config) == 0
    assert [line["step"] for line in step_lines(run_dir)] == list(range(1, num_steps + 1))
    resumed = [line for line in read_metrics(metrics) if line["kind"] == "run_started"][1]
    assert resumed["step"] % 10 == 0 and resumed["step"] >= 20


# Resuming: the next losses are those of the run that was never stopped.


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[train.Config, Recorder]:
    """A run on 4|3 that was killed in step 6, when its newest checkpoint was of step 4."""
    config = config_of(tmp_path_factory.mktemp("stopped"), [4, 3], checkpoint={"every": 4})
    recorder = CrashAfter(5)
    with pytest.raises(CrashError):
        run(config, recorder)
    assert [path.name for path in (config.run.dir / "checkpoints").iterdir()] == ["4"]
    return config, recorder


TARGETS: dict[str, int | list[int]] = {"3|3": [3, 3], "8": 8, "one device": 1, "4|3": [4, 3]}


@pytest.mark.parametrize("target", TARGETS)
def test_a_run_goes_on_onto_another_topology_and_back_as_if_it_had_never_stopped(
    target: str,
    calm: Recorder,
    stopped: tuple[train.Config, Recorder],
    tmp_path: Path,
) -> None:
    shutil.copytree(stopped[0].run.dir, tmp_path / "run")
    there, back = CrashAfter(9), Recorder()
    with pytest.raises(CrashError):
        run(config_of(tmp_path / "run", TARGETS[target], checkpoint={"every": 4}), there)
    trained, _ = run(config_of(tmp_path / "run", [4, 3], checkpoint={"every": 4}), back)
    assert [recorder.of(RunStarted)[0].step for recorder in (there, back)] == [4, 8]
    assert back.of(RunStarted)[0].resumed_from == str(tmp_path / "run" / "checkpoints" / "8")
    steps = [*stopped[1].of(StepDone)[:4], *there.of(StepDone)[:4], *back.of(StepDone)]
    undisturbed = calm.of(StepDone)
    assert [step.step for step in steps] == list(range(1, NUM_STEPS + 1))
    for name in ("sample_ids", "samples_seen", "learning_rate", "num_tokens"):
        assert [getattr(step, name) for step in steps] == [getattr(step, name) for step in undisturbed]
    for name in ("loss", "grad_norm"):
        found, expected = ([getattr(step, name) for step in run] for run in (steps, undisturbed))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
    lines = step_lines(tmp_path / "run")
    assert [(line["step"], line["loss"]) for line in lines] == [(step.step, step.loss) for step in steps]
    assert trained.ended.exit_code == 0


@pytest.mark.parametrize("degrees", [(4, 3), (3, 3), (8,), (1,), (1, 2, 5)])
def test_what_is_restored_is_what_was_saved_in_every_bit(
    degrees: tuple[int, ...],
    stopped: tuple[train.Config, Recorder],
) -> None:
    config, topology = stopped[0], Topology.of_degrees(degrees)
    saved = saved_state(config, 4)
    assert {leaf.dtype for leaf in saved["params"].values()} == {np.dtype("float64")}
    moments = {name: leaf for name, leaf in saved["opt_state"].items() if ".mu." in name or ".nu." in name}
    assert {leaf.dtype for leaf in moments.values()} == {np.dtype("float64")}
    assert len(moments) == 2 * len(saved["params"])
    job = job_of(config_of(config.run.dir, list(degrees)))
    with jax.enable_x64(True), closing(Checkpoints(config.run.dir / "checkpoints", keep_last=3)) as checkpoints:
        state = restored_state(job, topology, checkpoints, 4)
        generation = state.generation
        assert (state.step, state.samples_seen) == (4, 4 * BATCH)
        for positions in generation.flat.tp_groups:
            found = generation.gather(state.arrays, positions)
            for name in ("params", "opt_state"):
                assert_same_bits({key: named(found[name])[key] for key in saved[name]}, saved[name])


def test_a_run_with_a_relative_folder_resumes_from_another_working_directory(
    calm: Recorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {"checkpoint": {"every": 3}}
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    first = CrashAfter(7)
    with pytest.raises(CrashError):
        run(config_of(Path("runs/a"), 1, **changes), first)
    monkeypatch.chdir(tmp_path / "there")
    _, second = run(config_of(Path("../here/runs/a"), 1, **changes))
    assert second.of(RunStarted)[0].step == 6
    np.testing.assert_allclose(first.losses[:6] + second.losses, calm.losses, rtol=0, atol=1e-9)
    assert list((tmp_path / "there").iterdir()) == []
    assert len(step_lines(tmp_path / "here" / "runs" / "a")) == NUM_STEPS


# Another run in the same folder is refused.


OTHER_RUNS: dict[str, tuple[str, str]] = {
    "batch.size=8": ("batch.size", "the checkpoint has 6, this run 8"),
    "model.vocab_size=300": ("model.vocab_size", "the checkpoint has 257, this run 300"),
    "model.d_model=24": ("model.d_model", "the checkpoint has 16, this run 24"),
    "model.num_layers=2": ("model.num_layers", "the checkpoint has 1, this run 2"),
    "model.num_kv_heads=8": ("model.num_kv_heads", "the checkpoint has 4, this run 8"),
    "model.tie_embeddings=false": ("model.tie_embeddings", "the checkpoint has True, this run False"),
    "run.seed=1": ("run.seed", "the checkpoint has 0, this run 1"),
    "run.dtype=float32": ("run.dtype", "the checkpoint has 'float64', this run 'float32'"),
    "data.seq_len=4": ("data.seq_len", "the checkpoint has 8, this run 4"),
    "data.held_out=0.2": ("data.held_out", "the checkpoint has 0.1, this run 0.2"),
}


@pytest.mark.parametrize("change", OTHER_RUNS)
def test_resuming_another_run_is_refused_and_both_values_are_named(
    change: str,
    stopped: tuple[train.Config, Recorder],
    tmp_path: Path,
    main: Main,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = write_config(tmp_path, settings(stopped[0].run.dir, [4, 3]))
    before = contents(stopped[0].run.dir)
    assert main("--config", config, "--set", change) == 2
    message = capsys.readouterr().err
    key, rule = OTHER_RUNS[change]
    assert f"{key}: {rule}" in message
    assert str(stopped[0].run.dir / "checkpoints" / "4") in message
    assert "Traceback" not in message and len(message.splitlines()) == 3
    assert contents(stopped[0].run.dir) == before


def test_all_differences_to_the_checkpoint_are_named_at_once_and_another_text_too(
    stopped: tuple[train.Config, Recorder],
    tmp_path: Path,
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Another text. " * 50)
    changes = {"batch": {"size": 7}, "run": {"seed": 3}, "data": {"files": [str(other)]}}
    config = config_of(stopped[0].run.dir, [4, 3], **changes)
    with pytest.raises(ConfigError) as refusal:
        run(config)
    names = [train.read_tokens(c.data, 0).name for c in (stopped[0], config)]
    assert refusal.value.problems == (
        "batch.size: the checkpoint has 6, this run 7",
        "run.seed: the checkpoint has 0, this run 3",
        f"data: the checkpoint was made with text {names[0]}, this configuration reads {names[1]}; the name covers "
        "text, tokenizer and weights",
        "set them back to resume, or choose another run.dir to start anew",
    )


# Too few devices.


@pytest.mark.parametrize(
    ("tp", "topology", "found", "degrees", "spares"),
    [
        ([4, 4], {}, 8, (4, 4), 0),
        ([4, 4], {}, 9, (4, 4), 0),
        ([4, 4], {}, 7, (4, 3), 0),
        ([4, 4], {}, 5, (4, 1), 0),
        ([4, 4], {}, 4, (3, 1), 0),
        ([4, 4], {}, 2, (1, 1), 0),
        ([4, 4], {"tp_min": 3}, 6, (3, 3), 0),
        ([4, 4], {"tp_min": 0}, 3, (3, 0), 0),
        ([2, 2], {"spares": 2}, 5, (2, 2), 1),
        ([2, 2], {"spares": 2}, 3, (2, 1), 0),
        ([4, 3], {"tp_min": 3}, 6, (3, 3), 0),
    ],
)
def test_a_run_that_resumes_starts_on_the_devices_that_are_there(
    tp: list[int],
    topology: dict[str, int],
    found: int,
    degrees: tuple[int, ...],
    spares: int,
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, tp, topology=topology)
    start, remark = train.fit(config, found, 4)
    assert (start.degrees, len(start.spares), start.nominal_tp) == (degrees, spares, max(tp))
    assert sorted([*start.devices, *start.spares]) == list(range(min(found, config.topology.num_devices)))
    needed = config.topology.num_devices
    if found < needed:
        assert remark == f"{needed} devices are configured and {found} are there: going on with TP {list(degrees)}"
    else:
        assert remark is None


@pytest.mark.parametrize(("tp_min", "found", "resumed_step"), [(1, 7, None), (1, 1, 4), (4, 7, 4), (3, 5, 4)])
def test_too_few_devices_are_refused_with_both_numbers(
    tp_min: int,
    found: int,
    resumed_step: int | None,
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, [4, 4], topology={"tp_min": tp_min})
    with pytest.raises(ConfigError, match=rf"need 8 devices, and there are {found}; lower topology\.tp"):
        train.fit(config, found, resumed_step)


def test_a_schedule_that_the_devices_do_not_allow_any_more_is_refused(tmp_path: Path) -> None:
    schedule = {"fail": ["step=2 replica=0 rank=0", "step=9 replica=1 rank=3"]}
    config = config_of(tmp_path, [4, 4], schedule=schedule)
    with pytest.raises(ConfigError, match=r"starting with TP \[4, 3\]: loss at step 9: `rank` \(=3\)"):
        train.fit(config, 7, 4)
    assert train.fit(config, 7, 9)[0].degrees == (4, 3)


def test_a_run_resumes_on_fewer_devices_and_says_so(
    calm: Recorder,
    stopped: tuple[train.Config, Recorder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(stopped[0].run.dir, tmp_path / "run")
    devices = jax.devices()[:6]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    _, recorder = run(config_of(tmp_path / "run", [4, 3], topology={"tp_min": 3}))
    remark = "7 devices are configured and 6 are there: going on with TP [3, 3]"
    assert [note for note in recorder.of(Note) if note.level == "warning"] == [Note(4, remark, "warning")]
    assert {step.degrees for step in recorder.of(StepDone)} == {(3, 3)}
    np.testing.assert_allclose(recorder.losses, calm.losses[4:], rtol=0, atol=1e-9)


# Shapes that others refuse.


@pytest.mark.parametrize("tp", [7, 3])
def test_an_owner_of_7_or_3_devices_trains_from_the_start(
    tp: int,
    calm: Recorder,
    tmp_path: Path,
) -> None:
    trained, recorder = run(config_of(tmp_path, tp))
    assert trained.state.topology.degrees == (tp,)
    np.testing.assert_allclose(recorder.losses, calm.losses, rtol=0, atol=1e-9)


def test_28_heads_train_on_8_devices_and_on_7_after_a_loss(tmp_path: Path) -> None:
    # With one replica the lost units have no other copy: the newest checkpoint is taken.
    config = config_of(
        tmp_path,
        8,
        model={"num_heads": 28, "num_kv_heads": 4},
        checkpoint={"every": 2},
        schedule={"fail": ["step=6 replica=0 rank=5"]},
    )
    trained, recorder = run(config)
    (change,) = recorder.of(TopologyChanged)
    assert (change.degrees_after, change.rolled_back_to) == ((7,), 4)
    assert isinstance(recorder.records[-1], RunEnded) and trained.ended.num_lost_steps == 1
    losses = {step.step: step.loss for step in recorder.of(StepDone)}
    np.testing.assert_allclose(list(losses.values()), train_plainly(config, NUM_STEPS)[0], rtol=0, atol=1e-9)
