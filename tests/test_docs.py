"""`docs/use_it_in_your_model.md`: its Python runs and prints what is shown, and its diffs are those of `examples/`."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "use_it_in_your_model.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def _python() -> str:
    """The page's Python, each line where it is in the page, so that a traceback leads there."""
    lines, inside = [], False
    for line in PAGE.splitlines():
        if line.startswith("```"):
            inside = line == "```python"
        lines.append(line if inside and not line.startswith("```") else "")
    return "\n".join(lines)


@pytest.mark.timeout(300)
def test_the_snippets_run_in_order_and_print_what_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "use_it_in_your_model.py"
    script.write_text(_python(), encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-W", "error", script.name],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    shown = [line for block in _blocks("text") for line in block.splitlines() if line]
    assert [line for line in ran.stdout.splitlines() if line] == shown


@pytest.mark.parametrize("name", ["linen_transformer", "equinox_mlp_mixer", "dict_mlp"])
def test_the_diffs_are_those_of_the_files(name: str) -> None:
    paths = (f"examples/plain/{name}.py", f"examples/{name}.py")
    plain, nonuniform = ((ROOT / path).read_text(encoding="utf-8").splitlines() for path in paths)
    diff = list(difflib.unified_diff(plain, nonuniform, *paths, lineterm="", n=1))
    added = sum(line.startswith("+") for line in diff[2:])
    expected = f"{added} added or changed lines.\n\n```diff\n" + "\n".join(diff) + "\n```\n"
    assert expected in PAGE, f"put this into docs/use_it_in_your_model.md:\n{expected}"
