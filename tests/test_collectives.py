"""Collectives on uneven groups of real devices: gradients, bit patterns, and units exchanged, against NumPy.

Values that are moved are compared bit for bit. Gradients are computed in float64 and compared at a relative 1e-13.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from ntpjax.collectives import (
    TensorParallel,
    exchange_tables,
    exchange_units,
    group_sum,
    sum_bits,
    sum_values,
)
from ntpjax.layout import Copied, Family, Layout, Split
from ntpjax.mesh import AXIS, FlatMesh, flat_mesh
from ntpjax.packing import copy_slot_table, unit_id_table
from ntpjax.partition import Partition
from ntpjax.plan import Exchange, exchange
from ntpjax.topology import Topology

pytestmark = pytest.mark.timeout(60)

PyTree = Any


def mesh_of(degrees: tuple[int, ...]) -> FlatMesh:
    return flat_mesh(Topology.of_degrees(degrees), jax.devices())


def on_mesh(flat: FlatMesh, function: Callable[..., PyTree]) -> jax.stages.Wrapped:
    """`function` of one device's values as a jitted one of arrays [num_devices, ...]."""

    def local(*operands: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], operands)))

    spec = PartitionSpec(AXIS)
    return jax.jit(jax.shard_map(local, mesh=flat.mesh, in_specs=spec, out_specs=spec, check_vma=False))


def tensor_parallel(flat: FlatMesh) -> TensorParallel:
    """The handle of this device; to be called inside `on_mesh`."""
    rank = jnp.asarray(flat.ranks, jnp.int32)[lax.axis_index(AXIS)]
    return TensorParallel(rank, flat.sync_degree, flat.tp_groups, {}, {})


def sums_over(flat: FlatMesh, values: np.ndarray) -> np.ndarray:
    """Values [num_devices, ...] summed over each TP group, for every member."""
    total = np.empty_like(values)
    for group in flat.tp_groups:
        total[list(group)] = values[list(group)].sum(axis=0)
    return total


# -- the tensor-parallel handle -------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [(4, 3), (3, 2, 1)])
def test_gradients_between_enter_and_exit_are_those_of_the_whole_group(x64: None, degrees: tuple[int, ...]):
    flat, rng = mesh_of(degrees), np.random.default_rng(0)
    # Each replica has an x of its own, alike on all ranks; each rank has a weight of its own.
    x = rng.normal(size=(len(degrees), 5))[np.repeat(np.arange(len(degrees)), flat.degrees)]
    weight = rng.normal(size=(flat.num_devices, 5))

    def local(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        tp = tensor_parallel(flat)

        def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
            return jnp.sum(tp.exit(jnp.sin(tp.enter(x) * weight)) ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1))(x, weight)

    loss, (d_x, d_weight) = on_mesh(flat, local)(x, weight)
    y = sums_over(flat, np.sin(x * weight))
    d_product = 2 * y * np.cos(x * weight)
    assert loss.dtype == d_x.dtype == d_weight.dtype == np.float64
    np.testing.assert_allclose(loss, np.sum(y**2, axis=1), rtol=1e-13)
    np.testing.assert_allclose(d_weight, d_product * x, rtol=1e-13)
    np.testing.assert_allclose(d_x, sums_over(flat, d_product * weight), rtol=1e-13)


