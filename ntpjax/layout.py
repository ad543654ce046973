"""Which unit lives on which rank: nested balanced layouts.

A *unit* is what may not be split: a query head, a block of FFN columns, a row of the vocabulary. A *layout* says,
for each rank of a tensor-parallel group, which units it holds, in the order in which they lie in its buffer.

The layouts of one unit family form a chain `L_N, L_{N-1}, ..., L_1`. `L_N` cuts the units into contiguous blocks whose
sizes differ by at most one. `L_{n-1}` comes from `L_n` by dealing the last rank's units, one at a time, each to the
rank that holds fewest. Every layout of the chain is balanced to within one unit, and rank `i` of `L_{n-1}` starts with
exactly the units of rank `i` of `L_n`: going from degree `n` to `m` moves only what the ranks `>= m` hold.

Source: the idea of separate compute and sync layouts is from Arfeen et al., "Nonuniform-Tensor-Parallelism", arXiv
2504.06095, section 3. The chain, which serves any mix of degrees and any number of units, is ours.
"""

import functools
import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Layout:
    """`ranks[i]` holds the unit ids of rank `i`, in slot order. A unit may be held by several ranks."""

    ranks: tuple[tuple[int, ...], ...]

    @property
    def degree(self) -> int:
        return len(self.ranks)

    @property
    def slots(self) -> int:
        """The most units on any rank: the length that every rank's buffer is padded to."""
        return max(len(units) for units in self.ranks)

    def holders(self) -> dict[int, tuple[int, ...]]:
        """The ranks that hold each unit, lowest first.

        >>> Layout(((0, 1), (1, 2))).holders()
        {0: (0,), 1: (0, 1), 2: (1,)}
        """
        found: dict[int, tuple[int, ...]] = {}
        for rank, units in enumerate(self.ranks):
            for unit in units:
                found[unit] = (*found.get(unit, ()), rank)
        return found


def nested_layout(num_units: int, nominal_tp: int, degree: int, group_size: int = 1) -> Layout:
    """The layout of the chain of `nominal_tp` for a group that has `degree` ranks now.

    Ranks beyond the number of units hold nothing, which is allowed: their buffers are padding only. With a
    `group_size`, units are dealt so that a rank has units of few groups.

    >>> nested_layout(8, 4, 4).ranks
    ((0, 1), (2, 3), (4, 5), (6, 7))
    >>> nested_layout(8, 4, 3).ranks
    ((0, 1, 6), (2, 3, 7), (4, 5))
    >>> nested_layout(2, 4, 4).ranks
    ((0,), (1,), (), ())

    Raises:
      ValueError: unless `num_units >= 1` and `1 <= degree <= nominal_tp`.
    """
    if num_units < 1:
        raise ValueError(f"`num_units` (={num_units}) must be at least 1.")
    if not 1 <= degree <= nominal_tp:
        raise ValueError(f"`degree` (={degree}) must be between 1 and `nominal_tp` (={nominal_tp}).")
    return _chain(num_units, nominal_tp, group_size)[degree - 1]


class Family(Protocol):
    """The units of one kind, which share their layouts at every degree; a frozen dataclass of integers.

    A unit may be copied: held by several ranks of a compute layout. In the sync layout a copied unit has one owner.
    """

    @property
    def name(self) -> str: ...

    @property
    def num_units(self) -> int: ...

    @property
    def add_copies(self) -> bool:
        """Whether the gradients of a unit's copies are partial and must be added up (else all of them are whole)."""
        ...

    def compute_layout(self, degree: int) -> Layout:
        """Where the units are while a replica of `degree` ranks computes."""
        ...

    def sync_layout(self, degree: int, sync_degree: int) -> Layout:
        """Where a replica of `degree` ranks has its gradients while they are summed: on its core ranks only."""
        ...


@dataclass(frozen=True)
class Split:
    """Units of which every rank holds its own: the ordinary case.

    Attributes:
      name: such as "ffn"; of all parameters of one model, those of one family have the same units.
      num_units: how many there are.
      nominal_tp: degree of a healthy replica, with which the chain of layouts starts.
      group_size: so many consecutive units share something (query heads their KV head): a rank gets few such groups.
    """

    name: str
    num_units: int
    nominal_tp: int
    group_size: int = 1

    @property
    def add_copies(self) -> bool:
        return False  # there are none

    def compute_layout(self, degree: int) -> Layout:
        """
        >>> Split("ffn", 4, nominal_tp=2).compute_layout(2).ranks
        ((0, 1), (2, 3))
        """
        return nested_layout(self.num_units, self.nominal_tp, degree, self.group_size)

    def sync_layout(self, degree: int, sync_degree: int) -> Layout:
        """
        >>> Split("ffn", 3, nominal_tp=3).sync_layout(3, sync_degree=2).ranks
        ((0, 2), (1,), ())
        """
        return _on_core_ranks(self.compute_layout(sync_degree).ranks, degree)


