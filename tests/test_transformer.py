"""The transformer on one device: against NumPy, and what must not change its losses, gradients and initial values.

Losses are computed in float64 and compared at a relative 1e-12; what must not change at all, bit for bit.
"""

import functools
import re
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pydantic import ValidationError

from models.one_device import loss_sum, train_step
from models.transformer import Batch, TransformerConfig, TransformerFunctions, _rotate

PyTree = Any

CONFIG = TransformerConfig(
    vocab_size=11,
    d_model=8,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=4,
    ffn_dim=10,
    ffn_unit=2,
    tie_embeddings=False,
)


def random_params(config: TransformerConfig, dtype: Any = np.float64, seed: int = 0) -> PyTree:
    """Parameters large enough that every part of the model shows in the loss."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(TransformerFunctions(config, dtype).init, jax.random.key(0))
    return jax.tree.map(lambda leaf: rng.normal(scale=0.5, size=leaf.shape).astype(leaf.dtype), shapes)


def random_batch(config: TransformerConfig, num_rows: int = 2, seq_len: int = 5, seed: int = 1) -> Batch:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(config.vocab_size, size=(num_rows, seq_len + 1), dtype=np.int32)
    return {"tokens": jnp.asarray(tokens), "weights": jnp.asarray(rng.uniform(0.5, 2, size=(num_rows, seq_len)))}


def token_losses(config: TransformerConfig, params: PyTree, tokens: np.ndarray) -> np.ndarray:
    """Losses [B, S]: what the weights are multiplied with, so the gradient of the weighted sum."""
    model = TransformerFunctions(config, jnp.float64)

    def loss(weights: jax.Array, params: PyTree) -> jax.Array:
        return loss_sum(model, params, {"tokens": jnp.asarray(tokens), "weights": weights})[0]

    return np.asarray(jax.jit(jax.grad(loss))(jnp.ones((tokens.shape[0], tokens.shape[1] - 1)), params))


@functools.partial(jax.jit, static_argnames="config")
def losses_and_gradients(config: TransformerConfig, params: PyTree, batch: Batch) -> Any:
    """((loss, weight), gradients), summed over the batch."""
    model = TransformerFunctions(config, jnp.float64)
    return jax.value_and_grad(functools.partial(loss_sum, model), has_aux=True)(params, batch)


# -- against NumPy --------------------------------------------------------------------------------------------------


def numpy_losses(config: TransformerConfig, params: PyTree, tokens: np.ndarray) -> np.ndarray:
    """Losses [B, S] from full logits and full attention matrices, a head and a layer at a time."""

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.norm_eps) * scale

    def rotated(x: np.ndarray) -> np.ndarray:
        half = config.head_dim // 2
        turns = np.arange(x.shape[1])[:, None] * config.rope_theta ** (-2 * np.arange(half) / config.head_dim)
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * turns)
        return np.concatenate([z.real, z.imag], axis=-1)

    def attention(x: np.ndarray, weights: PyTree, num_kv_heads: int) -> np.ndarray:
        total, causal = np.zeros_like(x), np.tril(np.ones((x.shape[1],) * 2, bool))
        for head in range(config.num_heads):
            kv = head * num_kv_heads // config.num_heads
            query, key = rotated(x @ weights["q"][head].T), rotated(x @ weights["k"][kv].T)
            score = np.where(causal, query @ key.transpose(0, 2, 1) / np.sqrt(config.head_dim), -np.inf)
            mass = np.exp(score - score.max(axis=-1, keepdims=True))
            total += (mass / mass.sum(-1, keepdims=True)) @ (x @ weights["v"][kv].T) @ weights["out"][head]
        return total

    def ffn(x: np.ndarray, weights: PyTree) -> np.ndarray:
        gate = x @ weights["gate"].T
        return (gate / (1 + np.exp(-gate)) * (x @ weights["up"].T)) @ weights["down"]

    ends = params["ends"]
    x, turns = ends["embedding"][tokens[:, :-1]], config.kv_heads_in_turn
    for index in range(config.num_layers):
        repeat, turn = divmod(index, len(turns))
        layer = jax.tree.map(lambda stack: stack[repeat], params["layers"]["turn"][turn])  # noqa: B023
        x = x + attention(norm(x, layer["attention_norm"]["scale"]), layer["attention"], turns[turn])
        x = x + ffn(norm(x, layer["ffn_norm"]["scale"]), layer["ffn"])
    head = ends["embedding"] if config.tie_embeddings else ends["head"]
    logits = norm(x, ends["final_norm"]["scale"]) @ head.T
    log_mass = logits - logits.max(-1, keepdims=True)
    log_mass -= np.log(np.exp(log_mass).sum(-1, keepdims=True))
    return -np.take_along_axis(log_mass, tokens[:, 1:, None], axis=-1)[..., 0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": True, "num_kv_heads": 1, "rope_theta": 50.0},
        {"num_kv_heads": (2, 6), "num_layers": 4, "norm_eps": 0.1},
    ],
    ids=["untied", "tied", "kv-heads-in-turn"],
)
def test_losses_are_minus_the_log_softmax_of_full_logits(x64: None, changes: dict[str, Any]):
    config = TransformerConfig(**{**CONFIG.model_dump(), **changes})
    params, tokens = random_params(config), np.asarray(random_batch(config)["tokens"])
    found = token_losses(config, params, tokens)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, numpy_losses(config, params, tokens), rtol=1e-12)


# -- attention ------------------------------------------------------------------------------------------------------


def test_rope_is_a_rotation_that_leaves_position_0_as_it_is(x64: None):
    x = np.random.default_rng(0).normal(size=(2, 7, 3, 6))
    turned = np.asarray(_rotate(jnp.asarray(x), 100.0))
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-14)
    np.testing.assert_array_equal(turned[:, 0], x[:, 0])
    assert np.abs(turned[:, 1:] - x[:, 1:]).max(axis=-1).min() > 0.01


def test_rope_scores_depend_on_the_distance_only(x64: None):
    rng, length = np.random.default_rng(0), 9
    query, key = (_rotate(jnp.asarray(np.tile(rng.normal(size=6), (1, length, 1, 1))), 100.0) for _ in range(2))
    score = np.einsum("bsnh,btnh->st", query, key)
    by_distance = [np.diagonal(score, offset) for offset in range(1 - length, length)]
    assert max(np.ptp(scores) for scores in by_distance) < 1e-13
    assert np.ptp([scores[0] for scores in by_distance]) > 0.1


def test_a_later_token_does_not_change_a_bit_of_earlier_losses(x64: None):
    config, position = CONFIG, 3
    params, tokens = random_params(config), np.asarray(random_batch(config)["tokens"])
    changed = tokens.copy()
    changed[:, position] = (tokens[:, position] + 1) % config.vocab_size
    # Both in one call: in one program the rows cannot be computed differently.
    before, after = np.split(token_losses(config, params, np.concatenate([tokens, changed])), 2)
    assert before[:, : position - 1].tobytes() == after[:, : position - 1].tobytes()
    # It is the target of the position before, and an input from there on.
    assert (before[:, position - 1 :] != after[:, position - 1 :]).all()


def test_grouped_query_attention_is_full_attention_with_repeated_kv_heads(x64: None):
    grouped, batch = random_params(CONFIG), random_batch(CONFIG)
    group = CONFIG.num_heads // CONFIG.kv_heads_in_turn[0]
    full_config = CONFIG.model_copy(update={"num_kv_heads": CONFIG.num_heads})
    full = jax.tree.map(lambda leaf: leaf, grouped)
    attention = full["layers"]["turn"][0]["attention"]
    attention |= {name: np.repeat(attention[name], group, axis=1) for name in ("k", "v")}
    (loss, _), grads = losses_and_gradients(CONFIG, grouped, batch)
    (full_loss, _), full_grads = losses_and_gradients(full_config, full, batch)
    np.testing.assert_allclose(loss, full_loss, rtol=1e-12)
    found, expected = (tree["layers"]["turn"][0]["attention"] for tree in (grads, full_grads))
    for name in ("k", "v"):
        copies = expected[name].reshape(*found[name].shape[:2], group, *found[name].shape[2:])
        np.testing.assert_allclose(found[name], copies.sum(axis=2), rtol=1e-12, atol=1e-13)


# -- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "exponentials", "all_types"),
    [("float64", {"f64"}, {"f64"}), ("float32", {"f32"}, {"f32"}), ("bfloat16", {"f32"}, {"bf16", "f32"})],
)
def test_softmax_and_loss_are_in_at_least_float32_and_float64_stays_float64(
    dtype: str, exponentials: set[str], all_types: set[str]
):
    with jax.enable_x64(dtype == "float64"):
        model, batch = TransformerFunctions(CONFIG, jnp.dtype(dtype)), random_batch(CONFIG)
        params = random_params(CONFIG, jnp.dtype(dtype))
        program = str(jax.make_jaxpr(functools.partial(loss_sum, model))(params, batch))
    assert set(re.findall(r":(\w+)\[[^]]*\] = exp ", program)) == exponentials
    assert set(re.findall(r"\bb?f(?:16|32|64)\b", program)) == all_types


def test_rows_of_weight_0_count_nothing(x64: None):
    params, batch = random_params(CONFIG), random_batch(CONFIG, num_rows=2)
    other = np.asarray(random_batch(CONFIG, num_rows=1, seed=7)["tokens"])

    def with_row(row: np.ndarray) -> tuple[tuple[jax.Array, jax.Array], PyTree]:
        tokens = np.concatenate([batch["tokens"], row])
        weights = np.concatenate([batch["weights"], np.zeros((1, tokens.shape[1] - 1))])
        return losses_and_gradients(CONFIG, params, {"tokens": jnp.asarray(tokens), "weights": jnp.asarray(weights)})

    padded, other_padded, alone = with_row(0 * other), with_row(other), losses_and_gradients(CONFIG, params, batch)
    for a, b in zip(jax.tree.leaves(padded), jax.tree.leaves(other_padded), strict=True):
        np.testing.assert_array_equal(a, b)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), padded, alone)
    assert alone[0][1] == pytest.approx(float(batch["weights"].sum()), rel=1e-15)


# -- a shard with padding -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaddedRank:
    """The TP group of one rank, which holds every unit in an order of its own, with padding slots (-1) between."""

    ids: dict[str, list[int]]
    kv_slots: list[int]
    enter: Any = field(default=staticmethod(lambda x: x))
    exit: Any = field(default=staticmethod(lambda x: x))
    max: Any = field(default=staticmethod(jax.lax.stop_gradient))

    def unit_ids(self, family: str) -> jax.Array:
        return jnp.asarray(self.ids[family], jnp.int32)

    def copy_slots(self, family: str) -> jax.Array:
        assert family == "kv"
        return jnp.asarray(self.kv_slots, jnp.int32)


# Query heads 0 to 5 share KV heads 0, 0, 1, 1, 2, 2; slot 99 is out of range.
PADDED = PaddedRank(
    ids={
        "vocab": [3, -1, 0, 10, 9, 8, 1, 2, 7, 6, 5, 4, -1],
        "ffn": [4, 2, -1, 0, 1, 3, -1],
        "heads": [5, 0, -1, 2, 4, 1, 3, -1],
        "kv": [1, -1, 2, 0],
    },
    kv_slots=[2, 3, 99, 0, 2, 3, 0, 99],
)
CUTS = {"q": "heads", "out": "heads", "k": "kv", "v": "kv", "gate": "ffn", "up": "ffn", "down": "ffn"} | {
    "embedding": "vocab",
    "head": "vocab",
}


def laid_out(params: PyTree, padding: float) -> PyTree:
    """`params` with their units in the slots of `PADDED`, and `padding` in its vocabulary's padding slots."""

    def lay_out(path: tuple[Any, ...], leaf: np.ndarray) -> np.ndarray:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        if names[-1] not in CUTS:
            return leaf
        family, dim = CUTS[names[-1]], 0 if names[0] == "ends" else 1
        unit_size = CONFIG.ffn_unit if family == "ffn" else 1
        rows = [unit * unit_size + i if unit >= 0 else -1 for unit in PADDED.ids[family] for i in range(unit_size)]
        filler = np.full_like(leaf.take([0], axis=dim), padding if family == "vocab" else 0.0)
        return np.concatenate([leaf, filler], axis=dim).take(rows, axis=dim)

    return jax.tree_util.tree_map_with_path(lay_out, params)


