"""Collectives on the flat mesh: the tensor-parallel handle of a model, and the masked sum that reshards units.

All of them run inside `shard_map` over the flat mesh, with `check_vma=False` (uneven groups need it). Without that
check the transpose of `psum` is `psum`, so the pair `enter`/`exit` has gradients written by hand.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ntpjax.layout import Family
from ntpjax.mesh import AXIS, Groups
from ntpjax.packing import gather_units
from ntpjax.plan import Exchange

PyTree = Any
SumBuffers = Callable[[list[jax.Array]], list[jax.Array]]

NOTHING = np.iinfo(np.int32).max
"""An index that is out of range of every buffer: reads as zero."""


def group_sum(x: PyTree, groups: Groups) -> PyTree:
    """The arrays of `x` summed over each group; groups may be uneven and must cover every position."""
    return lax.psum(x, AXIS, axis_index_groups=groups)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _enter(x: jax.Array, groups: Groups) -> jax.Array:
    return x


_enter.defvjp(lambda x, groups: (x, None), lambda groups, _, g: (group_sum(g, groups),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _exit(x: jax.Array, groups: Groups) -> jax.Array:
    return group_sum(x, groups)


_exit.defvjp(lambda x, groups: (group_sum(x, groups), None), lambda groups, _, g: (g,))


@dataclass(frozen=True)
class TensorParallel:
    """What a model's functions get as `tp`: their place in the tensor-parallel group, and its collectives.

    A block computes between `enter` and `exit`: what enters is whole on every rank, what exits is summed to be whole
    again. A replicated parameter that is used between the two has a partial gradient on each rank: pass it through
    `enter` too.

    Attributes:
      rank: this device's rank, an int32 scalar (traced: one program serves all ranks).
      degree: ranks of the group.
      groups: the TP groups of the flat mesh.
      unit_tables: for each family, the unit ids of each rank's slots, [degree, slots], -1 for padding.
      copy_tables: for each copied family, where the units are that its users' slots need (see `copy_slots`).
    """

    rank: jax.Array
    degree: int
    groups: Groups
    unit_tables: Mapping[str, np.ndarray]
    copy_tables: Mapping[str, np.ndarray | None]

    def enter(self, x: jax.Array) -> jax.Array:
        """`x` unchanged; its gradient is summed over the group."""
        return _enter(x, self.groups)

    def exit(self, x: jax.Array) -> jax.Array:
        """`x` summed over the group; its gradient is unchanged."""
        return _exit(x, self.groups)

    def psum(self, x: jax.Array) -> jax.Array:
        """`x` summed over the group; its gradient is summed too: for values that differ by rank on both sides."""
        return group_sum(x, self.groups)

    def max(self, x: jax.Array) -> jax.Array:
        """The largest `x` over the group; has no gradient."""
        return lax.pmax(lax.stop_gradient(x), AXIS, axis_index_groups=self.groups)

    def unit_ids(self, family: str) -> jax.Array:
        """Ids of the units in this rank's slots, [slots] int32, -1 for a padding slot."""
        return jnp.asarray(self.unit_tables[family])[self.rank]

    def copy_slots(self, family: str) -> jax.Array | None:
        """For each slot of the users of a copied family, the slot of the unit that it needs, [user slots] int32.

        Out of range for a padding slot: gather with zeros there (`mode="fill"`), so that padding computes nothing. None
        where no gather is needed: on every rank the units serve equally many users, in the order of the slots.
        """
        table = self.copy_tables[family]
        return None if table is None else jnp.asarray(table)[self.rank]


@dataclass(frozen=True)
class ExchangeTables:
    """An `Exchange` as index arrays for buffers of given length; out of range reads as zero.

    Attributes:
      give: [ranks, places] int32, slots of the rank's own buffer.
      take: [ranks, new slots] int32, indices into the own buffer followed by the shared one.
    """

    give: np.ndarray | jax.Array
    take: np.ndarray | jax.Array


