"""How units get from one layout to another, as integers.

Two questions are answered here. *Which* units travel, and from whom: `plan_moves`, for a change of topology, where a
unit may come from the own replica or from another one. *How* they travel: `Exchange`, index tables for a masked sum,
which both the step (pre-sync and post-sync reshard) and the recovery run on devices. In a masked sum every rank puts
the units that it gives into an otherwise zero buffer, one sum over the group makes the buffer whole, and every rank
picks what it takes. It is exact, because each place of the buffer has one giver, or is meant to be a sum over the
holders of a copied unit.

A worked example with two ranks, of which rank 1 hands its only unit 2 to rank 0:

>>> have, want = Layout(((0, 1), (2,))), Layout(((0, 1, 2), ()))
>>> table = exchange(have, want)
>>> table.shared        # the buffer has one place, for unit 2
(2,)
>>> table.give          # rank 0 gives nothing; rank 1 gives its slot 0
((None,), (0,))
>>> table.take          # rank 0: its own slots 0 and 1, then place 0 of the buffer (place `p` is written `-1 - p`)
((0, 1, -1), ())
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from ntpjax.layout import Family, Layout, holdings
from ntpjax.topology import Topology


class NoHolderError(LookupError):
    """Some units have no live holder left. Attribute `units` has their ids."""

    def __init__(self, units: tuple[int, ...]) -> None:
        super().__init__(f"no live device holds units {units[:8]}{' and more' if len(units) > 8 else ''}")
        self.units = units


@dataclass(frozen=True)
class Move:
    """Unit `unit` travels from holder `source` to holder `target`."""

    unit: int
    source: int
    target: int


def plan_moves(have: Layout, want: Layout, replica_of: tuple[Hashable, ...]) -> tuple[Move, ...]:
    """The fewest moves that turn `have` into `want`, over the devices of all replicas.

    Args:
      have, want: what each device holds now and has to hold then; the "ranks" are device positions, the same in both.
      replica_of: the replica of each position.

    Returns:
      One move for each unit that a device has to get, and none for what it holds already. A unit comes from one source,
      from a replica that needs it where that replica has it, else from the holder that has given fewest so far.

    Raises:
      NoHolderError: if a wanted unit is held nowhere.

    >>> replica_0, replica_1 = ((0, 1), (2,)), ((0,), (1,))      # replica 1 has lost unit 2 with its third device
    >>> plan_moves(Layout(replica_0 + replica_1), Layout(replica_0 + ((0, 2), (1,))), (0, 0, 1, 1))
    (Move(unit=2, source=1, target=2),)
    """
    holders = have.holders()
    needing: dict[int, list[int]] = {}
    for target, units in enumerate(want.ranks):
        held = set(have.ranks[target])
        for unit in units:
            if unit not in held:
                needing.setdefault(unit, []).append(target)
    missing = tuple(sorted(unit for unit in needing if unit not in holders))
    if missing:
        raise NoHolderError(missing)
    given: Counter[int] = Counter()
    moves = []
    # Units with few holders choose first: the others can still even out.
    for unit in sorted(needing, key=lambda unit: (len(holders[unit]), unit)):
        needy = {replica_of[target] for target in needing[unit]}
        source = min(holders[unit], key=lambda rank: (replica_of[rank] not in needy, given[rank], rank))
        given[source] += len(needing[unit])
        moves += [Move(unit, source, target) for target in needing[unit]]
    return tuple(moves)


@dataclass(frozen=True)
class Change:
    """How the units of a family get to another topology; positions are those of its devices."""

    have: Layout
    want: Layout
    moves: tuple[Move, ...]


def plan_change(family: Family, old: Topology, new: Topology) -> Change:
    """The change of a family's units from `old` to `new`, where devices that both have keep what they hold.

    Raises:
      NoHolderError: if some unit was on devices only that `new` does not have.

    >>> from ntpjax.layout import Split
    >>> old = Topology.of_degrees((2, 2))
    >>> plan_change(Split("ffn", 4, nominal_tp=2), old, old.lose(replica=1, rank=1)).moves
    (Move(unit=2, source=1, target=2), Move(unit=3, source=1, target=2))
    """
    held_by = dict(zip(old.devices, holdings(family, old.ordered_degrees).ranks, strict=True))
    have = Layout(tuple(held_by.get(device, ()) for device in new.devices))
    want = holdings(family, new.ordered_degrees)
    return Change(have, want, plan_moves(have, want, new.owners))


@dataclass(frozen=True)
class Exchange:
    """Index tables of one masked sum over a group.

    Attributes:
      shared: the units in the shared buffer; a unit's index here is its place.
      give: `give[rank][place]` is the slot of the rank's own buffer to put there, or None.
      take: `take[rank][slot]` says where the unit in the new slot comes from: `s >= 0` is slot `s` of the rank's own
        old buffer, `-1 - p` is place `p` of the shared buffer.
    """

    shared: tuple[int, ...]
    give: tuple[tuple[int | None, ...], ...]
    take: tuple[tuple[int, ...], ...]


def exchange(have: Layout, want: Layout, *, add_copies: bool = False) -> Exchange:
    """Tables for going from `have` to `want` within one group, where any holder of a unit may give it.

    Args:
      have, want: layouts with the same degree; `want` may leave ranks empty (a sync layout does: ranks `>= m`).
      add_copies: whether a unit that several ranks hold becomes the sum over them (gradients of copied units) rather
        than the value of one of them.

    Raises:
      NoHolderError: if a wanted unit is held nowhere.
    """
    holders = have.holders()
    if add_copies:
        return _tables(have, want, holders, always=frozenset(u for u, ranks in holders.items() if len(ranks) > 1))
    return _tables(have, want, {unit: ranks[:1] for unit, ranks in holders.items()}, always=frozenset())


def exchange_of_moves(have: Layout, want: Layout, moves: tuple[Move, ...]) -> Exchange:
    """Tables that carry out `moves`, where each unit is given by the source that the plan chose."""
    return _tables(have, want, {move.unit: (move.source,) for move in moves}, always=frozenset())


def _tables(have: Layout, want: Layout, givers: Mapping[int, tuple[int, ...]], *, always: frozenset[int]) -> Exchange:
    """`always` are units that go through the shared buffer even where a rank holds them already."""
    slot_of = [{unit: slot for slot, unit in enumerate(units)} for units in have.ranks]
    lacking = {unit for rank, units in enumerate(want.ranks) for unit in units if unit not in slot_of[rank]}
    shared = tuple(sorted(lacking | always))
    if not givers.keys() >= set(shared):
        raise NoHolderError(tuple(sorted(set(shared) - givers.keys())))
    place_of = {unit: -1 - place for place, unit in enumerate(shared)}
    give = tuple(
        tuple(slots[unit] if rank in givers[unit] else None for unit in shared) for rank, slots in enumerate(slot_of)
    )
    take = tuple(
        tuple(place_of[u] if u in always or u not in slots else slots[u] for u in units)
        for slots, units in zip(slot_of, want.ranks, strict=True)
    )
    return Exchange(shared, give, take)