def test_neither_the_order_of_units_nor_padding_changes_losses_and_padding_gets_no_gradient(x64: None):
    params, batch, model = random_params(CONFIG), random_batch(CONFIG), TransformerFunctions(CONFIG, jnp.float64)

    def loss(params: PyTree) -> jax.Array:
        x = model.embed(params["ends"], batch, PADDED)
        x, _ = jax.lax.scan(lambda x, layer: (model.layer(layer, x, PADDED), None), x, params["layers"])
        return model.loss(params["ends"], x, batch, PADDED)[0]

    compute = jax.jit(jax.value_and_grad(loss))
    (expected_loss, _), expected_grads = losses_and_gradients(CONFIG, params, batch)
    # A padding row of the vocabulary has no logit mass, whatever is in it.
    for padding in (0.0, 1e3):
        found_loss, found_grads = compute(laid_out(params, padding))
        np.testing.assert_allclose(found_loss, expected_loss, rtol=1e-12)
        expected_leaves = jax.tree.leaves(laid_out(jax.tree.map(np.asarray, expected_grads), 0.0))
        for found, expected in zip(jax.tree.leaves(found_grads), expected_leaves, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)
    padding_only = laid_out(jax.tree.map(np.ones_like, params), 0.0)
    for grad, real in zip(jax.tree.leaves(found_grads), jax.tree.leaves(padding_only), strict=True):
        assert not np.asarray(grad)[real == 0].any()
    assert any((real == 0).any() for real in jax.tree.leaves(padding_only))


