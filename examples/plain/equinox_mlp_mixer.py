"""An MLP-Mixer in Equinox: it learns which pixel of the patches is brightest on average."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

PATCHES, PIXELS, WIDTH, NUM_LAYERS, CLASSES, ROWS, NUM_STEPS = 6, 12, 16, 2, 4, 64, 20
PATCH_HIDDEN, CHANNEL_HIDDEN = 14, 45


class Mlp(eqx.Module):
    """Two linear maps with a GELU between them."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, hidden: int, key: jax.Array) -> None:
        up_key, down_key = jax.random.split(key)
        self.up = eqx.nn.Linear(width, hidden, key=up_key)
        self.down = eqx.nn.Linear(hidden, width, key=down_key)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


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

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + jax.vmap(self.patch_mlp, in_axes=1, out_axes=1)(jax.vmap(self.patch_norm)(x))
        return x + jax.vmap(self.channel_mlp)(jax.vmap(self.channel_norm)(x))


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

    def __call__(self, image: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, layer: (layer(x), None), self.start(image), self.layers)
        return self.logits(x)


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


def mean_loss(model: Mixer, batch: dict[str, jax.Array]) -> jax.Array:
    """The loss of a batch."""
    return jnp.mean(image_losses(jax.vmap(model)(batch["images"]), batch))


def train(model: Any) -> tuple[Any, list[float]]:
    """The model after the last step, and the loss of every step."""
    optimizer = optax.sgd(0.1, momentum=0.9)

    @jax.jit
    def train_step(model: Any, opt_state: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(mean_loss)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, model)
        return optax.apply_updates(model, updates), opt_state, loss

    opt_state, losses = optimizer.init(model), []
    for step in range(NUM_STEPS):
        model, opt_state, loss = train_step(model, opt_state, make_batch(step))
        losses.append(float(loss))
        print(f"step {step:2}  loss {losses[-1]:.4f}")
    return model, losses


if __name__ == "__main__":
    train(init_params())
