"""Losses and returns of devices at given steps: the failure source of drills, demos and tests."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, final

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

    def __init__(self, losses: Iterable[Loss] = (), returns: Iterable[Return] = ()) -> None:
        self._losses = tuple(losses)
        self._returns = tuple(returns)

    def returned(self, step: int) -> tuple[int, ...]:
        due = tuple(event.replica for event in self._returns if event.step == step)
        self._returns = tuple(event for event in self._returns if event.step > step)
        return due

    def lost(self, step: int) -> tuple[tuple[int, int], ...]:
        due = tuple((event.replica, event.rank) for event in self._losses if event.step == step)
        self._losses = tuple(event for event in self._losses if event.step > step)
        return due


def schedule_problems(topology: Topology, losses: Iterable[Loss], returns: Iterable[Return]) -> list[str]:
    """What is impossible in a schedule that starts from `topology`, one text for each event.

    >>> schedule_problems(Topology.of_degrees((4,)), [Loss(5, 0, 3), Loss(6, 0, 3)], [])
    ['loss at step 6: `rank` (=3) must be below the TP degree of replica 0 (=3).']
    """
    problems = []
    # A return takes effect before its step, a loss during it.
    events = sorted([*returns, *losses], key=lambda event: (event.step, isinstance(event, Loss)))
    for event in events:
        try:
            if isinstance(event, Loss):
                topology = topology.lose(event.replica, event.rank).use_spares()
            else:
                topology = topology.restore(event.replica)
        except ValueError as error:
            problems.append(f"{type(event).__name__.lower()} at step {event.step}: {error}")
    return problems
