"""How a global batch is split over unequal replicas, and how much faster a reduced one would have to be."""

import itertools
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntpjax.layout import Copied, Family, Split
from ntpjax.policy import BatchPolicy, fullest_work, needed_speedup, split_batch

pytestmark = pytest.mark.timeout(60)

NOMINAL_TP = 4
POLICIES: tuple[BatchPolicy, ...] = get_args(BatchPolicy)
# All mixes of up to three replicas in which at least one is active.
DEGREES = [d for n in (1, 2, 3) for d in itertools.product(range(NOMINAL_TP + 1), repeat=n) if any(d)]
SIZES = range(1, 13)


def splits(size: int, num_replicas: int) -> Iterator[tuple[int, ...]]:
    """All ways to split `size` rows over replicas."""
    if num_replicas == 1:
        yield (size,)
        return
    for rows in range(size + 1):
        yield from ((rows, *rest) for rest in splits(size - rows, num_replicas - 1))


def step_time(rows: tuple[int, ...], degrees: tuple[int, ...]) -> Fraction:
    """When the last replica finishes, at a speed in proportion to its TP degree."""
    return max(Fraction(count, degree) for count, degree in zip(rows, degrees, strict=True))


@pytest.mark.parametrize("policy", ["keep_global", "equal"])
def test_no_row_of_the_global_batch_is_lost_and_dropped_replicas_get_none(policy: BatchPolicy):
    for size, degrees in itertools.product(SIZES, DEGREES):
        rows = split_batch(policy, size, degrees, NOMINAL_TP)
        assert sum(rows) == size
        assert len(rows) == len(degrees)
        assert all(count == 0 for count, degree in zip(rows, degrees, strict=True) if degree == 0)
        assert min(rows) >= 0


def test_keep_global_finishes_as_early_as_any_split_can():
    for size, degrees in itertools.product(SIZES, DEGREES):
        active = tuple(degree for degree in degrees if degree)
        best = min(step_time(rows, active) for rows in splits(size, len(active)))
        rows = split_batch("keep_global", size, degrees, NOMINAL_TP)
        assert step_time(tuple(count for count, d in zip(rows, degrees, strict=True) if d), active) == best


@given(st.lists(st.integers(0, 8), min_size=1, max_size=16).filter(any), st.integers(1, 500))
def test_keep_global_follows_the_degrees_in_large_batches(degrees: list[int], size: int):
    rows = split_batch("keep_global", size, degrees, 8)
    assert sum(rows) == size
    # No row could finish earlier on another replica: that is what makes the split the fastest one.
    finish = max(Fraction(count, degree) for count, degree in zip(rows, degrees, strict=True) if count)
    assert all(Fraction(count + 1, degree) >= finish for count, degree in zip(rows, degrees, strict=True) if degree)


def test_keep_global_splits_evenly_over_equal_replicas_and_the_earlier_one_wins_a_tie():
    assert split_batch("keep_global", 14, (4, 4, 4), 4) == (5, 5, 4)
    assert split_batch("keep_global", 9, (3, 3), 4) == (5, 4)
    assert split_batch("keep_global", 15, (8, 7), 8) == (8, 7)


