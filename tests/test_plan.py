"""Plans move the fewest units, from the right sources; exchanges carry them out, in masked sums over plain integers.

In these sums every slot's value is a power of two of its own, so that a total shows exactly which values went into it.
"""

import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntpjax.layout import REPLICATED, Copied, Family, Layout, Split, even_blocks, nested_layout
from ntpjax.plan import Exchange, Move, NoHolderError, exchange, exchange_of_moves, plan_change, plan_moves
from ntpjax.topology import Topology

pytestmark = pytest.mark.timeout(60)

Buffers = tuple[tuple[int, ...], ...]

# (nominal TP, units, larger degree, smaller degree)
DEGREE_PAIRS = [
    (nominal_tp, num_units, n, m)
    for nominal_tp in range(1, 9)
    for num_units in range(1, 21)
    for n in range(1, nominal_tp + 1)
    for m in range(1, n + 1)
]


def compute_and_sync(num_units: int, nominal_tp: int, degree: int, sync_degree: int) -> tuple[Layout, Layout]:
    family = Split("heads", num_units, nominal_tp)
    return family.compute_layout(degree), family.sync_layout(degree, sync_degree)


def one_value_a_unit(layout: Layout) -> Buffers:
    """Buffers in which all holders of a unit hold the same value."""
    return tuple(tuple(1 << unit for unit in units) for units in layout.ranks)


def one_value_a_holder(layout: Layout) -> Buffers:
    """Buffers in which no two slots hold the same value."""
    numbers = itertools.count()
    return tuple(tuple(1 << next(numbers) for _ in units) for units in layout.ranks)


def masked_sum(table: Exchange, buffers: Buffers) -> Buffers:
    """The buffers after an exchange: all ranks' gifts are summed, and each rank picks."""
    shared = [0] * len(table.shared)
    for slots, buffer in zip(table.give, buffers, strict=True):
        for place, slot in enumerate(slots):
            if slot is not None:
                shared[place] += buffer[slot]
    return tuple(
        tuple(buffer[source] if source >= 0 else shared[-1 - source] for source in sources)
        for sources, buffer in zip(table.take, buffers, strict=True)
    )


def sums_over_holders(layout: Layout, buffers: Buffers) -> dict[int, int]:
    totals: Counter[int] = Counter()
    for units, values in zip(layout.ranks, buffers, strict=True):
        for unit, value in zip(units, values, strict=True):
            totals[unit] += value
    return totals


def lacking(have: Layout, want: Layout) -> set[tuple[int, int]]:
    """(position, unit) of everything that is wanted and not held: no plan can do with fewer moves."""
    ranks = enumerate(zip(have.ranks, want.ranks, strict=True))
    return {(position, unit) for position, (held, wanted) in ranks for unit in set(wanted) - set(held)}


