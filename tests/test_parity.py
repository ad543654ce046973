"""The parity benchmark: its cheapest telling cases, held to a relative 1e-10, and that it would notice a fault."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models.transformer
from benchmarks.parity import BOUND, CASES, Case, errors, relative_error


def waves(key: jax.Array, unit_ids: jax.Array, unit_shape: tuple[int, ...], std: float, dtype: jnp.dtype) -> jax.Array:
    """Initial values that are cheap to compile: for each unit a wave of its own, zeros for padding."""
    phase = jnp.sum(jax.random.key_data(key) % 1009).astype(dtype)
    units = unit_ids.reshape(-1, *(1 for _ in unit_shape))
    places = jnp.arange(np.prod(unit_shape)).reshape(unit_shape)
    values = jnp.sin(phase + (units + 3) * (places + 2) * 1.3) * 2**0.5 * std
    return jnp.where(units >= 0, values, 0).astype(dtype).reshape(-1, *unit_shape[1:])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case((5,), num_heads=12, num_kv_heads=12), id="12 heads on 5"),
        pytest.param(Case((3,), num_heads=8, num_kv_heads=2), id="2 KV heads on 3, copied"),
        pytest.param(Case((3, 4), rows=(0, 5)), id="3|4 rows 0|5"),
    ],
)
def test_three_steps_equal_those_of_one_device(x64: None, monkeypatch: pytest.MonkeyPatch, case: Case):
    # Normal draws would be most of what has to be compiled here; test_transformer.py has them.
    monkeypatch.setattr(models.transformer, "_draw", waves)
    assert case in CASES
    found = list(errors(case))
    # Of each step loss, norm and gradients, then parameters and moments; all of it finite.
    assert len(found) == 3 * 3 + 2
    assert max(found) < BOUND
    assert np.isfinite(found).all()


def test_a_wrong_element_of_any_array_is_noticed():
    expected = {"large": np.full((3, 4), 1e6), "small": np.full(5, 1e-3), "zeros": np.zeros(2)}
    assert relative_error(expected, expected) == 0
    for name, wrong, error in (("large", 1e6 + 1, 1e-6), ("small", 2e-3, 1), ("zeros", 1e-9, 1e-9)):
        found = {key: value.copy() for key, value in expected.items()}
        found[name].flat[1] = wrong
        assert relative_error(found, expected) == pytest.approx(error)


def test_a_nan_in_any_array_is_noticed():
    expected = {"a": np.ones(3), "b": np.ones(3)}
    assert not relative_error({"a": np.ones(3), "b": np.array([1, np.nan, 1])}, expected) < BOUND


def test_an_array_of_another_shape_is_refused():
    with pytest.raises(AssertionError):
        relative_error({"a": np.ones((1, 3))}, {"a": np.ones(3)})
