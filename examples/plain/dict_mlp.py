"""A residual MLP as a dict of arrays: it learns a function of eight numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

INPUTS, WIDTH, HIDDEN, NUM_LAYERS, ROWS, NUM_STEPS = 8, 16, 60, 3, 64, 20

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


def apply_layer(layer: Arrays, x: jax.Array) -> jax.Array:
    """The next layer's input."""
    y = x @ layer["up"]
    y = jnp.where(y > 0, y, layer["slope"] * y)  # a leaky ReLU that learns its slope
    return x + y @ layer["down"]


def mean_loss(params: Arrays, batch: Arrays) -> jax.Array:
    """The mean squared error."""
    x = batch["x"] @ params["in"]
    x, _ = jax.lax.scan(lambda x, layer: (apply_layer(layer, x), None), x, params["layers"])
    return jnp.mean(((x @ params["out"])[:, 0] - batch["y"]) ** 2)


def train(params: Arrays) -> tuple[Arrays, list[float]]:
    """The parameters after the last step, and the loss of every step."""
    optimizer = optax.adam(1e-2)

    @jax.jit
    def train_step(params: Any, opt_state: Any, batch: Arrays) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(mean_loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = optimizer.init(params), []
    for step in range(NUM_STEPS):
        params, opt_state, loss = train_step(params, opt_state, make_batch(step))
        losses.append(float(loss))
        print(f"step {step:2}  loss {losses[-1]:.4f}")
    return params, losses


if __name__ == "__main__":
    train(init_params())
