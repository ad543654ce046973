"""The processes of a job: how one joins, and short texts that they tell each other.

Texts go through JAX's coordination service and not through a collective: processes that disagree would hang in one. A
process is told where to join by environment variables, which `python -m ntpjax.launch` sets.
"""

import itertools
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

import jax
from jax._src import distributed  # the only way to the key-value store of the coordination service

_COORDINATOR, _COUNT, _INDEX = "NTPJAX_COORDINATOR", "NTPJAX_NUM_PROCESSES", "NTPJAX_PROCESS"
_TIMEOUT_S = 600
# Each process compiles its own programs: none of this may be shared between them.
_OWN_PROGRAMS_ON_GPU = ("--xla_gpu_shard_autotuning=false", "--xla_gpu_enable_nccl_comm_splitting=false")


class ProcessesDifferError(RuntimeError):
    """Processes that must agree do not."""


@dataclass(frozen=True)
class Place:
    """The place of this process in a job: `index` of `count`, which meet at `coordinator`, "host:port"."""

    index: int = 0
    count: int = 1
    coordinator: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Place":
        """The place that the launcher gave to this process; a job of one process without a launcher.

        Raises:
          ValueError: naming what is missing or no number.
        """
        if _COORDINATOR not in environment:
            return cls()
        try:
            place = cls(int(environment[_INDEX]), int(environment[_COUNT]), environment[_COORDINATOR])
        except (KeyError, ValueError) as error:
            raise ValueError(f"with {_COORDINATOR}, {_COUNT} and {_INDEX} must be set to numbers ({error}).") from error
        if not 0 <= place.index < place.count:
            raise ValueError(f"`{_INDEX}` (={place.index}) must be at least 0 and below `{_COUNT}` (={place.count}).")
        return place

    def environment(self) -> dict[str, str]:
        """The variables that tell a process its place."""
        return {_COORDINATOR: self.coordinator, _COUNT: str(self.count), _INDEX: str(self.index)}

    def join(self) -> "Processes":
        """Joins the job. Call it before JAX looks for devices."""
        if self.count == 1:
            return Processes()
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_OWN_PROGRAMS_ON_GPU])
        jax.distributed.initialize(self.coordinator, self.count, self.index)
        return Processes(distributed.global_state.client, self)


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Runs `main` and ends this process with the exit code that it returns, or 1 for an error.

    A process of several that ends in the usual way waits for the others; after a failure they may wait for it.
    """
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    if code and distributed.global_state.client is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@final
class Processes:
    """All processes of the job, as this one sees them. All of them make the same calls in the same order."""

    def __init__(self, client: Any = None, place: Place | None = None) -> None:
        self._client = client
        self._place = place or Place()
        self._calls = itertools.count()

    @property
    def index(self) -> int:
        return self._place.index

    @property
    def count(self) -> int:
        return self._place.count

    def tell_all(self, text: str) -> list[str]:
        """What each process told in this call, by index."""
        if self.count == 1:
            return [text]
        key = f"ntpjax/{next(self._calls)}"
        self._client.key_value_set(f"{key}/{self.index}", text)
        return [self._get(f"{key}/{index}") for index in range(self.count)]

    def told_by(self, index: int, text: str) -> str:
        """What process `index` tells; the text of the others does not matter."""
        if self.count == 1:
            return text
        key = f"ntpjax/{next(self._calls)}"
        if self.index == index:
            self._client.key_value_set(key, text)
        return self._get(key)

    def require_equal(self, what: str, lines: Sequence[str] | None) -> None:
        """Checks that all processes have the same lines; None: this one has nothing to compare.

        Raises:
          ProcessesDifferError: on all processes, naming the first difference.
        """
        told = self.tell_all("none" if lines is None else "\n".join(["lines", *lines]))
        found = {index: text.split("\n")[1:] for index, text in enumerate(told) if text != "none"}
        for index, others in found.items():
            first = min(found)
            for place, (here, there) in enumerate(itertools.zip_longest(found[first], others, fillvalue="nothing")):
                if here != there:
                    raise ProcessesDifferError(
                        f"{what}: number {place} is {here} on process {first} and {there} on process {index}; they "
                        "would wait for each other for ever, or add up the wrong arrays. Nothing was run. Start all "
                        "processes with the same code, configuration and versions."
                    )

    def _get(self, key: str) -> str:
        return self._client.blocking_key_value_get(key, _TIMEOUT_S * 1000)
