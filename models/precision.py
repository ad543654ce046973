"""The types in which sums are computed."""

import jax.numpy as jnp


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    """The type in which numbers of type `dtype` are added up."""
    return jnp.promote_types(dtype, jnp.float32)
