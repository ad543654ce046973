"""The base of a run's configuration: `Section`, and `load`, which reads sections from a YAML file.

Layer 3. Each section belongs to one owner, is checked when it is built and refuses unknown keys; no field overrides
another. The sections that `ntpjax` owns are in `ntpjax.sections`. All meet in a root section, which `train.py` defines
and gives its cross checks:

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
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
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
        raise ConfigError([f"{path}: must be a mapping of sections (got {short(data)})"])
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
        raise ValueError(f"the value is not valid YAML; put it in quotes (got {short(value)})") from None


def _replace(data: Mapping[Any, Any], keys: Sequence[str], value: Any) -> dict[Any, Any]:
    key, *rest = keys
    if rest:
        inner = {} if data.get(key) is None else data[key]  # a section without lines reads as None
        if not isinstance(inner, Mapping):
            raise ValueError(f"'{key}' is no section, so it has no key '{rest[0]}' (got {short(inner)})")
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
            return f"is an unknown key{nearest(str(fault['loc'][-1]), _fields_at(root, fault['loc'][:-1]))}"
        case "value_error":
            return fault["msg"].removeprefix("Value error, ")
        case kind:
            rule = _RULES.get(kind, fault["msg"].replace("Input should be", "must be", 1))
            return f"{rule} (got {short(fault['input'])})"


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


def nearest(key: str, known: Iterable[str]) -> str:
    """Returns a hint to follow an unknown key: the known key that looks most like it, or all known ones."""
    known = list(known)
    close = difflib.get_close_matches(key, known, n=1)
    if close:
        return f" (did you mean '{close[0]}'?)"
    return f" (known here: {', '.join(known)})" if known else ""


def short(value: Any) -> str:
    """Returns `value` as an error text shows it: its `repr`, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
