"""The flat mesh: its groups, the devices it is made of, and where the parts of an array really are."""

import itertools
import re
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from ntpjax.layout import Split
from ntpjax.mesh import FlatMesh, Groups, flat_mesh
from ntpjax.topology import Topology

pytestmark = pytest.mark.timeout(60)

# All mixes of up to four replicas on eight devices, dropped replicas among them.
DEGREES = [
    degrees for num in range(1, 5) for degrees in itertools.product(range(6), repeat=num) if 1 <= sum(degrees) <= 8
]


def mesh_of(degrees: tuple[int, ...]) -> FlatMesh:
    return flat_mesh(Topology.of_degrees(degrees), jax.devices())


def members(groups: Groups) -> list[int]:
    return sorted(position for group in groups for position in group)


# -- groups ---------------------------------------------------------------------------------------------------------


def test_the_groups_of_degrees_4_and_3_are_those_of_the_module_docstring():
    flat = mesh_of((4, 3))
    assert flat.tp_groups == ((0, 1, 2, 3), (4, 5, 6))
    assert flat.sum_groups == ((0, 4), (1, 5), (2, 6), (3,))


def test_each_kind_of_group_covers_every_position_once():
    for degrees in DEGREES:
        flat = mesh_of(degrees)
        assert flat.num_devices == sum(degrees)
        assert members(flat.tp_groups) == members(flat.sum_groups) == list(range(flat.num_devices))


def test_tp_groups_are_the_replicas_healthy_first():
    for degrees in DEGREES:
        flat = mesh_of(degrees)
        assert flat.degrees == tuple(sorted((degree for degree in degrees if degree), reverse=True))
        assert tuple(len(group) for group in flat.tp_groups) == flat.degrees
        assert list(itertools.chain(*flat.tp_groups)) == list(range(flat.num_devices))


def test_core_ranks_sum_with_the_same_rank_of_every_replica_and_extra_ranks_alone():
    for degrees in DEGREES:
        flat = mesh_of(degrees)
        for group in flat.sum_groups:
            ranks, replicas = [{of[position] for position in group} for of in (flat.ranks, flat.replica_of)]
            assert len(ranks) == 1
            if ranks.pop() < flat.sync_degree:
                assert len(group) == len(replicas) == len(flat.degrees)
            else:
                assert len(group) == 1


def test_positions_know_their_rank_and_their_replica():
    flat = mesh_of((2, 0, 3, 1))
    assert flat.ranks == (0, 1, 2, 0, 1, 0)
    assert flat.replica_of == (2, 2, 2, 0, 0, 3)
    assert flat.sync_degree == 1


def test_the_mesh_is_made_of_the_topologys_devices_in_canonical_order():
    devices = jax.devices()[::-1]
    topology = Topology.of_degrees((4, 4)).lose(0, 1)
    flat = flat_mesh(topology, devices)
    assert topology.devices == (4, 5, 6, 7, 0, 3, 2)
    assert flat.mesh.devices.tolist() == [devices[number] for number in (4, 5, 6, 7, 0, 3, 2)]


# -- arrays ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [(4, 4), (4, 3), (3, 2, 1), (5,), (1,)])
def test_each_device_really_has_one_part_and_it_is_its_own(degrees: tuple[int, ...]):
    flat = mesh_of(degrees)
    values = [np.full((3, 2), position, np.float32) for position in range(flat.num_devices)]
    array = flat.place(values.__getitem__)
    assert array.shape == (flat.num_devices, 3, 2)
    assert array.sharding == flat.sharding
    assert len(array.addressable_shards) == flat.num_devices
    for shard in array.addressable_shards:
        position = shard.index[0].start or 0
        assert shard.data.shape == (1, 3, 2)
        assert shard.device == flat.mesh.devices[position]
        np.testing.assert_array_equal(shard.data[0], values[position])


