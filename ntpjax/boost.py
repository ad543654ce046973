"""The hook that the trainer calls between steps, to make reduced replicas keep up."""

from collections.abc import Callable, Mapping
from typing import Protocol, final

from ntpjax.layout import Family
from ntpjax.policy import needed_speedup
from ntpjax.records import Note, Record
from ntpjax.topology import Topology


class BoostHook(Protocol):
    """Called after every committed step, off the devices: it must return at once."""

    def between_steps(self, step: int, topology: Topology, step_times_s: Mapping[int, float]) -> None:
        """Args:
        step: the step that was just done.
        topology: the live devices.
        step_times_s: for each active replica id, seconds from the start of the step until its sums were there.
        """
        ...


@final
class ReportNeededSpeedup:
    """The default hook: says what speed-up each reduced replica would need, and changes nothing."""

    def __init__(self, shares: Mapping[Family, float], emit: Callable[[Record], None]) -> None:
        """`shares[family]` is the part of a step's time that the work on that family's units takes."""
        self._shares = shares
        self._emit = emit
        self._said: tuple[int, ...] = ()

    def between_steps(self, step: int, topology: Topology, step_times_s: Mapping[int, float]) -> None:
        if topology.degrees == self._said:
            return
        self._said = topology.degrees
        for replica in topology.order:
            degree = topology.degrees[replica]
            if degree < topology.nominal_tp:
                speedup = needed_speedup(self._shares, degree, topology.nominal_tp)
                text = (
                    f"replica {replica} (TP {degree} of {topology.nominal_tp}) would need devices {speedup:.3f} times "
                    f"as fast to keep up with a full share of the batch (last step {step_times_s[replica]:.3f} s)"
                )
                self._emit(Note(step, text, "info"))
