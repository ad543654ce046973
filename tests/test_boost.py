"""The default boost hook: what speed-up each reduced replica would need, said once for each change."""

import pytest

from ntpjax.boost import ReportNeededSpeedup
from ntpjax.layout import Family, Split
from ntpjax.records import Note, Record
from ntpjax.topology import Topology

pytestmark = pytest.mark.timeout(60)

# Attention does a quarter of the work: 8 units, then 2 on the fullest of 7 ranks. FFN: 224 units, 28 then 32.
SHARES: dict[Family, float] = {Split("kv", 8, nominal_tp=8): 0.25, Split("ffn", 224, nominal_tp=8): 0.75}
TIMES_S = {0: 0.125, 1: 0.25, 2: 0.5}


def texts(*topologies: Topology) -> list[list[str]]:
    """What the hook says after each step, with step 1 on the first topology."""
    notes: list[Record] = []
    hook, found = ReportNeededSpeedup(SHARES, notes.append), []
    for step, topology in enumerate(topologies, start=1):
        hook.between_steps(step, topology, TIMES_S)
        assert all(isinstance(note, Note) and (note.step, note.level) == (step, "info") for note in notes)
        found.append([note.text for note in notes if isinstance(note, Note)])
        notes.clear()
    return found


def test_the_text_has_the_needed_speed_up_and_the_last_step_time():
    ((text,),) = texts(Topology.of_degrees((8, 7)))
    assert text == (
        "replica 1 (TP 7 of 8) would need devices 1.357 times as fast to keep up with a full share of the batch "
        "(last step 0.250 s)"
    )


def test_every_reduced_replica_is_named_and_healthy_or_dropped_ones_are_not():
    (found,) = texts(Topology.of_degrees((7, 0, 4), nominal_tp=8))
    # At TP 4 every rank has twice the units.
    assert [text.split(" times")[0] for text in found] == [
        "replica 0 (TP 7 of 8) would need devices 1.357",
        "replica 2 (TP 4 of 8) would need devices 2.000",
    ]
    assert texts(Topology.of_degrees((8, 0, 8)), Topology.of_degrees((8, 8))) == [[], []]


def test_it_is_said_again_only_after_a_change():
    healthy = Topology.of_degrees((8, 8))
    reduced = healthy.lose(1, 2)
    found = texts(healthy, reduced, reduced, reduced.lose(0, 0), healthy, reduced, healthy.lose(1, 7))
    assert [len(said) for said in found] == [0, 1, 0, 2, 0, 1, 0]