def test_psum_sums_values_and_gradients_over_the_group(x64: None):
    flat, rng = mesh_of((4, 3)), np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 7, 5))

    def local(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(lambda x: jnp.sum(tensor_parallel(flat).psum(x) * weight))(x)

    value, gradient = on_mesh(flat, local)(x, weight)
    np.testing.assert_allclose(value, np.sum(sums_over(flat, x) * weight, axis=1), rtol=1e-13)
    np.testing.assert_allclose(gradient, sums_over(flat, weight), rtol=1e-13)


def test_the_largest_value_is_found_in_each_group_and_has_no_gradient():
    flat = mesh_of((4, 3))
    x = np.array([3, -1, 4, -1, -5, -9, -2], np.float32)

    def local(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(lambda x: tensor_parallel(flat).max(x) + 10 * x)(x)

    value, gradient = on_mesh(flat, local)(x)
    np.testing.assert_array_equal(value - 10 * x, [4, 4, 4, 4, -2, -2, -2])
    np.testing.assert_array_equal(gradient, [10] * 7)


def test_each_rank_knows_the_units_in_its_slots():
    flat = mesh_of((4, 3))
    family = Split("heads", 5, 4)
    table = unit_id_table(family, degree=3, slots=3)

    def local(_: jax.Array) -> jax.Array:
        rank = jnp.asarray(flat.ranks, jnp.int32)[lax.axis_index(AXIS)]
        return TensorParallel(rank, 3, flat.tp_groups, {"heads": table}, {}).unit_ids("heads")

    ids = on_mesh(flat, local)(np.zeros(7))
    assert ids.dtype == np.int32
    assert ids[4:].tolist() == [[0, 1, -1], [2, 4, -1], [3, -1, -1]]


def test_each_rank_knows_where_the_copied_units_of_its_users_are():
    flat = mesh_of((4, 3))
    family = Copied("kv", Split("queries", 8, nominal_tp=4, group_size=4))
    table = copy_slot_table(family, 3)
    assert table is not None

    def local(_: jax.Array) -> jax.Array:
        rank = jnp.asarray(flat.ranks, jnp.int32)[lax.axis_index(AXIS)]
        slots = TensorParallel(rank, 3, flat.tp_groups, {}, {"kv": table}).copy_slots("kv")
        assert slots is not None
        return slots

    np.testing.assert_array_equal(on_mesh(flat, local)(np.zeros(7))[4:], table)


def test_there_are_no_copy_slots_where_units_are_used_in_order():
    tp = TensorParallel(jnp.int32(0), 4, (), {}, {"kv": None})
    assert tp.copy_slots("kv") is None


# -- sums -----------------------------------------------------------------------------------------------------------


def bit_patterns(dtype: Any) -> np.ndarray:
    """All 16-bit patterns; of wider types zeros, NaNs with payloads, denormals, infinities and random others."""
    dtype = np.dtype(dtype)
    unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
    if dtype.itemsize == 2:
        return np.arange(2**16, dtype=unsigned).view(dtype)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0], f"float{8 * dtype.itemsize}").view(unsigned)
    nearby = np.concatenate(
        [special + unsigned.type(offset) for offset in (0, 1, 2, 12345)] + [special - unsigned.type(1)]
    )
    others = np.random.default_rng(0).integers(0, np.iinfo(unsigned).max, 20000, unsigned, endpoint=True)
    return np.concatenate([nearby, others]).view(dtype)


MOVED_TYPES = (np.float32, np.float64, jnp.bfloat16, np.float16, np.int32)


@pytest.mark.parametrize("givers", [(0, 4), (3, 5)])
def test_every_bit_pattern_moves_unchanged_from_one_rank_to_its_group(x64: None, givers: tuple[int, int]):
    flat = mesh_of((4, 3))
    patterns = [bit_patterns(dtype) for dtype in MOVED_TYPES]
    # The groups move different patterns: the second one has them in reverse.
    buffers = [np.zeros((7, values.size), values.dtype) for values in patterns]
    for buffer, values in zip(buffers, patterns, strict=True):
        buffer[givers[0]], buffer[givers[1]] = values, values[::-1]
    moved = _moves_bits(flat)(buffers)
    for array, values in zip(moved, patterns, strict=True):
        assert array.dtype == values.dtype
        for position, value in enumerate(np.asarray(array)):
            expected = values if position < 4 else values[::-1]
            assert value.tobytes() == expected.tobytes(), (values.dtype, position)


@cache
def _moves_bits(flat: FlatMesh) -> Callable[[list[np.ndarray]], list[jax.Array]]:
    return on_mesh(flat, lambda buffers: sum_bits(buffers, flat.tp_groups))


def some_buffers() -> list[np.ndarray]:
    """Buffers of three types in mixed order, and an empty one; whole numbers, so that any order of adding is exact."""
    kinds = [((2, 3), np.float32), ((5,), np.int32), ((0, 4), np.float16), ((3,), np.float32), ((), jnp.bfloat16)]
    rng = np.random.default_rng(0)
    return [rng.integers(-9, 9, (7, *shape)).astype(dtype) for shape, dtype in kinds]


