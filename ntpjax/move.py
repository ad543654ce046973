"""Arrays from one flat mesh to the next: survivors keep what they hold, and only what is missing travels.

Parameters and optimizer state rest in the compute layout, one whole copy in every replica: each replica is a live
checkpoint for the others. After a loss or a return the arrays of the new flat mesh are made of the survivors' buffers
as they are, zeros for newcomers, and one masked sum that carries the missing units, bit by bit. Buffers of lost devices
are never read.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from ntpjax.collectives import NOTHING, ExchangeTables, as_bits, exchange_tables, exchange_units, from_bits, sum_bits
from ntpjax.layout import REPLICATED, Family
from ntpjax.mesh import AXIS, FlatMesh
from ntpjax.packing import gather_units, unit_sources
from ntpjax.partition import Partition, families_in
from ntpjax.plan import Move, exchange_of_moves, plan_change
from ntpjax.program_store import NOWHERE, Program, ProgramStore

PyTree = Any
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Moved:
    """What travelled between devices: units (of any family), their bytes over all arrays, and where they came from."""

    num_units: int
    num_bytes: int
    source: str


def move_state(
    state: PyTree, partitions: PyTree, old: FlatMesh, new: FlatMesh, store: ProgramStore = NOWHERE
) -> tuple[PyTree, Moved]:
    """`state`, which lies on `old`, laid out on `new`.

    Args:
      state: arrays [old devices, ...] with the partitions `partitions`. Only buffers of devices in `new` are read.
      store: where the programs are that do it.

    Raises:
      NoHolderError: if some unit was on lost devices only.
    """
    plans = {family: _FamilyPlan.of(family, old, new) for family in families_in(partitions)}
    get_exchange = functools.cache(lambda *of: store.get(_exchange_program(new, *of)))
    num_bytes = 0

    @functools.cache
    def tables(family: Family) -> list[jax.Array]:
        tables = plans[family].tables
        return [new.place(list(table).__getitem__) for table in (tables.give, tables.take)]

    def move(array: jax.Array, part: Partition) -> jax.Array:
        nonlocal num_bytes
        plan = plans[part.family]
        num_bytes += len(plan.moves) * plan.bytes_of_unit(array)
        joined = _from_survivors(array, old, new)
        if not new.own_positions:
            return new.assemble([], _with_slots(joined, part, plan.new_slots))
        if plan.keeps_all(new.own_positions):
            return joined
        exchange = get_exchange(joined.shape, joined.dtype, part, plan.tables.give.shape, plan.tables.take.shape)
        before, after = new.shards(joined), new.shards(exchange(joined, *tables(part.family)))
        # Who keeps all units in their slots keeps the very buffer.
        shards = [before[p] if plan.keeps[p] else after[p] for p in new.own_positions]
        return new.assemble(shards, _with_slots(joined, part, plan.new_slots))

    moved = jax.block_until_ready(jax.tree.map(move, state, partitions))
    moves = [(move, new.replica_of) for plan in plans.values() for move in plan.moves]
    return moved, Moved(len(moves), num_bytes, _describe_sources(moves))


def compile_moves(state: PyTree, partitions: PyTree, old: FlatMesh, new: FlatMesh, store: ProgramStore) -> None:
    """Compiles what `move_state` runs, for the store; of `state` only shapes and types are needed."""
    plans = {family: _FamilyPlan.of(family, old, new) for family in families_in(partitions)}

    def compile_move(array: jax.ShapeDtypeStruct, part: Partition) -> None:
        plan, shape = plans[part.family], (new.num_devices, *array.shape[1:])
        if new.own_positions and not plan.keeps_all(new.own_positions):
            tables = plan.tables
            store.add(_exchange_program(new, shape, array.dtype, part, tables.give.shape, tables.take.shape))

    jax.tree.map(compile_move, state, partitions)


def collect(state: PyTree, partitions: PyTree, flat: FlatMesh, positions: Sequence[int], *, keep: bool) -> PyTree:
    """The logical arrays on the host, of units on the devices of several processes; all of them make this call.

    Args:
      positions: which devices are read.
      keep: whether this process wants the arrays; else it only sends what it has, and gets None for each.

    Raises:
      NoHolderError: if these devices do not hold every unit.
    """

    def collect_leaf(array: jax.Array, part: Partition) -> np.ndarray | None:
        sources = unit_sources(part.family, flat, positions)
        table = np.full((flat.num_devices, part.family.num_units), NOTHING, np.int32)
        for position, slot_of in sources.items():
            table[position, list(slot_of)] = list(slot_of.values())
        logical = _sum_units(array, flat.place(list(table).__getitem__), part, flat.mesh)
        return np.asarray(logical.addressable_data(0)) if keep else None

    return jax.tree.map(collect_leaf, state, partitions)


@dataclass(frozen=True)
class _FamilyPlan:
    """How the units of one family get to the new flat mesh; positions are those of the new one.

    `keeps` says of each position whether its buffer stays as it is; slots are those of this process.
    """

    moves: tuple[Move, ...]
    tables: ExchangeTables
    old_slots: int
    new_slots: int
    keeps: tuple[bool, ...]

    @classmethod
    def of(cls, family: Family, old: FlatMesh, new: FlatMesh) -> "_FamilyPlan":
        change = plan_change(family, old.topology, new.topology)
        old_slots, new_slots = old.slots(family), new.slots(family)
        exchange = exchange_of_moves(change.have, change.want, change.moves)
        # Devices of other processes have other slots.
        take = tuple(taken if p in new.own_positions else () for p, taken in enumerate(exchange.take))
        tables = exchange_tables(replace(exchange, take=take), old_slots, new_slots)
        pairs = zip(change.have.ranks, change.want.ranks, strict=True)
        keeps = tuple(have == want and old_slots == new_slots for have, want in pairs)
        return cls(change.moves, tables, old_slots, new_slots, keeps)

    def keeps_all(self, positions: Sequence[int]) -> bool:
        """Whether nothing is to be done at these positions. All processes take part in moves, or none does."""
        return not self.moves and all(self.keeps[position] for position in positions)

    def bytes_of_unit(self, array: jax.Array) -> int:
        return array.nbytes // array.shape[0] // self.old_slots


def _from_survivors(array: jax.Array, old: FlatMesh, new: FlatMesh) -> jax.Array:
    """The array on the new flat mesh of the survivors' buffers, uncopied, and zeros on newcomers."""
    buffers = {shard.device: shard.data for shard in array.addressable_shards}
    survivors = set(old.topology.devices)
    zeros = np.zeros((1, *array.shape[1:]), array.dtype)
    own = [(new.topology.devices[position], new.mesh.devices[position]) for position in new.own_positions]
    shards = [buffers[device] if number in survivors else jax.device_put(zeros, device) for number, device in own]
    return new.assemble(shards, jax.ShapeDtypeStruct(array.shape[1:], array.dtype))


