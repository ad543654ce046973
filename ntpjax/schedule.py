"""Losses and returns of devices at given steps: the failure source of drills, demos and tests."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar, final

from ntpjax.topology import Topology


@dataclass(frozen=True)
class Loss:
    """While step `step` is being done, rank `rank` of replica `replica` is lost."""

    step: int
    replica: int
    rank: int


@dataclass(frozen=True)
class Return:
    """Before step `step`, the device that replica `replica` lost first is back."""

    step: int
    replica: int


Event = Loss | Return
_EventT = TypeVar("_EventT", Loss, Return)


class FailureSource(Protocol):
    """Tells the trainer about devices. What was told once is not told again."""

    def returned(self, step: int) -> tuple[int, ...]:
        """Replicas that get a lost device back before step `step`, one entry a device."""
        ...

    def lost(self, step: int) -> tuple[tuple[int, int], ...]:
        """(replica, rank) of each device that was lost during step `step`, one after the other."""
        ...


@final
class Schedule:
    """A failure source that follows a list. Events before the first step that is asked for are dropped."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._events = tuple(events)

    def returned(self, step: int) -> tuple[int, ...]:
        return tuple(event.replica for event in self._take(Return, step))

    def lost(self, step: int) -> tuple[tuple[int, int], ...]:
        return tuple((event.replica, event.rank) for event in self._take(Loss, step))

    def _take(self, kind: type[_EventT], step: int) -> list[_EventT]:
        """The events of one kind at `step`; forgets them, and earlier ones of that kind."""
        due = [event for event in self._events if isinstance(event, kind) and event.step <= step]
        self._events = tuple(event for event in self._events if event not in due)
        return [event for event in due if event.step == step]


def schedule_problems(topology: Topology, events: Iterable[Event]) -> list[str]:
    """What is impossible in a schedule that starts from `topology`, one text for each event.

    >>> schedule_problems(Topology.of_degrees((4,)), [Loss(5, 0, 3), Loss(6, 0, 3)])
    ['loss at step 6: `rank` (=3) must be at least 0 and below the TP degree of replica 0 (=3).']
    """
    problems = []
    for event in _in_order(events):
        try:
            topology = _after(topology, event)
        except ValueError as error:
            problems.append(f"{type(event).__name__.lower()} at step {event.step}: {error}")
    return problems


def topology_after(topology: Topology, events: Iterable[Event], step: int) -> Topology:
    """The topology once `step` steps are done: where a run that resumes there goes on with its schedule.

    Raises:
      ValueError: if an event is impossible.
    """
    for event in _in_order(events):
        if event.step <= step:
            topology = _after(topology, event)
    return topology


def _in_order(events: Iterable[Event]) -> list[Event]:
    # A return takes effect before its step, a loss during it.
    return sorted(events, key=lambda event: (event.step, isinstance(event, Loss)))


def _after(topology: Topology, event: Event) -> Topology:
    if isinstance(event, Loss):
        return topology.lose(event.replica, event.rank).use_spares()
    return topology.restore(event.replica).use_spares()
