"""Rules cut parameters into units of families, and are refused where they do not fit, with names, sizes and remedy."""

import re
from typing import Any

import jax
import numpy as np
import pytest

from ntpjax.layout import REPLICATED, Copied, Split
from ntpjax.partition import Partition, families_in, partition_tree

pytestmark = pytest.mark.timeout(60)

FFN = Split("ffn", 5, 8)


# -- partitions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [Partition(FFN, 0, 2), Partition(FFN, 1, 3), Partition(FFN, 2, 1), Partition()])
def test_join_undoes_split_and_units_get_a_dimension_of_their_own(part: Partition):
    x = np.arange(4 * 6 * 5).reshape(4, 6, 5)
    units = part.split(x)
    assert units.ndim == 4
    np.testing.assert_array_equal(part.join(units), x)
    for unit in range(units.shape[part.dim]):
        rows = slice(unit * part.unit_size, (unit + 1) * part.unit_size)
        expected = x if part.family == REPLICATED else np.take(x, range(rows.start, rows.stop), axis=part.dim)
        np.testing.assert_array_equal(np.take(units, unit, axis=part.dim), expected)


def test_the_partition_of_one_layer_has_one_dimension_less():
    assert Partition(FFN, 1, 4).of_layer() == Partition(FFN, 0, 4)
    assert Partition().of_layer() == Partition()


SHAPES = {
    "ends": {"table": jax.ShapeDtypeStruct((257, 8), np.float32)},
    "layers": {
        "gate": jax.ShapeDtypeStruct((2, 12, 8), np.float32),
        "up": jax.ShapeDtypeStruct((2, 12, 8), np.float32),
        "norm": jax.ShapeDtypeStruct((2, 8), np.float32),
    },
}


def test_rules_find_parameters_by_pattern_and_the_others_are_replicated():
    partitions = partition_tree(SHAPES, {"layers.[gu]*": ("ffn", 1, 4), "*.table": ("vocab", 0, 1)}, 8)
    ffn = Split("ffn", 3, 8)
    assert partitions == {
        "ends": {"table": Partition(Split("vocab", 257, 8), 0, 1)},
        "layers": {"gate": Partition(ffn, 1, 4), "up": Partition(ffn, 1, 4), "norm": Partition()},
    }


@pytest.mark.parametrize(("dim", "unit_size"), [(1, 5), (3, 1), (-1, 1), (1, 0)])
def test_a_rule_that_does_not_fit_names_parameter_dimension_and_sizes(dim: int, unit_size: int):
    text = (
        f"rule 'layers.gate': parameter 'layers.gate' has shape (2, 12, 8), but its dimension {dim} must be a whole "
        f"number of units of `unit_size` (={unit_size}); change the rule or the parameter's size."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        partition_tree(SHAPES, {"layers.gate": ("ffn", dim, unit_size)}, 8)


def test_two_rules_for_one_parameter_are_refused():
    text = (
        "parameter 'layers.gate' of shape (2, 12, 8) is matched by the rules ['layers.*', '*.gate']; exactly one may "
        "match: remove one, or make its pattern narrower."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        partition_tree(SHAPES, {"layers.*": ("ffn", 1, 4), "*.gate": ("ffn", 1, 4)}, 8)


def test_a_rule_that_matches_nothing_is_refused():
    text = (
        "rules ['heads', 'layers.gates'] match no parameter; remove them or correct the pattern (the parameters: "
        "ends.table, layers.gate, layers.norm, layers.up)."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        partition_tree(SHAPES, {"layers.gates": ("ffn", 1, 4), "heads": ("kv", 0, 1), "*.up": ("ffn", 1, 4)}, 8)


# -- families -------------------------------------------------------------------------------------------------------


def test_a_family_has_the_units_of_its_parameters_and_only_those_that_occur_are_listed():
    partitions = partition_tree(SHAPES, {"layers.[gu]*": ("ffn", 1, 4), "*.table": ("vocab", 0, 1)}, 8)
    assert families_in(partitions) == (Split("vocab", 257, 8), Split("ffn", 3, 8), REPLICATED)
    assert families_in(partitions["layers"]["gate"]) == (Split("ffn", 3, 8),)


def test_a_parameter_with_another_number_of_units_than_its_family_is_refused():
    text = (
        "'layers.gate' (shape (2, 12, 8), dimension 1: 3 units) and 'layers.up' (shape (2, 12, 8), dimension 1: 4 "
        "units) are of family 'ffn', whose parameters must have equally many units and the same `copied_with`; give "
        "one a family of its own or another unit size."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        partition_tree(SHAPES, {"layers.gate": ("ffn", 1, 4), "layers.up": ("ffn", 1, 3)}, 8)


HEAD_SHAPES = {
    "q": jax.ShapeDtypeStruct((12, 8), np.float32),
    "k": jax.ShapeDtypeStruct((6, 8), np.float32),
    "w": jax.ShapeDtypeStruct((24, 8), np.float32),
}


def test_a_family_is_copied_with_the_groups_of_another():
    partitions = partition_tree(HEAD_SHAPES, {"q": ("queries", 0, 1), "k": ("kv", 0, 2, "queries")}, 8)
    queries = Split("queries", 12, 8, group_size=4)
    assert partitions == {
        "q": Partition(queries, 0, 1),
        "k": Partition(Copied("kv", queries), 0, 2),
        "w": Partition(),
    }


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (
            {"q": ("queries", 0, 3), "k": ("kv", 0, 2, "queries")},
            "'k' (shape (6, 8), dimension 0: 3 units) is copied with 'queries', 'q' (shape (12, 8), dimension 0: 4 "
            "units), which must have a whole multiple of its units; change a rule or a size.",
        ),
        (
            {"q": ("queries", 0, 3), "k": ("kv", 0, 2, "heads")},
            "'k' (shape (6, 8), dimension 0: 3 units) is copied with 'heads', which no ordinary rule names; change it.",
        ),
        (
            {"k": ("kv", 0, 2, "queries"), "q": ("queries", 0, 1, "blocks"), "w": ("blocks", 0, 1)},
            "'k' (shape (6, 8), dimension 0: 3 units) is copied with 'queries', which no ordinary rule names; change "
            "it.",
        ),
    ],
)
def test_units_that_cannot_be_copied_with_another_family_are_refused(rules: dict[str, tuple[Any, ...]], text: str):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        partition_tree(HEAD_SHAPES, rules, 8)


def test_families_copied_with_the_same_one_must_have_equally_many_units():
    shapes = HEAD_SHAPES | {"v": jax.ShapeDtypeStruct((4, 8), np.float32)}
    text = r"^families copied with 'queries', 'q' .*12 units\), must have equally many units; change a size\.$"
    with pytest.raises(ValueError, match=text):
        partition_tree(
            shapes, {"q": ("queries", 0, 1), "k": ("keys", 0, 1, "queries"), "v": ("values", 0, 1, "queries")}, 8
        )
