"""The examples compute what the plain models that they start from compute, with at most 40 lines more."""

import ast
import difflib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ntpjax

ROOT = Path(__file__).parent.parent
NAMES = ("linen_transformer", "equinox_mlp_mixer", "dict_mlp")
MOST_ADDED_LINES = 40


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Linen's dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _in_float64(params: Any) -> Any:
    return jax.tree.map(lambda array: array.astype(jnp.float64), params)


def _named(params: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", NAMES)
def test_an_example_computes_what_the_plain_model_computes(
    name: str, x64: None, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, nonuniform = _load(ROOT / "examples" / "plain" / f"{name}.py"), _load(ROOT / "examples" / f"{name}.py")
    params, losses = plain.train(_in_float64(plain.init_params()))
    capsys.readouterr()
    found_params, found_losses = nonuniform.train(_in_float64(nonuniform.init_params()))

    assert len(losses) == 20
    np.testing.assert_allclose(found_losses, losses, rtol=1e-9)
    expected, found = _named(params), _named(found_params)
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_allclose(found[key], array, rtol=0, atol=1e-9 * np.abs(array).max(), err_msg=key)

    # A line for each step, and one before steps 7 and 14.
    lines = capsys.readouterr().out.splitlines()
    assert [i for i, line in enumerate(lines) if not line.startswith("step")] == [7, 15]
    assert lines[7].startswith("TP (4, 4) -> (4, 3): Moved")
    assert lines[15].startswith("TP (4, 3) -> (4, 4): Moved")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_as_a_script(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", f"examples/{name}.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("loss") == 20


@pytest.mark.parametrize("name", NAMES)
def test_an_example_adds_few_lines(name: str) -> None:
    paths = (ROOT / "examples" / "plain" / f"{name}.py", ROOT / "examples" / f"{name}.py")
    plain, nonuniform = (path.read_text(encoding="utf-8").splitlines() for path in paths)
    diff = list(difflib.unified_diff(plain, nonuniform, lineterm="", n=0))[2:]
    added = [line for line in diff if line.startswith("+")]
    assert 0 < len(added) <= MOST_ADDED_LINES, "\n".join(added)


def _packages(path: Path) -> Iterator[str]:
    """The packages that a file imports from."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_stands_alone(name: str) -> None:
    libraries = {"typing", "jax", "optax", "flax", "equinox"}
    assert set(_packages(ROOT / "examples" / "plain" / f"{name}.py")) <= libraries
    assert set(_packages(ROOT / "examples" / f"{name}.py")) <= libraries | {"ntpjax"}


ATTENTION = {  # 3 layers, width 16, 8 query heads, 2 KV heads, 4 numbers a head
    "q": jax.ShapeDtypeStruct((3, 16, 8, 4), jnp.float32),
    "kv": jax.ShapeDtypeStruct((3, 16, 2, 4), jnp.float32),
}


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"layers.q": ("heads", 2)}, ["'layers.q'", "match no parameter", "remove", "correct the pattern", "q"]),
        (
            {"q": ("heads", 2), "*": ("heads", 2)},
            ["'q'", "(3, 16, 8, 4)", "['q', '*']", "exactly one may match", "remove one"],
        ),
        ({"q": ("heads", 2, 3)}, ["'q'", "(3, 16, 8, 4)", "dimension 2", "`unit_size` (=3)", "change the rule or"]),
        ({"q": ("heads", 4)}, ["'q'", "(3, 16, 8, 4)", "dimension 4", "change the rule or"]),
        (
            {"q": ("heads", 2), "kv": ("heads", 2)},
            ["'q' (shape (3, 16, 8, 4), dimension 2: 8 units)", "dimension 2: 2 units", "'heads'", "another unit size"],
        ),
        (
            {"q": ("heads", 2, 8), "kv": ("kv", 2, 1, "heads")},
            [
                "dimension 2: 2 units) is copied with 'heads', 'q'",
                "1 unit)",
                "whole multiple",
                "change a rule or a size",
            ],
        ),
        (
            {"kv": ("kv", 2, 1, "heads")},
            ["dimension 2: 2 units) is copied with 'heads'", "no ordinary rule names", "change it"],
        ),
    ],
)
def test_a_bad_rule_is_refused_with_its_names_sizes_and_remedy(rules: dict[str, tuple], words: list[str]) -> None:
    with pytest.raises(ValueError) as refused:
        ntpjax.partition_tree(ATTENTION, rules, nominal_tp=4)
    assert [word for word in words if word not in str(refused.value)] == []


def test_fewer_units_than_ranks_leave_ranks_empty() -> None:
    cut = ntpjax.partition_tree(ATTENTION, {"kv": ("kv", 2)}, nominal_tp=4)
    assert cut["kv"].family.compute_layout(4).ranks == ((0,), (1,), (), ())
