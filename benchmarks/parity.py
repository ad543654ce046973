"""Nonuniform training against one device, in float64: `python benchmarks/parity.py`.

With several processes: `python -m ntpjax.launch --processes 2 --program benchmarks/parity.py`.

For each case: the loss, every gradient, and parameters and moments after 3 AdamW steps, on every replica, are compared
with plain JAX on one device. The error of an array is max|a - b| / max|b|; what is printed is the worst over arrays,
replicas and steps.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parent.parent))

from models.one_device import train_step
from models.transformer import Batch, TransformerConfig, TransformerFunctions
from ntpjax.mesh import Device, emulate_cpu_devices
from ntpjax.move import collect
from ntpjax.optimizer import adamw, warmup_cosine
from ntpjax.partition import partition_tree
from ntpjax.processes import Place, exit_with
from ntpjax.topology import Topology
from ntpjax.training import Training, deal_rows

PyTree = Any

NUM_DEVICES = 16
SEQ_LEN = 6
BOUND = 1e-10


@dataclass(frozen=True)
class Case:
    """TP degrees, sizes, and rows of each replica (two each if not given). A healthy one has `nominal_tp` devices."""

    degrees: tuple[int, ...]
    num_heads: int = 8
    num_kv_heads: int | tuple[int, ...] = 4
    ffn_units: int = 12
    vocab_size: int = 64
    tied: bool = True
    rows: tuple[int, ...] = ()
    nominal_tp: int = 0

    @property
    def config(self) -> TransformerConfig:
        return TransformerConfig(
            vocab_size=self.vocab_size,
            d_model=16,
            num_layers=2,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=4,
            ffn_dim=4 * self.ffn_units,
            ffn_unit=4,
            tie_embeddings=self.tied,
            init_std=0.2,
        )


CASES = (
    Case((4, 4)),
    Case((4, 3), tied=False),
    Case((3, 3), nominal_tp=4),
    Case((4, 3, 2), num_heads=12, num_kv_heads=6, ffn_units=13, vocab_size=67),
    Case((5,), num_heads=12, num_kv_heads=12),
    Case((7, 5), num_heads=12, num_kv_heads=12, vocab_size=101, tied=False),
    Case((7,), num_heads=7, num_kv_heads=7, vocab_size=257),
    Case((3,), vocab_size=257, num_heads=9, num_kv_heads=3),
    Case((2, 1), vocab_size=257, tied=False),
    Case((8, 7), num_heads=28, num_kv_heads=14, ffn_units=17),
    Case((4, 3), rows=(8, 7)),
    Case((4, 4), rows=(8, 0), tied=False),
    Case((3, 4), rows=(0, 5)),
    Case((4, 2), num_heads=2, num_kv_heads=2, ffn_units=3),
    Case((5, 4), num_heads=5, num_kv_heads=5, ffn_units=5, vocab_size=19),
    Case((8, 2), num_heads=32, num_kv_heads=8, ffn_units=31, vocab_size=255),
    # Fewer KV heads than ranks, and KV heads cut apart: copies.
    Case((3,), num_heads=8, num_kv_heads=2),
    Case((4, 3), num_heads=8, num_kv_heads=1),
    Case((8, 7), num_heads=64, num_kv_heads=8, tied=False),
    Case((8, 7), num_heads=8, num_kv_heads=4),
    Case((7,), num_heads=28, num_kv_heads=4, nominal_tp=8),
    Case((5,), num_heads=8, num_kv_heads=(8, 4), tied=False),
    Case((5, 3), num_heads=12, num_kv_heads=(4, 1), rows=(3, 1)),
)


def relative_error(found: PyTree, expected: PyTree) -> float:
    """The worst max|a - b| / max|b| over the arrays of two trees; an array of zeros counts absolutely."""

    def of_array(a: Any, b: Any) -> float:
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape, (a.shape, b.shape)
        return float(np.max(np.abs(a - b)) / (np.max(np.abs(b)) or 1.0))

    # Not `max`, which passes over a NaN.
    return float(np.max(jax.tree.leaves(jax.tree.map(of_array, found, expected))))


def random_batch(config: TransformerConfig, num_rows: int, seed: int) -> Batch:
    tokens = np.random.default_rng(seed).integers(config.vocab_size, size=(num_rows, SEQ_LEN + 1), dtype=np.int32)
    return {"tokens": jnp.asarray(tokens), "weights": jnp.ones((num_rows, SEQ_LEN))}


def devices_for(case: Case) -> list[Device]:
    """Devices such that replica `r` lies in process `r`, modulo the number of processes."""
    pools = [[d for d in jax.devices() if d.process_index == index] for index in range(jax.process_count())]
    return [pools[replica % len(pools)].pop(0) for replica, degree in enumerate(case.degrees) for _ in range(degree)]


def errors(case: Case, num_steps: int = 3) -> Iterator[float]:
    """The worst errors of each step's loss and gradients, then of the parameters and of the moments at the end.

    Of several processes all take part, and the one that leads yields the errors.
    """
    model = TransformerFunctions(case.config, jnp.float64)
    params = jax.jit(model.init)(jax.random.key(1))
    nominal_tp = case.nominal_tp or max(case.degrees)
    partitions = partition_tree(params, model.rules, nominal_tp)
    schedule = warmup_cosine(learning_rate=1e-3, warmup_steps=2, num_steps=10, final_fraction=0.1)
    optimizer = adamw(schedule, partitions, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    clip_norm = 0.1  # below the norm of random gradients: clipping is on
    training = Training.of(model, params, partitions, optimizer, clip_norm=clip_norm, devices=devices_for(case))
    here = training.on(Topology.of_degrees(case.degrees, nominal_tp))
    if not here.flat.own_positions:
        return
    state, opt_state = here.draw(model.init, jax.random.key(1)), optimizer.init(params)
    rows = case.rows or (2,) * len(case.degrees)

    def on_each_replica(tree: PyTree, parts: PyTree, expected: PyTree) -> float:
        found = [collect(tree, parts, here.flat, group, keep=here.is_leader) for group in here.flat.tp_groups]
        return float(np.max([relative_error(logical, expected) for logical in found])) if here.is_leader else 0.0

    for step in range(num_steps):
        batch = random_batch(case.config, sum(rows), seed=step)
        reference = train_step(model, optimizer, clip_norm, params, opt_state, batch)
        grads, sums = here.grad_step(state["params"], here.batch(deal_rows(batch, rows), rows))
        yield relative_error(sums.loss, reference.loss)
        yield relative_error(sums.squared_norm, optax.tree.norm(reference.grads) ** 2)
        yield on_each_replica(grads, partitions, reference.grads)
        after = here.apply_step(state["params"], state["opt_state"], grads, sums)
        state = dict(zip(("params", "opt_state"), after, strict=True))
        params, opt_state = reference.params, reference.opt_state
    yield on_each_replica(state["params"], partitions, params)
    yield on_each_replica(state["opt_state"], training.partitions["opt_state"], opt_state)


def main() -> int:
    place = Place.from_environment()
    emulate_cpu_devices(NUM_DEVICES // place.count)
    processes = place.join()
    jax.config.update("jax_enable_x64", True)
    worst = 0.0
    for case in CASES:
        error = float(np.max(list(errors(case)), initial=0.0))
        worst = float(np.maximum(worst, error))
        if processes.index == 0:
            print(f"{error:.2e}  {case}", flush=True)
    if processes.index == 0:
        print(f"worst_relative_error {worst:.2e} cases {len(CASES)}")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    exit_with(main)