@pytest.mark.parametrize("total", [sum_values, sum_bits])
def test_sums_use_one_collective_for_each_type_that_has_elements(total: Callable[..., list[jax.Array]]):
    flat = mesh_of((4, 3))
    text = on_mesh(flat, lambda buffers: total(buffers, flat.tp_groups)).lower(some_buffers()).as_text()
    assert text.count("stablehlo.all_reduce") == 3


def test_values_are_summed_over_each_group_and_keep_shape_type_and_place():
    flat, buffers = mesh_of((4, 3)), some_buffers()
    summed = on_mesh(flat, lambda buffers: sum_values(buffers, flat.tp_groups))(buffers)
    assert len(summed) == len(buffers)
    for total, buffer in zip(summed, buffers, strict=True):
        assert total.dtype == buffer.dtype
        np.testing.assert_array_equal(total, sums_over(flat, buffer))


def test_a_group_may_be_a_single_position():
    flat = mesh_of((4, 3))
    x = 2.0 ** np.arange(7, dtype=np.float32)
    summed = on_mesh(flat, lambda x: group_sum(x, flat.sum_groups))(x)
    assert summed.tolist() == [1 + 16, 2 + 32, 4 + 64, 8, 1 + 16, 2 + 32, 4 + 64]


# -- exchanges ------------------------------------------------------------------------------------------------------


def test_index_tables_read_zeros_for_whatever_is_not_there():
    table = Exchange(shared=(7, 9), give=((None, 1), (0, None)), take=((0, -1), (-2,)))
    tables = exchange_tables(table, own_slots=4, new_slots=3)
    nothing = np.iinfo(np.int32).max
    assert tables.give.tolist() == [[nothing, 1], [0, nothing]]
    assert tables.take.tolist() == [[0, 4, nothing], [5, nothing, nothing]]


OTHER = Split("other", 4, nominal_tp=5)


def partitions_of(family: Family) -> dict[str, Partition]:
    """Two parameters of `family`, which an exchange moves, and two that it leaves as they are."""
    return {
        "rows": Partition(family, 0, 1),
        "stacked": Partition(family, 1, 2),
        "other": Partition(OTHER, 0, 1),
        "scale": Partition(),
    }


Tree = dict[str, np.ndarray]
Layouts = dict[int, Layout]


def random_trees(family: Family, count: int) -> list[Tree]:
    """Logical values of the parameters; whole numbers, so that sums are exact."""
    rng = np.random.default_rng(0)
    units = family.num_units
    shapes = {"rows": (units, 3), "stacked": (2, units * 2, 3), "other": (4, 2), "scale": (3,)}
    return [
        {name: rng.integers(-99, 99, shape).astype(np.float32) for name, shape in shapes.items()} for _ in range(count)
    ]


def laid_out(trees: list[Tree], family: Family, ranks: Sequence[tuple[int, ...]], slots: int) -> Tree:
    """Buffers of all positions in NumPy: position `p` has the units `ranks[p]` of `trees[p]`, then zeros."""
    stacked: dict[str, list[np.ndarray]] = {name: [] for name in trees[0]}
    for tree, units in zip(trees, ranks, strict=True):
        for name, part in partitions_of(family).items():
            value = tree[name]
            if part.family == family:
                logical = np.moveaxis(part.split(value), part.dim, 0)
                padding = np.zeros((slots - len(units), *logical.shape[1:]), np.float32)
                value = part.join(np.moveaxis(np.concatenate([logical[list(units)], padding]), 0, part.dim))
            stacked[name].append(value)
    return {name: np.stack(values) for name, values in stacked.items()}


