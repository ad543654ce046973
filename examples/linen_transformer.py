"""A small language model in Flax Linen: it learns to count in strides."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import ntpjax

VOCAB, WIDTH, NUM_LAYERS, SEQ_LEN, ROWS, NUM_STEPS = 16, 24, 2, 8, 32, 20
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN = 6, 2, 4, 46
ATTENTION = {"layers.q.*": ("heads", 2), "layers.[kv].*": ("kv", 2, 1, "heads"), "layers.out.*": ("heads", 1)}
RULES = ATTENTION | {"layers.up.*": ("columns", 2), "layers.down.*": ("columns", 1)}
EVENTS = {7: lambda now: now.lose(replica=1, rank=2), 14: lambda now: now.restore(replica=1)}

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

    def attention(self, x: jax.Array, kv_slots: jax.Array | None = None) -> jax.Array:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if kv_slots is None:
            kv_slots = jnp.arange(self.num_heads) // (self.num_heads // self.num_kv_heads)
        k, v = (jnp.take(heads, kv_slots, axis=2, mode="fill", fill_value=0) for heads in (k, v))
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


class Model:
    """The model as ntpjax takes it: what is before, in and after the layers."""

    def embed(self, ends: Params, tokens: jax.Array, tp: ntpjax.TensorParallel) -> Any:
        return LanguageModel().apply({"params": ends}, tokens[:, :-1], method="embed")

    def layer(self, layer: Params, x: jax.Array, tp: ntpjax.TensorParallel) -> jax.Array:
        widths = (layer[name]["kernel"].shape[1] for name in ("q", "k", "up"))  # of this rank
        local = Layer(*widths).bind({"params": layer})
        x = x + tp.exit(local.attention(tp.enter(local.attention_norm(x)), tp.copy_slots("kv")))
        return x + tp.exit(local.ffn(tp.enter(local.ffn_norm(x))))

    def loss(self, ends: Params, x: jax.Array, tokens: jax.Array, tp: ntpjax.TensorParallel) -> tuple[Any, Any]:
        losses = token_losses(LanguageModel().apply({"params": ends}, x, method="logits"), tokens)
        return jnp.sum(losses), jnp.array(losses.size, losses.dtype)


def train(params: Params) -> tuple[Params, list[float]]:
    """The parameters after the last step, and the loss of every step."""
    optimizer = optax.adamw(1e-2)
    params = {"ends": {name: params[name] for name in params if name != "layers"}, "layers": params["layers"]}
    partitions = ntpjax.partition_tree(params, RULES, nominal_tp=4)
    training = ntpjax.Training.of(Model(), params, partitions, optimizer)
    here = training.on(ntpjax.Topology.of_degrees((4, 4)))  # two replicas of four devices
    state, losses = here.start(params), []
    for step in range(NUM_STEPS):
        if step in EVENTS:
            old, here = here, training.on(EVENTS[step](here.topology))
            state, moved = here.take(state, old)
            print(f"TP {old.flat.degrees} -> {here.flat.degrees}: {moved}")
        state, sums = here.step(state, make_batch(step).reshape(2, -1, SEQ_LEN + 1))  # half the rows for each replica
        losses.append(sums.mean_loss())
        print(f"step {step:2}  loss {losses[-1]:.4f}")
    params = here.gather(state)["params"]
    return params["ends"] | {"layers": params["layers"]}, losses


if __name__ == "__main__":
    ntpjax.emulate_cpu_devices(8)
    train(init_params())
