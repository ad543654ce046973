"""An MLP-Mixer in Equinox: it learns which pixel of the patches is brightest on average."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import ntpjax

PATCHES, PIXELS, WIDTH, NUM_LAYERS, CLASSES, ROWS, NUM_STEPS = 6, 12, 16, 2, 4, 64, 20
PATCH_HIDDEN, CHANNEL_HIDDEN = 14, 45
UP_RULES = {f"layers.{mlp}_mlp.up.*": (mlp, 1) for mlp in ("patch", "channel")}
DOWN_RULES = {f"layers.{mlp}_mlp.down.weight": (mlp, 2) for mlp in ("patch", "channel")}
EVENTS = {7: lambda now: now.lose(replica=1, rank=2), 14: lambda now: now.restore(replica=1)}


class Mlp(eqx.Module):
    """Two linear maps with a GELU between them."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, hidden: int, key: jax.Array) -> None:
        up_key, down_key = jax.random.split(key)
        self.up = eqx.nn.Linear(width, hidden, key=up_key)
        self.down = eqx.nn.Linear(hidden, width, key=down_key)

    def __call__(self, x: jax.Array, tp: ntpjax.TensorParallel) -> jax.Array:
        return tp.exit(self.down.weight @ jax.nn.gelu(self.up(tp.enter(x)))) + self.down.bias  # pyright: ignore


class Layer(eqx.Module):
    """Mixes what patches know, then what channels know: [PATCHES, WIDTH] to the same."""

    patch_norm: eqx.nn.LayerNorm
    patch_mlp: Mlp
    channel_norm: eqx.nn.LayerNorm
    channel_mlp: Mlp

    def __init__(self, key: jax.Array) -> None:
        patch_key, channel_key = jax.random.split(key)
        self.patch_norm, self.channel_norm = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.patch_mlp = Mlp(PATCHES, PATCH_HIDDEN, patch_key)
        self.channel_mlp = Mlp(WIDTH, CHANNEL_HIDDEN, channel_key)

    def __call__(self, x: jax.Array, tp: ntpjax.TensorParallel) -> jax.Array:
        x = x + jax.vmap(self.patch_mlp, in_axes=(1, None), out_axes=1)(jax.vmap(self.patch_norm)(x), tp)
        return x + jax.vmap(self.channel_mlp, in_axes=(0, None))(jax.vmap(self.channel_norm)(x), tp)


class Mixer(eqx.Module):
    """Images [PATCHES, PIXELS] to logits. The arrays of `layers` are stacked: [NUM_LAYERS, ...]."""

    embed: eqx.nn.Linear
    layers: Layer
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        self.embed = eqx.nn.Linear(PIXELS, WIDTH, key=embed_key)
        self.layers = eqx.filter_vmap(Layer)(jax.random.split(layers_key, NUM_LAYERS))
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=head_key)

    def start(self, image: jax.Array) -> jax.Array:
        return jax.vmap(self.embed)(image)

    def logits(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.mean(jax.vmap(self.norm)(x), axis=0))


def init_params() -> Any:
    """The model before the first step."""
    return Mixer(jax.random.key(0))


def make_batch(step: int) -> dict[str, jax.Array]:
    """The rows of one step."""
    images = jax.random.normal(jax.random.key(100 + step), (ROWS, PATCHES, PIXELS))
    return {"images": images, "labels": jnp.argmax(jnp.mean(images[..., :CLASSES], axis=1), axis=-1)}


def image_losses(logits: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """The cross-entropy of each image."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])


class Model:
    """The model as ntpjax takes it: what is before, in and after the layers."""

    def embed(self, ends: Any, batch: dict[str, jax.Array], tp: ntpjax.TensorParallel) -> jax.Array:
        return jax.vmap(ends.start)(batch["images"])

    def layer(self, layer: Any, x: jax.Array, tp: ntpjax.TensorParallel) -> jax.Array:
        return jax.vmap(layer, in_axes=(0, None))(x, tp)

    def loss(self, ends: Any, x: jax.Array, batch: Any, tp: ntpjax.TensorParallel) -> tuple[jax.Array, jax.Array]:
        losses = image_losses(jax.vmap(ends.logits)(x), batch)
        return jnp.sum(losses), jnp.array(losses.size, losses.dtype)


def train(model: Any) -> tuple[Any, list[float]]:
    """The model after the last step, and the loss of every step."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    params = {"ends": eqx.tree_at(lambda m: m.layers, model, ()), "layers": model.layers}
    partitions = ntpjax.partition_tree(params, UP_RULES | DOWN_RULES, nominal_tp=4)
    training = ntpjax.Training.of(Model(), params, partitions, optimizer)
    here = training.on(ntpjax.Topology.of_degrees((4, 4)))  # two replicas of four devices
    state, losses = here.start(params), []
    for step in range(NUM_STEPS):
        if step in EVENTS:
            old, here = here, training.on(EVENTS[step](here.topology))
            state, moved = here.take(state, old)
            print(f"TP {old.flat.degrees} -> {here.flat.degrees}: {moved}")
        rows = jax.tree.map(lambda array: array.reshape(2, -1, *array.shape[1:]), make_batch(step))
        state, sums = here.step(state, rows)
        losses.append(sums.mean_loss())
        print(f"step {step:2}  loss {losses[-1]:.4f}")
    params = here.gather(state)["params"]
    model = eqx.tree_at(lambda m: m.layers, params["ends"], params["layers"], is_leaf=lambda x: isinstance(x, tuple))
    return model, losses


if __name__ == "__main__":
    ntpjax.emulate_cpu_devices(8)
    train(init_params())
