"""A small language model in Flax Linen: it learns to count in strides."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

VOCAB, WIDTH, NUM_LAYERS, SEQ_LEN, ROWS, NUM_STEPS = 16, 24, 2, 8, 32, 20
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN = 6, 2, 4, 46

Params = Any  # dicts of arrays


class Layer(nn.Module):
    """Attention, in which several query heads share a KV head, and a feed-forward block."""

    num_heads: int = NUM_HEADS
    num_kv_heads: int = NUM_KV_HEADS
    hidden: int = HIDDEN

    def setup(self) -> None:
        self.attention_norm, self.ffn_norm = nn.RMSNorm(), nn.RMSNorm()
        self.q = nn.DenseGeneral((self.num_heads, HEAD_DIM), use_bias=False)
        self.k = nn.DenseGeneral((self.num_kv_heads, HEAD_DIM), use_bias=False)
        self.v = nn.DenseGeneral((self.num_kv_heads, HEAD_DIM), use_bias=False)
        self.out = nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False)
        self.up = nn.Dense(self.hidden, use_bias=False)
        self.down = nn.Dense(WIDTH, use_bias=False)

    def attention(self, x: jax.Array) -> jax.Array:
        q, k, v = self.q(x), self.k(x), self.v(x)
        k, v = (jnp.repeat(heads, self.num_heads // self.num_kv_heads, axis=2) for heads in (k, v))
        return self.out(nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(x[..., 0])))

    def ffn(self, x: jax.Array) -> jax.Array:
        return self.down(nn.gelu(self.up(x)))

    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x)), None


class LanguageModel(nn.Module):
    """Tokens to logits. The parameters of `layers` are stacked: [NUM_LAYERS, ...]."""

    def setup(self) -> None:
        stacked = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=NUM_LAYERS)
        self.tokens, self.positions = nn.Embed(VOCAB, WIDTH), nn.Embed(SEQ_LEN, WIDTH)
        self.layers = stacked()
        self.norm, self.head = nn.RMSNorm(), nn.Dense(VOCAB)

    def embed(self, tokens: jax.Array) -> jax.Array:
        return self.tokens(tokens) + self.positions(jnp.arange(SEQ_LEN))

    def logits(self, x: jax.Array) -> jax.Array:
        return self.head(self.norm(x))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.logits(self.layers(self.embed(tokens), None)[0])


def init_params() -> Params:
    """The parameters before the first step."""
    return LanguageModel().init(jax.random.key(0), make_batch(0)[:, :-1])["params"]


def make_batch(step: int) -> jax.Array:
    """The rows of one step, tokens [ROWS, SEQ_LEN + 1]: each counts from some number in some stride."""
    starts, strides = jax.random.randint(jax.random.key(step), (2, ROWS, 1), 0, VOCAB)
    return (starts + (1 + strides % 3) * jnp.arange(SEQ_LEN + 1)) % VOCAB


def token_losses(logits: Any, tokens: jax.Array) -> jax.Array:
    """The cross-entropy of each token but the first."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def mean_loss(params: Params, tokens: jax.Array) -> jax.Array:
    """The loss of a batch."""
    return jnp.mean(token_losses(LanguageModel().apply({"params": params}, tokens[:, :-1]), tokens))


def train(params: Params) -> tuple[Params, list[float]]:
    """The parameters after the last step, and the loss of every step."""
    optimizer = optax.adamw(1e-2)

    @jax.jit
    def train_step(params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(mean_loss)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = optimizer.init(params), []
    for step in range(NUM_STEPS):
        params, opt_state, loss = train_step(params, opt_state, make_batch(step))
        losses.append(float(loss))
        print(f"step {step:2}  loss {losses[-1]:.4f}")
    return params, losses


if __name__ == "__main__":
    train(init_params())
