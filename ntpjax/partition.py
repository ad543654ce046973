"""How parameters are cut into units.

Rules say which dimension of which parameters carries the units of which family; `partition_tree` checks them against
the parameters and gives each leaf its `Partition`. Any dimension may carry the units, and any number of units goes with
any number of ranks.
"""

import fnmatch
from collections.abc import Iterable, Mapping
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
    unused, num_units = set(rules), dict[str, int]()

    def match(path: tuple[Any, ...], leaf: jax.Array) -> str | None:
        name = path_name(path)
        matching = [pattern for pattern in rules if fnmatch.fnmatchcase(name, pattern)]
        unused.difference_update(matching)
        if len(matching) > 1:
            raise ValueError(f"parameter '{name}' is matched by the rules {matching}; exactly one may match.")
        if not matching:
            return None
        rule = typed_rules[matching[0]]
        units = _num_units(name, leaf.shape, matching[0], rule)
        known = num_units.setdefault(rule.family, units)
        if known != units:
            raise ValueError(
                f"parameter '{name}' has {units} units of family '{rule.family}', others have {known}; give it a "
                "family of its own or another unit size."
            )
        return matching[0]

    patterns = jax.tree_util.tree_map_with_path(match, params)
    if unused:
        raise ValueError(f"rules {sorted(unused)} match no parameter; remove them or correct the pattern.")
    families = _families(typed_rules.values(), num_units, nominal_tp)

    def partition(pattern: str | None) -> Partition:
        if pattern is None:
            return Partition()
        rule = typed_rules[pattern]
        return Partition(families[rule.family], rule.dim, rule.unit_size)

    return jax.tree.map(partition, patterns, is_leaf=lambda leaf: leaf is None)


def _num_units(name: str, shape: tuple[int, ...], pattern: str, rule: Rule) -> int:
    if not 0 <= rule.dim < len(shape) or rule.unit_size < 1 or shape[rule.dim] % rule.unit_size or not shape[rule.dim]:
        raise ValueError(
            f"rule '{pattern}': parameter '{name}' has shape {tuple(shape)}, but its dimension {rule.dim} must be a "
            f"whole number of units of `unit_size` (={rule.unit_size}); change the rule or the parameter's size."
        )
    return shape[rule.dim] // rule.unit_size


def _families(rules: Iterable[Rule], num_units: Mapping[str, int], nominal_tp: int) -> dict[str, Family]:
    """The families that the rules name. Raises ValueError if one cannot be copied with the other."""
    leader_of = {rule.family: rule.copied_with for rule in rules if rule.copied_with is not None}
    group_sizes: dict[str, int] = {}
    for name, leader in leader_of.items():
        if leader not in num_units or leader in leader_of or num_units[leader] % num_units[name]:
            raise ValueError(
                f"family '{name}' ({num_units[name]} units) is copied with '{leader}' ({num_units.get(leader, 'no')} "
                "units), which must be an ordinary family with a whole multiple of its units; change a rule or a size."
            )
        size = num_units[leader] // num_units[name]
        if group_sizes.setdefault(leader, size) != size:
            raise ValueError(f"two families are copied with '{leader}', but have different numbers of units.")
    families: dict[str, Family] = {}
    splits = {
        name: Split(name, num, nominal_tp, group_sizes.get(name, 1))
        for name, num in num_units.items()
        if name not in leader_of
    }
    families.update(splits)
    families.update({name: Copied(name, splits[leader]) for name, leader in leader_of.items()})
    return families


def families_in(partitions: PyTree) -> tuple[Family, ...]:
    """The unit families that occur in a tree of partitions."""
    return tuple(dict.fromkeys(part.family for part in jax.tree.leaves(partitions)))
