"""The optimizer, and the proof that it may run on shards: it has to be elementwise.

Each rank updates its own units, padding included. That equals one optimizer over the whole model only if no element's
update depends on another element. Global-norm clipping, which does mix elements, is done by the step itself, from a
norm that counts each unit once.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ntpjax.layout import REPLICATED
from ntpjax.partition import Partition

PyTree = Any
_NUM_TRIAL_STEPS = 20


def warmup_cosine(*, learning_rate: float, warmup_steps: int, num_steps: int, final_fraction: float) -> optax.Schedule:
    """Learning rate over steps: linear from near 0 to `learning_rate`, then a cosine to `final_fraction` of it."""
    decay_steps = max(num_steps - warmup_steps, 1)
    cosine = optax.cosine_decay_schedule(learning_rate, decay_steps, alpha=final_fraction)
    if warmup_steps == 0:
        return cosine
    # The first step already learns: it gets 1 / warmup_steps of the rate, not 0.
    start = learning_rate / warmup_steps
    warmup = optax.linear_schedule(start, learning_rate, max(warmup_steps - 1, 1))
    return optax.join_schedules([warmup, cosine], [warmup_steps])


def adamw(
    schedule: optax.Schedule, partitions: PyTree, *, b1: float, b2: float, eps: float, weight_decay: float
) -> optax.GradientTransformation:
    """AdamW that decays sharded parameters (matrices) and not replicated ones (norm scales)."""
    decayed = jax.tree.map(lambda part: part.family != REPLICATED, partitions)
    return optax.chain(
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        optax.add_decayed_weights(weight_decay, mask=decayed),
        optax.scale_by_learning_rate(schedule),
    )


def state_partitions(optimizer: optax.GradientTransformation, params: PyTree, partitions: PyTree) -> PyTree:
    """How each array of the optimizer's state is cut: moments like their parameter, counters replicated.

    Args:
      params: arrays or shapes, logical or local.
    """
    found: list[PyTree] = []

    def trace(params: PyTree) -> None:
        state = optimizer.init(params)
        parts = optax.tree_utils.tree_map_params(
            optimizer, lambda _, part: part, state, partitions, transform_non_params=lambda _: Partition()
        )
        found.append(parts)

    # Traced, because optax calls `init` to find out which arrays are like parameters: that would touch a device.
    jax.eval_shape(trace, params)
    return found[0]


def require_elementwise(optimizer: optax.GradientTransformation, params: PyTree) -> None:
    """Checks by trial that `optimizer` may run on shards with zero padding.

    Args:
      params: arrays or shapes of the model.

    Raises:
      ValueError: if an element's update depends on other elements, if an element that is zero with zero gradients does
        not stay zero, or if a moment has another shape than its parameter.
    """
    _require_moments_like_params(optimizer, params)
    small = [tuple(min(dim, 4) for dim in leaf.shape) for leaf in jax.tree.leaves(params)]
    keys = jax.random.split(jax.random.key(0), 2 * len(small))
    draws = [jax.random.normal(key, shape) for key, shape in zip(keys, small * 2, strict=True)]

    @jax.jit
    def updates(first: float) -> list[jax.Array]:
        """What changes when the first element of every parameter and gradient is `first`."""
        set_first = [draw.ravel().at[0].set(first).reshape(draw.shape) for draw in draws]
        trees = (set_first[: len(small)], set_first[len(small) :])
        return _updates(optimizer, *(jax.tree.unflatten(jax.tree.structure(params), leaves) for leaves in trees))

    # Padding is zero; an outlier must not reach the other elements, nor may a NaN.
    with_padding = updates(0.0)
    if any(leaf.ravel()[0] != 0 for leaf in with_padding):
        raise ValueError(
            "the optimizer moves parameters that are zero and have no gradient, so padding would not stay zero."
        )
    for outlier in (1e3, 1e15, jnp.nan):
        for a, b in zip(with_padding, updates(outlier), strict=True):
            if (a.ravel()[1:] != b.ravel()[1:]).any():
                raise ValueError(
                    "the optimizer is not elementwise: a parameter's update depends on other elements (as in LAMB, "
                    "Muon, Adafactor, Prodigy or clip_by_global_norm), which shards cannot compute alone; use an "
                    "elementwise one such as adamw, lion or sgd, and the step's own `clip_norm`."
                )


def _updates(optimizer: optax.GradientTransformation, params: PyTree, grads: PyTree) -> list[jax.Array]:
    """The parameters' changes over a few steps with the same gradients."""

    def step(carry: tuple[PyTree, PyTree], _: None) -> tuple[tuple[PyTree, PyTree], None]:
        params, state = carry
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    (end, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), length=_NUM_TRIAL_STEPS)
    return jax.tree.leaves(jax.tree.map(jnp.subtract, end, params))


def _require_moments_like_params(optimizer: optax.GradientTransformation, params: PyTree) -> None:
    shapes = jax.eval_shape(lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), params))
    known = {leaf.shape for leaf in jax.tree.leaves(shapes)} | {()}
    for leaf in jax.tree.leaves(jax.eval_shape(optimizer.init, shapes)):
        if leaf.shape not in known:
            raise ValueError(
                f"the optimizer keeps an array of shape {leaf.shape}, which no parameter has (a factored moment?); its "
                "state cannot be cut into units; use an elementwise optimizer such as adamw, lion or sgd."
            )
