"""The training step on the flat mesh: local gradients, pre-sync, sum over replicas, post-sync, commit, update.

`grad_step` has all the collectives and donates nothing, so that a step that fails can be done again. The caller
commits: it waits for the sums, and only then calls `apply_step`, which is local and donates its arguments.

Every device runs one program. Where replicas have different degrees, `lax.switch` picks the replica's own compute
shapes for each block; its branches meet in the sync layout, in which the sum over replicas is the same for all.

Source: arXiv 2504.06095, section 3.2. The paper reshards the gradients with an all-to-all; here it is a masked sum.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from ntpjax.collectives import (
    ExchangeTables,
    TensorParallel,
    exchange_tables,
    exchange_units,
    sum_bits,
    sum_values,
)
from ntpjax.layout import REPLICATED, Copied, Family, buffer_slots
from ntpjax.mesh import AXIS, FlatMesh
from ntpjax.packing import copy_slot_table, narrow, unit_id_table
from ntpjax.partition import families_in
from ntpjax.plan import exchange

PyTree = Any
Program = jax.stages.Wrapped


class Model(Protocol):
    """A model as pure functions of `params = {"ends": ..., "layers": ...}`, where `layers` is stacked over layers.

    The functions see one rank's shard: they read their widths from the parameters' shapes and take sums over the group
    from `tp`. `batch` is any pytree with rows first; rows whose weights are 0 are padding.
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
    """Sums over the global batch, the same bits on every device: loss, weights, squared norm of the gradient of the
    loss sum.
    """

    loss: jax.Array
    weight: jax.Array
    squared_norm: jax.Array

    def mean_loss(self) -> float:
        return float(self.loss) / float(self.weight)

    def grad_norm(self) -> float:
        """Norm of the gradient of the mean loss."""
        return float(self.squared_norm) ** 0.5 / float(self.weight)


@dataclass(frozen=True)
class Replica:
    """What a device does as a rank of a replica of one degree."""

    tp: TensorParallel
    pre_tables: Mapping[Family, ExchangeTables]
    post_tables: Mapping[Family, ExchangeTables]

    def narrow(self, params: PyTree, partitions: PyTree) -> PyTree:
        """The slots that this replica's degree fills."""
        return narrow(params, partitions, self.tp.degree)

    def pre_sync(self, grads: PyTree, partitions: PyTree) -> PyTree:
        """From the compute to the sync layout: the extra ranks' gradients to the core ranks, copied units summed."""
        total = functools.partial(sum_values, groups=self.tp.groups)
        with jax.named_scope("pre_sync"):
            return exchange_units(grads, partitions, self.pre_tables, self.tp.rank, total)

    def post_sync(self, grads: PyTree, partitions: PyTree) -> PyTree:
        """From the sync back to the compute layout, bit by bit."""
        total = functools.partial(sum_bits, groups=self.tp.groups)
        with jax.named_scope("post_sync"):
            return exchange_units(grads, partitions, self.post_tables, self.tp.rank, total)


@dataclass(frozen=True)
class Replicas:
    """The flat mesh as the step sees it: one `Replica` for each degree that occurs."""

    flat: FlatMesh
    families: tuple[Family, ...]

    def run(self, function: Callable[..., Any], *operands: PyTree) -> Any:
        """`function(replica, *operands)` with the `Replica` of this device's degree."""
        degrees = sorted(set(self.flat.degrees))
        position = lax.axis_index(AXIS)
        rank = jnp.asarray(self.flat.ranks, jnp.int32)[position]
        branches = [functools.partial(function, self._replica(degree, rank)) for degree in degrees]
        if len(branches) == 1:
            return branches[0](*operands)
        kinds = [degrees.index(degree) for degree in self.flat.degrees for _ in range(degree)]
        return lax.switch(jnp.asarray(kinds, jnp.int32)[position], branches, *operands)

    def sum_over_replicas(self, grads: PyTree) -> PyTree:
        """Gradients in the sync layout, summed over each core rank of all replicas, in one collective."""
        with jax.named_scope("sum_over_replicas"):
            leaves, structure = jax.tree.flatten(grads)
            return jax.tree.unflatten(structure, sum_values(leaves, self.flat.sum_groups))

    def squared_norm(self, grads: PyTree, partitions: PyTree) -> jax.Array:
        """This device's part of the squared norm of summed gradients: each unit and each replicated parameter counts
        once.

        The first replica's core ranks contribute their units, its rank 0 what is replicated.
        """
        position = lax.axis_index(AXIS)
        total = jnp.zeros((), jnp.float32)
        for grad, part in zip(jax.tree.leaves(grads), jax.tree.leaves(partitions), strict=True):
            counted = position < (1 if part.family == REPLICATED else self.flat.sync_degree)
            wide = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
            total = total + jnp.where(counted, jnp.sum(wide * wide), 0)
        return total

    def from_ranks_0(self, *values: jax.Array) -> list[jax.Array]:
        """Scalars that every rank of a replica has alike: kept on its rank 0, zeros elsewhere, to count them once."""
        first = jnp.asarray(self.flat.ranks, jnp.int32)[lax.axis_index(AXIS)] == 0
        dtype = jnp.result_type(jnp.float32, *values)
        return [jnp.where(first, jnp.asarray(value, dtype), 0) for value in values]

    @functools.cached_property
    def _tables(self) -> dict[int, "_Tables"]:
        return {degree: _tables(self.flat, self.families, degree) for degree in set(self.flat.degrees)}

    def _replica(self, degree: int, rank: jax.Array) -> Replica:
        tables = self._tables[degree]
        tp = TensorParallel(rank, degree, self.flat.tp_groups, tables.unit_ids, tables.copy_slots)
        return Replica(tp, tables.pre_sync, tables.post_sync)


