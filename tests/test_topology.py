"""Losses, returns and spares: which device becomes which rank, and that *which* device failed changes no shape."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntpjax.topology import Topology

pytestmark = pytest.mark.timeout(60)

SMALL_DEGREES = [(1,), (4,), (2, 2), (4, 4), (4, 3), (3, 4), (4, 0, 4), (2, 1, 3), (4, 3, 2, 1)]


def ranks_of(topology: Topology) -> list[tuple[int, int]]:
    """Every (replica, rank) in use."""
    return [(r, rank) for r, degree in enumerate(topology.degrees) for rank in range(degree)]


def one_loss_each() -> list[tuple[Topology, int, int]]:
    """Every way to lose one device from a small topology: (before, replica, rank)."""
    topologies = [Topology.of_degrees(degrees, nominal_tp=4, spares=1) for degrees in SMALL_DEGREES]
    return [(topology, replica, rank) for topology in topologies for replica, rank in ranks_of(topology)]


def all_devices(topology: Topology) -> list[int]:
    """In use, spare and lost, in no order; a device that is in two places is listed twice."""
    in_use = [device for devices in topology.replicas for device in devices]
    return sorted([*in_use, *topology.spares, *(device for _, device in topology.lost)])


# -- construction and order -----------------------------------------------------------------------------------------


def test_devices_are_numbered_replica_by_replica_and_spares_come_last():
    topology = Topology.of_degrees((2, 0, 3), spares=2)
    assert topology.replicas == ((0, 1), (), (2, 3, 4))
    assert topology.spares == (5, 6)
    assert topology.lost == ()
    assert topology.degrees == (2, 0, 3)


def test_the_nominal_tp_is_the_largest_degree_unless_given():
    assert Topology.of_degrees((3, 2)).nominal_tp == 3
    assert Topology.of_degrees((3, 2), nominal_tp=4).nominal_tp == 4


@pytest.mark.parametrize("degrees", [(), (0,), (0, 0), (4, -1)])
def test_degrees_without_a_device_or_below_zero_are_refused(degrees: tuple[int, ...]):
    rule = f"`degrees` (={degrees}) must have at least one replica with a device."
    with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
        Topology.of_degrees(degrees)


@pytest.mark.parametrize(
    ("degrees", "order"),
    [
        ((4, 4), (0, 1)),
        ((3, 4), (1, 0)),
        ((2, 3, 2, 3), (1, 3, 0, 2)),
        ((1, 2, 3, 4), (3, 2, 1, 0)),
        ((0, 4, 0, 4, 1), (1, 3, 4)),
    ],
)
def test_replicas_stand_healthy_first_then_by_id_and_dropped_ones_are_left_out(
    degrees: tuple[int, ...], order: tuple[int, ...]
):
    assert Topology.of_degrees(degrees).order == order


def test_the_devices_of_the_flat_mesh_follow_the_canonical_order():
    assert Topology.of_degrees((1, 0, 3, 2)).devices == (1, 2, 3, 4, 5, 0)


def test_degrees_and_owners_follow_the_canonical_order_too():
    topology = Topology.of_degrees((1, 0, 3, 2))
    assert topology.ordered_degrees == (3, 2, 1)
    assert topology.owners == (2, 2, 2, 3, 3, 0)


@pytest.mark.parametrize(("degrees", "sync_degree"), [((4, 4), 4), ((4, 3, 2), 2), ((0, 4, 3), 3), ((0, 1, 0), 1)])
def test_the_sync_degree_is_the_smallest_of_active_replicas(degrees: tuple[int, ...], sync_degree: int):
    assert Topology.of_degrees(degrees).sync_degree == sync_degree


# -- losses ---------------------------------------------------------------------------------------------------------


def test_the_last_device_takes_the_lost_rank_and_nobody_else_moves():
    for topology, replica, rank in one_loss_each():
        before, after = topology.replicas[replica], topology.lose(replica, rank).replicas[replica]
        expected = list(before)
        expected[rank] = before[-1]
        assert list(after) == expected[:-1]


def test_a_loss_changes_one_replica_by_one_and_is_on_record():
    for topology, replica, rank in one_loss_each():
        after = topology.lose(replica, rank)
        assert after.lost == ((replica, topology.replicas[replica][rank]),)
        assert after.spares == topology.spares
        assert after.nominal_tp == topology.nominal_tp
        assert after.degrees == tuple(degree - (r == replica) for r, degree in enumerate(topology.degrees))
        others = [r for r in range(len(topology.replicas)) if r != replica]
        assert [after.replicas[r] for r in others] == [topology.replicas[r] for r in others]


def test_losing_any_device_gives_one_and_the_same_shape():
    healthy = Topology.of_degrees((4, 4))
    after = [healthy.lose(replica, rank) for replica, rank in ranks_of(healthy)]
    assert len({topology.devices for topology in after}) == 8
    shapes = {tuple(topology.degrees[r] for r in topology.order) for topology in after}
    assert shapes == {(4, 3)}


def test_a_replica_that_loses_its_last_device_is_dropped():
    topology = Topology.of_degrees((1, 2)).lose(0, 0)
    assert topology.degrees == (0, 2)
    assert topology.order == (1,)
    assert topology.devices == (1, 2)
    assert topology.sync_degree == 2


# -- returns --------------------------------------------------------------------------------------------------------


def test_a_device_returns_as_the_last_rank_and_the_others_stay():
    for topology, replica, rank in one_loss_each():
        reduced = topology.lose(replica, rank)
        back = reduced.restore(replica)
        assert back.replicas[replica] == (*reduced.replicas[replica], topology.replicas[replica][rank])
        assert back.lost == ()
        assert back.degrees == topology.degrees


def test_the_device_that_was_lost_first_returns_first():
    topology = Topology.of_degrees((4, 4)).lose(0, 1).lose(1, 2).lose(0, 0)
    assert topology.lost == ((0, 1), (1, 6), (0, 0))
    topology = topology.restore(0)
    assert topology.replicas[0] == (2, 3, 1)
    assert topology.lost == ((1, 6), (0, 0))
    assert topology.restore(0).replicas[0] == (2, 3, 1, 0)


def test_a_dropped_replica_comes_back():
    topology = Topology.of_degrees((1, 2)).lose(0, 0).restore(0)
    assert topology == Topology.of_degrees((1, 2))


def test_a_device_that_returns_to_a_full_replica_becomes_a_spare():
    filled = Topology.of_degrees((2, 2), spares=1).lose(0, 1).use_spares()
    topology = filled.restore(0)
    assert topology.replicas == filled.replicas
    assert topology.spares == (1,)
    assert topology.lost == ()


# -- spares ---------------------------------------------------------------------------------------------------------


def test_a_spare_becomes_the_last_rank_of_the_least_reduced_replica():
    for topology, replica, rank in one_loss_each():
        reduced = topology.lose(replica, rank)
        filled = reduced.use_spares()
        changed = [r for r, devices in enumerate(filled.replicas) if devices != reduced.replicas[r]]
        least_reduced = max(degree for degree in reduced.degrees if degree < 4)
        assert changed == [reduced.degrees.index(least_reduced)]
        assert filled.replicas[changed[0]] == (*reduced.replicas[changed[0]], topology.spares[0])
        assert filled.spares == ()


def test_a_replica_is_filled_before_the_next_one_gets_a_spare():
    topology = Topology.of_degrees((1, 2, 2), nominal_tp=4, spares=5).use_spares()
    assert topology.replicas == ((0, 9), (1, 2, 5, 6), (3, 4, 7, 8))
    assert topology.spares == ()


def test_spares_bring_back_a_dropped_replica_when_no_other_needs_them():
    topology = Topology.of_degrees((0, 1, 2), nominal_tp=2, spares=2).use_spares()
    assert topology.degrees == (1, 2, 2)


def test_spares_stay_spare_when_every_replica_is_whole():
    topology = Topology.of_degrees((2, 2), spares=2)
    assert topology.use_spares() == topology


# -- any sequence of events -----------------------------------------------------------------------------------------


events = st.lists(st.tuples(st.sampled_from(["lose", "restore", "use_spares"]), st.integers(0, 99), st.integers(0, 99)))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 3), events)
def test_after_any_events_every_device_is_in_one_place_and_each_event_changes_what_it_says(
    degrees: list[int], num_spares: int, events: list[tuple[str, int, int]]
):
    topology = Topology.of_degrees(tuple(degrees), nominal_tp=4, spares=num_spares)
    devices = all_devices(topology)
    assert devices == list(range(sum(degrees) + num_spares))
    for event, first, second in events:
        before, replica = topology, first % len(degrees)
        had = before.degrees[replica]
        has_lost = any(owner == replica for owner, _ in before.lost)
        change = 0
        if event == "lose" and had:
            topology, change = before.lose(replica, second % had), -1
        elif event == "restore" and has_lost:
            topology, change = before.restore(replica), int(had < 4)
        elif event == "use_spares":
            topology = before.use_spares()
            change = topology.degrees[replica] - had
            assert not topology.spares or set(topology.degrees) == {4}
            assert all(now >= then for now, then in zip(topology.degrees, before.degrees, strict=True))
        assert all_devices(topology) == devices
        assert topology.degrees[replica] == had + change
        assert max(topology.degrees) <= topology.nominal_tp
        if any(topology.degrees):
            assert sorted(topology.devices) == sorted(d for replica in topology.replicas for d in replica)


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replica", [2, -1])
def test_an_unknown_replica_is_refused(replica: int):
    topology = Topology.of_degrees((4, 3))
    rule = re.escape(f"`replica` (={replica}) must be at least 0 and below the number of replicas (=2).")
    with pytest.raises(ValueError, match=f"^{rule}$"):
        topology.lose(replica, 0)
    with pytest.raises(ValueError, match=f"^{rule}$"):
        topology.restore(replica)


@pytest.mark.parametrize(("replica", "rank", "degree"), [(0, 4, 4), (1, 3, 3), (1, -1, 3), (2, 0, 0)])
def test_a_rank_that_the_replica_does_not_have_is_refused(replica: int, rank: int, degree: int):
    rule = re.escape(f"`rank` (={rank}) must be at least 0 and below the TP degree of replica {replica} (={degree}).")
    with pytest.raises(ValueError, match=f"^{rule}$"):
        Topology.of_degrees((4, 3, 0)).lose(replica, rank)


def test_restoring_a_replica_that_has_lost_nothing_is_refused():
    topology = Topology.of_degrees((4, 3), nominal_tp=4).lose(0, 0)
    with pytest.raises(ValueError, match=r"^replica 1 has lost no device \(TP degree 3 of 4\)\.$"):
        topology.restore(1)


def test_a_nominal_degree_below_a_replicas_degree_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`nominal_tp` .=3. must be at least the largest of `degrees`"):
        Topology.of_degrees((4, 3), nominal_tp=3)
