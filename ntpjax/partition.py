"""How parameters are cut into units.

Rules say which dimension of which parameters carries the units of which family; `partition_tree` checks them against
the parameters and gives each leaf its `Partition`. Any dimension may carry the units, and any number of units goes with
any number of ranks.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from ntpjax.layout import REPLICATED, Copied, Family, Split

PyTree = Any
ArrayT = TypeVar("ArrayT", jax.Array, np.ndarray)


@dataclass(frozen=True)
class Partition:
    """Dimension `dim` carries units of `family`, `unit_size` elements each. By default: every rank holds the whole."""

    family: Family = REPLICATED
    dim: int = 0
    unit_size: int = 1

    def of_layer(self) -> "Partition":
        """The partition of one layer of a parameter that is stacked over layers."""
        return self if self.family == REPLICATED else Partition(self.family, self.dim - 1, self.unit_size)

    def split(self, x: ArrayT) -> ArrayT:
        """`x` with its units along a dimension of their own, at `dim`: [..., units, unit_size, ...]."""
        if self.family == REPLICATED:
            return x[None]
        return x.reshape(*x.shape[: self.dim], -1, self.unit_size, *x.shape[self.dim + 1 :])

    def join(self, x: ArrayT) -> ArrayT:
        """The inverse of `split`."""
        if self.family == REPLICATED:
            return x.reshape(x.shape[1:])
        return x.reshape(*x.shape[: self.dim], -1, *x.shape[self.dim + 2 :])


def path_name(path: tuple[Any, ...]) -> str:
    """A key path of a pytree as "layers.ffn.gate"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


class Rule(NamedTuple):
    """How the parameters are cut whose path matches a pattern: dimension `dim` carries units of `unit_size` elements.

    With `copied_with`, a unit goes to every rank that uses it: parameters of this family have one unit for each group
    of units of the other family, as KV heads have for their query heads.
    """

    family: str
    dim: int
    unit_size: int = 1
    copied_with: str | None = None


def partition_tree(params: PyTree, rules: Mapping[str, tuple[Any, ...]], nominal_tp: int) -> PyTree:
    """A tree like `params` of the `Partition` of each leaf.

    Args:
      params: arrays, or anything with a `shape`.
      rules: path pattern (such as "layers.*.gate") to a `Rule`, or a tuple of its fields. Unmatched leaves are
        replicated.
      nominal_tp: degree of a healthy replica.

    Raises:
      ValueError: naming the parameter and the rule, for a rule that matches no parameter, two rules that match the same
        one, a unit size that does not divide its dimension, parameters of one family with different numbers of units,
        or units that cannot be copied with another family's.
    """
    typed_rules = {pattern: Rule(*rule) for pattern, rule in rules.items()}
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    cuts = [_cut(path_name(path), tuple(leaf.shape), typed_rules) for path, leaf in leaves]
    unmatched = sorted(set(rules) - {cut.pattern for cut in cuts if cut})
    if unmatched:
        names = ", ".join(path_name(path) for path, _ in leaves)
        raise ValueError(
            f"rules {unmatched} match no parameter; remove them or correct the pattern (the parameters: {names})."
        )
    families = _families([cut for cut in cuts if cut], nominal_tp)
    return jax.tree.unflatten(structure, [cut.partition(families) if cut else Partition() for cut in cuts])


@dataclass(frozen=True)
class _Cut:
    """A parameter, and the rule that cuts it."""

    name: str
    shape: tuple[int, ...]
    pattern: str
    rule: Rule

    @property
    def num_units(self) -> int:
        return self.shape[self.rule.dim] // self.rule.unit_size

    def partition(self, families: Mapping[str, Family]) -> Partition:
        return Partition(families[self.rule.family], self.rule.dim, self.rule.unit_size)

    def __str__(self) -> str:
        units = "1 unit" if self.num_units == 1 else f"{self.num_units} units"
        return f"'{self.name}' (shape {self.shape}, dimension {self.rule.dim}: {units})"


def _cut(name: str, shape: tuple[int, ...], rules: Mapping[str, Rule]) -> _Cut | None:
    """The cut of a parameter, None if it is replicated. Raises ValueError if two rules match, or one does not fit."""
    matching = [pattern for pattern in rules if fnmatch.fnmatchcase(name, pattern)]
    if len(matching) > 1:
        raise ValueError(
            f"parameter '{name}' of shape {shape} is matched by the rules {matching}; exactly one may match: remove "
            "one, or make its pattern narrower."
        )
    if not matching:
        return None
    rule = rules[matching[0]]
    fits = 0 <= rule.dim < len(shape) and rule.unit_size >= 1 and shape[rule.dim] % rule.unit_size == 0
    if not fits or not shape[rule.dim]:
        raise ValueError(
            f"rule '{matching[0]}': parameter '{name}' has shape {shape}, but its dimension {rule.dim} must be a whole "
            f"number of units of `unit_size` (={rule.unit_size}); change the rule or the parameter's size."
        )
    return _Cut(name, shape, matching[0], rule)


def _families(cuts: Sequence[_Cut], nominal_tp: int) -> dict[str, Family]:
    """The families of the parameters, by name. Raises ValueError if their numbers of units do not go together."""
    first: dict[str, _Cut] = {}
    for cut in cuts:
        same = first.setdefault(cut.rule.family, cut)
        if (same.num_units, same.rule.copied_with) != (cut.num_units, cut.rule.copied_with):
            raise ValueError(
                f"{same} and {cut} are of family '{cut.rule.family}', whose parameters must have equally many units "
                "and the same `copied_with`; give one a family of its own or another unit size."
            )
    copied = {name: cut for name, cut in first.items() if cut.rule.copied_with is not None}
    ordinary = {name: cut for name, cut in first.items() if name not in copied}
    splits: dict[str, Split] = {}
    for name, cut in ordinary.items():
        group_sizes = {_group_size(cut, copy) for copy in copied.values() if copy.rule.copied_with == name} or {1}
        if len(group_sizes) > 1:
            raise ValueError(f"families copied with '{name}', {cut}, must have equally many units; change a size.")
        splits[name] = Split(name, cut.num_units, nominal_tp, group_sizes.pop())
    copies: dict[str, Family] = {}
    for name, cut in copied.items():
        users = splits.get(cut.rule.copied_with or "")
        if users is None:
            raise ValueError(f"{cut} is copied with '{cut.rule.copied_with}', which no ordinary rule names; change it.")
        copies[name] = Copied(name, users)
    return copies | splits


def _group_size(users: _Cut, copied: _Cut) -> int:
    """How many units of the users share one copied unit."""
    if users.num_units % copied.num_units:
        raise ValueError(
            f"{copied} is copied with '{users.rule.family}', {users}, which must have a whole multiple of its units; "
            "change a rule or a size."
        )
    return users.num_units // copied.num_units


def families_in(partitions: PyTree) -> tuple[Family, ...]:
    """The unit families that occur in a tree of partitions."""
    return tuple(dict.fromkeys(part.family for part in jax.tree.leaves(partitions)))