def _with_slots(array: jax.Array, part: Partition, slots: int) -> jax.ShapeDtypeStruct:
    """What one device has of `array` when its buffer has `slots` slots."""
    shape = list(array.shape[1:])
    if part.family != REPLICATED:
        shape[part.dim] = slots * part.unit_size
    return jax.ShapeDtypeStruct(tuple(shape), array.dtype)


def _exchange_program(
    new: FlatMesh, shape: Shape, dtype: jnp.dtype, part: Partition, give: Shape, take: Shape
) -> Program:
    """`_exchange` of an array [new devices, ...] and tables of these shapes."""
    arguments = ((shape, dtype), (give, np.int32), (take, np.int32))
    arrays = [jax.ShapeDtypeStruct(*argument, sharding=new.sharding) for argument in arguments]
    key = f"exchange of {shape} {dtype} {part}, through {give} to {take}"
    return Program(key, new.mesh.devices.tolist(), lambda: _exchange.lower(*arrays, part, new.mesh).compile())


@functools.partial(jax.jit, static_argnames=("part", "mesh"))
def _exchange(array: jax.Array, give: jax.Array, take: jax.Array, part: Partition, mesh: Mesh) -> jax.Array:
    """The masked sum of one array; the tables are operands, so that arrays of one shape share a program."""

    def local(array: jax.Array, give: jax.Array, take: jax.Array) -> jax.Array:
        everyone = (tuple(range(mesh.size)),)
        total = functools.partial(sum_bits, groups=everyone)
        tables = {part.family: ExchangeTables(give, take)}
        # As bits from the start: even a gather may change a NaN.
        return from_bits(exchange_units(as_bits(array[0]), part, tables, jnp.int32(0), total), array.dtype)[None]

    spec = PartitionSpec(AXIS)
    return jax.shard_map(local, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)(
        array, give, take
    )


@functools.partial(jax.jit, static_argnames=("part", "mesh"))
def _sum_units(array: jax.Array, table: jax.Array, part: Partition, mesh: Mesh) -> jax.Array:
    """The logical array, on every device: each unit from the one that has its slot in `table`, [devices, units]."""

    def local(array: jax.Array, table: jax.Array) -> jax.Array:
        mine = gather_units(part.split(as_bits(array[0])), table[0], part.dim)
        (total,) = sum_bits([mine], (tuple(range(mesh.size)),))
        return from_bits(part.join(total), array.dtype)

    specs = (PartitionSpec(AXIS), PartitionSpec(AXIS))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)(array, table)


def _describe_sources(moves: list[tuple[Move, tuple[int, ...]]]) -> str:
    own = {replica_of[move.source] == replica_of[move.target] for move, replica_of in moves}
    names = {frozenset(): "nothing moved", frozenset({True}): "own replica", frozenset({False}): "other replica"}
    return names.get(frozenset(own), "own and other replica")
