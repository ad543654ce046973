"""Arrays cut into units and laid out on the flat mesh: nothing is lost or changed, and padding is zero."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ntpjax.layout import REPLICATED, Copied, Split, holdings
from ntpjax.mesh import FlatMesh, flat_mesh
from ntpjax.packing import copy_slot_table, gather_units, narrow, pack, unit_id_table, unpack
from ntpjax.partition import Partition
from ntpjax.plan import NoHolderError
from ntpjax.topology import Topology

pytestmark = pytest.mark.timeout(60)

DEGREES = [(4, 3), (1, 4, 2), (3, 0, 3), (5,), (8,), (1,)]

# Parameter to (shape, type, partition). Unit counts fit no degree; 'few' leaves ranks empty.
VOCAB, FEW, FFN, HEADS = Split("vocab", 19, 8), Split("few", 2, 8), Split("ffn", 5, 8), Split("heads", 7, 8)
QUERIES = Split("queries", 12, 8, group_size=4)
CASES: dict[str, tuple[tuple[int, ...], Any, Partition]] = {
    "rows": ((19, 3), np.float32, Partition(VOCAB, 0, 1)),
    "blocks": ((6, 2, 3), jnp.bfloat16, Partition(FEW, 0, 3)),
    "stacked": ((4, 10, 3), np.float32, Partition(FFN, 1, 2)),
    "last": ((2, 3, 28), np.float16, Partition(HEADS, 2, 4)),
    "copied": ((2, 9), np.float32, Partition(Copied("kv", QUERIES), 1, 3)),
    "ids": ((5, 7), np.int32, Partition(HEADS, 1, 1)),
    "scale": ((3, 2), np.float32, Partition()),
    "scalar": ((), np.float32, Partition()),
}
PARTITIONS = {name: part for name, (_, _, part) in CASES.items()}


def mesh_of(degrees: tuple[int, ...]) -> FlatMesh:
    return flat_mesh(Topology.of_degrees(degrees), jax.devices())


def random_bits(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """An array of any bit patterns: NaNs with payloads, infinities and denormals among them, and a -0.0 in front."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).bytes(int(np.prod(shape)) * dtype.itemsize)
    values = np.frombuffer(raw, dtype).reshape(shape).copy()
    values.reshape(-1)[:1] = -values.dtype.type(0)
    return values


def make_params() -> dict[str, np.ndarray]:
    return {name: random_bits(shape, dtype, seed) for seed, (name, (shape, dtype, _)) in enumerate(CASES.items())}


def parts_of(array: jax.Array) -> list[np.ndarray]:
    """What each position has, as its device has it."""
    by_position = {shard.index[0].start or 0: np.asarray(shard.data) for shard in array.addressable_shards}
    return [by_position[position][0] for position in range(array.shape[0])]