def test_shrink_gives_each_replica_at_most_its_nominal_share_and_less_in_proportion_to_its_degree():
    for size, degrees in itertools.product(range(12, 40), DEGREES):
        nominal = [size // len(degrees) + (r < size % len(degrees)) for r in range(len(degrees))]
        for rows, share, degree in zip(split_batch("shrink", size, degrees, NOMINAL_TP), nominal, degrees, strict=True):
            exact = Fraction(share * degree, NOMINAL_TP)
            assert rows <= share
            assert exact - 1 < rows <= exact


def test_shrink_leaves_a_healthy_job_its_whole_batch():
    assert split_batch("shrink", 15, (4, 4), 4) == (8, 7)


def test_equal_gives_active_replicas_the_same_rows_to_within_one():
    for size, degrees in itertools.product(SIZES, DEGREES):
        rows = split_batch("equal", size, degrees, NOMINAL_TP)
        active = [count for count, degree in zip(rows, degrees, strict=True) if degree]
        assert max(active) - min(active) <= 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("degrees", [(), (0,), (0, 0)])
def test_a_job_without_an_active_replica_is_refused(policy: BatchPolicy, degrees: tuple[int, ...]):
    rule = re.escape(f"`degrees` (={degrees}) must have at least one active replica.")
    with pytest.raises(ValueError, match=f"^{rule}$"):
        split_batch(policy, 8, degrees, 4)


@pytest.mark.parametrize(
    ("policy", "size", "degrees"),
    [("shrink", 1, (0, 4)), ("shrink", 0, (1, 1)), ("keep_global", 0, (4,)), ("equal", 0, (4, 4))],
)
def test_a_batch_that_leaves_no_row_at_all_is_refused(policy: BatchPolicy, size: int, degrees: tuple[int, ...]):
    rule = re.escape(f"`batch.size` (={size}) leaves no sample for degrees {degrees} under policy '{policy}'.")
    with pytest.raises(ValueError, match=f"^{rule}$"):
        split_batch(policy, size, degrees, 4)


# -- needed speed ---------------------------------------------------------------------------------------------------


KV, FFN, VOCAB = Split("kv", 8, nominal_tp=8), Split("ffn", 224, nominal_tp=8), Split("vocab", 257, nominal_tp=8)


@pytest.mark.parametrize(
    ("shares", "degree", "speedup"),
    [
        # A healthy replica needs no boost.
        ({KV: 0.25, FFN: 0.75}, 8, 1.0),
        # 8 KV heads from 8 ranks to 7: one rank has two, so attention takes twice as long; 28 FFN blocks become 32.
        ({KV: 0.25, FFN: 0.75}, 7, 0.25 * 2 + 0.75 * 32 / 28),
        # With three ranks for 8 heads the fullest has 3; with one rank it has all.
        ({KV: 0.5, FFN: 0.5}, 3, 0.5 * 3 + 0.5 * 75 / 28),
        ({KV: 0.5, FFN: 0.5}, 1, 8.0),
        # 257 rows: 33 on the fullest of 8 ranks, 37 on that of 7.
        ({VOCAB: 1.0}, 7, 37 / 33),
    ],
)
def test_needed_speed_is_the_growth_of_the_fullest_rank_weighted_by_each_familys_share(
    shares: dict[Family, float], degree: int, speedup: float
):
    assert needed_speedup(shares, degree, 8) == pytest.approx(speedup, rel=1e-15)


def test_copied_units_count_on_every_rank_that_holds_them():
    # 8 query heads, 2 KV heads: of 4 ranks each has 2 query heads and 1 KV head; 8 FFN blocks, 2 on each.
    queries = Split("queries", 8, nominal_tp=4, group_size=4)
    shares = {queries: 0.6, Copied("kv", queries): 0.2, Split("ffn", 8, nominal_tp=4): 0.2}
    assert fullest_work(shares, 4) == pytest.approx((0.6 * 2 / 8 + 0.2 * 1 / 2) + 0.2 * 2 / 8, rel=1e-15)
    assert fullest_work(shares, 1) == pytest.approx(1.0, rel=1e-15)


def test_the_fullest_rank_has_most_work_of_a_block_and_not_most_of_each_family():
    # Rank 0 has 3 query heads of one group, rank 2 has 2 of two groups: 2 query heads and 2 KV heads are more work.
    queries = Split("queries", 9, nominal_tp=4, group_size=3)
    assert queries.compute_layout(4).ranks == ((0, 1, 2), (3, 4), (5, 6), (7, 8))
    shares = {queries: 0.5, Copied("kv", queries): 0.5}
    assert fullest_work(shares, 4) == pytest.approx(0.5 * 2 / 9 + 0.5 * 2 / 3, rel=1e-15)


def test_work_that_every_rank_repeats_does_not_grow_when_ranks_are_lost():
    queries = Split("queries", 8, nominal_tp=8, group_size=8)
    healthy, reduced = 0.6 * 1 / 8 + 0.4, 0.6 * 2 / 8 + 0.4
    shares = {queries: 0.6, Copied("kv", queries): 0.4}
    assert needed_speedup(shares, 4, 8) == pytest.approx(reduced / healthy, rel=1e-15)


def test_an_unknown_batch_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"`policy` .='keep'. must be one of keep_global, shrink, equal"):
        split_batch("keep", 8, (4, 3), 4)  # pyright: ignore[reportArgumentType]


def test_shrink_leaves_every_active_replica_with_a_nominal_share_a_row() -> None:
    assert split_batch("shrink", 3, (1, 1), 4) == (1, 1)
    assert split_batch("shrink", 2, (1, 0), 4) == (1, 0)


@pytest.mark.parametrize("policy", ["keep_global", "equal"])
@pytest.mark.parametrize("size", [5, 6, 7, 8, 15])
def test_which_replica_is_reduced_does_not_change_what_a_degree_takes(policy: BatchPolicy, size: int):
    of_degrees = [
        sorted(zip(degrees, split_batch(policy, size, degrees, 4), strict=True))
        for degrees in ((4, 4, 3), (4, 3, 4), (3, 4, 4))
    ]
    assert of_degrees[0] == of_degrees[1] == of_degrees[2]