def exchange_tables(table: Exchange, own_slots: int, new_slots: int) -> ExchangeTables:
    """The index arrays of `table` for buffers of `own_slots` units before and `new_slots` units after the exchange."""
    give = np.full((len(table.give), len(table.shared)), NOTHING, np.int32)
    take = np.full((len(table.take), new_slots), NOTHING, np.int32)
    for rank, (given, taken) in enumerate(zip(table.give, table.take, strict=True)):
        give[rank] = [NOTHING if slot is None else slot for slot in given]
        take[rank, : len(taken)] = [source if source >= 0 else own_slots - 1 - source for source in taken]
    return ExchangeTables(give, take)


def exchange_units(
    tree: PyTree, partitions: PyTree, tables: Mapping[Family, ExchangeTables], rank: jax.Array, total: SumBuffers
) -> PyTree:
    """One rank's part of a masked sum over its group (see `ntpjax.plan`).

    Args:
      tree: this device's arrays.
      partitions: how each of them is cut.
      tables: for each family; families that are not in it stay as they are.
      rank: this device's row in the tables, an int32 scalar.
      total: sums a list of buffers over the group.
    """
    leaves, structure = jax.tree.flatten(tree)
    parts = jax.tree.leaves(partitions)
    moving = [i for i, part in enumerate(parts) if part.family in tables]
    units = {i: parts[i].split(leaves[i]) for i in moving}

    def rows(i: int, which: str) -> jax.Array:
        return jnp.asarray(getattr(tables[parts[i].family], which))[rank]

    shared = dict(
        zip(moving, total([gather_units(units[i], rows(i, "give"), parts[i].dim) for i in moving]), strict=True)
    )
    for i in moving:
        both = jnp.concatenate([units[i], shared[i]], axis=parts[i].dim) if shared[i].size else units[i]
        leaves[i] = parts[i].join(gather_units(both, rows(i, "take"), parts[i].dim))
    return jax.tree.unflatten(structure, leaves)


def sum_values(buffers: list[jax.Array], groups: Groups) -> list[jax.Array]:
    """The buffers summed over each group, in one collective for each dtype."""
    return _in_one_vector(buffers, lambda vector: group_sum(vector, groups))


def sum_bits(buffers: list[jax.Array], groups: Groups) -> list[jax.Array]:
    """Like `sum_values`, where at most one rank of a group has anything but zeros: moves every bit pattern unchanged.

    The sum is over the bits as unsigned integers. A floating-point sum would turn -0.0 into 0.0.
    """

    def total(vector: jax.Array) -> jax.Array:
        bits = as_bits(vector)
        if bits.dtype.itemsize >= 4:
            return from_bits(group_sum(bits, groups), vector.dtype)
        # Collective libraries sum no 16-bit integers. In pairs they can be summed: no carry leaves either half.
        pairs = lax.bitcast_convert_type(jnp.pad(bits, (0, bits.size % 2)).reshape(-1, 2), jnp.uint32)
        halves = lax.bitcast_convert_type(group_sum(pairs, groups), bits.dtype)
        return from_bits(halves.ravel()[: bits.size], vector.dtype)

    return _in_one_vector(buffers, total)


def as_bits(x: jax.Array) -> jax.Array:
    """Floating-point numbers as unsigned integers of the same width; integers as they are."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def from_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The inverse of `as_bits`."""
    return lax.bitcast_convert_type(bits, dtype) if jnp.issubdtype(dtype, jnp.floating) else bits


def _in_one_vector(buffers: list[jax.Array], total: Callable[[jax.Array], jax.Array]) -> list[jax.Array]:
    summed = list(buffers)
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers if buffer.size):
        chosen = [i for i, buffer in enumerate(buffers) if buffer.dtype == dtype and buffer.size]
        vector = total(jnp.concatenate([buffers[i].ravel() for i in chosen]))
        ends = np.cumsum([buffers[i].size for i in chosen])[:-1]
        for i, part in zip(chosen, jnp.split(vector, ends), strict=True):
            summed[i] = part.reshape(buffers[i].shape)
    return summed
