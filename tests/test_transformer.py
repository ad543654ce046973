"""The transformer on one device: against NumPy, and what must not change its losses, gradients and initial values.

Losses are computed in float64 and compared at a relative 1e-12; what must not change at all, bit for bit. Narrower
types are compared with wider ones, at the tolerances stated in each test.
"""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import NamedSharding, PartitionSpec
from pydantic import ValidationError

from models import transformer
from models.one_device import loss_sum, train_step
from models.tensor_parallel import OneDevice
from models.transformer import (
    Batch,
    TransformerConfig,
    TransformerFunctions,
    _attend,
    _rms_norm,
    _rotate,
)
from ntpjax.targets import compile_for_cuda, target_devices

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


def test_rope_of_bfloat16_is_exact_up_to_the_rounding_of_its_result(x64: None):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 500, 2, 8)), jnp.bfloat16)
    exact = np.asarray(_rotate(x.astype(jnp.float64), 100.0))
    # Half a unit in the last of 8 bits, and what float32 makes of an angle of 500.
    assert (np.abs(np.asarray(_rotate(x, 100.0), np.float64) - exact) <= 2.0**-8 * np.abs(exact) + 1e-4).all()


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


@pytest.mark.parametrize("num_kv_heads", [6, 2, 1])
def test_attention_of_float32_is_that_of_float64(x64: None, num_kv_heads: int):
    """Values and gradients, at a relative 1e-5 of the largest: float32 has 6e-8."""
    rng = np.random.default_rng(0)
    q, k, v, d_out = (rng.normal(size=(2, 9, num, 8)) for num in (6, num_kv_heads, num_kv_heads, 6))
    narrow = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    wide = [x.astype(jnp.float64) for x in narrow]

    @jax.jit
    def with_gradients(d_out: jax.Array, *qkv: jax.Array) -> Any:
        out, pullback = jax.vjp(lambda q, k, v: _attend(q, k, v, "auto"), *qkv)
        return out, pullback(d_out)

    found, expected = with_gradients(jnp.asarray(d_out, jnp.float32), *narrow), with_gradients(d_out, *wide)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, b.dtype) == (jnp.float32, jnp.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(
    ("backend", "kind", "dtype", "head_dim", "expected"),
    [
        ("cuda 12080", "auto", "bfloat16", 128, "cudnn"),
        ("cuda 12080", "auto", "float16", 64, "cudnn"),
        ("cuda 12080", "auto", "float32", 64, "xla"),
        ("cuda 12080", "auto", "bfloat16", 12, "xla"),
        ("cuda 12080", "auto", "bfloat16", 136, "xla"),
        ("cuda 12080", "xla", "bfloat16", 128, "xla"),
        ("cpu", "auto", "bfloat16", 128, "xla"),
        ("cpu", "cudnn", "bfloat16", 128, "cudnn"),
    ],
)
def test_auto_attention_is_cudnn_on_cuda_for_what_it_takes_and_what_is_named_is_done(
    monkeypatch: pytest.MonkeyPatch, backend: str, kind: Any, dtype: str, head_dim: int, expected: str
):
    asked: list[str] = []
    monkeypatch.setattr(transformer, "get_backend", lambda: SimpleNamespace(platform_version=backend))
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *qkv, implementation, **_: asked.append(implementation))
    x = jnp.zeros((1, 4, 2, head_dim), dtype)
    _attend(x, x, x, kind)
    assert asked == [expected]


def test_cudnn_attention_compiles_for_an_h200_in_shard_map_scan_checkpoint_and_vjp(monkeypatch: pytest.MonkeyPatch):
    # JAX asks for the version of cuDNN while it traces; the compiler itself needs neither cuDNN nor a GPU.
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    mesh = jax.sharding.Mesh(np.array(target_devices("h200", 2)), ("x",))

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def layer(q: jax.Array, _: None) -> tuple[jax.Array, None]:
            out, pullback = jax.vjp(jax.checkpoint(lambda q, k, v: _attend(q, k, v, "cudnn")), q, k, v)
            return pullback(out)[0], None

        return jax.lax.scan(layer, q, None, length=3)[0]

    split = PartitionSpec("x")
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
    q, kv = (
        jax.ShapeDtypeStruct((2, 256, num_heads, 64), jnp.bfloat16, sharding=NamedSharding(mesh, split))
        for num_heads in (4, 2)
    )
    text = compile_for_cuda(program.trace(q, kv, kv)).as_text() or ""
    assert set(re.findall(r"__cudnn\$(\w+)", text)) == {"fmhaSoftmax", "fmhaSoftmaxBackward"}


