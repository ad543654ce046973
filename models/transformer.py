"""A decoder-only transformer in Flax NNX: RMSNorm, RoPE, grouped-query attention, SwiGLU.

It knows nothing of ntpjax. What it needs of tensor parallelism it takes as an argument, `tp` (see `TensorParallel`),
and it reads its local widths from its parameters' shapes, so the same module runs on one device (`tp=OneDevice(...)`)
and as one shard of an uneven group, whatever the number of heads, FFN columns or vocabulary rows that the shard has.

Every sharded parameter has its units first (after the layer, in a stack) and `d_model` last: a unit of family `heads`
is a query head, one of `kv` a KV head (a rank holds those that its query heads need, so one may be on several ranks),
one of `ffn` a block of FFN columns (its gate, up and down), one of `vocab` a row of the vocabulary. Initial values are
drawn unit by unit, from a key that names the parameter and the unit: they do not depend on how the units are spread,
and no rank ever draws more than it holds.

The model computes in the type of the parameters that it is given, which may be narrower than that of the parameters
that are trained: a caller casts them first. Whatever the type, norms, rotations, softmaxes and losses are computed in
at least float32, and gradients that are sums over tokens are summed in it.

Shape suffixes: B rows of the batch, S positions, T tokens (all positions of all rows), D d_model, N local query heads,
K local KV heads, G query heads for each KV head, H head dimension, L positions of the keys, F local FFN columns,
V local vocabulary rows, U local units.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.backend import get_backend
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from models.cross_entropy import cross_entropy
from models.precision import at_least_float32
from models.tensor_parallel import TensorParallel

Count = Annotated[int, Field(ge=1)]
AttentionKind = Literal["auto", "xla", "cudnn"]

UnitIds = Mapping[str, jax.Array]
"""For each unit family the ids of the units to hold, [U] int32, -1 for a padding slot."""


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class TransformerConfig(BaseModel):
    """Sizes of the model, and how it computes. Any number of heads, FFN units and vocabulary rows goes with any TP
    degree.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    vocab_size: int = Field(ge=1, description="rows of the embedding and of the head")
    d_model: int = Field(ge=1, description="width of the residual stream")
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1, description="query heads")
    num_kv_heads: Annotated[Count | tuple[Count, ...], BeforeValidator(_as_tuple)] = Field(
        description="KV heads; must divide num_heads. A list gives those of the layers in turn"
    )
    head_dim: int = Field(ge=2, description="must be even (RoPE rotates pairs)")
    ffn_dim: int = Field(ge=1, description="FFN columns")
    ffn_unit: int = Field(ge=1, description="FFN columns that stay together; must divide ffn_dim")
    tie_embeddings: bool = Field(default=True, description="the head is the embedding")
    rope_theta: float = Field(default=10_000.0, gt=0, allow_inf_nan=False)
    norm_eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    init_std: float = Field(
        default=0.02, gt=0, allow_inf_nan=False, description="residual outputs: over sqrt(2 layers)"
    )
    attention: AttentionKind = Field(
        default="auto",
        description="xla: attention matrices in memory; cudnn: its fused kernel, 16-bit types on CUDA only; auto: "
        "cudnn if JAX's default backend is CUDA and it takes the type and head_dim (a multiple of 8, at most 128), "
        "else xla. float64 has a way of its own",
    )
    loss_chunk: Count | None = Field(
        default=2048,
        description="most tokens whose logits exist at a time; the backward pass computes them again. null: all tokens",
    )

    @model_validator(mode="after")
    def _check(self) -> "TransformerConfig":
        parts = [("num_heads", "num_kv_heads", num) for num in self.kv_heads_in_turn]
        for whole, part, unit in (*parts, ("ffn_dim", "ffn_unit", self.ffn_unit)):
            if getattr(self, whole) % unit:
                raise ValueError(f"`{part}` (={unit}) must divide `{whole}` (={getattr(self, whole)}); change one.")
        turn = len(self.kv_heads_in_turn)
        if not turn or self.num_layers % turn:
            raise ValueError(
                f"`num_kv_heads` lists {turn} layers in turn, which must divide `num_layers` (={self.num_layers})."
            )
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` (={self.head_dim}) must be even, because RoPE rotates pairs.")
        return self

    @property
    def kv_heads_in_turn(self) -> tuple[int, ...]:
        """KV heads of the first layers; the next layers repeat them."""
        return self.num_kv_heads if isinstance(self.num_kv_heads, tuple) else (self.num_kv_heads,)

    def attention_families(self, turn: int) -> tuple[str, str]:
        """Names of the families of query heads and KV heads, for the layers with that place in turn."""
        suffix = str(turn) if len(self.kv_heads_in_turn) > 1 else ""
        return f"heads{suffix}", f"kv{suffix}"

    @property
    def num_units(self) -> dict[str, int]:
        """Units of each family."""
        found = {"ffn": self.ffn_dim // self.ffn_unit, "vocab": self.vocab_size}
        for turn, num_kv_heads in enumerate(self.kv_heads_in_turn):
            heads, kv = self.attention_families(turn)
            found |= {heads: self.num_heads, kv: num_kv_heads}
        return found


class Batch(TypedDict):
    """`tokens` [B, S+1] int32; `weights` [B, S]: what each predicted token counts, 0 for padding."""

    tokens: jax.Array
    weights: jax.Array


def _draw(key: jax.Array, unit_ids: jax.Array, unit_shape: tuple[int, ...], std: float, dtype: jnp.dtype) -> jax.Array:
    """Normal values for each unit, zeros for padding: [U x unit_shape[0], *unit_shape[1:]]."""
    draw = jax.vmap(lambda unit: jax.random.normal(jax.random.fold_in(key, unit), unit_shape, dtype))(unit_ids)
    held = (unit_ids >= 0).reshape(-1, *(1 for _ in unit_shape))
    return jnp.where(held, draw * std, 0).reshape(-1, *unit_shape[1:])


class RMSNorm(nnx.Module):
    def __init__(self, config: TransformerConfig, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones(config.d_model, dtype))
        self.eps = config.norm_eps

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        return _rms_norm(x_BSD, self.scale[...], self.eps)


@functools.partial(jax.checkpoint, static_argnums=2, prevent_cse=False)
def _rms_norm(x_BSD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """Computed again in the backward pass, which would otherwise keep `x_BSD` in the wider type."""
    wide = at_least_float32(x_BSD.dtype)
    wide_BSD = x_BSD.astype(wide)
    inverse_BS1 = jax.lax.rsqrt(jnp.mean(wide_BSD * wide_BSD, axis=-1, keepdims=True) + eps)
    # The scale's gradient is a sum over all tokens: it must not be one of 16-bit numbers.
    return (wide_BSD * inverse_BS1 * scale_D.astype(wide)).astype(x_BSD.dtype)


class Attention(nnx.Module):
    def __init__(self, config: TransformerConfig, turn: int, key: jax.Array, units: UnitIds, dtype: jnp.dtype) -> None:
        keys, shape = jax.random.split(key, 4), (1, config.head_dim, config.d_model)
        heads, self.kv_family = config.attention_families(turn)
        residual_std = config.init_std / (2 * config.num_layers) ** 0.5
        self.q = nnx.Param(_draw(keys[0], units[heads], shape, config.init_std, dtype))
        self.k = nnx.Param(_draw(keys[1], units[self.kv_family], shape, config.init_std, dtype))
        self.v = nnx.Param(_draw(keys[2], units[self.kv_family], shape, config.init_std, dtype))
        self.out = nnx.Param(_draw(keys[3], units[heads], shape, residual_std, dtype))
        self.rope_theta = config.rope_theta
        self.kind: AttentionKind = config.attention

    def __call__(self, x_BSD: jax.Array, tp: TensorParallel) -> jax.Array:
        q_BSNH = _rotate(jnp.einsum("bsd,nhd->bsnh", x_BSD, self.q[...]), self.rope_theta)
        k_BSKH = _rotate(jnp.einsum("bsd,khd->bskh", x_BSD, self.k[...]), self.rope_theta)
        v_BSKH = jnp.einsum("bsd,khd->bskh", x_BSD, self.v[...])
        kv_slots_N = tp.copy_slots(self.kv_family)
        if kv_slots_N is not None:
            # Zeros for padding: its output must be zero, or its out-projection would get a gradient.
            k_BSKH, v_BSKH = (jnp.take(x, kv_slots_N, axis=2, mode="fill", fill_value=0) for x in (k_BSKH, v_BSKH))
        mixed_BSNH = _attend(q_BSNH, k_BSKH, v_BSKH, self.kind)
        return jnp.einsum("bsnh,nhd->bsd", mixed_BSNH, self.out[...])


def _rotate(x_BSNH: jax.Array, theta: float) -> jax.Array:
    """RoPE: the two halves of a head are the pairs' coordinates; angle position x theta^(-2i/H)."""
    half = x_BSNH.shape[-1] // 2
    wide = at_least_float32(x_BSNH.dtype)
    frequency = theta ** (-jnp.arange(half, dtype=wide) / half)
    angle_SH = jnp.arange(x_BSNH.shape[1], dtype=wide)[:, None] * frequency
    cos, sin = (f(angle_SH)[:, None, :] for f in (jnp.cos, jnp.sin))
    left, right = (part.astype(wide) for part in (x_BSNH[..., :half], x_BSNH[..., half:]))
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x_BSNH.dtype)


def _attend(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, kind: AttentionKind) -> jax.Array:
    """Causal grouped-query attention; softmax in at least float32."""
    if q_BSNH.dtype == jnp.float64:
        return _attend_in_float64(q_BSNH, k_BSKH, v_BSKH)
    if kind == "auto":
        kind = "cudnn" if _cudnn_takes(q_BSNH) else "xla"
    return jax.nn.dot_product_attention(q_BSNH, k_BSKH, v_BSKH, is_causal=True, implementation=kind)


def _cudnn_takes(q_BSNH: jax.Array) -> bool:
    # Asked while tracing: JAX cannot even trace the kernel where there is no cuDNN, so that `platform_dependent`, which
    # traces what it does not choose too, is no way out.
    is_cuda, head_dim = "cuda" in get_backend().platform_version, q_BSNH.shape[-1]
    return is_cuda and q_BSNH.dtype in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and head_dim <= 128


def _attend_in_float64(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
    """`jax.nn.dot_product_attention`, which does the softmax of float64 in float32, without that loss."""
    rows, length, _, head_dim = q_BSNH.shape
    q_BSKGH = q_BSNH.reshape(rows, length, k_BSKH.shape[2], -1, head_dim)
    score_BKGSL = jnp.einsum("bskgh,blkh->bkgsl", q_BSKGH, k_BSKH) * head_dim**-0.5
    causal_SL = jnp.tril(jnp.ones((length, length), bool))
    weight_BKGSL = jax.nn.softmax(jnp.where(causal_SL, score_BKGSL, -jnp.inf), axis=-1)
    return jnp.einsum("bkgsl,blkh->bskgh", weight_BKGSL, v_BSKH).reshape(q_BSNH.shape)


class FeedForward(nnx.Module):
    def __init__(self, config: TransformerConfig, key: jax.Array, units: UnitIds, dtype: jnp.dtype) -> None:
        keys, shape = jax.random.split(key, 3), (config.ffn_unit, config.d_model)
        residual_std = config.init_std / (2 * config.num_layers) ** 0.5
        self.gate = nnx.Param(_draw(keys[0], units["ffn"], shape, config.init_std, dtype))
        self.up = nnx.Param(_draw(keys[1], units["ffn"], shape, config.init_std, dtype))
        self.down = nnx.Param(_draw(keys[2], units["ffn"], shape, residual_std, dtype))

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        gate_BSF = jnp.einsum("bsd,fd->bsf", x_BSD, self.gate[...])
        up_BSF = jnp.einsum("bsd,fd->bsf", x_BSD, self.up[...])
        return jnp.einsum("bsf,fd->bsd", _swiglu(gate_BSF, up_BSF), self.down[...])


@functools.partial(jax.checkpoint, prevent_cse=False)
def _swiglu(gate_BSF: jax.Array, up_BSF: jax.Array) -> jax.Array:
    """Computed again in the backward pass, which would otherwise keep three more arrays [B, S, F]."""
    wide = at_least_float32(gate_BSF.dtype)
    return (jax.nn.silu(gate_BSF.astype(wide)) * up_BSF.astype(wide)).astype(gate_BSF.dtype)


class Layer(nnx.Module):
    def __init__(self, config: TransformerConfig, turn: int, key: jax.Array, units: UnitIds, dtype: jnp.dtype) -> None:
        attention_key, ffn_key = jax.random.split(key)
        self.attention_norm = RMSNorm(config, dtype)
        self.attention = Attention(config, turn, attention_key, units, dtype)
        self.ffn_norm = RMSNorm(config, dtype)
        self.ffn = FeedForward(config, ffn_key, units, dtype)

    def __call__(self, x_BSD: jax.Array, tp: TensorParallel) -> jax.Array:
        x_BSD = x_BSD + tp.exit(self.attention(tp.enter(self.attention_norm(x_BSD)), tp))
        return x_BSD + tp.exit(self.ffn(tp.enter(self.ffn_norm(x_BSD))))


class Turn(nnx.Module):
    """One layer after the other, until all numbers of KV heads had their turn: what the stack repeats."""

    def __init__(self, config: TransformerConfig, key: jax.Array, units: UnitIds, dtype: jnp.dtype) -> None:
        keys = jax.random.split(key, len(config.kv_heads_in_turn))
        self.turn = nnx.List([Layer(config, turn, keys[turn], units, dtype) for turn in range(len(keys))])

    def __call__(self, x_BSD: jax.Array, tp: TensorParallel) -> jax.Array:
        for layer in self.turn:
            x_BSD = layer(x_BSD, tp)
        return x_BSD


class Ends(nnx.Module):
    """The two ends of the model: embedding and loss. They share the embedding when it is tied."""

    def __init__(self, config: TransformerConfig, key: jax.Array, units: UnitIds, dtype: jnp.dtype) -> None:
        embedding_key, head_key = jax.random.split(key)
        shape = (1, config.d_model)
        self.embedding = nnx.Param(_draw(embedding_key, units["vocab"], shape, config.init_std, dtype))
        self.final_norm = RMSNorm(config, dtype)
        if not config.tie_embeddings:
            self.head = nnx.Param(_draw(head_key, units["vocab"], shape, config.init_std, dtype))
        self.config = config

    def embed(self, tokens_BS: jax.Array, tp: TensorParallel) -> jax.Array:
        """Embeddings [B, S, D]; each rank contributes the rows that it holds."""
        slots = self.embedding.shape[0]
        slot_of_token = jnp.full(self.config.vocab_size, slots, jnp.int32)
        # Padding has id -1, which must not be taken for the last token.
        slot_of_token = slot_of_token.at[tp.unit_ids("vocab")].set(
            jnp.arange(slots, dtype=jnp.int32), mode="drop", wrap_negative_indices=False
        )
        # A row's gradient is a sum over all places where its token stands: not one of 16-bit numbers.
        wide_VD = jnp.asarray(self.embedding[...], at_least_float32(self.embedding.dtype))
        x_BSD = wide_VD.at[slot_of_token[tokens_BS]].get(mode="fill", fill_value=0)
        return tp.exit(x_BSD.astype(self.embedding.dtype))

    def loss(self, x_BSD: jax.Array, targets_BS: jax.Array, tp: TensorParallel) -> jax.Array:
        """Cross-entropy [B, S] in nats."""
        head_VD = self.embedding[...] if self.config.tie_embeddings else self.head[...]
        hidden_TD = tp.enter(self.final_norm(x_BSD)).reshape(-1, x_BSD.shape[-1])
        losses_T = cross_entropy(hidden_TD, targets_BS.reshape(-1), head_VD, tp, chunk=self.config.loss_chunk)
        return losses_T.reshape(targets_BS.shape)


class Transformer(nnx.Module):
    """The whole model, or one rank's shard of it: `ends` and a stack of `layers`.

    Parameters of `layers` are [repeats, ...]: one for each layer, or for each turn of layers with unequal KV heads.

    Args:
      config: the logical sizes.
      key: the random key; the same key gives the same values whatever `units` says.
      units: the units to hold, for each family; all of them by default.
      dtype: of the parameters.
    """

    def __init__(
        self, config: TransformerConfig, key: jax.Array, units: UnitIds | None = None, dtype: jnp.dtype = jnp.float32
    ) -> None:
        units = units or {family: jnp.arange(num, dtype=jnp.int32) for family, num in config.num_units.items()}
        ends_key, layers_key = jax.random.split(key)
        self.ends = Ends(config, ends_key, units, dtype)
        repeats = config.num_layers // len(config.kv_heads_in_turn)
        self.layers = nnx.vmap(lambda key: Turn(config, key, units, dtype))(jax.random.split(layers_key, repeats))


@dataclass(frozen=True)
class TransformerFunctions:
    """The transformer as pure functions of its parameters, the form that a training step takes.

    `params` is a dict with `ends` and `layers`; every leaf of `layers` is stacked over layers.

    Attributes:
      config: the logical sizes.
      dtype: of the parameters that `init` draws. The other functions compute in the type of those they are given.
    """

    config: TransformerConfig
    dtype: jnp.dtype = jnp.float32

    def init(self, key: jax.Array, units: UnitIds | None = None) -> dict:
        return nnx.to_pure_dict(nnx.split(Transformer(self.config, key, units, self.dtype))[1])

    def embed(self, ends: dict, batch: Batch, tp: TensorParallel) -> jax.Array:
        return nnx.merge(self._graphs["ends"], ends).embed(batch["tokens"][:, :-1], tp)

    def layer(self, layer: dict, x_BSD: jax.Array, tp: TensorParallel) -> jax.Array:
        return nnx.merge(self._graphs["layers"], layer)(x_BSD, tp)

    def loss(self, ends: dict, x_BSD: jax.Array, batch: Batch, tp: TensorParallel) -> tuple[jax.Array, jax.Array]:
        """Sum of the weighted losses, and the sum of the weights."""
        loss_BS = nnx.merge(self._graphs["ends"], ends).loss(x_BSD, batch["tokens"][:, 1:], tp)
        weights_BS = batch["weights"].astype(jnp.result_type(loss_BS, batch["weights"]))
        return jnp.sum(loss_BS * weights_BS), jnp.sum(weights_BS)

    @functools.cached_property
    def _graphs(self) -> dict[str, nnx.GraphDef]:
        model = nnx.eval_shape(lambda: Transformer(self.config, jax.random.key(0), dtype=self.dtype))
        return {"ends": nnx.split(model.ends)[0], "layers": nnx.split(model.layers)[0]}

    @property
    def rules(self) -> dict[str, tuple[str, int, int] | tuple[str, int, int, str]]:
        """How each sharded parameter is cut: path to (unit family, dimension that carries the units, a unit's size).

        A fourth entry names the family whose units need copies of this one's. What is not listed is replicated.
        """
        ffn = ("ffn", 1, self.config.ffn_unit)
        rules: dict[str, tuple[str, int, int] | tuple[str, int, int, str]] = {
            f"layers.turn.*.ffn.{name}": ffn for name in ("gate", "up", "down")
        }
        for turn in range(len(self.config.kv_heads_in_turn)):
            heads, kv = self.config.attention_families(turn)
            rules |= {f"layers.turn.{turn}.attention.{name}": (heads, 1, 1) for name in ("q", "out")}
            rules |= {f"layers.turn.{turn}.attention.{name}": (kv, 1, 1, heads) for name in ("k", "v")}
        rules["ends.embedding"] = ("vocab", 0, 1)
        if not self.config.tie_embeddings:
            rules["ends.head"] = ("vocab", 0, 1)
        return rules
