"""Cross-entropy over a vocabulary whose rows are spread over a tensor-parallel group; whole logits never exist.

Shape suffixes: T tokens, C tokens of one chunk of them, D d_model, V local vocabulary rows.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.precision import at_least_float32
from models.tensor_parallel import TensorParallel


def cross_entropy(
    hidden_TD: jax.Array, targets_T: jax.Array, head_VD: jax.Array, tp: TensorParallel, *, chunk: int | None
) -> jax.Array:
    """Cross-entropy [T] in nats. Each rank has the logits of its own rows only; padding rows have no mass.

    Args:
      hidden_TD: what has passed `tp.enter`.
      targets_T: token ids.
      head_VD: the rows of the units `tp.unit_ids("vocab")`.
      chunk: of how many tokens logits exist at a time, at most; None for all.
    """
    own: _OwnLogits = _own_logits(chunk, hidden_TD, targets_T, head_VD, tp.unit_ids("vocab"))
    # The only collectives of the loss: there are none between its chunks.
    largest_T = tp.max(own.largest)
    own_total_T = own.total * jnp.exp(own.largest - largest_T)
    total_T, target_T = tp.exit(jnp.stack([own_total_T, own.target]))
    return jnp.log(total_T) + largest_T - target_T


class _OwnLogits(NamedTuple):
    """What the loss needs of one rank's logits, for each token.

    The largest, m (-inf on a rank that holds padding only; has no gradient); the sum of all exp(logit - m); and the
    target's logit, 0 if another rank has it.
    """

    largest: jax.Array
    total: jax.Array
    target: jax.Array

    @classmethod
    def of(cls, logit_TV: jax.Array, targets_T: jax.Array, unit_ids_V: jax.Array) -> "_OwnLogits":
        logit_TV = jnp.where(unit_ids_V >= 0, logit_TV, -jnp.inf)
        largest_T = jax.lax.stop_gradient(jnp.max(logit_TV, axis=-1))
        # Where all is padding, -inf - (-inf) would be NaN.
        finite_T = jnp.where(largest_T > -jnp.inf, largest_T, 0)
        total_T = jnp.sum(jnp.exp(logit_TV - finite_T[:, None]), axis=-1)
        is_target_TV = unit_ids_V == targets_T[:, None]
        return cls(largest_T, total_T, jnp.sum(jnp.where(is_target_TV, logit_TV, 0), axis=-1))


def _logits(hidden_CD: jax.Array, head_VD: jax.Array) -> jax.Array:
    wide = at_least_float32(hidden_CD.dtype)
    return jnp.einsum("cd,vd->cv", hidden_CD, head_VD, preferred_element_type=wide)


def _cut(array: jax.Array, most: int | None) -> jax.Array:
    """An array [T, ...] as chunks [num_chunks, C, ...] with C <= `most`, the last one filled up with zeros."""
    num = array.shape[0]
    num_chunks = -(-num // (most or num))
    size = -(-num // num_chunks)
    filled = jnp.pad(array, [(0, num_chunks * size - num), *[(0, 0)] * (array.ndim - 1)])
    return filled.reshape(num_chunks, size, *array.shape[1:])


def _join(chunks: jax.Array, num: int) -> jax.Array:
    """The inverse of `_cut`, for `num` entries."""
    return chunks.reshape(-1, *chunks.shape[2:])[:num]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _own_logits(
    most: int | None, hidden_TD: jax.Array, targets_T: jax.Array, head_VD: jax.Array, unit_ids_V: jax.Array
) -> _OwnLogits:
    """`_OwnLogits` with the logits of at most `most` tokens at a time, in the backward pass too.

    JAX's own gradient of this loop would do its matmuls in float32, since that is what logits are, would add up the
    head's gradient in the head's type, and would keep arrays [C, V] that it finds to be the same for all chunks.
    """

    def of_chunk(_: None, chunk: tuple[jax.Array, jax.Array]) -> tuple[None, _OwnLogits]:
        hidden_CD, targets_C = chunk
        return None, _OwnLogits.of(_logits(hidden_CD, head_VD), targets_C, unit_ids_V)

    _, own = jax.lax.scan(of_chunk, None, (_cut(hidden_TD, most), _cut(targets_T, most)))
    return jax.tree.map(lambda chunks: _join(chunks, len(targets_T)), own)


def _own_logits_forward(most: int | None, *arrays: jax.Array) -> tuple[_OwnLogits, tuple[jax.Array, ...]]:
    return _own_logits(most, *arrays), arrays


def _own_logits_backward(
    most: int | None, arrays: tuple[jax.Array, ...], d_own: _OwnLogits
) -> tuple[jax.Array, None, jax.Array, None]:
    hidden_TD, targets_T, head_VD, unit_ids_V = arrays

    def of_chunk(d_head_VD: jax.Array, chunk: tuple[jax.Array, jax.Array, _OwnLogits]) -> tuple[jax.Array, jax.Array]:
        hidden_CD, targets_C, d_own = chunk
        logit_CV = _logits(hidden_CD, head_VD)
        _, pullback = jax.vjp(lambda logit_CV: _OwnLogits.of(logit_CV, targets_C, unit_ids_V), logit_CV)
        d_logit_CV = pullback(d_own)[0].astype(hidden_CD.dtype)
        own_VD = jnp.einsum("cv,cd->vd", d_logit_CV, hidden_CD, preferred_element_type=d_head_VD.dtype)
        return d_head_VD + own_VD, jnp.einsum("cv,vd->cd", d_logit_CV, head_VD)

    zeros_VD = jnp.zeros(head_VD.shape, at_least_float32(head_VD.dtype))
    chunks = jax.tree.map(lambda array: _cut(array, most), (hidden_TD, targets_T, d_own))
    d_head_VD, d_hidden_CD = jax.lax.scan(of_chunk, zeros_VD, chunks)
    return _join(d_hidden_CD, len(targets_T)), None, d_head_VD.astype(head_VD.dtype), None


_own_logits.defvjp(_own_logits_forward, _own_logits_backward)
