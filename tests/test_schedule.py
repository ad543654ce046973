"""Schedules of losses and returns: each event is told once, and impossible ones are found before the start."""

import itertools

import pytest

from ntpjax.schedule import Event, Loss, Return, Schedule, schedule_problems, topology_after
from ntpjax.topology import Topology

pytestmark = pytest.mark.timeout(60)


def told(schedule: Schedule, steps: range) -> dict[int, tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]:
    """What the schedule says at each of `steps`, where it says anything."""
    found = {step: (schedule.returned(step), schedule.lost(step)) for step in steps}
    return {step: events for step, events in found.items() if any(events)}


# What the trainer is told.


def test_each_event_is_told_once_at_its_step():
    schedule = Schedule([Loss(3, 1, 2), Return(5, 1), Loss(8, 0, 0)])
    assert told(schedule, range(1, 11)) == {3: ((), ((1, 2),)), 5: ((1,), ()), 8: ((), ((0, 0),))}
    assert told(schedule, range(1, 11)) == {}


def test_a_step_that_is_done_again_does_not_lose_its_device_again():
    schedule = Schedule([Return(4, 0), Loss(4, 1, 2)])
    assert (schedule.returned(4), schedule.lost(4)) == ((0,), ((1, 2),))
    assert (schedule.returned(4), schedule.lost(4)) == ((), ())


def test_events_of_one_step_come_together_in_the_order_of_the_list():
    events = [Loss(3, 1, 2), Return(3, 1), Loss(3, 0, 3), Return(3, 0), Loss(4, 0, 0), Loss(3, 1, 2)]
    schedule = Schedule(events)
    assert schedule.returned(3) == (1, 0)
    assert schedule.lost(3) == ((1, 2), (0, 3), (1, 2))
    assert schedule.lost(4) == ((0, 0),)


def test_events_before_the_first_step_that_is_asked_for_are_dropped():
    events = [Loss(3, 1, 2), Return(5, 1), Loss(6, 1, 0), Loss(7, 1, 1), Return(7, 1)]
    schedule = Schedule(events)
    assert told(schedule, range(7, 12)) == {7: ((1,), ((1, 1),))}
    assert told(schedule, range(1, 12)) == {}


def test_asking_for_losses_leaves_the_returns_and_the_other_way_round():
    schedule = Schedule([Loss(3, 0, 0), Return(3, 0), Loss(9, 0, 0)])
    assert schedule.lost(3) == ((0, 0),)
    assert schedule.returned(3) == (0,)
    assert schedule.lost(9) == ((0, 0),)


def test_a_schedule_without_events_says_nothing():
    assert told(Schedule([]), range(1, 5)) == {}


# What is impossible.

RANK = "`rank` (={rank}) must be at least 0 and below the TP degree of replica {replica} (={degree})."
REPLICA = "`replica` (={replica}) must be at least 0 and below the number of replicas (={num})."
NOTHING_LOST = "replica {replica} has lost no device (TP degree {degree} of {nominal})."


@pytest.mark.parametrize(
    ("degrees", "events", "problems"),
    [
        ((4, 4), [Loss(5, 1, 4)], ["loss at step 5: " + RANK.format(rank=4, replica=1, degree=4)]),
        ((4, 3), [Loss(5, 1, 3)], ["loss at step 5: " + RANK.format(rank=3, replica=1, degree=3)]),
        ((4, 4), [Loss(5, 2, 0)], ["loss at step 5: " + REPLICA.format(replica=2, num=2)]),
        ((4, 4), [Return(5, 2)], ["return at step 5: " + REPLICA.format(replica=2, num=2)]),
        ((4, 3), [Return(5, 1)], ["return at step 5: " + NOTHING_LOST.format(replica=1, degree=3, nominal=4)]),
        # The device that is lost first is gone when the second loss comes.
        ((4,), [Loss(5, 0, 3), Loss(5, 0, 3)], ["loss at step 5: " + RANK.format(rank=3, replica=0, degree=3)]),
        ((1, 1), [Loss(2, 0, 0), Loss(3, 0, 0)], ["loss at step 3: " + RANK.format(rank=0, replica=0, degree=0)]),
        # One device comes back once, to the replica that lost it.
        (
            (2, 2),
            [Loss(2, 0, 0), Return(4, 1), Return(4, 0), Return(6, 0)],
            [
                "return at step 4: " + NOTHING_LOST.format(replica=1, degree=2, nominal=2),
                "return at step 6: " + NOTHING_LOST.format(replica=0, degree=2, nominal=2),
            ],
        ),
        # A device that is lost in a step is not back before it.
        (
            (2,),
            [Loss(4, 0, 0), Return(4, 0)],
            ["return at step 4: " + NOTHING_LOST.format(replica=0, degree=2, nominal=2)],
        ),
    ],
)
def test_every_impossible_event_is_named_with_its_reason(
    degrees: tuple[int, ...], events: list[Event], problems: list[str]
):
    assert schedule_problems(Topology.of_degrees(degrees), events) == problems


