"""Training on one device with plain JAX and optax: the reference that every sharded run is compared with.

Nothing here knows of ranks, layouts or padding.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from models.tensor_parallel import OneDevice
from models.transformer import Batch, TransformerFunctions

PyTree = Any


class StepResult(NamedTuple):
    """`loss` is the sum over the batch, `grads` are its gradients; parameters and optimizer state are those after the
    step.
    """

    loss: jax.Array
    grads: PyTree
    params: PyTree
    opt_state: PyTree


def loss_sum(model: TransformerFunctions, params: PyTree, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Sum of the losses over the batch, and of the weights."""
    tp = OneDevice(model.config.num_units)
    x = model.embed(params["ends"], batch, tp)
    x, _ = jax.lax.scan(lambda x, layer: (model.layer(layer, x, tp), None), x, params["layers"])
    return model.loss(params["ends"], x, batch, tp)


@functools.partial(jax.jit, static_argnames=("model", "optimizer", "clip_norm"))
def train_step(
    model: TransformerFunctions,
    optimizer: optax.GradientTransformation,
    clip_norm: float,
    params: PyTree,
    opt_state: PyTree,
    batch: Batch,
) -> StepResult:
    """One step on the mean loss, with the gradient clipped to a global norm of `clip_norm`."""
    (loss, weight), grads = jax.value_and_grad(lambda params: loss_sum(model, params, batch), has_aux=True)(params)
    mean_grads = jax.tree.map(lambda grad: grad / weight, grads)
    scale = jnp.minimum(1, clip_norm / optax.tree.norm(mean_grads))
    updates, opt_state = optimizer.update(jax.tree.map(lambda grad: grad * scale, mean_grads), opt_state, params)
    return StepResult(loss, grads, optax.apply_updates(params, updates), opt_state)