def test_a_process_sees_its_own_degree_only_and_has_room_for_that_only():
    family, topology = Split("units", 12, nominal_tp=4), Topology.of_degrees((4, 3))
    healthy, reduced = (flat_mesh(topology, jax.devices(), topology.devices_of_degree(tp)) for tp in (4, 3))
    assert (healthy.own_positions, reduced.own_positions) == ((0, 1, 2, 3), (4, 5, 6))
    assert (healthy.slots(family), reduced.slots(family)) == (3, 4)
    both = mesh_of((4, 3))
    assert (both.own_degrees, both.slots(family)) == ((3, 4), 4)


def test_assembling_an_array_copies_nothing():
    flat = mesh_of((3, 2))
    shards = [jax.device_put(np.ones((1, 1024), np.float32), device) for device in flat.mesh.devices]
    array = flat.assemble(shards)
    assert array.shape == (5, 1024)
    parts = {shard.device: shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
    assert parts == {shard.device: shard.unsafe_buffer_pointer() for shard in shards}


def test_an_array_goes_over_to_a_mesh_of_the_same_devices_in_another_order():
    topology = Topology.of_degrees((2, 2))
    ahead, behind = flat_mesh(topology, jax.devices()[:4]), flat_mesh(topology, jax.devices()[3::-1])
    array = jax.device_put(ahead.place(lambda position: np.full(2, position)), behind.sharding)
    on_device = {shard.device: shard.data for shard in array.addressable_shards}
    assert [int(on_device[device][0, 0]) for device in jax.devices()[:4]] == [3, 2, 1, 0]


# -- TPU ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TpuDevice:
    """All that a mesh needs to know of a device."""

    id: int
    platform: str = "tpu"
    process_index: int = 0


def tpu_devices(count: int) -> list[TpuDevice]:
    return [TpuDevice(number) for number in range(count)]


@pytest.mark.parametrize("degrees", [(4, 3), (1, 0, 2)])
def test_uneven_replicas_are_refused_on_tpu(degrees: tuple[int, ...]):
    text = (
        f"TP degrees {degrees} are uneven, and the TPU compiler refuses collectives over uneven groups; "
        "use GPUs or CPUs, or give every replica the same degree."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        flat_mesh(Topology.of_degrees(degrees), tpu_devices(7))


@pytest.mark.parametrize("degrees", [(4, 4), (3, 0, 3), (2,)])
def test_equal_replicas_are_accepted_on_tpu(degrees: tuple[int, ...]):
    assert set(flat_mesh(Topology.of_degrees(degrees), tpu_devices(8)).degrees) == {max(degrees)}


def test_a_topology_with_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="the topology has device 8, but there are only 8 devices"):
        flat_mesh(Topology.of_degrees((5, 4)), jax.devices())


@pytest.mark.parametrize(
    ("process_of", "own_replicas"),
    [
        ([0, 0, 0, 1, 1, 2, 2], [{0}, {1}, {2}]),
        # Replica 1 is on processes 0 and 1: all that these have is one program.
        ([0, 0, 0, 0, 1, 2, 2], [{0, 1}, {0, 1}, {2}]),
        ([0, 0, 1, 1, 1, 1, 2], [{0, 1, 2}] * 3),
        ([0, 1, 2, 3, 4, 5, 6], [{0}] * 3 + [{1}] * 2 + [{2}] * 2),
        # One link after the other.
        ([0, 0, 1, 1, 2, 2, 3], [{0, 1, 2}] * 4),
    ],
)
def test_processes_that_share_a_replica_run_one_program(process_of: list[int], own_replicas: list[set[int]]):
    topology, found = Topology.of_degrees((3, 2, 2)), []
    for process in sorted(set(process_of)):
        own_devices = [number for number, holder in enumerate(process_of) if holder == process]
        found.append(flat_mesh(topology, jax.devices(), own_devices, process_of))
    assert [flat.own_replicas for flat in found] == own_replicas
    assert [flat.own_degrees for flat in found] == [tuple(sorted({(3, 2, 2)[r] for r in own})) for own in own_replicas]


def test_lost_devices_link_no_processes():
    topology = Topology.of_degrees((2, 2)).lose(1, 0)
    assert flat_mesh(topology, jax.devices(), [0, 1, 2], [0, 0, 0, 1]).own_replicas == {0}
    assert flat_mesh(topology, jax.devices(), [3], [0, 0, 0, 1]).own_replicas == {1}