@st.composite
def copied_layouts(draw: st.DrawFn, num_ranks: int, num_units: int) -> Layout:
    """Layouts in which every unit has at least one holder, in any order of slots."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for unit in draw(st.permutations(range(num_units))):
        for rank in draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)):
            ranks[rank].append(unit)
    return Layout(tuple(map(tuple, ranks)))


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[Layout, Layout, tuple[int, ...]]:
    """What is held, what is wanted, and the replica of each position: arbitrary, but every unit has a holder."""
    num_ranks, num_units = draw(st.integers(1, 8)), draw(st.integers(1, 12))
    have = draw(copied_layouts(num_ranks, num_units))
    some_units = st.lists(st.integers(0, num_units - 1), unique=True).map(tuple)
    want = Layout(tuple(draw(some_units) for _ in range(num_ranks)))
    return have, want, tuple(draw(st.integers(0, 2)) for _ in range(num_ranks))


# -- plans ----------------------------------------------------------------------------------------------------------


@given(layout_pairs())
def test_a_plan_makes_exactly_the_moves_that_are_lacking(case: tuple[Layout, Layout, tuple[int, ...]]):
    have, want, replica_of = case
    moves = plan_moves(have, want, replica_of)
    assert sorted((move.target, move.unit) for move in moves) == sorted(lacking(have, want))


@given(layout_pairs())
def test_units_come_from_a_holder_and_from_a_replica_in_need_where_one_has_them(
    case: tuple[Layout, Layout, tuple[int, ...]],
):
    have, want, replica_of = case
    moves = plan_moves(have, want, replica_of)
    in_need = {(move.unit, replica_of[move.target]) for move in moves}
    for move in moves:
        assert move.unit in have.ranks[move.source]
        if any((move.unit, replica_of[holder]) in in_need for holder in have.holders()[move.unit]):
            assert (move.unit, replica_of[move.source]) in in_need


@given(layout_pairs())
def test_a_unit_has_one_source(case: tuple[Layout, Layout, tuple[int, ...]]):
    sources = {(move.unit, move.source) for move in plan_moves(*case)}
    assert len(sources) == len({unit for unit, _ in sources})


def test_nothing_moves_when_every_device_holds_what_it_needs():
    have = Layout(((0, 1, 2), (3, 4), (0, 1, 2, 3, 4)))
    assert plan_moves(have, Layout(((2, 0), (4,), ())), (0, 0, 1)) == ()


def test_a_unit_of_several_needy_targets_is_a_move_to_each():
    moves = plan_moves(Layout(((7,), (), ())), Layout(((7,), (7,), (7,))), (0, 0, 1))
    assert moves == (Move(7, 0, 1), Move(7, 0, 2))


def test_the_own_replica_is_preferred_even_if_it_has_given_more():
    have = Layout(((0, 1, 2), (), (0, 1, 2)))
    moves = plan_moves(have, Layout(((), (0, 1, 2), ())), (0, 0, 1))
    assert {move.source for move in moves} == {0}


def test_any_replica_in_need_that_holds_a_unit_is_preferred_to_one_that_is_not():
    # Replicas 0 and 1 need unit 5; replica 1 has it, and so has replica 2, whose position comes first.
    have = Layout(((5,), (), (), (5,)))
    moves = plan_moves(have, Layout(((5,), (5,), (5,), (5,))), (2, 0, 1, 1))
    assert moves == (Move(5, 3, 1), Move(5, 3, 2))


def test_units_of_a_lost_shard_come_evenly_from_all_replicas_that_hold_it():
    for nominal_tp, num_units, num_healthy in itertools.product(range(1, 9), range(1, 21), range(1, 5)):
        whole = nested_layout(num_units, nominal_tp, nominal_tp).ranks
        for lost in range(nominal_tp):
            newcomer = tuple(() if rank == lost else units for rank, units in enumerate(whole))
            replica_of = tuple(r for r in range(num_healthy + 1) for _ in range(nominal_tp))
            moves = plan_moves(Layout(whole * num_healthy + newcomer), Layout(whole * (num_healthy + 1)), replica_of)
            given = Counter(replica_of[move.source] for move in moves)
            counts = [given[r] for r in range(num_healthy)]
            assert sum(counts) == len(moves) == len(whole[lost])
            assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("num_targets", [1, 2, 3])
@pytest.mark.parametrize("num_holders", [1, 2, 3, 4])
def test_devices_that_hold_the_same_units_give_equally_many(num_holders: int, num_targets: int):
    for num_units in range(1, 21):
        everything = tuple(range(num_units))
        have = Layout((everything,) * num_holders + ((),) * num_targets)
        want = Layout(((),) * num_holders + (everything,) * num_targets)
        moves = plan_moves(have, want, tuple(range(num_holders + num_targets)))
        given = Counter(source for _, source in {(move.unit, move.source) for move in moves})
        counts = [given[holder] for holder in range(num_holders)]
        assert max(counts) - min(counts) <= 1, num_units


def test_units_with_one_holder_are_planned_first_so_that_the_others_even_out():
    # Unit 9 is held by position 0 only, so position 1 gives one more of the units that both hold.
    have = Layout(((0, 1, 2, 9), (0, 1, 2), ()))
    moves = plan_moves(have, Layout(((), (), (0, 1, 2, 9))), (0, 1, 2))
    assert Counter(move.source for move in moves) == {0: 2, 1: 2}


def test_units_without_a_holder_are_listed_and_the_text_names_the_first_ones():
    have, want = Layout(((1,), (), ())), Layout(((1, *range(2, 12)), (0, 1), ()))
    with pytest.raises(
        NoHolderError, match=r"^no live device holds units \(0, 2, 3, 4, 5, 6, 7, 8\) and more$"
    ) as caught:
        plan_moves(have, want, (0, 0, 0))
    assert caught.value.units == (0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)


def test_a_unit_that_nobody_wants_needs_no_holder():
    assert plan_moves(Layout(((0,), ())), Layout(((0,), (0,))), (0, 0)) == (Move(0, 0, 1),)


_PRINT_A_PLAN = """
from ntpjax.layout import Layout, nested_layout
from ntpjax.plan import plan_moves
whole = nested_layout(20, 4, 4).ranks
have, want = Layout(whole * 3 + whole[:2] + ((), ())), Layout(whole * 4)
print(plan_moves(have, want, tuple(name for name in ("a", "b", "c", "d") for _ in range(4))))
"""


def test_every_process_makes_the_same_plan():
    # Each process plans for itself; the seed changes the order of sets and dictionaries of strings.
    plans = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", _PRINT_A_PLAN]
        root = Path(__file__).parents[1]
        plans.add(subprocess.run(command, env=environment, cwd=root, check=True, capture_output=True).stdout)
    assert len(plans) == 1
    assert plans.pop().count(b"Move(") == 10


# -- changes of topology --------------------------------------------------------------------------------------------


def held_by_device(family: Family, topology: Topology) -> dict[int, tuple[int, ...]]:
    """The units of each device in use, replica by replica."""
    return {
        device: units
        for devices in topology.replicas
        if devices
        for device, units in zip(devices, family.compute_layout(len(devices)).ranks, strict=True)
    }


def changes() -> Iterator[tuple[Family, Topology, Topology]]:
    """Every loss of one device from some topologies, and every return, for three kinds of units."""
    queries = Split("queries", 12, nominal_tp=4, group_size=3)
    for family in (Split("ffn", 11, nominal_tp=4), queries, Copied("kv", queries), REPLICATED):
        for degrees in [(4, 4), (3, 4), (4, 3, 2), (2, 4, 4)]:
            topology = Topology.of_degrees(degrees, nominal_tp=4)
            for replica, degree in enumerate(degrees):
                for rank in range(degree):
                    reduced = topology.lose(replica, rank)
                    yield family, topology, reduced
                    yield family, reduced, reduced.restore(replica)


def test_survivors_keep_what_they_hold_newcomers_hold_nothing_and_only_the_rest_moves():
    for family, old, new in changes():
        change, held = plan_change(family, old, new), held_by_device(family, old)
        assert change.have.ranks == tuple(held.get(device, ()) for device in new.devices)
        wanted = held_by_device(family, new)
        assert change.want.ranks == tuple(wanted[device] for device in new.devices)
        assert len(change.moves) == len(lacking(change.have, change.want))


def test_nothing_moves_into_replicas_that_stay_as_they_are():
    for family, old, new in changes():
        changed = {r for r in new.order if new.replicas[r] != old.replicas[r]}
        assert {new.owners[move.target] for move in plan_change(family, old, new).moves} <= changed


def test_units_come_from_the_own_replica_where_it_has_them():
    for family, old, new in changes():
        change = plan_change(family, old, new)
        held_in = {(new.owners[position], unit) for position, units in enumerate(change.have.ranks) for unit in units}
        for move in change.moves:
            own = new.owners[move.target]
            assert (new.owners[move.source] == own) == ((own, move.unit) in held_in)


def test_a_loss_moves_the_lost_units_and_what_the_last_device_no_longer_needs():
    for num_units, nominal_tp in itertools.product(range(1, 21), range(2, 9)):
        family = Split("ffn", num_units, nominal_tp)
        before, after = (family.compute_layout(degree).ranks for degree in (nominal_tp, nominal_tp - 1))
        topology = Topology.of_degrees((nominal_tp, nominal_tp))
        for rank in range(nominal_tp - 1):
            moves = plan_change(family, topology, topology.lose(1, rank)).moves
            # Rank `rank` was dealt some of the last rank's units, and its new device is the one that had them.
            kept = set(after[rank]) & set(before[-1])
            assert len(moves) == len(before[rank]) + len(before[-1]) - len(kept)
        assert len(plan_change(family, topology, topology.lose(1, nominal_tp - 1)).moves) == len(before[-1])


def test_units_that_only_lost_devices_had_are_named():
    topology = Topology.of_degrees((3,))
    with pytest.raises(NoHolderError) as caught:
        plan_change(Split("ffn", 7, nominal_tp=3), topology, topology.lose(0, 1))
    assert caught.value.units == (3, 4)


# -- exchanges ------------------------------------------------------------------------------------------------------


def test_pre_sync_reaches_the_sync_layout_and_post_sync_the_compute_layout():
    for nominal_tp, num_units, n, m in DEGREE_PAIRS:
        compute, sync = compute_and_sync(num_units, nominal_tp, n, m)
        computed, synced = one_value_a_unit(compute), one_value_a_unit(sync)
        assert masked_sum(exchange(compute, sync, add_copies=True), computed) == synced
        assert masked_sum(exchange(sync, compute), synced) == computed


def test_the_shared_buffer_has_the_units_of_extra_ranks_and_no_others():
    for nominal_tp, num_units, n, m in DEGREE_PAIRS:
        compute, sync = compute_and_sync(num_units, nominal_tp, n, m)
        extra = tuple(sorted(unit for units in compute.ranks[m:] for unit in units))
        assert exchange(compute, sync, add_copies=True).shared == exchange(sync, compute).shared == extra


def test_core_ranks_keep_their_slots_in_pre_sync_and_give_nothing():
    for nominal_tp, num_units, n, m in DEGREE_PAIRS:
        compute, sync = compute_and_sync(num_units, nominal_tp, n, m)
        table = exchange(compute, sync, add_copies=True)
        for rank, units in enumerate(compute.ranks[:m]):
            assert table.take[rank][: len(units)] == tuple(range(len(units)))
            assert set(table.give[rank]) <= {None}


def topology_changes() -> Iterator[tuple[Layout, Layout, tuple[int, ...]]]:
    """Replica 0 goes from one degree to another, down and up; replica 1, reduced or healthy, stays as it is."""
    for nominal_tp, num_units, n, m in DEGREE_PAIRS:
        larger, smaller = (nested_layout(num_units, nominal_tp, degree).ranks for degree in (n, m))
        for other_degree in {1, nominal_tp}:
            other = nested_layout(num_units, nominal_tp, other_degree).ranks
            # Down: ranks >= m are gone with what they held. Up: newcomers hold nothing.
            yield Layout(larger[:m] + other), Layout(smaller + other), (0,) * m + (1,) * other_degree
            newcomers = ((),) * (n - m)
            yield Layout(smaller + newcomers + other), Layout(larger + other), (0,) * n + (1,) * other_degree


def test_carrying_out_a_plan_reaches_the_new_layout_of_every_topology_change():
    for have, want, replica_of in topology_changes():
        moves = plan_moves(have, want, replica_of)
        assert len(moves) == len(lacking(have, want))
        assert masked_sum(exchange_of_moves(have, want, moves), one_value_a_unit(have)) == one_value_a_unit(want)


@given(layout_pairs())
def test_carrying_out_a_plan_takes_each_unit_from_the_planned_source(case: tuple[Layout, Layout, tuple[int, ...]]):
    have, want, replica_of = case
    moves = plan_moves(have, want, replica_of)
    before = one_value_a_holder(have)
    held = [dict(zip(units, values, strict=True)) for units, values in zip(have.ranks, before, strict=True)]
    came_from = {(move.target, move.unit): held[move.source][move.unit] for move in moves}
    after = tuple(
        tuple(held[position].get(unit) or came_from[position, unit] for unit in units)
        for position, units in enumerate(want.ranks)
    )
    assert masked_sum(exchange_of_moves(have, want, moves), before) == after


@given(layout_pairs())
def test_an_exchange_without_sums_gives_every_rank_a_value_of_each_wanted_unit(
    case: tuple[Layout, Layout, tuple[int, ...]],
):
    have, want, _ = case
    assert masked_sum(exchange(have, want), one_value_a_unit(have)) == one_value_a_unit(want)


# -- copied units ---------------------------------------------------------------------------------------------------


def small_copied_layouts(num_ranks: int, num_units: int) -> Iterator[tuple[Layout, Layout]]:
    """All compute layouts with copies, each with all sync layouts that have one owner a unit."""
    ranks = range(num_ranks)
    holder_sets = [chosen for size in ranks for chosen in itertools.combinations(ranks, size + 1)]
    for holders in itertools.product(holder_sets, repeat=num_units):
        compute = Layout(tuple(tuple(unit for unit in range(num_units) if rank in holders[unit]) for rank in ranks))
        for owner in itertools.product(ranks, repeat=num_units):
            yield compute, Layout(tuple(tuple(u for u in range(num_units) if owner[u] == rank) for rank in ranks))


def assert_copies_are_summed_and_handed_back(compute: Layout, sync: Layout) -> None:
    gradients = one_value_a_holder(compute)
    totals = sums_over_holders(compute, gradients)
    summed = masked_sum(exchange(compute, sync, add_copies=True), gradients)
    assert summed == tuple(tuple(totals[unit] for unit in units) for units in sync.ranks)
    handed_back = masked_sum(exchange(sync, compute), summed)
    assert handed_back == tuple(tuple(totals[unit] for unit in units) for units in compute.ranks)


@pytest.mark.parametrize(("num_ranks", "num_units"), [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3), (4, 2)])
def test_copied_units_are_summed_for_their_owner_and_all_holders_get_the_owners_value(num_ranks: int, num_units: int):
    for compute, sync in small_copied_layouts(num_ranks, num_units):
        assert_copies_are_summed_and_handed_back(compute, sync)


@given(st.integers(1, 8), st.integers(1, 12), st.data())
def test_larger_layouts_with_copies_are_summed_and_handed_back(num_ranks: int, num_units: int, data: st.DataObject):
    compute = data.draw(copied_layouts(num_ranks, num_units))
    sync = data.draw(st.permutations(even_blocks(num_units, num_ranks)))
    assert_copies_are_summed_and_handed_back(compute, Layout(tuple(map(tuple, sync))))


def test_what_every_rank_holds_travels_only_to_the_ranks_that_lack_it():
    for degree in range(1, 9):
        everyone = REPLICATED.compute_layout(degree)
        for sync_degree in range(1, degree + 1):
            core = REPLICATED.sync_layout(degree, sync_degree)
            assert exchange(everyone, core).shared == ()
            back = exchange(core, everyone)
            assert back.shared == (() if sync_degree == degree else (0,))
            assert masked_sum(back, one_value_a_unit(core)) == one_value_a_unit(everyone)


def test_an_exchange_that_wants_a_unit_nobody_holds_is_refused_with_its_id() -> None:
    with pytest.raises(NoHolderError, match=r"units \(7,\)") as caught:
        exchange(Layout(((0,), (1,))), Layout(((0, 7), (1,))))
    assert caught.value.units == (7,)
