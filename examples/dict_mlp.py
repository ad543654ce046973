"""A residual MLP as a dict of arrays: it learns a function of eight numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import ntpjax

INPUTS, WIDTH, HIDDEN, NUM_LAYERS, ROWS, NUM_STEPS = 8, 16, 60, 3, 64, 20
RULES = {"layers.up": ("columns", 2, 4), "layers.down": ("columns", 1, 4)}  # 15 units of 4 hidden columns
EVENTS = {7: lambda now: now.lose(replica=1, rank=2), 14: lambda now: now.restore(replica=1)}

Arrays = dict[str, Any]  # arrays by name, nested


def init_params() -> Arrays:
    """The parameters before the first step."""

    def draw(seed: int, *shape: int) -> jax.Array:
        return 0.2 * jax.random.normal(jax.random.key(seed), shape)

    layers = {
        "up": draw(0, NUM_LAYERS, WIDTH, HIDDEN),
        "slope": jnp.full(NUM_LAYERS, 0.1),
        "down": draw(1, NUM_LAYERS, HIDDEN, WIDTH),
    }
    return {"in": draw(2, INPUTS, WIDTH), "layers": layers, "out": draw(3, WIDTH, 1)}


def make_batch(step: int) -> Arrays:
    """The rows of one step."""
    x = jax.random.normal(jax.random.key(100 + step), (ROWS, INPUTS))
    return {"x": x, "y": jnp.sin(x).sum(axis=-1)}


class Model:
    """The model as ntpjax takes it: what is before, in and after the layers."""

    def embed(self, ends: Arrays, batch: Arrays, tp: ntpjax.TensorParallel) -> jax.Array:
        return batch["x"] @ ends["in"]

    def layer(self, layer: Arrays, x: jax.Array, tp: ntpjax.TensorParallel) -> jax.Array:
        y = tp.enter(x) @ layer["up"]
        y = jnp.where(y > 0, y, tp.enter(layer["slope"]) * y)  # a leaky ReLU that learns its slope
        return x + tp.exit(y @ layer["down"])

    def loss(self, ends: Arrays, x: jax.Array, batch: Arrays, tp: ntpjax.TensorParallel) -> tuple[jax.Array, jax.Array]:
        errors = ((x @ ends["out"])[:, 0] - batch["y"]) ** 2
        return jnp.sum(errors), jnp.array(errors.size, errors.dtype)


def train(params: Arrays) -> tuple[Arrays, list[float]]:
    """The parameters after the last step, and the loss of every step."""
    optimizer = optax.adam(1e-2)
    params = {"ends": {"in": params["in"], "out": params["out"]}, "layers": params["layers"]}
    partitions = ntpjax.partition_tree(params, RULES, nominal_tp=4)
    training = ntpjax.Training.of(Model(), params, partitions, optimizer)
    here = training.on(ntpjax.Topology.of_degrees((4, 4)))  # two replicas of four devices
    state, losses = here.start(params), []
    for step in range(NUM_STEPS):
        if step in EVENTS:
            old, here = here, training.on(EVENTS[step](here.topology))
            state, moved = here.take(state, old)
            print(f"TP {old.flat.degrees} -> {here.flat.degrees}: {moved}")
        rows = jax.tree.map(lambda array: array.reshape(2, -1, *array.shape[1:]), make_batch(step))
        state, sums = here.step(state, rows)
        losses.append(sums.mean_loss())
        print(f"step {step:2}  loss {losses[-1]:.4f}")
    params = here.gather(state)["params"]
    return {**params["ends"], "layers": params["layers"]}, losses


if __name__ == "__main__":
    ntpjax.emulate_cpu_devices(8)
    train(init_params())
