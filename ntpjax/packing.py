"""How parameters are cut into units, and how units lie in the buffers of devices.

A `Partition` says which dimension of a parameter carries the units of which family. On the flat mesh the parameter is
[num_devices, ...] with that dimension cut to the device's own slots: its units first, in layout order, then zeros, so
that every device's part has the same shape. Zero padding is a fixed point of training: it never gets a gradient, and an
elementwise optimizer leaves it zero.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ntpjax.layout import REPLICATED, Family
from ntpjax.mesh import FlatMesh
from ntpjax.plan import NoHolderError

PyTree = Any
ArrayT = TypeVar("ArrayT", jax.Array, np.ndarray)


@dataclass(frozen=True)
class Partition:
    """Dimension `dim` carries units of `family`, `unit_size` elements each. By default: every rank holds the whole."""

    family: Family = REPLICATED
    dim: int = 0
    unit_size: int = 1

    def of_layer(self) -> "Partition":
        """The partition of one layer of a parameter that is stacked over layers."""
        return self if self.family == REPLICATED else Partition(self.family, self.dim - 1, self.unit_size)

    def split(self, x: ArrayT) -> ArrayT:
        """`x` with its units along a dimension of their own, at `dim`: [..., units, unit_size, ...]."""
        if self.family == REPLICATED:
            return x[None]
        return x.reshape(*x.shape[: self.dim], -1, self.unit_size, *x.shape[self.dim + 1 :])

    def join(self, x: ArrayT) -> ArrayT:
        """The inverse of `split`."""
        if self.family == REPLICATED:
            return x.reshape(x.shape[1:])
        return x.reshape(*x.shape[: self.dim], -1, *x.shape[self.dim + 2 :])


def path_name(path: tuple[Any, ...]) -> str:
    """A key path of a pytree as "layers.ffn.gate"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def partition_tree(params: PyTree, rules: Mapping[str, tuple[str, int, int]], nominal_tp: int) -> PyTree:
    """A tree like `params` of the `Partition` of each leaf.

    Args:
      params: arrays, or anything with a `shape`.
      rules: path pattern (such as "layers.*.gate") to (family name, dimension, unit size). Unmatched leaves are
        replicated.
      nominal_tp: degree of a healthy replica.

    Raises:
      ValueError: naming the parameter and the rule, for a rule that matches no parameter, two rules that match the same
        one, a unit size that does not divide its dimension, or parameters of one family with different numbers of
        units.
    """
    unused, families = set(rules), dict[str, Family]()

    def partition(path: tuple[Any, ...], leaf: jax.Array) -> Partition:
        name = path_name(path)
        matching = [pattern for pattern in rules if fnmatch.fnmatchcase(name, pattern)]
        unused.difference_update(matching)
        if len(matching) > 1:
            raise ValueError(f"parameter '{name}' is matched by the rules {matching}; exactly one may match.")
        if not matching:
            return Partition()
        family_name, dim, unit_size = rules[matching[0]]
        if not 0 <= dim < len(leaf.shape) or leaf.shape[dim] % unit_size:
            raise ValueError(
                f"rule '{matching[0]}': parameter '{name}' has shape {tuple(leaf.shape)}, but its dimension {dim} must "
                f"be a whole number of units of `unit_size` (={unit_size}); change the rule or the parameter's size."
            )
        family = Family(family_name, leaf.shape[dim] // unit_size, nominal_tp)
        known = families.setdefault(family_name, family)
        if known != family:
            raise ValueError(
                f"parameter '{name}' has {family.num_units} units of family '{family_name}', others have "
                f"{known.num_units}; give it a family of its own or another unit size."
            )
        return Partition(family, dim, unit_size)

    tree = jax.tree_util.tree_map_with_path(partition, params)
    if unused:
        raise ValueError(f"rules {sorted(unused)} match no parameter; remove them or correct the pattern.")
    return tree


def families_in(partitions: PyTree) -> tuple[Family, ...]:
    """The unit families that occur in a tree of partitions."""
    return tuple(dict.fromkeys(part.family for part in jax.tree.leaves(partitions)))


def pack(params: PyTree, partitions: PyTree, flat: FlatMesh) -> PyTree:
    """Logical arrays laid out on the flat mesh.

    Args:
      params: arrays of logical shape [..., units x unit_size, ...].

    Returns:
      Arrays [num_devices, ..., slots x unit_size, ...], zeros in padding slots.
    """

    def pack_leaf(x: np.ndarray, part: Partition) -> jax.Array:
        units, slots = part.split(np.asarray(x)), part.family.slots(flat.degrees)
        local_shape = (*units.shape[: part.dim], slots, *units.shape[part.dim + 1 :])
        values = []
        for held in part.family.holdings(flat.degrees).ranks:
            value = np.zeros(local_shape, units.dtype)
            at_slots = (slice(None),) * part.dim + (slice(len(held)),)
            value[at_slots] = np.take(units, held, axis=part.dim)
            values.append(part.join(value))
        return flat.place(values)

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
        sources = _unit_sources(part.family, flat, positions)
        shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
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


def _unit_sources(family: Family, flat: FlatMesh, positions: Sequence[int]) -> dict[int, dict[int, int]]:
    """For each position that is to be read, the units to take from it and their slots."""
    holdings, wanted = family.holdings(flat.degrees).ranks, set(range(family.num_units))
    sources: dict[int, dict[int, int]] = {}
    for position in positions:
        taken = {unit: slot for slot, unit in enumerate(holdings[position]) if unit in wanted}
        if taken:
            sources[position] = taken
            wanted.difference_update(taken)
    if wanted:
        raise NoHolderError(tuple(sorted(wanted)))
    return sources


def narrow(local: PyTree, partitions: PyTree, degree: int) -> PyTree:
    """One device's parameters cut to the slots that a replica of `degree` ranks fills: no padding is computed with."""

    def cut(x: jax.Array, part: Partition) -> jax.Array:
        if part.family == REPLICATED:
            return x
        size = part.family.compute_layout(degree).slots * part.unit_size
        return jax.lax.slice_in_dim(x, 0, size, axis=part.dim)

    return jax.tree.map(cut, local, partitions)


def unit_id_table(family: Family, degree: int, slots: int) -> np.ndarray:
    """Ids of the units in each rank's slots, [degree, slots] int32, -1 for padding."""
    table = np.full((degree, slots), -1, np.int32)
    for rank, units in enumerate(family.compute_layout(degree).ranks):
        table[rank, : len(units)] = units
    return table


def gather_units(x: jax.Array, slots: jax.Array, axis: int) -> jax.Array:
    """Units of `x` at `slots` along `axis`; zeros where the slot is out of range."""
    return jnp.take(x, slots, axis=axis, mode="fill", fill_value=0)