def assert_same_bits(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert actual[name].shape == value.shape, name
        assert actual[name].tobytes() == value.tobytes(), name


# -- pack and unpack ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", DEGREES)
def test_unpack_returns_every_bit_that_was_packed(degrees: tuple[int, ...]):
    flat, params = mesh_of(degrees), make_params()
    assert_same_bits(unpack(pack(params, PARTITIONS, flat), PARTITIONS, flat), params)


@pytest.mark.parametrize("degrees", DEGREES)
def test_each_replica_holds_everything(degrees: tuple[int, ...]):
    flat, params = mesh_of(degrees), make_params()
    packed = pack(params, PARTITIONS, flat)
    for group in flat.tp_groups:
        assert_same_bits(unpack(packed, PARTITIONS, flat, group), params)


@pytest.mark.parametrize("degrees", DEGREES)
def test_each_position_has_its_units_in_layout_order_then_zeros(degrees: tuple[int, ...]):
    flat, params = mesh_of(degrees), make_params()
    for name, array in pack(params, PARTITIONS, flat).items():
        part = PARTITIONS[name]
        if part.family == REPLICATED:
            assert all(value.tobytes() == params[name].tobytes() for value in parts_of(array))
            continue
        logical = np.moveaxis(params[name], part.dim, 0)
        for value, units in zip(parts_of(array), holdings(part.family, flat.degrees).ranks, strict=True):
            value = np.moveaxis(value, part.dim, 0)
            rows = [unit * part.unit_size + row for unit in units for row in range(part.unit_size)]
            assert value[: len(rows)].tobytes() == logical[rows].tobytes(), name
            # Compared as bytes: a padding of -0.0 would not be zero.
            assert not any(value[len(rows) :].tobytes()), name


def test_scalars_and_replicated_arrays_are_whole_on_every_device():
    flat, params = mesh_of((4, 3)), make_params()
    packed = pack(params, PARTITIONS, flat)
    assert packed["scalar"].shape == (7,)
    assert packed["scale"].shape == (7, 3, 2)
    assert {shard.data.shape for shard in packed["scale"].addressable_shards} == {(1, 3, 2)}


@pytest.mark.parametrize(
    ("degrees", "slots"), [((8,), 3), ((8, 0), 3), ((7,), 3), ((3, 3), 6), ((4, 3), 6), ((5, 2, 1), 17)]
)
def test_seventeen_rows_are_really_sharded_to_the_slots_of_the_smallest_degree(degrees: tuple[int, ...], slots: int):
    flat = mesh_of(degrees)
    part = Partition(Split("vocab", 17, nominal_tp=8), 0, 1)
    array = pack(np.ones((17, 2), np.float32), part, flat)
    assert array.shape == (flat.num_devices, slots, 2)
    assert not array.sharding.is_fully_replicated or flat.num_devices == 1
    assert {shard.data.shape for shard in array.addressable_shards} == {(1, slots, 2)}
    assert len({shard.device for shard in array.addressable_shards}) == flat.num_devices
    rows = [int(value[:, 0].sum()) for value in parts_of(array)]
    for group in flat.tp_groups:
        held = [rows[position] for position in group]
        assert sum(held) == 17
        assert max(held) - min(held) <= 1


def test_two_heads_on_four_devices_leave_two_of_them_with_padding_only():
    flat = mesh_of((4,))
    array = pack(np.ones((2, 3), np.float32), Partition(Split("heads", 2, 4), 0, 1), flat)
    assert [value.tolist() for value in parts_of(array)] == [[[1, 1, 1]], [[1, 1, 1]], [[0, 0, 0]], [[0, 0, 0]]]


@pytest.mark.parametrize(("num_rows", "degrees"), [(257, (2, 3, 8, 7)), (65535, (8, 7))])
def test_an_odd_vocabulary_goes_from_degree_to_degree_unpadded(num_rows: int, degrees: tuple[int, ...]):
    part = Partition(Split("vocab", num_rows, 8), 0, 1)
    logical = random_bits((num_rows, 2), np.float32, seed=0)
    value = logical
    for degree in degrees:
        flat = mesh_of((degree,))
        value = unpack(pack(value, part, flat), part, flat)
    assert_same_bits({"vocab": value}, {"vocab": logical})


# -- unpack from some positions -------------------------------------------------------------------------------------


def test_unpack_reads_only_the_given_positions():
    flat, part = mesh_of((4, 3)), Partition(VOCAB, 0, 1)
    held = holdings(VOCAB, flat.degrees).ranks
    logical = random_bits((19, 3), np.float32, seed=1)
    values = parts_of(pack(logical, part, flat))
    # Ranks 1 to 3 of replica 0 and the rank of replica 1 that has what rank 0 held; the others hold rubbish now.
    assert set(held[0]) <= set(held[4])
    readable = (1, 4, 3, 2)
    rubbish = np.full_like(values[0], 1e30)
    array = flat.place([value if p in readable else rubbish for p, value in enumerate(values)].__getitem__)
    assert unpack(array, part, flat, readable).tobytes() == logical.tobytes()


def test_positions_that_do_not_hold_every_unit_are_refused_with_the_missing_units():
    flat, part = mesh_of((4, 3)), Partition(Split("heads", 12, 4), 0, 1)
    packed = pack(np.ones((12, 2), np.float32), part, flat)
    assert holdings(part.family, flat.degrees).ranks[:5] == ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11), (0, 1, 2, 9))
    with pytest.raises(NoHolderError, match=r"^no live device holds units \(6, 7, 8, 10, 11\)$") as caught:
        unpack(packed, part, flat, (4, 1, 0))
    assert caught.value.units == (6, 7, 8, 10, 11)