class _Tables(NamedTuple):
    """Index arrays of a replica of one degree, for each unit family that needs them."""

    unit_ids: dict[str, np.ndarray]
    copy_slots: dict[str, np.ndarray | None]
    pre_sync: dict[Family, ExchangeTables]
    post_sync: dict[Family, ExchangeTables]


def _tables(flat: FlatMesh, families: tuple[Family, ...], degree: int) -> _Tables:
    tables = _Tables({}, {}, {}, {})
    for family in families:
        compute, sync = family.compute_layout(degree), family.sync_layout(degree, flat.sync_degree)
        tables.unit_ids[family.name] = unit_id_table(family, degree, compute.slots)
        if isinstance(family, Copied):
            tables.copy_slots[family.name] = copy_slot_table(family, degree)
        slots = buffer_slots(family, flat.degrees)
        # Also where only padding is to be dropped: a model may well give it a gradient (sigmoid(0) is not 0).
        if compute != sync or any(len(units) < slots for units in compute.ranks):
            to_sync = exchange(compute, sync, add_copies=family.add_copies)
            tables.pre_sync[family] = exchange_tables(to_sync, slots, slots)
            if compute != sync:
                tables.post_sync[family] = exchange_tables(exchange(sync, compute), slots, slots)
    return tables


def _of_layer(partitions: PyTree) -> PyTree:
    """Partitions of one layer's parameters, from those of the stack."""
    return jax.tree.map(lambda part: part.of_layer(), partitions)


