"""Tests of `ntpjax.describe`: the words of each event, and how numbers are written."""

import math
import re
from dataclasses import replace

from ntpjax.describe import describe, format_bytes, format_seconds
from ntpjax.records import Note, RunEnded, TopologyChanged

LOSS = TopologyChanged(
    step=30,
    reason="loss",
    changes=("replica 1 lost rank 2 (device 6)",),
    degrees_before=(4, 4),
    degrees_after=(4, 3),
    num_units_moved=21,
    num_bytes_moved=1_400_000,
    source="own replica",
    phases_s={"reshard": 0.21, "compile": 2.3},
    rolled_back_to=None,
)
RETURN = replace(LOSS, reason="return", changes=("replica 1 got device 6 back",), source="other replica")
ENDED = RunEnded(100, "all steps done", 0, 5.0, 2.5, 1, 1, 0, 819_200, 75.0, "runs/demo")


def test_a_loss_says_what_was_lost_what_moved_how_long_it_took_and_how_training_goes_on():
    lost = ("step 30", "replica 1 lost rank 2 (device 6)", "TP 4|4 -> 4|3")
    moved = ("21 units", "1.4 MB", "own replica", "reshard 0.21 s", "compile 2.30 s", "total 2.51 s")
    goes_on = ("step 30 is tried again", "no step lost")
    text = describe(LOSS)
    assert [words for words in lost + moved + goes_on if words not in text] == []


def test_a_rollback_says_so_and_does_not_claim_that_no_step_was_lost():
    text = describe(replace(LOSS, source="checkpoint", rolled_back_to=20))
    assert "rolled back to the checkpoint of step 20" in text
    assert "no step lost" not in text and "tried again" not in text


def test_a_return_is_told_without_a_retry():
    text = describe(RETURN)
    assert "replica 1 got device 6 back" in text and "another replica" in text and "no step lost" in text
    assert "tried again" not in text


def test_a_change_that_moved_nothing_says_so():
    text = describe(replace(LOSS, num_units_moved=0, num_bytes_moved=0, source="nothing moved", phases_s={}))
    assert text.count("nothing moved") == 1 and "unit" not in text and "total" not in text


def test_degrees_of_many_replicas_are_counted():
    many = replace(LOSS, degrees_before=(4,) * 64, degrees_after=(4, 3) + (4,) * 62)
    assert "TP 64 replicas at 4 -> 63 replicas at 4, 1 at 3" in describe(many)


def test_a_note_that_is_not_mere_information_names_its_level():
    assert describe(Note(3, "all well", "info")) == "step 3  all well"
    assert describe(Note(3, "slow", "warning")) == "step 3  warning: slow"
    assert describe(Note(3, "broken", "error")) == "step 3  error: broken"


def test_the_summary_says_how_the_run_went():
    text = describe(ENDED)
    for words in ["all steps done", "5.0000 -> 2.5000", "819,200", "1 min 15 s", "no step lost", "runs/demo"]:
        assert words in text
    assert "exit code" not in text


def test_the_summary_of_a_failed_run_has_its_exit_code_and_its_lost_steps():
    text = describe(replace(ENDED, exit_code=3, num_lost_steps=10, first_loss=None, last_loss=None))
    assert re.search(r"exit code +3", text) and "10 done again" in text and "no step lost" not in text
    assert "no step done" in text


def test_bytes_are_written_for_people():
    small = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 999_949: "999.9 kB", 999_950: "1.0 MB", 1_400_000: "1.4 MB"}
    texts = small | {2_000_000_000: "2.0 GB", 5 * 10**15: "5000.0 TB"}
    assert {num_bytes: format_bytes(num_bytes) for num_bytes in texts} == texts


def test_seconds_are_written_for_people():
    short = {0.0: "0.00 s", 0.214: "0.21 s", 9.996: "10.0 s", 59.94: "59.9 s", 59.96: "1 min 00 s"}
    texts = short | {245.0: "4 min 05 s", 3599.6: "1 h 00 min", 11_520.0: "3 h 12 min", math.inf: "unknown time"}
    assert {time_s: format_seconds(time_s) for time_s in texts} == texts


def test_the_summary_has_the_part_of_the_steps_that_the_commit_takes():
    assert "commit gap" not in describe(ENDED)
    assert re.search(r"commit gap +1\.25% of the time of the steps", describe(replace(ENDED, commit_gap=0.0125)))