# -- local views ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("degree", "num_rows"), [(4, 2 * 3), (3, 2 * 4), (2, 2 * 5), (1, 2 * 10)])
def test_narrow_cuts_to_the_slots_of_the_replicas_own_degree(degree: int, num_rows: int):
    local = {"gate": np.arange(2 * 20 * 3.0).reshape(2, 20, 3), "norm": np.ones((2, 3))}
    partitions = {"gate": Partition(Split("ffn", 10, 4), 1, 2), "norm": Partition()}
    cut = narrow(local, partitions, degree)
    assert cut["gate"].shape == (2, num_rows, 3)
    np.testing.assert_array_equal(cut["gate"], local["gate"][:, :num_rows])
    assert cut["norm"].shape == (2, 3)


def test_a_table_of_unit_ids_follows_the_compute_layout_and_marks_padding():
    table = unit_id_table(Split("heads", 5, 4), degree=3, slots=3)
    assert table.tolist() == [[0, 1, -1], [2, 4, -1], [3, -1, -1]]
    assert table.dtype == np.int32


def test_each_user_slot_points_to_the_slot_of_its_copied_unit_and_padding_to_none():
    for nominal_tp, num_groups, group_size in itertools.product(range(1, 9), range(1, 7), (1, 2, 3, 4, 8)):
        users = Split("queries", num_groups * group_size, nominal_tp, group_size)
        family = Copied("kv", users)
        for degree in range(1, nominal_tp + 1):
            units, used_by = family.compute_layout(degree), users.compute_layout(degree)
            expected = np.full((degree, used_by.slots), units.slots)
            for rank, users_of_rank in enumerate(used_by.ranks):
                for slot, user in enumerate(users_of_rank):
                    expected[rank, slot] = units.ranks[rank].index(user // group_size)
            table = copy_slot_table(family, degree)
            if table is None:
                # Then a model repeats each unit for a run of users: the real ones get theirs, padding gets padding.
                repeated = np.repeat(np.arange(units.slots), used_by.slots // units.slots)
                num_held = np.array([[len(held)] for held in units.ranks])
                table = np.where(repeated < num_held, repeated, units.slots)
            np.testing.assert_array_equal(table, expected)


@pytest.mark.parametrize(
    ("num_queries", "group_size", "degree", "needed"),
    [
        (8, 4, 2, False),  # each rank has one KV head and its four query heads
        (8, 8, 4, False),  # one KV head on every rank
        (8, 4, 4, False),  # each KV head on two ranks
        (2, 1, 4, False),  # as many KV heads as query heads, and two ranks with neither
        (8, 4, 3, True),  # ranks 0 and 1 have query heads of both groups
        (5, 5, 4, True),  # one KV head, and padding query heads on all ranks but the first
    ],
)
def test_a_table_of_copy_slots_is_made_only_where_units_are_not_used_in_order(
    num_queries: int, group_size: int, degree: int, needed: bool
):
    table = copy_slot_table(Copied("kv", Split("queries", num_queries, 4, group_size)), degree)
    assert (table is not None) == needed


def test_gathering_reads_zeros_out_of_range():
    x = jnp.arange(1, 13).reshape(2, 3, 2)
    slots = jnp.array([2, np.iinfo(np.int32).max, 0, 3])
    expected = np.stack([x[:, 2], np.zeros((2, 2)), x[:, 0], np.zeros((2, 2))], axis=1)
    np.testing.assert_array_equal(gather_units(x, slots, axis=1), expected)
