"""The benchmark of ours against GSPMD: on a tiny model both sides train alike, and its last line can be read."""

import re

import pytest

from benchmarks import healthy_tax

# Compiling is slow on a busy machine.
pytestmark = pytest.mark.timeout(300)

LAST_LINE = r"healthy_tax (\d+\.\d{3}) memory_ratio (\d+\.\d{3})"


def test_both_sides_have_the_same_losses_and_the_last_line_has_two_ratios(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The devices are there already.
    monkeypatch.setattr(healthy_tax, "emulate_cpu_devices", lambda num_devices: None)
    monkeypatch.setattr("sys.argv", ["healthy_tax.py", "--tiny"])
    healthy_tax.main()
    lines = capsys.readouterr().out.splitlines()
    losses = [[float(loss) for loss in line.split(": ")[1].split()] for line in lines if line.startswith("losses of")]
    assert [len(of_side) for of_side in losses] == [healthy_tax.NUM_COMPARED] * 2
    assert losses[0] == pytest.approx(losses[1], rel=healthy_tax.LOSS_TOLERANCE)
    # They learn: equal losses of states that never change would say nothing.
    assert losses[0][-1] < losses[0][0]
    found = re.fullmatch(LAST_LINE, lines[-1])
    assert found is not None
    assert all(float(ratio) > 0 for ratio in found.groups())


@pytest.mark.parametrize("wrong", [1.0001, float("nan")])
def test_a_loss_that_differs_is_refused(wrong: float) -> None:
    healthy_tax.require_equal([2.0, 1.000001], [2.0, 1.0])
    with pytest.raises(SystemExit, match="losses differ"):
        healthy_tax.require_equal([2.0, wrong], [2.0, 1.0])
