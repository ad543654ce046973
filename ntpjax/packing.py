"""How units lie in the buffers of devices.

On the flat mesh a parameter is [num_devices, ...] with the dimension that carries its units cut to the device's own
slots: its units first, in layout order, then zeros, so that every device's part has the same shape. Zero padding is a
fixed point of training: it never gets a gradient, and an elementwise optimizer leaves it zero.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ntpjax.layout import REPLICATED, Copied, Family, holdings
from ntpjax.mesh import FlatMesh
from ntpjax.partition import Partition
from ntpjax.plan import NoHolderError

PyTree = Any


def pack(params: PyTree, partitions: PyTree, flat: FlatMesh) -> PyTree:
    """Logical arrays laid out on the flat mesh.

    Args:
      params: arrays of logical shape [..., units x unit_size, ...].

    Returns:
      Arrays [num_devices, ..., slots x unit_size, ...], zeros in padding slots.
    """

    def pack_leaf(x: np.ndarray, part: Partition) -> jax.Array:
        units, held = part.split(np.asarray(x)), holdings(part.family, flat.degrees).ranks
        local_shape = (*units.shape[: part.dim], flat.slots(part.family), *units.shape[part.dim + 1 :])

        def value_at(position: int) -> np.ndarray:
            value = np.zeros(local_shape, units.dtype)
            at_slots = (slice(None),) * part.dim + (slice(len(held[position])),)
            value[at_slots] = np.take(units, held[position], axis=part.dim)
            return part.join(value)

        return flat.place(value_at)

    return jax.tree.map(pack_leaf, params, partitions)


def unpack(packed: PyTree, partitions: PyTree, flat: FlatMesh, positions: Sequence[int] | None = None) -> PyTree:
    """Logical arrays, on the host: the inverse of `pack`.

    Args:
      packed: arrays [num_devices, ..., slots x unit_size, ...].
      positions: which devices may be read; by default those of the first replica, which hold everything.

    Raises:
      NoHolderError: if these devices do not hold every unit.
    """
    positions = flat.tp_groups[0] if positions is None else positions

    def unpack_leaf(array: jax.Array, part: Partition) -> np.ndarray:
        sources = unit_sources(part.family, flat, positions)
        shards = flat.shards(array)
        at_units = (slice(None),) * part.dim
        logical = None
        for position, slot_of in sources.items():
            units = part.split(np.asarray(shards[position])[0])
            if logical is None:
                logical = np.empty(
                    (*units.shape[: part.dim], part.family.num_units, *units.shape[part.dim + 1 :]), units.dtype
                )
            logical[(*at_units, list(slot_of))] = units[(*at_units, list(slot_of.values()))]
        assert logical is not None
        return part.join(logical)

    return jax.tree.map(unpack_leaf, packed, partitions)


def unit_sources(family: Family, flat: FlatMesh, positions: Sequence[int]) -> dict[int, dict[int, int]]:
    """For each position that is to be read, the units to take from it and their slots."""
    held, wanted = holdings(family, flat.degrees).ranks, set(range(family.num_units))
    sources: dict[int, dict[int, int]] = {}
    for position in positions:
        taken = {unit: slot for slot, unit in enumerate(held[position]) if unit in wanted}
        if taken:
            sources[position] = taken
            wanted.difference_update(taken)
    if wanted:
        raise NoHolderError(tuple(sorted(wanted)))
    return sources


def narrow(local: PyTree, partitions: PyTree, degree: int) -> PyTree:
    """One device's parameters cut to the slots that a replica of `degree` ranks fills: no padding is computed with."""

    def cut(x: jax.Array, part: Partition) -> jax.Array:
        size = _size(part, degree)
        return x if part.family == REPLICATED or x.shape[part.dim] == size else x[_up_to(part.dim, size)]

    return jax.tree.map(cut, local, partitions)


def widen(local: PyTree, like: PyTree, partitions: PyTree) -> PyTree:
    """The inverse of `narrow`: zeros after the slots, up to the shapes of `like`."""

    def pad(x: jax.Array, wide: jax.Array, part: Partition) -> jax.Array:
        missing = 0 if part.family == REPLICATED else wide.shape[part.dim] - x.shape[part.dim]
        return jnp.pad(x, [(0, missing if dim == part.dim else 0) for dim in range(x.ndim)]) if missing else x

    return jax.tree.map(pad, local, like, partitions)


def _size(part: Partition, degree: int) -> int:
    return part.family.compute_layout(degree).slots * part.unit_size


def _up_to(dim: int, size: int) -> tuple[slice, ...]:
    return (*(slice(None),) * dim, slice(size))


def unit_id_table(family: Family, degree: int, slots: int) -> np.ndarray:
    """Ids of the units in each rank's slots, [degree, slots] int32, -1 for padding."""
    table = np.full((degree, slots), -1, np.int32)
    for rank, units in enumerate(family.compute_layout(degree).ranks):
        table[rank, : len(units)] = units
    return table


def copy_slot_table(family: Copied, degree: int) -> np.ndarray | None:
    """For each rank and each slot of the users, the slot of the unit that it needs, [degree, user slots] int32.

    Padding points beyond the slots. None where unit slot `k` serves the `k`-th run of equally many user slots
    everywhere.
    """
    units, users = family.compute_layout(degree), family.users.compute_layout(degree)
    table = np.full((degree, users.slots), units.slots, np.int32)
    for rank, (held, used_by) in enumerate(zip(units.ranks, users.ranks, strict=True)):
        table[rank, : len(used_by)] = [held.index(user // family.users.group_size) for user in used_by]
    run = users.slots // units.slots
    in_order = np.arange(users.slots) // run
    # A padding slot inside the run of a real unit would compute something: there the table is needed.
    held_slots = np.array([len(held) for held in units.ranks])[:, None]
    regular = np.where(in_order < held_slots, in_order, units.slots)
    return None if users.slots == run * units.slots and (table == regular).all() else table


def gather_units(x: jax.Array, slots: jax.Array, axis: int) -> jax.Array:
    """Units of `x` at `slots` along `axis`; zeros where the slot is out of range."""
    return jnp.take(x, slots, axis=axis, mode="fill", fill_value=0)
