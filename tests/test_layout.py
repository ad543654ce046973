"""Chains of layouts: balanced, nested, and moving the fewest units, for every small size and for large samples.

The units that move from `L_n` to `L_m` are exactly those on the ranks `>= m` of `L_n`, and how many of them any two
core ranks get differs by at most one. That is about totals: what one extra rank sends to each may differ by more.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntpjax.layout import REPLICATED, Copied, Layout, Split, even_blocks, holdings, nested_layout

pytestmark = pytest.mark.timeout(60)

# (nominal TP, units): every small case, and unit counts that real models have.
SMALL = [(nominal_tp, num_units) for nominal_tp in range(1, 25) for num_units in range(1, 61)]
SAMPLES = [(72, 129), (7, 50257), (8, 65535), (5, 12), (8, 28), (7, 257)]
larger = st.tuples(st.integers(1, 100), st.integers(1, 3000))


def chain(nominal_tp: int, num_units: int) -> list[Layout]:
    """The layouts of a chain; the one for degree `n` is at index `n - 1`."""
    return [nested_layout(num_units, nominal_tp, degree) for degree in range(1, nominal_tp + 1)]


def chains() -> Iterator[tuple[int, list[Layout]]]:
    """The number of units and the layouts of every enumerated case."""
    for nominal_tp, num_units in SMALL + SAMPLES:
        yield num_units, chain(nominal_tp, num_units)


def sizes(layout: Layout) -> list[int]:
    return [len(units) for units in layout.ranks]


def is_balanced(layout: Layout) -> bool:
    return max(sizes(layout)) - min(sizes(layout)) <= 1


def is_partition(layout: Layout, num_units: int) -> bool:
    """Whether each unit is on exactly one rank, once."""
    return sorted(unit for units in layout.ranks for unit in units) == list(range(num_units))


def is_nested(smaller: Layout, larger: Layout) -> bool:
    """Whether each rank of `smaller` starts with all that it holds in `larger`."""
    kept = zip(smaller.ranks, larger.ranks[: smaller.degree], strict=True)
    return all(after[: len(before)] == before for after, before in kept)


def owners(layout: Layout) -> dict[int, int]:
    return {unit: rank for rank, units in enumerate(layout.ranks) for unit in units}


def moved_units(before: dict[int, int], after: dict[int, int]) -> set[int]:
    return {unit for unit, owner in before.items() if after[unit] != owner}


# -- chains ---------------------------------------------------------------------------------------------------------


def test_the_layout_for_a_degree_has_that_many_ranks():
    for _, layouts in chains():
        assert [layout.degree for layout in layouts] == list(range(1, len(layouts) + 1))


def test_every_layout_is_balanced_to_within_one_unit():
    for num_units, layouts in chains():
        assert all(map(is_balanced, layouts)), (len(layouts), num_units)


def test_every_unit_is_on_exactly_one_rank():
    for num_units, layouts in chains():
        assert all(is_partition(layout, num_units) for layout in layouts), (len(layouts), num_units)


def test_each_rank_starts_with_all_that_it_holds_at_the_next_higher_degree():
    for num_units, layouts in chains():
        assert all(is_nested(smaller, larger) for smaller, larger in pairwise(layouts)), (len(layouts), num_units)


def test_the_healthy_layout_is_contiguous():
    for num_units, layouts in chains():
        healthy = layouts[-1]
        assert [unit for units in healthy.ranks for unit in units] == list(range(num_units))


def test_a_group_of_one_holds_everything():
    for num_units, layouts in chains():
        assert sizes(layouts[0]) == [num_units]


def test_as_many_ranks_are_empty_as_there_are_fewer_units():
    for num_units, layouts in chains():
        for layout in layouts:
            assert sizes(layout).count(0) == max(layout.degree - num_units, 0), (len(layouts), num_units)


def test_slots_are_the_units_of_the_fullest_rank_rounded_up():
    for num_units, layouts in chains():
        assert [layout.slots for layout in layouts] == [-(-num_units // layout.degree) for layout in layouts]


def test_exactly_the_units_of_extra_ranks_move_and_core_ranks_get_equally_many():
    for nominal_tp, num_units in SMALL + SAMPLES:
        layouts = chain(nominal_tp, num_units)
        owner_at = [owners(layout) for layout in layouts]
        for n in range(2, nominal_tp + 1):
            for m in range(1, n):
                moved = moved_units(owner_at[n - 1], owner_at[m - 1])
                assert moved == {unit for units in layouts[n - 1].ranks[m:] for unit in units}
                received = Counter(owner_at[m - 1][unit] for unit in moved)
                counts = [received[rank] for rank in range(m)]
                assert max(counts) - min(counts) <= 1, (nominal_tp, num_units, n, m)


def test_what_one_extra_rank_sends_to_two_core_ranks_may_differ_by_more_than_one():
    sent, owner = nested_layout(19, 4, 4).ranks[3], owners(nested_layout(19, 4, 2))
    assert sorted(Counter(owner[unit] for unit in sent).values()) == [1, 3]


@given(larger)
def test_larger_chains_are_balanced_nested_and_complete(case: tuple[int, int]):
    nominal_tp, num_units = case
    layouts = chain(nominal_tp, num_units)
    assert all(map(is_balanced, layouts))
    assert all(is_partition(layout, num_units) for layout in layouts)
    assert all(is_nested(after, before) for after, before in pairwise(layouts))


@given(larger, st.data())
def test_larger_groups_move_only_the_units_of_extra_ranks_and_evenly(case: tuple[int, int], data: st.DataObject):
    nominal_tp, num_units = case
    n = data.draw(st.integers(1, nominal_tp))
    m = data.draw(st.integers(1, n))
    before, after = nested_layout(num_units, nominal_tp, n), nested_layout(num_units, nominal_tp, m)
    moved = moved_units(owners(before), owners(after))
    assert moved == {unit for units in before.ranks[m:] for unit in units}
    counts = [len(units) - len(kept) for units, kept in zip(after.ranks, before.ranks[:m], strict=True)]
    assert sum(counts) == len(moved)
    assert max(counts) - min(counts) <= 1


# -- groups and copies ----------------------------------------------------------------------------------------------

# Query heads in groups that share a KV head: 1 to 8 KV heads, and 1 to 8 query heads for each.
QUERIES = [
    Split("queries", num_groups * group_size, nominal_tp, group_size)
    for nominal_tp in range(1, 13)
    for num_groups in range(1, 9)
    for group_size in (1, 2, 3, 4, 7, 8)
]


def degrees_of(family: Split) -> range:
    return range(1, family.nominal_tp + 1)


def test_grouped_chains_are_balanced_nested_complete_and_contiguous_when_healthy():
    for family in QUERIES:
        layouts = [family.compute_layout(degree) for degree in degrees_of(family)]
        assert all(map(is_balanced, layouts)), family
        assert all(is_partition(layout, family.num_units) for layout in layouts), family
        assert all(is_nested(after, before) for after, before in pairwise(layouts)), family
        assert layouts[-1] == nested_layout(family.num_units, family.nominal_tp, family.nominal_tp)


def test_dealing_by_groups_needs_fewer_copies_than_dealing_without_them():
    def num_copies(family: Split) -> int:
        copied = [Copied("kv", family).compute_layout(degree) for degree in degrees_of(family)]
        return sum(sum(sizes(layout)) for layout in copied)

    def dealt_without_groups(family: Split) -> int:
        layouts = chain(family.nominal_tp, family.num_units)
        return sum(len({unit // family.group_size for unit in units}) for layout in layouts for units in layout.ranks)

    # Not in each case, since dealing looks one unit ahead.
    assert sum(map(num_copies, QUERIES)) < 0.95 * sum(map(dealt_without_groups, QUERIES))


def test_the_query_heads_of_a_lost_rank_bring_each_survivor_one_kv_head_more():
    heads = Split("heads", 64, nominal_tp=8, group_size=8)
    assert [len(units) for units in heads.compute_layout(7).ranks] == [10, 9, 9, 9, 9, 9, 9]
    assert [len(units) for units in Copied("kv", heads).compute_layout(7).ranks] == [2] * 7


def test_a_copied_unit_is_on_exactly_the_ranks_that_need_it_once():
    for users in QUERIES:
        for degree in degrees_of(users):
            layout = Copied("kv", users).compute_layout(degree)
            for held, used_by in zip(layout.ranks, users.compute_layout(degree).ranks, strict=True):
                assert sorted(held) == sorted({user // users.group_size for user in used_by})


def test_each_rank_keeps_its_copied_units_in_their_slots_when_the_degree_falls():
    for users in QUERIES:
        layouts = [Copied("kv", users).compute_layout(degree) for degree in degrees_of(users)]
        assert all(is_nested(after, before) for after, before in pairwise(layouts)), users


def test_each_copied_unit_has_one_owner_in_the_sync_layout_and_it_is_a_core_rank_that_computes_with_it():
    for users in QUERIES:
        family = Copied("kv", users)
        for sync_degree in degrees_of(users):
            sync = family.sync_layout(users.nominal_tp, sync_degree)
            assert sync.degree == users.nominal_tp
            assert is_partition(sync, family.num_units)
            computing = family.compute_layout(sync_degree).ranks
            assert all(set(owned) <= set(held) for owned, held in zip(sync.ranks, computing, strict=False))
            assert sync.ranks[sync_degree:] == ((),) * (users.nominal_tp - sync_degree)


def test_one_kv_head_for_all_is_on_every_rank_and_owned_by_the_first():
    family = Copied("kv", Split("queries", 8, nominal_tp=4, group_size=8))
    assert family.num_units == 1
    assert family.compute_layout(3).ranks == ((0,), (0,), (0,))
    assert family.sync_layout(4, 3).ranks == ((0,), (), (), ())


def test_a_copied_unit_is_owned_by_the_holder_that_owns_fewest():
    family = Copied("kv", Split("queries", 6, nominal_tp=2, group_size=2))
    assert family.compute_layout(2).ranks == ((0, 1), (1, 2))
    assert family.sync_layout(2, 2).ranks == ((0,), (1, 2))


def test_only_gradients_of_copied_units_are_added_up():
    users = Split("queries", 8, nominal_tp=4, group_size=4)
    assert [family.add_copies for family in (users, Copied("kv", users), REPLICATED)] == [False, True, False]


# -- families -------------------------------------------------------------------------------------------------------


def test_holders_are_listed_lowest_rank_first():
    assert Layout(((2, 0), (), (2, 1), (2,))).holders() == {2: (0, 2, 3), 0: (0,), 1: (2,)}


def test_a_family_computes_in_the_chain_of_its_nominal_tp():
    family = Split("heads", 12, nominal_tp=5)
    assert [family.compute_layout(degree) for degree in range(1, 6)] == chain(5, 12)


def test_a_sync_layout_has_every_unit_on_the_core_ranks_and_none_on_extra_ranks():
    family = Split("heads", 12, nominal_tp=5)
    for degree in range(1, 6):
        for sync_degree in range(1, degree + 1):
            sync = family.sync_layout(degree, sync_degree)
            assert sync.degree == degree
            assert sync.ranks[:sync_degree] == family.compute_layout(sync_degree).ranks
            assert sync.ranks[sync_degree:] == ((),) * (degree - sync_degree)


def test_what_is_replicated_is_one_unit_on_every_rank_or_on_every_core_rank():
    assert REPLICATED.compute_layout(3).ranks == ((0,), (0,), (0,))
    assert REPLICATED.sync_layout(3, 2).ranks == ((0,), (0,), ())


def test_holdings_are_those_of_one_replica_after_the_other():
    family = Split("heads", 5, nominal_tp=4)
    assert holdings(family, (4, 2)).ranks == (*family.compute_layout(4).ranks, *family.compute_layout(2).ranks)


def test_the_sync_layout_fits_where_the_compute_layout_of_the_smallest_degree_does():
    for family in [*QUERIES, *(Copied("kv", users) for users in QUERIES)]:
        nominal_tp = family.nominal_tp if isinstance(family, Split) else family.users.nominal_tp
        for smallest in range(1, nominal_tp + 1):
            for degree in (nominal_tp, smallest):
                assert family.sync_layout(degree, smallest).slots <= family.compute_layout(smallest).slots


# -- even blocks ----------------------------------------------------------------------------------------------------


def test_even_blocks_cover_all_items_in_order_and_longer_ones_come_first():
    for num_items in range(61):
        for num_blocks in range(1, 25):
            blocks = even_blocks(num_items, num_blocks)
            lengths = [len(block) for block in blocks]
            assert [item for block in blocks for item in block] == list(range(num_items))
            assert len(blocks) == num_blocks
            assert lengths == sorted(lengths, reverse=True)
            assert lengths[0] - lengths[-1] <= 1


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_units", [0, -3])
def test_a_family_without_units_is_refused(num_units: int):
    with pytest.raises(ValueError, match=rf"^`num_units` \(={num_units}\) must be at least 1\.$"):
        nested_layout(num_units, 4, 4)


@pytest.mark.parametrize(("nominal_tp", "degree"), [(4, 0), (4, 5), (4, -1), (0, 1)])
def test_a_degree_outside_the_chain_is_refused(nominal_tp: int, degree: int):
    rule = rf"^`degree` \(={degree}\) must be between 1 and `nominal_tp` \(={nominal_tp}\)\.$"
    with pytest.raises(ValueError, match=rule):
        nested_layout(8, nominal_tp, degree)
