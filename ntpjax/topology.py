"""Which devices are alive, and which rank of which replica each of them is.

Devices are numbered 0, 1, 2, ...; this module knows nothing else about them. A loss shortens a replica's chain of
layouts at its end: the device with the last rank takes the lost rank. A device that returns becomes the last rank. In
the canonical order replicas stand by degree, healthy first, so that *which* device failed does not change the program.
"""

from collections import Counter
from dataclasses import dataclass, replace

_MAX_DEGREES_LISTED = 8


@dataclass(frozen=True)
class Topology:
    """The live devices of a job.

    Attributes:
      nominal_tp: devices that a healthy replica has.
      replicas: `replicas[r][i]` is the device that is rank `i` of replica `r`. A replica may be empty (dropped).
      spares: live devices that no replica uses.
      lost: devices that are gone, each with the replica that it belonged to, oldest first.
    """

    nominal_tp: int
    replicas: tuple[tuple[int, ...], ...]
    spares: tuple[int, ...] = ()
    lost: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_degrees(cls, degrees: tuple[int, ...], nominal_tp: int | None = None, spares: int = 0) -> "Topology":
        """A topology whose replicas take devices 0, 1, 2, ... in order.

        >>> Topology.of_degrees((4, 3)).replicas
        ((0, 1, 2, 3), (4, 5, 6))
        """
        if not degrees or min(degrees) < 0 or max(degrees) < 1:
            raise ValueError(f"`degrees` (={degrees}) must have at least one replica with a device.")
        if nominal_tp is not None and nominal_tp < max(degrees):
            raise ValueError(f"`nominal_tp` (={nominal_tp}) must be at least the largest of `degrees` (={degrees}).")
        numbers = iter(range(sum(degrees) + spares))
        replicas = tuple(tuple(next(numbers) for _ in range(degree)) for degree in degrees)
        return cls(nominal_tp or max(degrees), replicas, spares=tuple(numbers))

    @property
    def degrees(self) -> tuple[int, ...]:
        """TP degree of each replica, by replica id; 0 for a dropped one."""
        return tuple(len(devices) for devices in self.replicas)

    @property
    def order(self) -> tuple[int, ...]:
        """Ids of the active replicas in canonical order: by degree, healthy first, then by id.

        >>> Topology.of_degrees((3, 4, 0, 4)).order
        (1, 3, 0)
        """
        active = [r for r, devices in enumerate(self.replicas) if devices]
        return tuple(sorted(active, key=lambda r: (-len(self.replicas[r]), r)))

    @property
    def ordered_degrees(self) -> tuple[int, ...]:
        """TP degree of each active replica in canonical order: never rising."""
        return tuple(len(self.replicas[r]) for r in self.order)

    @property
    def sync_degree(self) -> int:
        """The smallest degree among active replicas, of which there must be one."""
        return min(degree for degree in self.degrees if degree)

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices in use, in canonical order: the order of the flat mesh."""
        return tuple(device for r in self.order for device in self.replicas[r])

    @property
    def owners(self) -> tuple[int, ...]:
        """The replica of each device of `devices`.

        >>> Topology.of_degrees((1, 2)).owners
        (1, 1, 0)
        """
        return tuple(r for r in self.order for _ in self.replicas[r])

    def devices_of_degree(self, degree: int) -> tuple[int, ...]:
        """The devices of all replicas of a TP degree.

        >>> Topology.of_degrees((4, 3)).devices_of_degree(3)
        (4, 5, 6)
        """
        return tuple(device for devices in self.replicas if len(devices) == degree for device in devices)

    def lose(self, replica: int, rank: int) -> "Topology":
        """The topology without one device; the replica's last device takes the lost rank.

        >>> Topology.of_degrees((4,)).lose(0, 1).replicas
        ((0, 3, 2),)

        Raises:
          ValueError: if there is no such replica or rank.
        """
        devices = self._replica(replica)
        if not 0 <= rank < len(devices):
            rule = f"must be at least 0 and below the TP degree of replica {replica} (={len(devices)})"
            raise ValueError(f"`rank` (={rank}) {rule}.")
        left = (*devices[:rank], devices[-1], *devices[rank + 1 : -1]) if rank < len(devices) - 1 else devices[:-1]
        return replace(self._with(replica, left), lost=(*self.lost, (replica, devices[rank])))

    def restore(self, replica: int) -> "Topology":
        """The topology with the replica's longest lost device back, as its last rank (or as a spare if it is full).

        >>> Topology.of_degrees((4,)).lose(0, 1).restore(0).replicas
        ((0, 3, 2, 1),)

        Raises:
          ValueError: if there is no such replica or it has lost nothing.
        """
        devices = self._replica(replica)
        back = next((device for owner, device in self.lost if owner == replica), None)
        if back is None:
            raise ValueError(f"replica {replica} has lost no device (TP degree {len(devices)} of {self.nominal_tp}).")
        rest = replace(self, lost=tuple(entry for entry in self.lost if entry != (replica, back)))
        if len(devices) == self.nominal_tp:
            return replace(rest, spares=(*self.spares, back))
        return rest._with(replica, (*devices, back))

    def use_spares(self) -> "Topology":
        """The topology with spares filled into reduced replicas, the least reduced first.

        >>> Topology.of_degrees((2, 2), spares=1).lose(0, 0).use_spares().replicas
        ((1, 4), (2, 3))
        """
        topology = self
        while topology.spares and min(topology.degrees) < topology.nominal_tp:
            reduced = [r for r, degree in enumerate(topology.degrees) if degree < topology.nominal_tp]
            replica = max(reduced, key=lambda r: (topology.degrees[r], -r))
            filled = topology._with(replica, (*topology.replicas[replica], topology.spares[0]))
            topology = replace(filled, spares=topology.spares[1:])
        return topology

    def next_topologies(self) -> tuple["Topology", ...]:
        """What may come next, the likeliest first: a replica loses a device, or a reduced one has one back.

        Replicas of equal degree are alike, so that of each degree the first one stands for all. Which rank is lost does
        not matter for the degrees, only for what has to move: the last ranks come first.

        >>> [topology.degrees for topology in Topology.of_degrees((2, 2)).next_topologies()]
        [(1, 2), (1, 2)]
        """
        alike = {degree: replica for replica, degree in reversed(list(enumerate(self.degrees)))}
        back = {self.degrees[replica]: replica for replica, _ in reversed(self.lost)}
        last = [self.lose(replica, degree - 1) for degree, replica in sorted(alike.items()) if degree]
        others = [self.lose(replica, rank) for degree, replica in sorted(alike.items()) for rank in range(degree - 1)]
        found = [*reversed(last), *(self.restore(replica) for replica in back.values()), *others]
        return tuple(topology.use_spares() for topology in found if any(topology.degrees))

    def _replica(self, replica: int) -> tuple[int, ...]:
        if not 0 <= replica < len(self.replicas):
            rule = f"must be at least 0 and below the number of replicas (={len(self.replicas)})"
            raise ValueError(f"`replica` (={replica}) {rule}.")
        return self.replicas[replica]

    def _with(self, replica: int, devices: tuple[int, ...]) -> "Topology":
        return replace(self, replicas=(*self.replicas[:replica], devices, *self.replicas[replica + 1 :]))


def format_degrees(degrees: tuple[int, ...]) -> str:
    """Returns "4|3" for a few replicas, "63 replicas at 4, 1 at 3" for many."""
    if len(degrees) <= _MAX_DEGREES_LISTED:
        return "|".join(str(degree) for degree in degrees)
    (degree, count), *rest = sorted(Counter(degrees).items(), reverse=True)
    return ", ".join((f"{count} replicas at {degree}", *(f"{count} at {degree}" for degree, count in rest)))
