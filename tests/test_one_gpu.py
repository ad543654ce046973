"""The benchmark on one GPU, with a tiny model on the CPU: it prints its figures, and says what it cannot do."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.one_gpu import ONE_BILLION, TINY, Figures, Work

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "one_gpu.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, env=environment)


@pytest.mark.timeout(400)
def test_a_tiny_run_prints_the_figures_of_each_contender():
    found = run("--tiny", "--remat", "dots")
    assert found.returncode == 0, found.stderr
    losses = {}
    for contender in ("ntpjax", "plain"):
        line = re.search(rf"^{contender} +([\d,]+) tokens/s, (.*)$", found.stdout, re.MULTILINE)
        assert line, found.stdout
        assert int(line[1].replace(",", "")) > 0
        assert "no MFU (no peak for 'cpu'), peak memory not counted; step " in line[2]
        losses[contender] = [float(loss) for loss in re.findall(r"\d+\.\d+", line[2].split("loss")[1])]
    # The same model, the same initial values, the same batch: the same losses, to the 8 bits of bfloat16.
    assert losses["ntpjax"] == pytest.approx(losses["plain"], rel=0.01)
    assert losses["plain"][1] < losses["plain"][0]
    assert re.search(r"^torch(: not installed, skipped| .* tokens/s)", found.stdout, re.MULTILINE)
    assert re.search(r"^ntpjax_over_plain \d+\.\d+ ", found.stdout, re.MULTILINE)


def test_without_a_gpu_it_says_so_and_exits_with_2():
    found = run()
    assert found.returncode == 2
    assert found.stdout == ""
    assert "no GPU found by JAX; run with --tiny" in found.stderr


def test_flops_and_utilisation_are_those_of_the_stated_formula():
    work = Work(ONE_BILLION, 2048, 8, "none", num_rounds=5, steps_a_round=10)
    layer = 4 * 2048 * 2048 + 3 * 2048 * 5632 + 2 * 2048
    assert work.num_params == 18 * layer + 2 * 32_768 * 2048 + 2048
    assert work.flops_a_token == 6 * (18 * layer + 32_768 * 2048 + 2048) + 6 * 18 * 2048 * 2048
    figures = Figures("NVIDIA H200", [0.3, 0.25, 0.2], 2**35, 10.0, 9.0)
    share = work.flops_a_token * 8 * 2048 / 0.25 / 989e12
    assert f"65,536 tokens/s, MFU {share:.1%}, peak memory 32.0 GiB; step 250.0 ms" in figures.line(work)


def test_a_device_whose_peak_is_not_known_gets_no_utilisation():
    work = Work(TINY, 32, 2, "none", num_rounds=1, steps_a_round=1)
    line = Figures("NVIDIA A100-SXM4-80GB", [1.0], None, 4.0, 4.0).line(work)
    assert "64 tokens/s, no MFU (no peak for 'NVIDIA A100-SXM4-80GB'), peak memory not counted" in line
