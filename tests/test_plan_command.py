"""`python -m ntpjax plan` prints what the forecasts say, and refuses what it cannot use, without touching a device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ntpjax.cli import main

ROOT = Path(__file__).parent.parent
DEMO = ["plan", "--config", "configs/demo.yaml"]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_json_has_a_row_for_each_degree_down_to_tp_min(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEMO, "--json", "--set", "topology.tp_min=2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [row["degree"] for row in plan["degrees"]] == [4, 3, 2]
    assert plan["degrees"][0]["units"]["vocab"] == [64, 65]  # 257 rows on 4
    assert plan["degrees"][1]["units"]["heads"] == [4, 4]  # 12 heads on 3


def test_lost_limits_the_rows_and_the_table_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEMO, "--lost", "1"]) == 0
    shown = capsys.readouterr().out
    assert "64-65" in shown and "85-86" in shown
    assert "128-129" not in shown


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([*DEMO, "--lost", "4"], "--lost must be between 0 and 3"),
        ([*DEMO, "--program", "nowhere.py"], "--program nowhere.py is not a file"),
        ([*DEMO, "--program", "ntpjax/layout.py"], "has no function `blueprint"),
        ([*DEMO, "--set", "model.num_heads=5"], "model: `num_kv_heads` (=12) must divide `num_heads` (=5)"),
        (["plan", "--config", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)
def test_what_cannot_be_used_is_exit_code_2_and_a_short_text(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert text in shown
    assert len(shown.splitlines()) <= 3


def test_no_device_is_touched() -> None:
    # A platform that does not exist: whoever looks for a device fails.
    found = subprocess.run(
        [sys.executable, "-m", "ntpjax", "plan", "--config", "configs/llama_8b_2x8.yaml"],
        env={**os.environ, "JAX_PLATFORMS": "nonexistent"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert "8,030,261,248 parameters" in found.stdout
