"""What the README shows runs as it is shown."""

import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from ntpjax.exit_codes import ExitCode

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def _example() -> dict:
    (source,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(compile(source, "README.md", "exec"), names)
    return names


@pytest.mark.timeout(300)
def test_the_example_of_a_foreign_model_trains_through_a_loss_like_one_device(x64: None) -> None:
    found = _example()
    assert found["here"].flat.degrees == (4, 3)
    assert found["moved"].source == "own and other replica"
    np.testing.assert_allclose(found["losses"], _losses_on_one_device(found), rtol=1e-10)
    assert found["losses"][-1] < found["losses"][0] / 2


def _losses_on_one_device(found: dict) -> list[float]:
    class OneDevice:
        enter = exit = staticmethod(lambda x: x)

    draw, model, optimizer = found["draw"], found["MLP"](), optax.adam(1e-2)
    params = {
        "ends": {"in": draw(0, 5, 16), "out": draw(1, 16, 1)},
        "layers": {"up": draw(2, 3, 30, 16), "down": draw(3, 3, 30, 16)},
    }
    batch = {name: rows.reshape(-1, *rows.shape[2:]) for name, rows in found["batch"].items()}

    def mean_loss(params: dict) -> jax.Array:
        h = model.embed(params["ends"], batch, OneDevice())
        for i in range(3):
            h = model.layer(jax.tree.map(lambda stack: stack[i], params["layers"]), h, OneDevice())  # noqa: B023
        total, weight = model.loss(params["ends"], h, batch, OneDevice())
        return total / weight

    state, losses = optimizer.init(params), []
    for _ in range(20):
        loss, grads = jax.value_and_grad(mean_loss)(params)
        losses.append(float(loss))
        norm = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * min(1, 1 / norm), grads)  # noqa: B023
        updates, state = optimizer.update(grads, state, params)
        params = jax.tree.map(lambda p, u: p + u, params, updates)
    return losses


def test_the_table_of_exit_codes_is_complete() -> None:
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    assert documented == {int(code) for code in ExitCode}
