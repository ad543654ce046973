"""Local gradients of one device, and their sums over replicas under the backward pass.

The backward pass goes through the layers, last first. The gradients of a layer are one *bucket*. A bucket needs a
pre-sync, a sum over replicas and a post-sync. Each is a stage of a pipeline: while a layer is computed, every stage
works on the bucket of another, earlier one. No stage waits for the layer at hand, so that a compiler which runs
collectives asynchronously hides all three under its matmuls. The ends of the model are the last bucket.

    layer at hand       2     1     0    then, without a layer
    pre-sync                  2     1     0     ends
    sum over replicas               2     1     0     ends
    post-sync                             2     1     0     ends

Processes whose replicas have different TP degrees run different programs, which meet in the sums over replicas. So the
programs of all have the same stages, and each sum waits for the one before: left alone, a compiler puts sums of equal
shape into one order in one program and into another in the other, and gradients of different parameters are added up.

Source: arXiv 2504.06095, section 3.2. The paper reshards the gradients with an all-to-all; here it is a masked sum.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ntpjax.collectives import TensorParallel
from ntpjax.mesh import AXIS, FlatMesh
from ntpjax.packing import widen
from ntpjax.partition import families_in
from ntpjax.replicas import Replica, Replicas, sum_scope

PyTree = Any


class Model(Protocol):
    """A model as pure functions of `params = {"ends": ..., "layers": ...}`, where `layers` is stacked over layers.

    The functions see one rank's shard: they read widths and types from the parameters and take sums over the group from
    `tp`. `batch` is any pytree with rows first; rows whose weights are 0 are padding.
    """

    def embed(self, ends: PyTree, batch: PyTree, tp: TensorParallel, /) -> jax.Array:
        """The first layer's input."""
        ...

    def layer(self, layer: PyTree, x: jax.Array, tp: TensorParallel, /) -> jax.Array:
        """The next layer's input, of the same shape."""
        ...

    def loss(self, ends: PyTree, x: jax.Array, batch: PyTree, tp: TensorParallel, /) -> tuple[jax.Array, jax.Array]:
        """Weighted sum of the losses, and the sum of the weights."""
        ...


class StepSums(NamedTuple):
    """Sums over the global batch, the same bits on every device.

    The loss, the weights, and the squared norm of the gradient of the loss sum.
    """

    loss: jax.Array | np.ndarray
    weight: jax.Array | np.ndarray
    squared_norm: jax.Array | np.ndarray

    def mean_loss(self) -> float:
        return float(self.loss) / float(self.weight)

    def grad_norm(self) -> float:
        """Norm of the gradient of the mean loss."""
        return float(self.squared_norm) ** 0.5 / float(self.weight)