def exchanged(
    tree: Tree, flat: FlatMesh, family: Family, have: Layouts, want: Layouts, total: Callable[..., list[jax.Array]]
) -> PyTree:
    """`tree` after an exchange in each replica from `have` to `want`, which are given for each degree."""
    degrees = sorted(set(flat.degrees))
    slots = max(layout.slots for layouts in (have, want) for layout in layouts.values())
    kinds = [degrees.index(degree) for degree in flat.degrees for _ in range(degree)]

    def branch(degree: int, rank: jax.Array, tree: PyTree) -> PyTree:
        table = exchange(have[degree], want[degree], add_copies=total is sum_values)
        tables = {family: exchange_tables(table, slots, slots)}
        return exchange_units(tree, partitions_of(family), tables, rank, partial(total, groups=flat.tp_groups))

    def local(tree: PyTree) -> PyTree:
        position = lax.axis_index(AXIS)
        rank = jnp.asarray(flat.ranks, jnp.int32)[position]
        branches = [partial(branch, degree) for degree in degrees]
        return lax.switch(jnp.asarray(kinds, jnp.int32)[position], branches, rank, tree)

    return on_mesh(flat, local)(tree)


def assert_trees_equal(actual: PyTree, expected: Tree) -> None:
    for name, value in expected.items():
        assert np.asarray(actual[name]).tobytes() == value.tobytes(), name


@pytest.mark.parametrize(("degrees", "num_units"), [((4, 3), 11), ((4, 3, 1), 6), ((3, 3, 2), 2), ((5,), 7)])
def test_units_go_from_compute_to_sync_layout_and_back(degrees: tuple[int, ...], num_units: int):
    flat, family = mesh_of(degrees), Split("units", num_units, nominal_tp=5)
    compute = {degree: family.compute_layout(degree) for degree in degrees}
    sync = {degree: family.sync_layout(degree, flat.sync_degree) for degree in degrees}
    compute_ranks = [units for degree in degrees for units in compute[degree].ranks]
    sync_ranks = [units for degree in degrees for units in sync[degree].ranks]
    slots = flat.slots(family)
    # Each replica has values of its own: nothing is summed over replicas here.
    trees = [
        tree for tree, degree in zip(random_trees(family, len(degrees)), degrees, strict=True) for _ in range(degree)
    ]
    there = exchanged(laid_out(trees, family, compute_ranks, slots), flat, family, compute, sync, sum_values)
    assert_trees_equal(there, laid_out(trees, family, sync_ranks, slots))
    # The way back is no sum: -0.0 stays -0.0.
    trees = [{name: np.where(value > 0, value, -0.0) for name, value in tree.items()} for tree in trees]
    back = exchanged(laid_out(trees, family, sync_ranks, slots), flat, family, sync, compute, sum_bits)
    assert_trees_equal(back, laid_out(trees, family, compute_ranks, slots))


@pytest.mark.parametrize(("num_queries", "group_size"), [(8, 4), (6, 6)])
def test_copied_units_are_summed_on_the_way_to_the_sync_layout_and_all_holders_get_the_sum(
    num_queries: int, group_size: int
):
    # Two KV heads, of which some ranks of degree 3 need both, and one KV head for all.
    flat, family = mesh_of((4, 3)), Copied("units", Split("queries", num_queries, nominal_tp=4, group_size=group_size))
    compute = {degree: family.compute_layout(degree) for degree in (4, 3)}
    sync = {degree: family.sync_layout(degree, 3) for degree in (4, 3)}
    compute_ranks, sync_ranks = [layouts[4].ranks + layouts[3].ranks for layouts in (compute, sync)]
    slots = flat.slots(family)
    # Each rank has gradients of its own, zero for the units that it does not hold.
    gradients = random_trees(family, 7)
    for gradient, units in zip(gradients, compute_ranks, strict=True):
        missing = [unit for unit in range(family.num_units) if unit not in units]
        for name, part in partitions_of(family).items():
            if part.family == family:
                view = np.moveaxis(part.split(gradient[name]), part.dim, 0)
                view[missing] = 0
    summed = [
        gradient | {name: np.sum([gradients[p][name] for p in group], axis=0) for name in ("rows", "stacked")}
        for group in flat.tp_groups
        for gradient in (gradients[position] for position in group)
    ]
    there = exchanged(laid_out(gradients, family, compute_ranks, slots), flat, family, compute, sync, sum_values)
    assert_trees_equal(there, laid_out(summed, family, sync_ranks, slots))
    back = exchanged(laid_out(summed, family, sync_ranks, slots), flat, family, sync, compute, sum_bits)
    assert_trees_equal(back, laid_out(summed, family, compute_ranks, slots))
