"""The replicas of a flat mesh as a program sees them: their index tables, and the sums that they take part in.

A program has a branch for each TP degree among its process's devices. Normally that is one, and there is no branch at
run time. Where replicas of different degrees share a process, `lax.switch` picks the replica's own compute shapes for
each block; its branches meet in the sync layout, in which the sum over replicas is the same for all.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ntpjax.collectives import (
    ExchangeTables,
    TensorParallel,
    exchange_tables,
    exchange_units,
    sum_bits,
    sum_values,
)
from ntpjax.hlo import collectives
from ntpjax.layout import REPLICATED, Copied, Family
from ntpjax.mesh import AXIS, FlatMesh
from ntpjax.packing import copy_slot_table, narrow, unit_id_table
from ntpjax.plan import Exchange, exchange

PyTree = Any
_SUM_SCOPE = "sum_over_replicas"


def sum_scope(name: str) -> AbstractContextManager[Any]:
    """The scope of a sum that all processes take part in: its name stands in the compiled program."""
    return jax.named_scope(f"{_SUM_SCOPE}/{name}")


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

    @property
    def is_own_program(self) -> bool:
        """Whether this process's devices have one TP degree, so that the program has no branches."""
        return len(self.flat.own_degrees) == 1

    @property
    def own(self) -> Replica:
        """The replica of this device, in an own program."""
        (degree,) = self.flat.own_degrees
        return self._replica(degree, jnp.asarray(self.flat.ranks, jnp.int32)[lax.axis_index(AXIS)])

    def run(self, function: Callable[..., Any], *operands: PyTree) -> Any:
        """`function(replica, *operands)` with the `Replica` of this device's degree."""
        if self.is_own_program:
            return function(self.own, *operands)
        own_degrees, position = self.flat.own_degrees, lax.axis_index(AXIS)
        rank = jnp.asarray(self.flat.ranks, jnp.int32)[position]
        branches = [functools.partial(function, self._replica(degree, rank)) for degree in own_degrees]
        kinds = [own_degrees.index(d) if d in own_degrees else 0 for d in self.flat.degrees for _ in range(d)]
        return lax.switch(jnp.asarray(kinds, jnp.int32)[position], branches, *operands)

    @functools.cached_property
    def any_pre_sync(self) -> bool:
        """Whether some replica, of whatever process, sends gradients to its core ranks."""
        return any(bool(to_sync.shared) for to_sync, _ in self._exchanges)

    @functools.cached_property
    def any_post_sync(self) -> bool:
        """Whether some replica, of whatever process, sends summed gradients back."""
        return any(bool(to_compute.shared) for _, to_compute in self._exchanges)

    @functools.cached_property
    def _exchanges(self) -> list[tuple[Exchange, Exchange]]:
        """The pre-sync and the post-sync of each family in each replica."""
        pairs = [(family, degree) for family in self.families for degree in set(self.flat.degrees)]
        return [_exchange_pair(family, degree, self.flat.sync_degree) for family, degree in pairs]

    def sum_over_replicas(self, grads: PyTree, name: str) -> PyTree:
        """Gradients in the sync layout, summed over each core rank of all replicas, in one collective.

        `name` stands in the compiled program, by which processes compare what they sum.
        """
        with sum_scope(name):
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
        return {degree: _tables(self.flat, self.families, degree) for degree in self.flat.own_degrees}

    def _replica(self, degree: int, rank: jax.Array) -> Replica:
        tables = self._tables[degree]
        tp = TensorParallel(rank, degree, self.flat.tp_groups, tables.unit_ids, tables.copy_slots)
        return Replica(tp, tables.pre_sync, tables.post_sync)


def sums_over_replicas(text: str) -> tuple[str, ...]:
    """What a compiled program sums over replicas, in order: one line for each sum, to be compared between processes."""
    found = [one for one in collectives(text) if _SUM_SCOPE in one.scope.split("/")]
    return tuple(
        f"{one.scope.split(f'{_SUM_SCOPE}/')[-1]} {one.shape} over {one.groups} x {one.executions}" for one in found
    )


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
        slots, sync_slots = flat.slots(family), sync.slots
        to_sync, to_compute = _exchange_pair(family, degree, flat.sync_degree)
        # Also where only padding is to be dropped: a model may well give it a gradient (sigmoid(0) is not 0).
        if compute != sync or any(len(units) < slots for units in compute.ranks):
            tables.pre_sync[family] = exchange_tables(to_sync, slots, sync_slots)
        if compute != sync or slots != sync_slots:
            tables.post_sync[family] = exchange_tables(to_compute, sync_slots, slots)
    return tables


def _exchange_pair(family: Family, degree: int, sync_degree: int) -> tuple[Exchange, Exchange]:
    compute, sync = family.compute_layout(degree), family.sync_layout(degree, sync_degree)
    return exchange(compute, sync, add_copies=family.add_copies), exchange(sync, compute)