@dataclass(frozen=True)
class StepOptions:
    """How a step computes; what it computes is the same, up to rounding.

    Attributes:
      remat: what the forward pass keeps of a layer: "full" its input only, so that the backward pass computes the layer
        again, "dots" the results of its matmuls too, "none" all that is needed. Where replicas of different TP degrees
        share a process, it is always the input only.
      num_microbatches: the rows are worked through in so many parts, with one sum over replicas for all.
      compute_dtype: floating-point parameters are cast to it for computation; None for no cast.
      sum_dtype: gradients are summed over replicas in it; None for the parameters' own.
    """

    remat: Literal["none", "dots", "full"] = "full"
    num_microbatches: int = 1
    compute_dtype: str | None = None
    sum_dtype: str | None = None

    def for_compute(self, params: PyTree) -> PyTree:
        def cast(x: jax.Array) -> jax.Array:
            return x.astype(self.compute_dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return params if self.compute_dtype is None else jax.tree.map(cast, params)

    def for_sums(self, grads: PyTree, params: PyTree) -> PyTree:
        return jax.tree.map(lambda grad, param: grad.astype(self.sum_dtype or param.dtype), grads, params)

    def zeros(self, params: PyTree) -> PyTree:
        """Where gradients are gathered: over microbatches in at least float32."""

        def zeros(param: jax.Array) -> jax.Array:
            dtype = jnp.dtype(self.sum_dtype or param.dtype)
            return jnp.zeros(param.shape, dtype if self.num_microbatches == 1 else jnp.promote_types(dtype, "float32"))

        return jax.tree.map(zeros, params)

    def remember(self, layer: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """`layer` that keeps for its backward pass what `remat` says."""
        policies = jax.checkpoint_policies
        if self.remat == "none":
            return layer
        policy = policies.dots_saveable if self.remat == "dots" else policies.nothing_saveable
        # Forward and backward pass are two loops, between which no compiler merges what is computed twice.
        return jax.checkpoint(layer, policy=policy, prevent_cse=False)


DEFAULTS = StepOptions()


@dataclass(frozen=True)
class Blocks:
    """The model's functions on this device's shard, forward and backward.

    They take parameters as they rest, and return gradients of the same shapes in the type of the computation.
    """

    model: Model
    replicas: Replicas
    partitions: dict[str, PyTree]
    options: StepOptions

    @classmethod
    def of(cls, model: Model, flat: FlatMesh, partitions: PyTree, options: StepOptions) -> "Blocks":
        of_one_layer = jax.tree.map(lambda part: part.of_layer(), partitions["layers"])
        partitions_of = {"ends": partitions["ends"], "layers": of_one_layer}
        return cls(model, Replicas(flat, families_in(partitions)), partitions_of, options)

    def shard(self, replica: Replica, params: PyTree, kind: str) -> PyTree:
        """What the model computes with: the slots that the replica fills, in the type of the computation."""
        return self.options.for_compute(replica.narrow(params, self.partitions[kind]))

    def embed(self, ends: PyTree, batch: PyTree) -> jax.Array:
        def run(replica: Replica, ends: PyTree) -> jax.Array:
            return self.model.embed(self.shard(replica, ends, "ends"), batch, replica.tp)

        return self.replicas.run(run, ends)

    def embed_backward(self, ends: PyTree, batch: PyTree, d_x: jax.Array) -> PyTree:
        def run(replica: Replica, ends: PyTree, d_x: jax.Array) -> PyTree:
            shard = self.shard(replica, ends, "ends")
            pullback = jax.vjp(lambda ends: self.model.embed(ends, batch, replica.tp), shard)[1]
            return widen(pullback(d_x)[0], ends, self.partitions["ends"])

        return self.replicas.run(run, ends, d_x)

    def layer_forward(self, x: jax.Array, weights: PyTree) -> tuple[jax.Array, Any]:
        """The next layer's input, and what the backward pass needs beside the weights."""
        if not self.replicas.is_own_program:
            return self.replicas.run(self._layer, weights, x), x
        replica = self.replicas.own
        layer = self.options.remember(lambda shard, x: self.model.layer(shard, x, replica.tp))
        x, pullback = jax.vjp(layer, self.shard(replica, weights, "layers"), x)
        # The weights are there already: kept here too, the loop would stack a second copy of all of them.
        return x, _with_weights(pullback, None)

    def layer_backward(self, weights: PyTree, kept: Any, d_x: jax.Array) -> tuple[PyTree, jax.Array]:
        """Gradients of the weights and of the layer's input."""

        def again(replica: Replica, weights: PyTree, x: jax.Array, d_x: jax.Array) -> tuple[PyTree, jax.Array]:
            shard = self.shard(replica, weights, "layers")
            d_weights, d_x = jax.vjp(lambda shard, x: self.model.layer(shard, x, replica.tp), shard, x)[1](d_x)
            return widen(d_weights, weights, self.partitions["layers"]), d_x

        if not self.replicas.is_own_program:
            return self.replicas.run(again, weights, kept, d_x)
        return _with_weights(kept, self.shard(self.replicas.own, weights, "layers"))(d_x)

    def loss_backward(
        self, ends: PyTree, x: jax.Array, batch: PyTree
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[PyTree, jax.Array]]:
        """(sum of the losses, of the weights), and gradients of the first of `ends` and `x`."""

        def run(replica: Replica, ends: PyTree, x: jax.Array) -> Any:
            shard = self.shard(replica, ends, "ends")
            loss = functools.partial(self._loss, replica, batch)
            sums, (d_ends, d_x) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(shard, x)
            return sums, (widen(d_ends, ends, self.partitions["ends"]), d_x)

        return self.replicas.run(run, ends, x)

    def _layer(self, replica: Replica, weights: PyTree, x: jax.Array) -> jax.Array:
        return self.model.layer(self.shard(replica, weights, "layers"), x, replica.tp)

    def _loss(self, replica: Replica, batch: PyTree, ends: PyTree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.model.loss(ends, x, batch, replica.tp)


def _with_weights(pullback: Any, weights: PyTree) -> Any:
    """What `jax.vjp` returned, with the first argument that it keeps replaced."""
    pullback.args_res[0] = weights
    return pullback


@functools.partial(jax.tree_util.register_dataclass, data_fields=["grads", "square"], meta_fields=["kind"])
@dataclass(frozen=True)
class Bucket:
    """Gradients on their way: those of one layer (`kind` "layers") or those of the ends (`kind` "ends").

    `square` is this device's part of their squared norm, from when they are summed.
    """

    grads: PyTree
    square: jax.Array
    kind: str

    @classmethod
    def of(cls, grads: PyTree, kind: str) -> "Bucket":
        return cls(grads, jnp.zeros((), jnp.result_type(jnp.float32, *jax.tree.leaves(grads))), kind)


@dataclass(frozen=True)
class Pipeline:
    """The stages that a bucket goes through, one at each `advance`."""

    blocks: Blocks

    @functools.cached_property
    def stages(self) -> tuple[Callable[[Bucket], Bucket], ...]:
        """Pre-sync, sum, post-sync. What no replica has a collective for is no stage of its own."""
        replicas = self.blocks.replicas
        summed = self._sum if replicas.any_pre_sync else lambda bucket: self._sum(self._pre_sync(bucket))
        first = (self._pre_sync,) if replicas.any_pre_sync else ()
        if replicas.any_post_sync:
            return (*first, summed, self._post_sync)
        return (*first, lambda bucket: self._post_sync(summed(bucket)))

    def empty(self, grads: PyTree) -> tuple[Bucket, ...]:
        """As many buckets of zeros as there are stages, for gradients like `grads` of a layer."""
        bucket = Bucket.of(grads, "layers")
        buckets = []
        for stage in self.stages:
            shapes = jax.eval_shape(lambda bucket=bucket: bucket)
            buckets.append(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))
            bucket = jax.eval_shape(stage, shapes)
        return tuple(buckets)

    def advance(self, flight: tuple[Bucket, ...], fresh: tuple[Bucket, ...] = ()) -> tuple[tuple[Bucket, ...], Bucket]:
        """Each bucket through the stage that it has come to, the oldest first.

        Args:
          flight: the buckets on their way, the newest first; the oldest comes to the last stage.
          fresh: the next bucket, if there is one.

        Returns:
          The buckets that are still on their way, and the one that is done.
        """
        moved: list[Bucket] = []
        for stage, bucket in zip(reversed(self.stages), reversed(flight), strict=False):
            if moved and not self.blocks.replicas.is_own_program:
                # Where programs have branches, one collective after the other: devices would take them in unlike order.
                bucket, _ = lax.optimization_barrier((bucket, moved[-1]))
            moved.append(stage(bucket))
        return (*fresh, *reversed(moved[1:])), moved[0]

    def _pre_sync(self, bucket: Bucket) -> Bucket:
        partitions = self.blocks.partitions[bucket.kind]
        grads = self.blocks.replicas.run(lambda replica, grads: replica.pre_sync(grads, partitions), bucket.grads)
        return Bucket(grads, bucket.square, bucket.kind)

    def _sum(self, bucket: Bucket) -> Bucket:
        grads = self.blocks.replicas.sum_over_replicas(bucket.grads, bucket.kind)
        square = self.blocks.replicas.squared_norm(grads, self.blocks.partitions[bucket.kind])
        return Bucket(grads, square, bucket.kind)

    def _post_sync(self, bucket: Bucket) -> Bucket:
        partitions = self.blocks.partitions[bucket.kind]
        grads = self.blocks.replicas.run(lambda replica, grads: replica.post_sync(grads, partitions), bucket.grads)
        return Bucket(grads, bucket.square, bucket.kind)


def local_gradients(blocks: Blocks, params: PyTree, batch: PyTree) -> tuple[PyTree, StepSums]:
    """Gradients of the summed loss over the global batch, in the compute layout, on one device.

    Args:
      params: this device's parameters.
      batch: this device's rows, a multiple of `num_microbatches`.

    Returns:
      Gradients with the leading dimension of the flat mesh, 1, and the sums.
    """
    options, pipeline = blocks.options, Pipeline(blocks)
    num_parts, num_stages = options.num_microbatches, len(pipeline.stages)
    parts = jax.tree.map(lambda rows: rows.reshape(num_parts, -1, *rows.shape[1:]), batch)
    grads = options.zeros({"ends": params["ends"], "layers": jax.tree.map(lambda x: x[None], params["layers"])})
    one_layer = jax.tree.map(lambda stack: jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype), params["layers"])

    def gather(state: tuple[PyTree, jax.Array], part: PyTree) -> tuple[tuple[PyTree, jax.Array], None]:
        grads, sums = state
        layers, d_ends, here = _forward_backward(blocks, params, part, _add_layer, grads["layers"])
        return ({"ends": _add(grads["ends"], d_ends), "layers": layers}, sums + here), None

    def sync(state: tuple[Any, PyTree, jax.Array], index: jax.Array, d_layer: PyTree) -> tuple[Any, PyTree, jax.Array]:
        flight, layers, square = state
        if num_parts > 1:
            d_layer = _add(_layer_at(layers, index), d_layer)
        fresh = Bucket.of(options.for_sums(d_layer, one_layer), "layers")
        if not blocks.replicas.is_own_program:
            flight, fresh = lax.optimization_barrier((flight, fresh))
        flight, done = pipeline.advance(flight, (fresh,))
        # Until the last layer is done, zeros come out. They are put where it will be: an index too large is clamped.
        return flight, _put_layer(layers, index + num_stages, done.grads), square + done.square

    sums = jnp.zeros(2, jnp.result_type(jnp.float32, *jax.tree.leaves(params)))
    if num_parts > 1:
        (grads, sums), _ = lax.scan(gather, (grads, sums), jax.tree.map(lambda rows: rows[:-1], parts))
    flight = pipeline.empty(options.for_sums(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), one_layer), one_layer))
    state = (flight, grads["layers"], flight[-1].square)
    last = jax.tree.map(lambda rows: rows[-1], parts)
    (flight, layers, square), d_ends, here = _forward_backward(blocks, params, last, sync, state)
    ends = _add(grads["ends"], d_ends)
    fresh = (Bucket.of(options.for_sums(ends, params["ends"]), "ends"),)
    for index in reversed(range(num_stages)):
        # Each round has one sum over replicas, and waits for the round before.
        flight, done = pipeline.advance(lax.optimization_barrier(flight), fresh)
        layers, square, fresh = _put_layer(layers, index, done.grads), square + done.square, ()
    _, done = pipeline.advance(lax.optimization_barrier(flight))
    loss, weight = blocks.replicas.from_ranks_0(*(sums + here))
    # The last sum: alone, like all others.
    grads = {"ends": jax.tree.map(lambda grad: grad[None], done.grads), "layers": layers}
    grads, scalars = lax.optimization_barrier((grads, [loss, weight, square + done.square]))
    with sum_scope("scalars"):
        return grads, StepSums(*lax.psum(jnp.stack(scalars), AXIS))


