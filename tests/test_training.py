"""The library surface: what a foreign model may do, and what is refused with a text that helps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ntpjax.packing import unpack
from ntpjax.partition import partition_tree
from ntpjax.topology import Topology
from ntpjax.training import Generation, Training, deal_rows

Tree = Any
RULES = {"layers.up": ("columns", 1), "layers.down": ("columns", 1)}
WIDTH, COLUMNS, NUM_LAYERS = 4, 7, 2


class Sigmoid:
    """Residual layers whose activation of 0 is not 0: padding gets a gradient if nobody drops it."""

    def embed(self, ends: Tree, batch: Tree, tp: Any) -> jax.Array:
        return batch["x"] @ ends["in"]

    def layer(self, layer: Tree, x: jax.Array, tp: Any) -> jax.Array:
        return x + tp.exit(jax.nn.sigmoid(tp.enter(x) @ layer["up"].T) @ layer["down"])

    def loss(self, ends: Tree, x: jax.Array, batch: Tree, tp: Any) -> tuple[jax.Array, jax.Array]:
        errors = (x.sum(axis=-1) - batch["y"]) ** 2
        return jnp.sum(errors * batch["weights"]), jnp.sum(batch["weights"]).astype(jnp.int32)


class OneDevice:
    enter = exit = staticmethod(lambda x: x)


def init_params() -> Tree:
    keys = jax.random.split(jax.random.key(0), 3)
    up, down = (jax.random.normal(key, (NUM_LAYERS, COLUMNS, WIDTH)) for key in keys[:2])
    return {"ends": {"in": jax.random.normal(keys[2], (3, WIDTH))}, "layers": {"up": up, "down": down, "no bias": None}}


def make_batch(num_rows: int) -> Tree:
    x = jax.random.normal(jax.random.key(1), (num_rows, 3))
    return {"x": x, "y": jnp.sin(x).sum(axis=-1), "weights": jnp.ones(num_rows)}


def train_on_one_device(batch: Tree, num_steps: int) -> tuple[Tree, list[float]]:
    model, tp, params, optimizer = Sigmoid(), OneDevice(), init_params(), optax.adam(1e-2)

    def mean_loss(params: Tree) -> jax.Array:
        x = model.embed(params["ends"], batch, tp)
        for i in range(NUM_LAYERS):
            x = model.layer(jax.tree.map(lambda stack, i=i: stack[i], params["layers"]), x, tp)
        total, weight = model.loss(params["ends"], x, batch, tp)
        return total / weight

    state, losses = optimizer.init(params), []
    for _ in range(num_steps):
        loss, grads = jax.value_and_grad(mean_loss)(params)
        losses.append(float(loss))
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, losses


def generation_of(degrees: tuple[int, ...]) -> Generation:
    params = init_params()
    training = Training.of(Sigmoid(), params, partition_tree(params, RULES, max(degrees)), optax.adam(1e-2))
    return training.on(Topology.of_degrees(degrees))


@pytest.mark.parametrize(("degrees", "rows"), [((4, 4), (4, 4)), ((4, 3), (5, 3)), ((3,), (8,))])
def test_padding_stays_zero_whatever_the_activation(degrees: tuple[int, ...], rows: tuple[int, ...], x64: None) -> None:
    here, batch = generation_of(degrees), make_batch(8)
    state, losses = here.start(init_params()), []
    for _ in range(4):
        state, sums = here.step(state, deal_rows(batch, rows))
        losses.append(sums.mean_loss())
    expected_params, expected_losses = train_on_one_device(batch, num_steps=4)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-12)
    found = unpack(state["params"], here.training.partitions["params"], here.flat)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), found, expected_params)
    # Seven columns on any of these degrees leave a slot of some rank empty.
    last = np.asarray(state["params"]["layers"]["down"])[here.flat.tp_groups[0][-1], :, -1]
    np.testing.assert_array_equal(last, 0)


def test_rows_are_dealt_in_order_and_padded_with_zeros() -> None:
    dealt = deal_rows({"x": np.arange(10).reshape(5, 2), "weights": np.ones(5)}, (3, 0, 2))
    assert dealt["x"].tolist() == [[[0, 1], [2, 3], [4, 5]], [[0, 0]] * 3, [[6, 7], [8, 9], [0, 0]]]
    assert dealt["weights"].tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 0]]


def test_a_batch_of_other_rows_or_replicas_is_refused_with_its_shape() -> None:
    with pytest.raises(ValueError, match=r"shape \(8,\), but must have the 7 rows dealt"):
        deal_rows(make_batch(8), (4, 3))
    with pytest.raises(ValueError, match=r"shape \(1, 8\), but its dimension 0 must be the 2 replicas"):
        generation_of((4, 4)).batch(deal_rows(make_batch(8), (8,)))


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"layers": {}}, r"must be a dict of 'ends' and 'layers' .got \['layers'\]"),
        ([np.ones(3)], "must be a dict of 'ends' and 'layers' .got list"),
    ],
)
def test_parameters_that_are_not_ends_and_layers_are_refused(params: Tree, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Training.of(Sigmoid(), params, partition_tree(params, {}, 4), optax.sgd(0.1))


def test_units_on_the_dimension_that_counts_layers_are_refused() -> None:
    params = init_params()
    partitions = partition_tree(params, {"layers.up": ("columns", 0)}, 4)
    with pytest.raises(ValueError, match=r"'layers.up' of shape \(2, 7, 4\) has its units on dimension 0"):
        Training.of(Sigmoid(), params, partitions, optax.sgd(0.1))
