"""Real processes, each with its own program: losses, returns, checkpoints, and a process that has no device left."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from ntpjax.exit_codes import ExitCode
from ntpjax.launch import free_port
from ntpjax.launch import main as launch
from ntpjax.processes import Place, Processes, ProcessesDifferError

ROOT = Path(__file__).parent.parent
TEXT = "\n".join(f"{n} bottles of beer on the wall, {n} bottles of beer; one falls." for n in range(60, 20, -1))
pytestmark = pytest.mark.timeout(400)


def write_config(folder: Path, run_dir: str, changes: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> Path:
    """Two replicas of two devices. Replica 1 loses both of its devices in turn, so that a process is left with none."""
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    config: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / run_dir), "steps": 6, "dtype": "float64", "cpu_devices": 4, "compile_ahead": False},
        "topology": {"replicas": 2, "tp": 2, "tp_min": 0},
        "model": {
            "vocab_size": 257,
            "d_model": 16,
            "num_layers": 1,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 2,
            "ffn_dim": 12,
            "ffn_unit": 4,
        },
        "data": {"source": "files", "files": [str(folder / "text.txt")], "seq_len": 8, "cache_dir": str(folder)},
        "batch": {"size": 6},
        "optimizer": {"learning_rate": 0.01},
        "eval": {"every": 3, "samples": 5},
        "checkpoint": {"every": 2},
        "schedule": {
            "fail": ["step=2 replica=1 rank=0", "step=3 replica=1 rank=0"],
            "restore": ["step=5 replica=1", "step=5 replica=1"],
        },
    }
    for section, values in changes.items():
        config[section] |= values
    path = folder / f"{run_dir}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=350, check=False)


def records(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def test_two_processes_do_what_one_does(tmp_path: Path):
    alone = run([sys.executable, "train.py", "--config", str(write_config(tmp_path, "alone"))])
    assert alone.returncode == 0, alone.stderr
    together_config = write_config(tmp_path, "together")
    together = run([sys.executable, "-m", "ntpjax.launch", "--processes", "2", "--config", str(together_config)])
    assert together.returncode == 0, together.stderr
    one, several = (records(tmp_path / name, "step_done") for name in ("alone", "together"))
    assert [step["step"] for step in several] == list(range(1, 7))
    assert [step["degrees"] for step in several] == [step["degrees"] for step in one]
    assert [step["sample_ids_crc32"] for step in several] == [step["sample_ids_crc32"] for step in one]
    assert [step["loss"] for step in several] == pytest.approx([step["loss"] for step in one], rel=1e-12)
    held_out = [record["loss"] for record in records(tmp_path / "together", "evaluated")]
    assert held_out == pytest.approx([r["loss"] for r in records(tmp_path / "alone", "evaluated")], rel=1e-12)
    # Only the first process reports: each line is there once.
    assert together.stdout.count("run ended") == 1
    # A run of two processes is resumed by one.
    resumed = run([sys.executable, "train.py", "--config", str(together_config), "--set", "run.steps=7"])
    assert resumed.returncode == 0, resumed.stderr
    assert "checkpoints/6" in resumed.stdout
    assert len(records(tmp_path / "together", "step_done")) == 7


def test_replicas_may_lie_across_processes(tmp_path: Path):
    """Of six devices in three processes, each replica has three: process 1 has a part of both."""
    schedule = {"fail": ["step=2 replica=1 rank=1"], "restore": ["step=5 replica=1"]}
    changes = {"run": {"cpu_devices": 6}, "topology": {"tp": 3}, "schedule": schedule}
    alone = run([sys.executable, "train.py", "--config", str(write_config(tmp_path, "alone", changes))])
    assert alone.returncode == 0, alone.stderr
    config = write_config(tmp_path, "together", changes)
    together = run([sys.executable, "-m", "ntpjax.launch", "--processes", "3", "--config", str(config)])
    assert together.returncode == 0, together.stderr
    one, several = (records(tmp_path / name, "step_done") for name in ("alone", "together"))
    assert [step["degrees"] for step in several] == [[3, 3]] + [[3, 2]] * 3 + [[3, 3]] * 2
    assert [step["loss"] for step in several] == pytest.approx([step["loss"] for step in one], rel=1e-12)


def test_the_job_ends_when_one_process_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\nif os.environ['NTPJAX_PROCESS'] == '1': sys.exit(5)\ntime.sleep(300)\n", encoding="utf-8"
    )
    assert launch(["--processes", "3", "--program", str(program)]) == 5
    assert "process 1 of 3 ended with exit code 5" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [(["--processes", "0"], "--processes"), (["--processes", "2", "--program", "missing.py"], "missing.py")],
)
def test_bad_arguments(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]):
    assert launch(arguments) == ExitCode.BAD_CONFIG
    assert problem in capsys.readouterr().err


def test_devices_that_cannot_be_shared_out_are_refused(tmp_path: Path):
    command = [sys.executable, "-m", "ntpjax.launch", "--processes", "3"]
    done = run([*command, "--config", str(write_config(tmp_path, "uneven"))])
    assert done.returncode == ExitCode.BAD_CONFIG
    assert "run.cpu_devices" in done.stderr and "3 processes" in done.stderr


# -- places and texts -------------------------------------------------------------------------------------------------


def test_a_place_survives_the_environment():
    place = Place(1, 3, f"127.0.0.1:{free_port()}")
    assert Place.from_environment(place.environment()) == place
    assert Place.from_environment({}) == Place()


@pytest.mark.parametrize("wrong", [{"NTPJAX_PROCESS": "3"}, {"NTPJAX_PROCESS": "one"}, {"NTPJAX_NUM_PROCESSES": ""}])
def test_a_place_that_cannot_be_is_refused(wrong: dict[str, str]):
    with pytest.raises(ValueError, match=next(iter(wrong)) if wrong != {"NTPJAX_PROCESS": "one"} else "one"):
        Place.from_environment(Place(0, 3, "127.0.0.1:1").environment() | wrong)


class Service:
    """A key-value store that already holds what the other processes told."""

    def __init__(self, **values: str) -> None:
        self.values = values

    def key_value_set(self, key: str, value: str) -> None:
        self.values[key] = value

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        return self.values[key]


def test_the_first_difference_is_named():
    service = Service(**{"ntpjax/0/1": "lines\nlayers f32[8]\nends f32[4]"})
    processes = Processes(service, Place(0, 2, "127.0.0.1:1"))
    with pytest.raises(
        ProcessesDifferError, match=r"number 1 is ends f32\[5\] on process 0 and ends f32\[4\] on process 1"
    ):
        processes.require_equal("sums", ["layers f32[8]", "ends f32[5]"])


def test_a_sum_that_only_one_process_has_is_named():
    processes = Processes(Service(**{"ntpjax/0/1": "lines\na"}), Place(0, 2, "127.0.0.1:1"))
    with pytest.raises(ProcessesDifferError, match="number 1 is b on process 0 and nothing on process 1"):
        processes.require_equal("sums", ["a", "b"])


def test_a_process_without_programs_has_nothing_to_compare():
    service = Service(**{"ntpjax/0/1": "none", "ntpjax/0/2": "lines\na"})
    Processes(service, Place(0, 3, "127.0.0.1:1")).require_equal("sums", ["a"])
    service = Service(**{"ntpjax/0/1": "none", "ntpjax/0/2": "lines\nb"})
    with pytest.raises(ProcessesDifferError, match="process 2"):
        Processes(service, Place(0, 3, "127.0.0.1:1")).require_equal("sums", ["a"])
