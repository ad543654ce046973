"""State moved between topologies: every replica ends with the same bits as before, read from survivors only.

The state holds any bit patterns (NaNs with payloads, denormals, -0.0). Before a move the buffers of lost devices are
deleted, so that reading one is an error.
"""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ntpjax.layout import Copied, Family, Split, holdings
from ntpjax.mesh import FlatMesh, flat_mesh
from ntpjax.move import Moved, move_state
from ntpjax.packing import pack, unpack
from ntpjax.partition import Partition, families_in
from ntpjax.plan import NoHolderError, plan_change
from ntpjax.topology import Topology

State = dict[str, Any]
Change = Callable[[Topology], Topology]

# Unit counts fit no degree. Five KV heads are copied where their query heads are; 'few' leaves ranks empty.
HEADS, FFN = Split("heads", 10, nominal_tp=4, group_size=2), Split("ffn", 13, nominal_tp=4)
VOCAB, FEW = Split("vocab", 19, nominal_tp=4), Split("few", 2, nominal_tp=4)
CASES: dict[str, tuple[tuple[int, ...], Any, Partition]] = {
    "q": ((2, 10, 3), np.float32, Partition(HEADS, 1)),
    "k": ((2, 5, 3), jnp.bfloat16, Partition(Copied("kv", HEADS), 1)),
    "gate": ((26, 3), np.float16, Partition(FFN, 0, unit_size=2)),
    "rows": ((19, 3), np.float32, Partition(VOCAB, 0)),
    "few": ((3, 4), np.int32, Partition(FEW, 1, unit_size=2)),
    "scale": ((3,), np.float32, Partition()),
    "count": ((), np.int32, Partition()),
}
PARTITIONS = {name: part for name, (_, _, part) in CASES.items()}