def _forward_backward(
    blocks: Blocks, params: PyTree, batch: PyTree, take: Callable[[Any, jax.Array, PyTree], Any], state: Any
) -> tuple[Any, PyTree, jax.Array]:
    """Forward and backward pass over some rows.

    Args:
      take: (state, index of a layer, its gradients) to the next state; called for each layer, the last one first.

    Returns:
      The last state, the gradients of the ends, and [sum of the losses, sum of the weights].
    """
    ends, layers = params["ends"], params["layers"]
    x, kept = lax.scan(blocks.layer_forward, blocks.embed(ends, batch), layers)
    (loss, weight), (d_ends, d_x) = blocks.loss_backward(ends, x, batch)

    def backward(carry: tuple[jax.Array, Any], layer: tuple[jax.Array, PyTree, Any]) -> tuple[Any, None]:
        (d_x, state), (index, weights, kept) = carry, layer
        d_layer, d_x = blocks.layer_backward(weights, kept, d_x)
        return (d_x, take(state, index, d_layer)), None

    indices = jnp.arange(jax.tree.leaves(layers)[0].shape[0])
    (d_x, state), _ = lax.scan(backward, (d_x, state), (indices, layers, kept), reverse=True)
    of_embedding = blocks.options.for_sums(blocks.embed_backward(ends, batch, d_x), ends)
    d_ends = _add(blocks.options.for_sums(d_ends, ends), of_embedding)
    return state, d_ends, jnp.stack([loss, weight])


def _add(total: PyTree, grads: PyTree) -> PyTree:
    """`total` with `grads` added, in the type of `total`."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, grads)


# Stacks are [1, num_layers, ...] from the start: reshaped after the loop, they would not be written in place.


def _layer_at(stack: PyTree, index: jax.Array) -> PyTree:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False)[0], stack)


def _put_layer(stack: PyTree, index: jax.Array | int, layer: PyTree) -> PyTree:
    def put(x: jax.Array, of_layer: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(x, of_layer[None].astype(x.dtype), index, axis=1)

    return jax.tree.map(put, stack, layer)


def _add_layer(stack: PyTree, index: jax.Array, grads: PyTree) -> PyTree:
    return _put_layer(stack, index, _add(_layer_at(stack, index), grads))
