"""The exit codes of a run, for scripts and supervisors that start it."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Why a run ended."""

    DONE = 0
    """All steps are done."""
    BAD_CONFIG = 2
    """The configuration, a file that it names, or a checkpoint that does not fit it; nothing was changed."""
    NO_COPY = 3
    """Every copy of some unit was lost, and there is no checkpoint."""
    BELOW_TP_MIN = 4
    """A replica has fewer devices than `topology.tp_min`; the state was saved, if it was whole."""
    BAD_NUMBERS = 5
    """Loss or gradients are not finite; the last good state was saved."""
    CHECKPOINT_FAILED = 6
    """A checkpoint could not be written."""
    PROCESSES_DIFFER = 7
    """The programs of the processes do not fit together; no step was done with them."""
    INTERRUPTED = 130
    """Stopped from the keyboard."""