@pytest.mark.parametrize(
    ("degrees", "spares", "events"),
    [
        ((4, 4), 0, []),
        ((4, 4), 0, [Loss(5, 0, 3), Loss(5, 0, 2), Loss(5, 1, 0)]),
        ((4, 4), 0, [Loss(5, 0, 3), Return(6, 0), Loss(6, 0, 3)]),
        ((2,), 0, [Loss(3, 0, 1), Loss(3, 0, 0)]),
        # A spare takes a rank over at once, for another loss in the same step too.
        ((2,), 1, [Loss(3, 0, 1), Loss(3, 0, 1)]),
        ((2, 2), 1, [Loss(3, 0, 1), Loss(4, 0, 1), Return(5, 0), Return(6, 0)]),
    ],
)
def test_possible_events_have_no_problems(degrees: tuple[int, ...], spares: int, events: list[Event]):
    assert schedule_problems(Topology.of_degrees(degrees, spares=spares), events) == []


def test_the_steps_say_in_which_order_events_happen_not_the_list():
    events = [Loss(3, 0, 1), Return(5, 0), Loss(5, 0, 1), Return(8, 0)]
    for order in itertools.permutations(events):
        assert schedule_problems(Topology.of_degrees((2,)), order) == []


def test_without_the_spare_the_same_losses_are_impossible():
    losses = [Loss(3, 0, 1), Loss(3, 0, 1)]
    assert len(schedule_problems(Topology.of_degrees((2,)), losses)) == 1


# Where a run that resumes goes on.


@pytest.mark.parametrize(
    ("step", "replicas"),
    [
        (0, ((0, 1), (2, 3))),
        (2, ((0, 1), (2, 3))),
        (3, ((0, 1), (3,))),
        (4, ((0, 1), (3,))),
        (5, ((0, 1), (3, 2))),
        (6, ((0, 1), (3, 2))),
        (7, ((1,), (3, 2))),
        (99, ((1,), (3, 2))),
    ],
)
def test_events_up_to_a_step_have_happened_once_it_is_done(step: int, replicas: tuple[tuple[int, ...], ...]):
    events = [Loss(7, 0, 0), Return(5, 1), Loss(3, 1, 0)]
    assert topology_after(Topology.of_degrees((2, 2)), events, step).replicas == replicas


def test_a_spare_has_taken_over_by_then():
    topology = topology_after(Topology.of_degrees((2, 2), spares=1), [Loss(3, 0, 0), Loss(4, 1, 0)], 4)
    assert (topology.replicas, topology.spares) == (((1, 4), (3,)), ())
    assert topology.lost == ((0, 0), (1, 2))


def test_a_run_that_resumes_meets_the_rest_of_its_schedule():
    start = Topology.of_degrees((4, 4))
    events = [Loss(3, 1, 0), Loss(5, 0, 3), Return(7, 1), Loss(7, 1, 3), Return(9, 0), Return(9, 1)]
    for step in range(12):
        to_come = [event for event in events if event.step > step]
        assert schedule_problems(topology_after(start, events, step), to_come) == []
    assert topology_after(start, events, 11).degrees == (4, 4)


def test_a_device_that_returns_to_a_full_replica_fills_a_reduced_one() -> None:
    start = Topology.of_degrees((2, 2), spares=1)
    events = [Loss(1, 0, 0), Loss(2, 1, 0), Return(3, 0)]
    assert topology_after(start, events, 2).degrees == (2, 1)
    back = topology_after(start, events, 3)
    assert (back.degrees, back.spares) == ((2, 2), ())
    assert back.replicas[1] == (3, 0)