# -- numbers --------------------------------------------------------------------------------------------------------


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program, those of loops and calls too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def gradient_program(config: TransformerConfig, dtype: Any) -> Any:
    model, batch = TransformerFunctions(config, dtype), random_batch(config)
    params = random_params(config, dtype)
    return jax.make_jaxpr(jax.value_and_grad(functools.partial(loss_sum, model), has_aux=True))(params, batch).jaxpr


@pytest.mark.parametrize(
    ("dtype", "wide", "all_types"),
    [
        ("float64", "float64", {"float64"}),
        ("float32", "float32", {"float32"}),
        ("bfloat16", "float32", {"bfloat16", "float32"}),
    ],
)
def test_what_needs_it_is_in_at_least_float32_and_float64_stays_float64(dtype: str, wide: str, all_types: set[str]):
    """Functions that are no polynomials, and sums: in the gradient too. Loss and weights are scalars of that type."""
    with jax.enable_x64(dtype == "float64"):
        program = gradient_program(CONFIG, jnp.dtype(dtype))
    found: dict[str, set[str]] = {}
    for eqn in equations(program):
        for var in eqn.outvars:
            if jnp.issubdtype(var.aval.dtype, jnp.floating):
                found.setdefault(eqn.primitive.name, set()).add(var.aval.dtype.name)
    checked = {"exp", "log", "rsqrt", "logistic", "cos", "sin", "reduce_sum", "reduce_max", "scatter-add"}
    assert checked <= found.keys()
    assert {name: found[name] for name in checked} == {name: {wide} for name in checked}
    assert set.union(*found.values()) == all_types
    loss, weight, *grads = (var.aval.dtype.name for var in program.outvars)
    assert (loss, weight, *set(grads)) == (wide, wide, dtype)


def test_the_model_computes_in_the_type_of_the_parameters_that_it_is_given():
    """Whatever the type that `init` draws."""
    model, batch, tp = TransformerFunctions(CONFIG), random_batch(CONFIG), OneDevice(CONFIG.num_units)
    params, batch["weights"] = random_params(CONFIG, jnp.bfloat16), batch["weights"].astype(jnp.bfloat16)
    x = jax.eval_shape(lambda: model.embed(params["ends"], batch, tp))
    layer = jax.tree.map(lambda stack: stack[0], params["layers"])
    assert x.dtype == jnp.bfloat16
    assert jax.eval_shape(lambda x: model.layer(layer, x, tp), x).dtype == jnp.bfloat16
    assert {sum_.dtype for sum_ in jax.eval_shape(lambda x: model.loss(params["ends"], x, batch, tp), x)} == {
        jnp.dtype("float32")
    }
    dots = [eqn for eqn in equations(gradient_program(CONFIG, jnp.bfloat16)) if eqn.primitive.name == "dot_general"]
    mixed = [eqn for eqn in dots if len({var.aval.dtype for var in eqn.invars}) > 1 and eqn.params["precision"] is None]
    assert not mixed, "a matmul of bfloat16 with float32 is one of float32"


def relative_errors(found: PyTree, expected: PyTree) -> list[float]:
    """Norm of the difference over norm, for each array."""

    def of_array(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    return jax.tree.leaves(jax.tree.map(of_array, found, expected))


def test_gradients_in_bfloat16_are_close_to_those_in_float32():
    """bfloat16 has 8 bits, so a relative 4e-3; through two layers each gradient is right to 5 %, the loss to 1 %."""
    model, batch = TransformerFunctions(CONFIG), random_batch(CONFIG, num_rows=4, seq_len=16)
    narrow = random_params(CONFIG, jnp.bfloat16)
    compute = jax.jit(jax.value_and_grad(functools.partial(loss_sum, model), has_aux=True))
    (loss, _), grads = compute(narrow, batch)
    (expected_loss, _), expected = compute(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow), batch)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected_loss, rtol=0.01)
    assert max(relative_errors(grads, expected)) < 0.05


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_that_are_sums_over_tokens_are_summed_in_float32(tied: bool):
    """1,024 equal terms: a sum in bfloat16, term by term, stops at 256 of them."""
    config = CONFIG.model_copy(update={"loss_chunk": 1, "tie_embeddings": tied, "num_layers": 1})
    model, tp = TransformerFunctions(config), OneDevice(config.num_units)
    ends = random_params(config, jnp.bfloat16)["ends"]
    batch: Batch = {"tokens": jnp.full((1, 1025), 3), "weights": jnp.ones((1, 1024))}

    def loss(ends: PyTree) -> jax.Array:
        return model.loss(ends, model.embed(ends, batch, tp), batch, tp)[0]

    grads, expected = (
        jax.jit(jax.grad(loss))(tree) for tree in (ends, jax.tree.map(lambda x: x.astype(np.float32), ends))
    )
    assert {grad.dtype for grad in jax.tree.leaves(grads)} == {jnp.dtype("bfloat16")}
    assert max(relative_errors(grads, expected)) < 0.02


