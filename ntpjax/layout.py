"""Which unit lives on which rank: nested balanced layouts.

A *unit* is what may not be split: a KV-head group, a block of FFN columns, a row of the vocabulary. A *layout* says,
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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


def nested_layout(num_units: int, nominal_tp: int, degree: int) -> Layout:
    """The layout of the chain of `nominal_tp` for a group that has `degree` ranks now.

    Ranks beyond the number of units hold nothing, which is allowed: their buffers are padding only.

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
    return _chain(num_units, nominal_tp)[degree - 1]


@dataclass(frozen=True)
class Family:
    """The units of one kind, which share their layouts at every degree.

    Attributes:
      name: such as "ffn"; of all parameters of one model, those of one family have the same units.
      num_units: how many there are.
      nominal_tp: degree of a healthy replica, with which the chain of layouts starts.
    """

    name: str
    num_units: int
    nominal_tp: int

    def compute_layout(self, degree: int) -> Layout:
        """Where the units are while a replica of `degree` ranks computes.

        >>> Family("ffn", 4, nominal_tp=2).compute_layout(2).ranks
        ((0, 1), (2, 3))
        >>> REPLICATED.compute_layout(2).ranks
        ((0,), (0,))
        """
        if self == REPLICATED:
            return Layout(((0,),) * degree)
        return nested_layout(self.num_units, self.nominal_tp, degree)

    def sync_layout(self, degree: int, sync_degree: int) -> Layout:
        """Where a replica of `degree` ranks has its gradients while they are summed: on its core ranks only.

        >>> Family("ffn", 3, nominal_tp=3).sync_layout(3, sync_degree=2).ranks
        ((0, 2), (1,), ())
        """
        return Layout(self.compute_layout(sync_degree).ranks + ((),) * (degree - sync_degree))

    def holdings(self, degrees: Sequence[int]) -> Layout:
        """What each device of replicas with these degrees holds, one replica after the other."""
        return Layout(tuple(units for degree in degrees for units in self.compute_layout(degree).ranks))

    def slots(self, degrees: Sequence[int]) -> int:
        """Slots of a buffer that has room for the layout of each of these degrees."""
        return max(self.compute_layout(degree).slots for degree in set(degrees))


REPLICATED = Family("replicated", num_units=1, nominal_tp=1)
"""What every rank holds whole: one unit, with as many holders as there are ranks."""


@functools.cache
def _chain(num_units: int, nominal_tp: int) -> tuple[Layout, ...]:
    """All layouts of a chain, degree 1 first."""
    return tuple(reversed(list(_shrinking(num_units, nominal_tp))))


def _shrinking(num_units: int, nominal_tp: int) -> Iterator[Layout]:
    """The layouts of a chain from `nominal_tp` ranks down to one."""
    held = [list(block) for block in even_blocks(num_units, nominal_tp)]
    yield Layout(tuple(map(tuple, held)))
    while len(held) > 1:
        dealt = held.pop()
        fewest = [(len(units), rank) for rank, units in enumerate(held)]
        heapq.heapify(fewest)
        for unit in dealt:
            size, rank = fewest[0]
            held[rank].append(unit)
            heapq.heapreplace(fewest, (size + 1, rank))
        yield Layout(tuple(map(tuple, held)))


def even_blocks(num_items: int, num_blocks: int) -> tuple[range, ...]:
    """Contiguous ranges over `num_items`, sizes within one of each other, longer ones first.

    >>> even_blocks(7, 3)
    (range(0, 3), range(3, 5), range(5, 7))
    """
    size, longer = divmod(num_items, num_blocks)
    starts = [block * size + min(block, longer) for block in range(num_blocks + 1)]
    return tuple(itertools.starmap(range, itertools.pairwise(starts)))