@dataclass(frozen=True)
class Copied:
    """Units that go wherever they are needed: unit `g` is on every rank that holds a unit of group `g` of `users`.

    >>> heads = Split("heads", 8, nominal_tp=2, group_size=4)          # 8 query heads, 2 KV heads
    >>> Copied("kv", heads).compute_layout(2).ranks
    ((0,), (1,))
    >>> heads = Split("heads", 8, nominal_tp=4, group_size=8)          # one KV head for all of them
    >>> Copied("kv", heads).compute_layout(4).ranks
    ((0,), (0,), (0,), (0,))
    """

    name: str
    users: Split

    @property
    def num_units(self) -> int:
        return self.users.num_units // self.users.group_size

    @property
    def add_copies(self) -> bool:
        return True

    def compute_layout(self, degree: int) -> Layout:
        used = self.users.compute_layout(degree).ranks
        return Layout(tuple(tuple(dict.fromkeys(user // self.users.group_size for user in users)) for users in used))

    def sync_layout(self, degree: int, sync_degree: int) -> Layout:
        """Each unit on the one of its holders that owns fewest so far.

        >>> Copied("kv", Split("heads", 6, nominal_tp=3, group_size=3)).sync_layout(3, sync_degree=3).ranks
        ((0,), (1,), ())
        """
        owned: list[tuple[int, ...]] = [()] * sync_degree
        for unit, holders in sorted(self.compute_layout(sync_degree).holders().items()):
            owner = min(holders, key=lambda rank: (len(owned[rank]), rank))
            owned[owner] = (*owned[owner], unit)
        return _on_core_ranks(tuple(owned), degree)


@dataclass(frozen=True)
class Replicated:
    """What every rank holds whole: one unit, with as many holders as there are ranks, each with the whole gradient."""

    name: str = "replicated"
    num_units: int = 1
    add_copies: bool = False

    def compute_layout(self, degree: int) -> Layout:
        """
        >>> REPLICATED.compute_layout(2).ranks
        ((0,), (0,))
        """
        return Layout(((0,),) * degree)

    def sync_layout(self, degree: int, sync_degree: int) -> Layout:
        return _on_core_ranks(((0,),) * sync_degree, degree)


REPLICATED = Replicated()


def holdings(family: Family, degrees: Sequence[int]) -> Layout:
    """What each device of replicas with these degrees holds, one replica after the other."""
    return Layout(tuple(units for degree in degrees for units in family.compute_layout(degree).ranks))


def _on_core_ranks(ranks: tuple[tuple[int, ...], ...], degree: int) -> Layout:
    return Layout(ranks + ((),) * (degree - len(ranks)))


@functools.cache
def _chain(num_units: int, nominal_tp: int, group_size: int) -> tuple[Layout, ...]:
    """All layouts of a chain, degree 1 first."""
    held = [list(block) for block in even_blocks(num_units, nominal_tp)]
    chain = [Layout(tuple(map(tuple, held)))]
    while len(held) > 1:
        dealt = held.pop()
        deal = _deal if group_size == 1 else functools.partial(_deal_groups, group_size=group_size)
        deal(dealt, held)
        chain.append(Layout(tuple(map(tuple, held))))
    return tuple(reversed(chain))


def _deal(dealt: list[int], held: list[list[int]]) -> None:
    """Gives each unit to the rank that holds fewest, the lowest of them."""
    fewest = [(len(units), rank) for rank, units in enumerate(held)]
    heapq.heapify(fewest)
    for unit in dealt:
        size, rank = fewest[0]
        held[rank].append(unit)
        heapq.heapreplace(fewest, (size + 1, rank))


def _deal_groups(dealt: list[int], held: list[list[int]], group_size: int) -> None:
    """Like `_deal`, but keeps the groups of a rank few.

    Of the ranks that hold fewest, the next unit goes where it leaves the fewest groups; of the units, one whose group
    has most units left to deal goes first.
    """
    groups = [{unit // group_size for unit in units} for units in held]
    left = list(dealt)
    while left:
        fewest = min(map(len, held))
        in_group = Counter(unit // group_size for unit in left)
        _, _, rank, unit = min(
            (len(groups[rank] | {unit // group_size}), -in_group[unit // group_size], rank, unit)
            for rank, units in enumerate(held)
            if len(units) == fewest
            for unit in left
        )
        left.remove(unit)
        held[rank].append(unit)
        groups[rank].add(unit // group_size)


def even_blocks(num_items: int, num_blocks: int) -> tuple[range, ...]:
    """Contiguous ranges over `num_items`, sizes within one of each other, longer ones first.

    >>> even_blocks(7, 3)
    (range(0, 3), range(3, 5), range(5, 7))
    """
    size, longer = divmod(num_items, num_blocks)
    starts = [block * size + min(block, longer) for block in range(num_blocks + 1)]
    return tuple(itertools.starmap(range, itertools.pairwise(starts)))
