"""The programs of a training step on the flat mesh: local gradients and their sums, commit, update.

`grad_step` has all the collectives and donates nothing, so that a step that fails can be done again. The caller
commits: it waits for the sums, and only then calls `apply_step`, which is local and donates its arguments.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from ntpjax.backward import DEFAULTS, Blocks, Model, StepOptions, StepSums, local_gradients
from ntpjax.layout import Family
from ntpjax.mesh import AXIS, FlatMesh
from ntpjax.packing import unit_id_table
from ntpjax.partition import families_in
from ntpjax.replicas import Replica

PyTree = Any
Program = jax.stages.Wrapped

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

    def table(family: Family) -> np.ndarray:
        slots = flat.slots(family)
        # Devices of other processes have other slots.
        nothing = {degree: np.full((degree, slots), -1, np.int32) for degree in flat.degrees}
        own = {degree: unit_id_table(family, degree, slots) for degree in flat.own_degrees}
        return np.concatenate([(nothing | own)[degree] for degree in flat.degrees])

    tables = {family.name: table(family) for family in families_in(partitions)}

    def local(key: jax.Array) -> PyTree:
        position = lax.axis_index(AXIS)
        return _stacked(init(key, {name: jnp.asarray(table)[position] for name, table in tables.items()}))

    return _program(flat, local, _WHOLE, _SPLIT)


def make_optimizer_init(optimizer: optax.GradientTransformation, flat: FlatMesh) -> Program:
    """A function of parameters on the flat mesh to the optimizer's state on it."""
    return _program(flat, lambda params: _stacked(optimizer.init(_own(params))), _SPLIT, _SPLIT)


def make_grad_step(model: Model, flat: FlatMesh, partitions: PyTree, options: StepOptions = DEFAULTS) -> Program:
    """`grad_step(params, batch)`: gradients of the summed loss on the flat mesh, and the sums.

    `params` and `batch` are arrays [num_devices, ...]; all devices of a replica have the same rows.
    """
    blocks = Blocks.of(model, flat, partitions, options)

    def local(params: PyTree, batch: PyTree) -> tuple[PyTree, StepSums]:
        return local_gradients(blocks, _own(params), _own(batch))

    return _program(flat, local, _SPLIT, (_SPLIT, _WHOLE))


def make_apply_step(optimizer: optax.GradientTransformation, flat: FlatMesh, clip_norm: float | None) -> Program:
    """`apply_step(params, opt_state, grads, sums)`: the next parameters and optimizer state.

    Local: no collectives. Donates parameters and state. The gradient of the mean loss is clipped to norm `clip_norm`.
    """

    def local(stacked_params: PyTree, opt_state: PyTree, grads: PyTree, sums: StepSums) -> tuple[PyTree, PyTree]:
        params, opt_state, grads = _own(stacked_params), _own(opt_state), _own(grads)
        scale = 1 / sums.weight
        if clip_norm is not None:
            norm = jnp.sqrt(sums.squared_norm) * scale
            scale = scale * jnp.minimum(1, clip_norm / norm)
        grads = jax.tree.map(lambda grad, param: (grad * scale).astype(param.dtype), grads, params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        # In the shape in which they are donated: reshaped afterwards, they would not be updated in place.
        return optax.apply_updates(stacked_params, _stacked(updates)), _stacked(opt_state)

    return _program(flat, local, (_SPLIT, _SPLIT, _SPLIT, _WHOLE), _SPLIT, donate_argnums=(0, 1))


def make_eval_step(model: Model, flat: FlatMesh, partitions: PyTree, options: StepOptions = DEFAULTS) -> Program:
    """`eval_step(params, batch)`: sum of the losses and of the weights over all replicas' rows."""
    blocks = Blocks.of(model, flat, partitions, options)

    def forward(replica: Replica, params: PyTree, batch: PyTree) -> tuple[jax.Array, jax.Array]:
        def layer(x: jax.Array, weights: PyTree) -> tuple[jax.Array, None]:
            return model.layer(blocks.shard(replica, weights, "layers"), x, replica.tp), None

        ends = blocks.shard(replica, params["ends"], "ends")
        x, _ = lax.scan(layer, model.embed(ends, batch, replica.tp), params["layers"])
        return model.loss(ends, x, batch, replica.tp)

    def local(params: PyTree, batch: PyTree) -> list[jax.Array]:
        sums = blocks.replicas.run(forward, _own(params), _own(batch))
        return lax.psum(blocks.replicas.from_ranks_0(*sums), AXIS)

    return _program(flat, local, _SPLIT, _WHOLE)