def test_a_norm_s_scale_has_a_gradient_summed_in_float32():
    x, scale = jnp.ones((1024, 8), jnp.bfloat16), jnp.ones(8, jnp.bfloat16)
    program = jax.make_jaxpr(jax.grad(lambda scale: _rms_norm(x, scale, 0.0).astype(jnp.float32).sum()))(scale)
    sums = [eqn.outvars[0].aval for eqn in equations(program.jaxpr) if eqn.primitive.name == "reduce_sum"]
    assert {aval.dtype.name for aval in sums if aval.shape == (8,)} == {"float32"}


# -- the loss in chunks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_in_chunks_is_the_loss_at_once(x64: None, tied: bool):
    """10 tokens: in chunks of 1, chunks that do not divide them, of all, and of more than all."""
    config = CONFIG.model_copy(update={"tie_embeddings": tied})
    ends, batch, tp = random_params(config)["ends"], random_batch(config), OneDevice(config.num_units)
    x = np.random.default_rng(5).normal(size=(2, 5, config.d_model))

    def with_chunks_of(most: int | None) -> Any:
        model = TransformerFunctions(config.model_copy(update={"loss_chunk": most}))
        compute = jax.value_and_grad(lambda ends, x: model.loss(ends, x, batch, tp), argnums=(0, 1), has_aux=True)
        return jax.jit(compute)(ends, x)

    expected = with_chunks_of(None)
    for most in (1, 3, 4, 9, 10, 2048):
        for a, b in zip(jax.tree.leaves(with_chunks_of(most)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def largest_array_of_the_loss(loss_chunk: int | None) -> int:
    """Numbers of the largest array in the program of loss and gradient, of 60 tokens and 101 logits each."""
    config = CONFIG.model_copy(update={"vocab_size": 101, "loss_chunk": loss_chunk})
    model, batch = TransformerFunctions(config), random_batch(config, num_rows=2, seq_len=30)
    ends, x = random_params(config, np.float32)["ends"], jnp.zeros((2, 30, config.d_model))

    def loss(ends: PyTree, x: jax.Array) -> jax.Array:
        return model.loss(ends, x, batch, OneDevice(config.num_units))[0]

    program = jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)))(ends, x)
    return max(var.aval.size for eqn in equations(program.jaxpr) for var in eqn.outvars if hasattr(var.aval, "size"))


def test_logits_of_all_tokens_never_exist_together():
    assert largest_array_of_the_loss(None) == 60 * 101
    # What is left is the head [101, 8].
    assert largest_array_of_the_loss(6) == 101 * 8


@dataclass(frozen=True)
class RankUnderVmap:
    """A rank of a TP group whose ranks are the entries of a `vmap`; JAX itself sums the gradients."""

    ids: jax.Array
    enter: Any = field(default=staticmethod(lambda x: x))
    exit: Any = field(default=staticmethod(lambda x: jax.lax.psum(x, "tp")))
    max: Any = field(default=staticmethod(lambda x: jax.lax.pmax(jax.lax.stop_gradient(x), "tp")))

    def unit_ids(self, family: str) -> jax.Array:
        assert family == "vocab"
        return self.ids

    def copy_slots(self, family: str) -> None:
        raise AssertionError