def _local_gradients(
    model: Model, replicas: Replicas, partitions: PyTree, params: PyTree, batch: PyTree
) -> tuple[PyTree, StepSums]:
    """Gradients of the summed loss over the global batch, in the compute layout, on one device."""
    ends, layers = params["ends"], params["layers"]
    ends_cut, layer_cut = partitions["ends"], _of_layer(partitions["layers"])

    def embed(replica: Replica, ends: PyTree) -> jax.Array:
        return model.embed(replica.narrow(ends, ends_cut), batch, replica.tp)

    def layer(replica: Replica, weights: PyTree, x: jax.Array) -> jax.Array:
        return model.layer(replica.narrow(weights, layer_cut), x, replica.tp)

    def loss(replica: Replica, ends: PyTree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return model.loss(replica.narrow(ends, ends_cut), x, batch, replica.tp)

    def embed_backward(replica: Replica, ends: PyTree, d_x: jax.Array) -> PyTree:
        return jax.vjp(functools.partial(embed, replica), ends)[1](d_x)[0]

    def layer_backward(replica: Replica, weights: PyTree, x: jax.Array, d_x: jax.Array) -> tuple[PyTree, jax.Array]:
        grads = jax.vjp(functools.partial(layer, replica), weights, x)[1](d_x)
        # One collective after the other: the pre-sync must not be in flight together with the last sum of `d_x`.
        d_weights, d_x = lax.optimization_barrier(grads)
        return replica.pre_sync(d_weights, layer_cut), d_x

    def loss_backward(replica: Replica, ends: PyTree, x: jax.Array) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        return jax.value_and_grad(functools.partial(loss, replica), argnums=(0, 1), has_aux=True)(ends, x)

    def synced(grads: PyTree, cut: PyTree) -> tuple[PyTree, jax.Array]:
        grads = replicas.sum_over_replicas(grads)
        square = replicas.squared_norm(grads, cut)
        return replicas.run(lambda replica, grads: replica.post_sync(grads, cut), grads), square

    def backward_step(d_x: jax.Array, saved: tuple[PyTree, jax.Array]) -> tuple[jax.Array, tuple[PyTree, jax.Array]]:
        weights, x = saved
        d_weights, d_x = replicas.run(layer_backward, weights, x, d_x)
        return d_x, synced(d_weights, layer_cut)

    x = replicas.run(embed, ends)
    x, inputs = lax.scan(lambda x, weights: (replicas.run(layer, weights, x), x), x, layers)
    (loss_sum, weight_sum), (d_ends, d_x) = replicas.run(loss_backward, ends, x)
    d_x, (d_layers, squares) = lax.scan(backward_step, d_x, (layers, inputs), reverse=True)
    d_ends = jax.tree.map(jnp.add, d_ends, replicas.run(embed_backward, ends, d_x))
    d_ends = replicas.run(lambda replica, grads: replica.pre_sync(grads, ends_cut), d_ends)
    d_ends, square = synced(d_ends, ends_cut)
    scalars = [*replicas.from_ranks_0(loss_sum, weight_sum), square + jnp.sum(squares)]
    grads = {"ends": d_ends, "layers": d_layers}
    # Nor may the last sum be in flight together with a post-sync: ranks that took them in another order would wait for
    # ever.
    grads, scalars = lax.optimization_barrier((grads, scalars))
    return grads, StepSums(*lax.psum(scalars, AXIS))


_SPLIT, _WHOLE = PartitionSpec(AXIS), PartitionSpec()


def _program(flat: FlatMesh, local: Callable[..., Any], in_specs: Any, out_specs: Any, **options: Any) -> Program:
    return jax.jit(
        jax.shard_map(local, mesh=flat.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False), **options
    )


def _own(tree: PyTree) -> PyTree:
    """This device's part of arrays [num_devices, ...]."""
    return jax.tree.map(lambda array: array[0], tree)


def _stacked(tree: PyTree) -> PyTree:
    """The inverse of `_own`."""
    return jax.tree.map(lambda array: array[None], tree)


def make_init(
    init: Callable[[jax.Array, Mapping[str, jax.Array]], PyTree], flat: FlatMesh, partitions: PyTree
) -> Program:
    """A function of a random key to parameters on the flat mesh, of which each device draws only its own units.

    Args:
      init: (key, unit ids for each family: [slots] int32, -1 for padding) to a rank's shard of the parameters.
    """
    tables = {
        family.name: np.concatenate(
            [unit_id_table(family, degree, buffer_slots(family, flat.degrees)) for degree in flat.degrees]
        )
        for family in families_in(partitions)
    }

    def local(key: jax.Array) -> PyTree:
        position = lax.axis_index(AXIS)
        return _stacked(init(key, {name: jnp.asarray(table)[position] for name, table in tables.items()}))

    return _program(flat, local, _WHOLE, _SPLIT)


def make_optimizer_init(optimizer: optax.GradientTransformation, flat: FlatMesh) -> Program:
    """A function of parameters on the flat mesh to the optimizer's state on it."""
    return _program(flat, lambda params: _stacked(optimizer.init(_own(params))), _SPLIT, _SPLIT)


def make_grad_step(model: Model, flat: FlatMesh, partitions: PyTree) -> Program:
    """`grad_step(params, batch)`: gradients of the summed loss on the flat mesh, and the sums.

    `params` and `batch` are arrays [num_devices, ...]; all devices of a replica have the same rows.
    """
    replicas = Replicas(flat, families_in(partitions))

    def local(params: PyTree, batch: PyTree) -> tuple[PyTree, StepSums]:
        grads, sums = _local_gradients(model, replicas, partitions, _own(params), _own(batch))
        return _stacked(grads), sums

    return _program(flat, local, _SPLIT, (_SPLIT, _WHOLE))


def make_apply_step(optimizer: optax.GradientTransformation, flat: FlatMesh, clip_norm: float | None) -> Program:
    """`apply_step(params, opt_state, grads, sums)`: the next parameters and optimizer state.

    Local: no collectives. Donates parameters and state. The gradient of the mean loss is clipped to norm `clip_norm`.
    """

    def local(params: PyTree, opt_state: PyTree, grads: PyTree, sums: StepSums) -> tuple[PyTree, PyTree]:
        params, opt_state, grads = _own(params), _own(opt_state), _own(grads)
        scale = 1 / sums.weight
        if clip_norm is not None:
            norm = jnp.sqrt(sums.squared_norm) * scale
            scale = scale * jnp.minimum(1, clip_norm / norm)
        grads = jax.tree.map(lambda grad: (grad * scale).astype(grad.dtype), grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return _stacked(optax.apply_updates(params, updates)), _stacked(opt_state)

    return _program(flat, local, (_SPLIT, _SPLIT, _SPLIT, _WHOLE), _SPLIT, donate_argnums=(0, 1))


def make_eval_step(model: Model, flat: FlatMesh, partitions: PyTree) -> Program:
    """`eval_step(params, batch)`: sum of the losses and of the weights over all replicas' rows."""
    replicas = Replicas(flat, families_in(partitions))
    ends_cut, layer_cut = partitions["ends"], _of_layer(partitions["layers"])

    def forward(replica: Replica, params: PyTree, batch: PyTree) -> tuple[jax.Array, jax.Array]:
        def layer(x: jax.Array, weights: PyTree) -> tuple[jax.Array, None]:
            return model.layer(replica.narrow(weights, layer_cut), x, replica.tp), None

        ends = replica.narrow(params["ends"], ends_cut)
        x, _ = lax.scan(layer, model.embed(ends, batch, replica.tp), params["layers"])
        return model.loss(ends, x, batch, replica.tp)

    def local(params: PyTree, batch: PyTree) -> list[jax.Array]:
        sums = replicas.run(forward, _own(params), _own(batch))
        return lax.psum(replicas.from_ranks_0(*sums), AXIS)

    return _program(flat, local, _SPLIT, _WHOLE)
