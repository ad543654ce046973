"""The layers of ntpjax: a file imports only from its own layer or a lower one, layer 0 only from the standard library.

To add a file to `ntpjax/`, put its name into `LAYERS`. If a test here fails, move the code, not the table.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LAYERS = {
    0: "layout plan topology policy schedule records exit_codes ledger hlo hlo_text",
    1: "mesh partition packing collectives executables program_store power health membership processes checkpoint text"
    " bpe data metrics simulator targets",
    2: "replicas backward step optimizer move training ahead forecast boost job recovery trainer",
    3: "config sections describe display report program plan_command aot_command cli launch ahead_process __main__",
    4: "__init__",  # gathers the public names of all the others
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names.split()}
ROOT = Path(__file__).parent.parent


def _imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yields (line number, dotted name) of all imports of a file in `package`, those inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, ("ntpjax" if node.level else None, node.module)))
            if module == "ntpjax":
                # `from ntpjax import mesh` names a file; any other name comes from `__init__`.
                for alias in node.names:
                    yield node.lineno, f"ntpjax.{alias.name}" if alias.name in LAYER_OF else "ntpjax"
            else:
                yield node.lineno, module


def _problems(name: str, source: str) -> list[str]:
    """Returns what is wrong with the imports of `ntpjax/<name>.py`, one text for each; empty when all is well."""
    if name not in LAYER_OF:
        return [f"ntpjax/{name}.py is in no layer; add '{name}' to LAYERS in tests/test_layering.py"]
    problems = []
    for line, imported in _imports(source, "ntpjax"):
        where = f"ntpjax/{name}.py:{line} (layer {LAYER_OF[name]}) imports {imported}"
        package, _, rest = imported.partition(".")
        if package == "ntpjax":
            other = rest.partition(".")[0] or "__init__"
            if other not in LAYER_OF:
                problems.append(f"{where}, which is in no layer; add '{other}' to LAYERS in tests/test_layering.py")
            elif LAYER_OF[other] > LAYER_OF[name]:
                problems.append(f"{where} of layer {LAYER_OF[other]}; move code down or pass it as an argument")
        elif package == "models":
            problems.append(f"{where}; ntpjax knows no model: take what is needed as an argument from train.py")
        elif LAYER_OF[name] == 0 and package not in sys.stdlib_module_names:
            problems.append(f"{where}; layer 0 uses the standard library only: move this file or that code to layer 1")
    return problems


def test_every_file_imports_only_from_its_own_layer_or_below():
    folder = ROOT / "ntpjax"
    problems = [
        problem
        for path in sorted(folder.rglob("*.py"))
        for problem in _problems(".".join(path.relative_to(folder).with_suffix("").parts), path.read_text())
    ]
    assert not problems, "\n".join(problems)


def test_models_do_not_import_ntpjax():
    problems = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}; pass it in from train.py as an argument"
        for path in sorted((ROOT / "models").rglob("*.py"))
        for line, imported in _imports(path.read_text(), "models")
        if imported.partition(".")[0] == "ntpjax"
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("layout", "from ntpjax.mesh import build", "layout.py:1 (layer 0) imports ntpjax.mesh of layer 1"),
        ("mesh", "import os\nimport ntpjax.step", "mesh.py:2 (layer 1) imports ntpjax.step of layer 2"),
        ("mesh", "from ntpjax import step", "imports ntpjax.step of layer 2"),
        ("mesh", "from . import step", "imports ntpjax.step of layer 2"),
        ("mesh", "from .step import grad_step", "imports ntpjax.step of layer 2"),
        ("step", "def f():\n    import ntpjax.config", "step.py:2 (layer 2) imports ntpjax.config of layer 3"),
        ("mesh", "from ntpjax import Trainer", "imports ntpjax of layer 4"),
        ("mesh", "import ntpjax", "imports ntpjax of layer 4"),
        ("plan", "import jax.numpy as jnp", "imports jax.numpy; layer 0 uses the standard library only"),
        ("plan", "from numpy import array", "imports numpy; layer 0 uses the standard library only"),
        ("trainer", "from models.transformer import Transformer", "ntpjax knows no model"),
        ("utils", "", "ntpjax/utils.py is in no layer; add 'utils' to LAYERS"),
        ("mesh", "import ntpjax.utils", "imports ntpjax.utils, which is in no layer"),
    ],
)
def test_a_forbidden_import_is_reported(name: str, source: str, expected: str):
    problems = _problems(name, source)
    assert len(problems) == 1
    assert expected in problems[0]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("layout", "import math\nfrom collections.abc import Mapping\nfrom ntpjax.plan import moves"),
        ("step", "import jax\nfrom ntpjax import mesh\nfrom ntpjax.layout import units\nfrom .optimizer import apply"),
        ("__init__", "from ntpjax.config import load\nfrom ntpjax.layout import units"),
    ],
)
def test_imports_from_the_same_layer_or_below_are_allowed(name: str, source: str):
    assert _problems(name, source) == []