@pytest.mark.parametrize("loss_chunk", [None, 3])
@pytest.mark.parametrize("logit_shift", [0.0, 1000.0, -1000.0])
def test_a_rank_with_nothing_but_padding_changes_no_loss_and_no_gradient(
    x64: None, loss_chunk: int | None, logit_shift: float
):
    """Rows on ranks 0 and 2 of three; large logits too, of either sign: all on these are exact differences."""
    config = CONFIG.model_copy(update={"loss_chunk": loss_chunk})
    model, batch = TransformerFunctions(config, jnp.float64), random_batch(config)
    ends, rng = random_params(config)["ends"], np.random.default_rng(5)
    x = rng.normal(size=(2, 5, config.d_model))
    # The last coordinate of what the head sees is 1 (up to the norm): the logits of all rows move alike.
    ends["final_norm"]["scale"][-1], x[..., -1] = 100.0, 3.0
    ends["head"][:, -1] += logit_shift / 100
    ids = np.array([[4, 7, -1, 0, 1, 10], [-1] * 6, [2, 3, 5, 6, 9, 8]])
    heads = np.where(ids[..., None] >= 0, ends["head"][ids], 0.0)

    def one_device(head: jax.Array, x: jax.Array) -> jax.Array:
        return model.loss(ends | {"head": head}, x, batch, OneDevice(config.num_units))[0]

    def three_ranks(heads: jax.Array, x: jax.Array) -> jax.Array:
        def rank(head: jax.Array, ids: jax.Array) -> jax.Array:
            return model.loss(ends | {"head": head}, x, batch, RankUnderVmap(ids))[0]

        return jax.vmap(rank, axis_name="tp")(heads, jnp.asarray(ids))[0]

    expected, (d_head, expected_d_x) = jax.value_and_grad(one_device, argnums=(0, 1))(jnp.asarray(ends["head"]), x)
    found, (d_heads, d_x) = jax.jit(jax.value_and_grad(three_ranks, argnums=(0, 1)))(heads, x)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(d_x, expected_d_x, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(d_heads, np.where(ids[..., None] >= 0, d_head[ids], 0.0), rtol=1e-11, atol=1e-12)
    assert not np.asarray(d_heads)[ids < 0].any()


# -- rows -----------------------------------------------------------------------------------------------------------


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


def padded_loss(config: TransformerConfig, batch: Batch) -> Callable[[PyTree], jax.Array]:
    """The loss as a function of parameters laid out as `PADDED`."""
    model = TransformerFunctions(config)

    def loss(params: PyTree) -> jax.Array:
        x = model.embed(params["ends"], batch, PADDED)
        x, _ = jax.lax.scan(lambda x, layer: (model.layer(layer, x, PADDED), None), x, params["layers"])
        return model.loss(params["ends"], x, batch, PADDED)[0]

    return loss


def assert_padding_has_no_gradient(params: PyTree, grads: PyTree) -> None:
    padding_only = laid_out(jax.tree.map(np.ones_like, params), 0.0)
    for grad, real in zip(jax.tree.leaves(grads), jax.tree.leaves(padding_only), strict=True):
        assert not np.asarray(grad)[real == 0].any()
    assert any((real == 0).any() for real in jax.tree.leaves(padding_only))


@pytest.mark.parametrize("loss_chunk", [None, 3])
def test_neither_the_order_of_units_nor_padding_changes_losses_and_padding_gets_no_gradient(
    x64: None, loss_chunk: int | None
):
    params, batch = random_params(CONFIG), random_batch(CONFIG)
    compute = jax.jit(jax.value_and_grad(padded_loss(CONFIG.model_copy(update={"loss_chunk": loss_chunk}), batch)))
    (expected_loss, _), expected_grads = losses_and_gradients(CONFIG, params, batch)
    # A padding row of the vocabulary has no logit mass, whatever is in it.
    for padding in (0.0, 1e3):
        found_loss, found_grads = compute(laid_out(params, padding))
        np.testing.assert_allclose(found_loss, expected_loss, rtol=1e-12)
        expected_leaves = jax.tree.leaves(laid_out(jax.tree.map(np.asarray, expected_grads), 0.0))
        for found, expected in zip(jax.tree.leaves(found_grads), expected_leaves, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)
    assert_padding_has_no_gradient(params, found_grads)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_gets_no_gradient_from_attention_in_narrower_types(dtype: str):
    """Those that `jax.nn.dot_product_attention` computes: a padding head gives exactly zero."""
    params, batch = random_params(CONFIG, np.float32), random_batch(CONFIG)
    narrow = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), laid_out(params, 0.0))
    grads = jax.jit(jax.grad(padded_loss(CONFIG, batch)))(narrow)
    assert_padding_has_no_gradient(params, grads)
    assert all(np.isfinite(np.asarray(grad, np.float32)).all() for grad in jax.tree.leaves(grads))


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
        ("attention", "flash"),
        ("loss_chunk", 0),
        ("loss_chunk", "2048"),
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