def random_bits(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """An array of any bit patterns, with -0.0, a NaN with a payload and a denormal in front."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).bytes(max(1, int(np.prod(shape))) * dtype.itemsize)
    values = np.frombuffer(raw, f"u{dtype.itemsize}").copy()
    sign = 1 << (8 * dtype.itemsize - 1)
    values[:3] = [sign, sign - 3, 1][: len(values)]
    return values.view(dtype).reshape(shape)


LOGICAL = {name: random_bits(shape, dtype, seed) for seed, (name, (shape, dtype, _)) in enumerate(CASES.items())}


def mesh_of(topology: Topology) -> FlatMesh:
    return flat_mesh(topology, jax.devices())


def shards_of(array: jax.Array) -> dict[Any, jax.Array]:
    return {shard.device: shard.data for shard in array.addressable_shards}


def without_lost(state: State, old: FlatMesh, new: FlatMesh) -> State:
    """`state` with the buffers deleted of devices that `new` does not have."""
    lost = [p for p, device in enumerate(old.mesh.devices) if device not in set(new.mesh.devices)]

    def destroy(array: jax.Array) -> jax.Array:
        shards = [shards_of(array)[device] for device in old.mesh.devices]
        for position in lost:
            if position == 0:
                # JAX takes an array whose first shard is deleted for deleted as a whole: rubbish instead.
                rubbish = np.full(shards[0].shape, 77, array.dtype)
                shards[0] = jax.device_put(rubbish, old.mesh.devices[0])
        array = old.assemble(shards)
        for position in lost:
            if position:
                shards_of(array)[old.mesh.devices[position]].delete()
        return array

    return {name: destroy(array) for name, array in state.items()}


def assert_laid_out(state: State, flat: FlatMesh) -> None:
    """Every replica holds every bit of the logical state, in its slots, and zeros in padding."""
    for group in flat.tp_groups:
        for name, value in unpack(state, PARTITIONS, flat, group).items():
            assert value.dtype == LOGICAL[name].dtype, name
            assert value.tobytes() == LOGICAL[name].tobytes(), name
    for name, array in pack(LOGICAL, PARTITIONS, flat).items():
        assert state[name].sharding == flat.sharding
        found = shards_of(state[name])
        for device, shard in shards_of(array).items():
            assert np.asarray(found[device]).tobytes() == np.asarray(shard).tobytes(), (name, device)


def units_to_get(family: Family, old: Topology, new: Topology) -> int:
    """Units that devices must get because they do not hold them, counted device by device."""
    have, want = (
        dict(zip(topology.devices, holdings(family, topology.ordered_degrees).ranks, strict=True))
        for topology in (old, new)
    )
    return sum(len(set(units) - set(have.get(device, ()))) for device, units in want.items())


def moved_through(*topologies: Topology) -> tuple[State, list[Moved]]:
    """The state at the end, and what each change moved; checked after every one."""
    flat, log = mesh_of(topologies[0]), []
    state: State = pack(LOGICAL, PARTITIONS, flat)
    for topology in topologies[1:]:
        old, flat = flat, mesh_of(topology)
        state, moved = move_state(without_lost(state, old, flat), PARTITIONS, old, flat)
        assert_laid_out(state, flat)
        units = {family: units_to_get(family, old.topology, topology) for family in families_in(PARTITIONS)}
        assert moved.num_units == sum(units.values())
        sizes = {name: value.nbytes // PARTITIONS[name].family.num_units for name, value in LOGICAL.items()}
        assert moved.num_bytes == sum(units[PARTITIONS[name].family] * size for name, size in sizes.items())
        log.append(moved)
    return state, log


# -- losses and returns ---------------------------------------------------------------------------------------------

HEALTHY = Topology.of_degrees((4, 4))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t: t.lose(0, 0), id="rank 0 of replica 0"),
        pytest.param(lambda t: t.lose(0, 3), id="last rank of replica 0"),
        pytest.param(lambda t: t.lose(1, 2), id="middle rank of replica 1"),
        pytest.param(lambda t: t.lose(1, 3), id="last rank of replica 1"),
        pytest.param(lambda t: t.lose(0, 1).lose(1, 2), id="one in each"),
        pytest.param(lambda t: t.lose(1, 0).lose(1, 0), id="two of one"),
        pytest.param(lambda t: t.lose(1, 3).lose(1, 2).lose(1, 1).lose(1, 0), id="a whole replica"),
    ],
)
def test_after_losses_every_replica_holds_the_bits_of_before_and_again_after_returns(change: Change):
    reduced = change(HEALTHY)
    back = reduced
    for replica, _ in reduced.lost:
        back = back.restore(replica)
    assert back.degrees == HEALTHY.degrees
    moved_through(HEALTHY, reduced, back)


def test_down_to_one_device_and_up_again_in_steps():
    two = HEALTHY.lose(1, 1).lose(1, 2)
    one = two.lose(1, 0)
    none_healthy = one.lose(0, 2)
    assert (one.degrees, none_healthy.degrees) == ((4, 1), (3, 1))
    moved_through(HEALTHY, two, one, none_healthy, none_healthy.restore(1), none_healthy.restore(1).restore(0))


def test_a_spare_takes_the_place_of_a_lost_device():
    start = Topology.of_degrees((4, 3), nominal_tp=4, spares=1)
    replaced = start.lose(0, 2).use_spares()
    assert replaced.replicas[0][3] == start.spares[0]
    moved_through(start, replaced)


def test_a_replica_takes_over_when_the_larger_one_becomes_the_smaller():
    # The canonical order changes with it: replica 1 comes first from then on.
    start = Topology.of_degrees((4, 3), nominal_tp=4)
    moved_through(start, start.lose(0, 0).lose(0, 0))


def test_a_state_moves_between_two_orders_of_the_same_devices():
    mixed = Topology(4, replicas=((6, 0, 3, 5), (7, 1, 2, 4)))
    _, (there, back) = moved_through(HEALTHY, mixed, HEALTHY)
    assert there.num_units > sum(part.num_units for part in (HEADS, FFN, VOCAB))
    assert back.num_units > 0


def test_nans_of_bfloat16_keep_their_payloads():
    logical = np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16).reshape(-1, 32)
    part = Partition(Split("all patterns", len(logical), nominal_tp=4), 0)
    old, new = mesh_of(HEALTHY), mesh_of(HEALTHY.lose(1, 2))
    moved, _ = move_state(pack(logical, part, old), part, old, new)
    for group in new.tp_groups:
        assert unpack(moved, part, new, group).tobytes() == logical.tobytes()


# -- what moves -----------------------------------------------------------------------------------------------------


def test_counts_and_sources_are_those_of_the_plan():
    reduced = HEALTHY.lose(1, 2)
    _, (lost, returned) = moved_through(HEALTHY, reduced, reduced.restore(1))
    assert lost.num_units == sum(len(plan_change(f, HEALTHY, reduced).moves) for f in families_in(PARTITIONS))
    assert lost.source == "own and other replica"
    assert returned.source == "own replica"
    # Only what the last rank held has to travel when it is the last rank that is lost.
    _, (last_rank_lost,) = moved_through(HEALTHY, HEALTHY.lose(1, 3))
    assert last_rank_lost.source == "other replica"
    assert last_rank_lost.num_units < lost.num_units


def test_returned_devices_get_what_is_replicated():
    reduced = HEALTHY.lose(0, 1)
    parts, logical = ({name: tree[name] for name in ("scale", "count")} for tree in (PARTITIONS, LOGICAL))
    old, new = mesh_of(reduced), mesh_of(reduced.restore(0))
    state, moved = move_state(pack(logical, parts, old), parts, old, new)
    newcomer = jax.devices()[1]
    assert newcomer not in set(old.mesh.devices)
    for name in parts:
        assert np.asarray(shards_of(state[name])[newcomer])[0].tobytes() == LOGICAL[name].tobytes()
    assert moved == Moved(1, 3 * 4 + 4, "own replica")


def pointers(array: jax.Array) -> dict[Any, int]:
    return {device: shard.unsafe_buffer_pointer() for device, shard in shards_of(array).items()}


def test_survivors_keep_the_very_buffers_of_what_has_no_unit_to_move():
    old, new = mesh_of(HEALTHY), mesh_of(HEALTHY.lose(1, 3))
    state = pack(LOGICAL, PARTITIONS, old)
    before = {name: pointers(array) for name, array in state.items()}
    moved, _ = move_state(state, PARTITIONS, old, new)
    for name in ("few", "scale", "count"):
        assert pointers(moved[name]) == {device: before[name][device] for device in new.mesh.devices}, name
    # This is not so for all arrays: these have grown.
    assert not set(pointers(moved["rows"]).values()) & set(before["rows"].values())


def test_when_a_whole_replica_is_dropped_the_others_keep_all_their_buffers():
    dropped = HEALTHY.lose(0, 0).lose(0, 0).lose(0, 0).lose(0, 0)
    old, new = mesh_of(HEALTHY), mesh_of(dropped)
    state = pack(LOGICAL, PARTITIONS, old)
    before = {name: pointers(array) for name, array in state.items()}
    moved, log = move_state(state, PARTITIONS, old, new)
    assert log == Moved(0, 0, "nothing moved")
    for name, array in moved.items():
        assert pointers(array) == {device: before[name][device] for device in new.mesh.devices}, name


# -- nobody left ----------------------------------------------------------------------------------------------------


def test_units_that_only_lost_devices_held_are_named_and_the_old_state_stays_readable():
    old, new = mesh_of(HEALTHY), mesh_of(HEALTHY.lose(0, 1).lose(1, 1))
    state = pack(LOGICAL, PARTITIONS, old)
    with pytest.raises(NoHolderError, match=r"no live device holds units \(5, 6, 7, 8, 9\)") as caught:
        move_state(state["rows"], PARTITIONS["rows"], old, new)
    assert caught.value.units == (5, 6, 7, 8, 9)
    with pytest.raises(NoHolderError):
        move_state(state, PARTITIONS, old, new)
    assert_laid_out(state, old)


def test_what_is_copied_on_a_survivor_is_not_lost():
    # Ranks 0 and 1 of ten query heads share KV head 1; rank 1 alone has query heads 3, 4, 5.
    assert Copied("kv", HEADS).compute_layout(4).ranks == ((0, 1), (1, 2), (3,), (4,))
    old, new = mesh_of(HEALTHY), mesh_of(HEALTHY.lose(0, 1).lose(1, 1))
    with pytest.raises(NoHolderError, match=r"units \(2,\)"):
        move_state(pack(LOGICAL["k"], PARTITIONS["k"], old), PARTITIONS["k"], old, new)


# -- compiled programs ----------------------------------------------------------------------------------------------


def test_arrays_of_one_shape_share_a_compiled_program(caplog: pytest.LogCaptureFixture):
    part = Partition(Split("columns", 11, nominal_tp=4), 0)
    logical = {name: random_bits((11, 5), np.float32, seed) for seed, name in enumerate(("param", "mu", "nu"))}
    parts = dict.fromkeys(logical, part)

    def num_compiles(topology: Topology) -> int:
        old, new = mesh_of(HEALTHY), mesh_of(topology)
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            move_state(pack(logical, parts, old), parts, old, new)
        return sum("Compiling jit(_exchange)" in record.getMessage() for record in caplog.records)

    assert num_compiles(HEALTHY.lose(1, 1)) == 1
    assert num_compiles(HEALTHY.lose(1, 1)) == 0
    assert num_compiles(HEALTHY.lose(1, 1).lose(1, 1)) == 1