# -- initial values -------------------------------------------------------------------------------------------------

SOME_UNITS = {"vocab": [10, -1, 3], "ffn": [4, 0, -1], "heads": [-1, 5, 1], "kv": [2, -1]}


def test_units_have_the_same_initial_values_whoever_draws_them_and_padding_is_zero():
    model, key = TransformerFunctions(CONFIG.model_copy(update={"init_std": 0.5})), jax.random.key(3)
    units = {family: jnp.asarray(ids, jnp.int32) for family, ids in SOME_UNITS.items()}
    whole, some = jax.jit(model.init)(key), jax.jit(model.init)(key, units)
    values: list[np.ndarray] = []

    def compare(path: tuple[Any, ...], all_units: jax.Array, held: jax.Array) -> None:
        name, dim = path[-1].key, 0 if path[0].key == "ends" else 1
        if name == "scale":
            assert (all_units == 1).all()
            assert (held == 1).all()
            return
        ids, size = np.asarray(SOME_UNITS[CUTS[name]]), CONFIG.ffn_unit if CUTS[name] == "ffn" else 1
        rows = (ids[:, None] * size + np.arange(size)).ravel()
        expected = np.asarray(all_units).take(np.maximum(rows, 0), axis=dim)
        expected[(slice(None),) * dim + (np.repeat(ids < 0, size),)] = 0
        assert np.asarray(held).tobytes() == expected.tobytes(), name
        std = 0.5 / (2 * CONFIG.num_layers) ** 0.5 if name in ("out", "down") else 0.5
        assert np.std(all_units) == pytest.approx(std, rel=0.2), name
        values.append(np.asarray(all_units).ravel())

    jax.tree_util.tree_map_with_path(compare, whole, some)
    assert len(values) == len(CUTS)
    drawn = np.concatenate(values)
    assert len(np.unique(drawn)) == len(drawn), "two units or parameters share values"


