"""What a model asks of the tensor-parallel group that it is a shard of. It knows nothing of ntpjax."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp


class TensorParallel(Protocol):
    """What a model asks of the tensor-parallel group that it is a shard of."""

    def enter(self, x: jax.Array) -> jax.Array:
        """`x` unchanged; its gradient is summed over the group. Stands before the first use of sharded weights."""
        ...

    def exit(self, x: jax.Array) -> jax.Array:
        """`x` summed over the group; its gradient is unchanged. Stands after the last use of sharded weights."""
        ...

    def max(self, x: jax.Array) -> jax.Array:
        """The largest `x` over the group; has no gradient."""
        ...

    def unit_ids(self, family: str) -> jax.Array:
        """Ids of the units in this rank's slots, [U] int32, -1 for a padding slot."""
        ...

    def copy_slots(self, family: str) -> jax.Array | None:
        """For each local query head the slot of its KV head, [N] int32, out of range for padding.

        None if local KV head `k` serves the `k`-th run of equally many query heads, as on one device.
        """
        ...


@dataclass(frozen=True)
class OneDevice:
    """The TP group of one rank, which holds every unit: no collectives."""

    num_units: Mapping[str, int]

    def enter(self, x: jax.Array) -> jax.Array:
        return x

    def exit(self, x: jax.Array) -> jax.Array:
        return x

    def max(self, x: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(x)

    def unit_ids(self, family: str) -> jax.Array:
        return jnp.arange(self.num_units[family], dtype=jnp.int32)

    def copy_slots(self, family: str) -> None:
        return None