# -- the reference step ---------------------------------------------------------------------------------------------


def test_the_reference_step_clips_the_gradient_of_the_mean_loss_to_the_given_norm(x64: None):
    model, params, batch = TransformerFunctions(CONFIG, jnp.float64), random_params(CONFIG), random_batch(CONFIG)
    optimizer = optax.sgd(1.0)
    found = train_step(model, optimizer, 0.01, params, optimizer.init(params), batch)
    (loss, weight), grads = losses_and_gradients(CONFIG, params, batch)
    np.testing.assert_allclose(found.loss, loss, rtol=1e-12)
    norm = float(optax.tree.norm(grads) / weight)
    assert norm > 0.02
    change = jax.tree.map(lambda new, old: new - old, found.params, params)
    expected = jax.tree.map(lambda grad: -grad / weight * 0.01 / norm, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-15), change, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), found.grads, grads)


# -- configuration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_kv_heads": 4}, "`num_kv_heads` (=4) must divide `num_heads` (=6)"),
        ({"num_kv_heads": (3, 4)}, "`num_kv_heads` (=4) must divide `num_heads` (=6)"),
        ({"num_kv_heads": (1, 2), "num_layers": 3}, "`num_kv_heads` lists 2 layers in turn, which must divide `num_la"),
        ({"num_kv_heads": ()}, "`num_kv_heads` lists 0 layers in turn, which must divide `num_layers` (=2)"),
        ({"ffn_unit": 3}, "`ffn_unit` (=3) must divide `ffn_dim` (=10)"),
        ({"head_dim": 5}, "`head_dim` (=5) must be even, because RoPE rotates pairs"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_field_value_and_rule(changes: dict[str, Any], text: str):
    with pytest.raises(ValidationError, match=re.escape(text)):
        TransformerConfig(**{**CONFIG.model_dump(), **changes})


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("num_layer", 2),
        ("num_heads", "8"),
        ("num_heads", 8.0),
        ("num_heads", True),
        ("num_kv_heads", "3"),
        ("num_kv_heads", [3, "3"]),
        ("num_kv_heads", 0),
        ("vocab_size", 0),
        ("head_dim", 0),
        ("rope_theta", 0.0),
        ("rope_theta", float("inf")),
        ("norm_eps", float("nan")),
        ("init_std", -0.1),
        ("tie_embeddings", "yes"),
    ],
)
def test_unknown_keys_and_values_of_another_type_or_range_are_refused_by_name(field_name: str, value: Any):
    with pytest.raises(ValidationError) as caught:
        TransformerConfig(**{**CONFIG.model_dump(), field_name: value})
    errors = caught.value.errors()
    assert {error["loc"][0] for error in errors} == {field_name}
    if field_name == "num_layer":
        assert errors[0]["type"] == "extra_forbidden"


def test_a_list_of_kv_heads_makes_families_of_their_own():
    config = TransformerConfig(**{**CONFIG.model_dump(), "num_kv_heads": [3, 6]})
    assert config.num_kv_heads == (3, 6)
    assert config.num_units == {"vocab": 11, "ffn": 5, "heads0": 6, "kv0": 3, "heads1": 6, "kv1": 6}
    assert CONFIG.num_units == {"vocab": 11, "ffn": 5, "heads": 6, "kv": 3}
