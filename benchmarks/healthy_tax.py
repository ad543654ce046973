"""What a training step costs while all replicas are healthy, against GSPMD: `python benchmarks/healthy_tax.py`.

Two replicas of TP 4 on 8 emulated CPU devices, in float32. Ours are the programs that training runs, `grad_step` and
`apply_step`. The other side is the same model as an ordinary program of one `jax.jit` over a (replica, tp) mesh, for
which the compiler chooses the collectives: parameters and moments cut like ours, the same rematerialization, clipping
and AdamW, parameters and moments donated. Both start from the same parameters and see the same batch, and their losses
must agree. Neither side's batch is sent again in every step.

Rounds of some steps alternate between the sides; `healthy_tax` is the median over rounds of the ratio of their times.
As in training, ours waits for the sums of each step before it applies them; GSPMD waits at the end of a round only.

`memory_ratio` compares bytes on a device: of each program its arguments, outputs and temporaries, what is both argument
and output once, plus what else is held meanwhile. What counts is the most over the programs of a step.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parent.parent))

from models.tensor_parallel import OneDevice
from models.transformer import Batch, TransformerConfig, TransformerFunctions
from ntpjax.backward import StepOptions
from ntpjax.job import row_shapes
from ntpjax.layout import REPLICATED
from ntpjax.mesh import emulate_cpu_devices
from ntpjax.optimizer import adamw, warmup_cosine
from ntpjax.partition import Partition, partition_tree
from ntpjax.topology import Topology
from ntpjax.training import Training, deal_rows

PyTree = Any
State = dict[str, PyTree]

DEGREES = (4, 4)
CLIP_NORM = 1.0  # below the norm of the first gradients: clipping is on
NUM_COMPARED = 3
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Sizes:
    """How much is computed: a model, rows of `seq_len` tokens for each replica, and how often it is timed."""

    d_model: int
    num_layers: int
    num_heads: int
    vocab_size: int
    seq_len: int
    num_rows: int
    num_rounds: int
    steps_in_round: int

    @property
    def config(self) -> TransformerConfig:
        return TransformerConfig(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.d_model // self.num_heads,
            ffn_dim=4 * self.d_model,
            ffn_unit=self.d_model // 4,
            # Chunks of tokens would be cut across replicas, which only a program that knows of both can do.
            loss_chunk=None,
        )


FULL = Sizes(512, 4, 8, 2048, seq_len=256, num_rows=1, num_rounds=15, steps_in_round=2)
TINY = Sizes(32, 2, 4, 64, seq_len=8, num_rows=2, num_rounds=3, steps_in_round=2)


@dataclass(frozen=True)
class Memory:
    """Bytes on a device while one program runs; `beside` is held though the program does not take it."""

    arguments: int
    outputs: int
    temporaries: int
    aliases: int
    beside: int

    @classmethod
    def of(cls, compiled: jax.stages.Compiled, beside: PyTree = ()) -> "Memory":
        stats = compiled.memory_analysis()
        assert stats is not None
        arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
        return cls(arguments, outputs, stats.temp_size_in_bytes, stats.alias_size_in_bytes, _bytes_on_device(beside))

    @property
    def total(self) -> int:
        return self.arguments + self.outputs + self.temporaries - self.aliases + self.beside


@dataclass(frozen=True)
class Side:
    """One way to train: the first state, `step` (state to the next state and the mean loss), memory of the programs."""

    name: str
    state: State
    step: Callable[[State], tuple[State, jax.Array]]
    memory: dict[str, Memory]


def _bytes_on_device(tree: PyTree) -> int:
    shapes = ((leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree))
    return sum(int(np.prod(shape)) * itemsize for shape, itemsize in shapes)


def training_of(config: TransformerConfig) -> Training:
    model = TransformerFunctions(config)
    params = jax.eval_shape(model.init, jax.random.key(0))
    partitions = partition_tree(params, model.rules, max(DEGREES))
    schedule = warmup_cosine(learning_rate=1e-3, warmup_steps=0, num_steps=1000, final_fraction=0.1)
    optimizer = adamw(schedule, partitions, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    options = StepOptions(remat="full")
    return Training.of(model, params, partitions, optimizer, options=options, clip_norm=CLIP_NORM)


def random_batch(sizes: Sizes) -> dict[str, np.ndarray]:
    """The global batch: the same number of rows for each replica."""
    num_rows = len(DEGREES) * sizes.num_rows
    shape = (num_rows, sizes.seq_len + 1)
    tokens = np.random.default_rng(0).integers(sizes.vocab_size, size=shape, dtype=np.int32)
    return {"tokens": tokens, "weights": np.ones((num_rows, sizes.seq_len), np.float32)}


def ours(training: Training, params: PyTree, batch: dict[str, np.ndarray]) -> Side:
    """The programs of `ntpjax`, run as its trainer runs them."""
    num_rows = (len(batch["tokens"]) // len(DEGREES),) * len(DEGREES)
    generation = training.on(Topology.of_degrees(DEGREES))
    generation = generation.compiled(row_shapes(batch["weights"].shape[1]), num_rows)
    state, placed = generation.start(params), generation.batch(deal_rows(batch, num_rows))

    def step(state: State) -> tuple[State, jax.Array]:
        grads, sums = generation.grad_step(state["params"], placed)
        jax.block_until_ready(sums)
        params, opt_state = generation.apply_step(state["params"], state["opt_state"], grads, sums)
        return {"params": params, "opt_state": opt_state}, sums.loss / sums.weight

    memory = {
        "grad_step": Memory.of(generation.grad_step, beside=state["opt_state"]),
        "apply_step": Memory.of(generation.apply_step, beside=placed),
    }
    return Side("ours", state, step, memory)


def gspmd(training: Training, params: PyTree, batch: dict[str, np.ndarray]) -> Side:
    """The same model as one program without a word on collectives."""
    mesh = Mesh(np.array(training.devices).reshape(len(DEGREES), max(DEGREES)), ("replica", "tp"))

    def sharding(part: Partition) -> NamedSharding:
        cut = () if part.family == REPLICATED else (*(None,) * part.dim, "tp")
        return NamedSharding(mesh, PartitionSpec(*cut))

    shardings = jax.tree.map(sharding, training.partitions)
    params = jax.device_put(params, shardings["params"])
    opt_state = jax.jit(training.optimizer.init, out_shardings=shardings["opt_state"])(params)
    state = {"params": params, "opt_state": opt_state}
    placed = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("replica")))
    program = jax.jit(
        lambda state, batch: gspmd_step(training, state, batch),
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=0,
    )
    compiled = program.lower(state, placed).compile()
    return Side("GSPMD", state, lambda state: compiled(state, placed), {"step": Memory.of(compiled)})


def gspmd_step(training: Training, state: State, batch: Batch) -> tuple[State, jax.Array]:
    """The next state and the mean loss, with arrays as on one device."""
    model = training.model
    assert isinstance(model, TransformerFunctions) and training.clip_norm is not None
    tp = OneDevice(model.config.num_units)
    layer = jax.checkpoint(lambda x, weights: (model.layer(weights, x, tp), None), prevent_cse=False)

    def loss_sum(params: PyTree) -> tuple[jax.Array, jax.Array]:
        x, _ = lax.scan(layer, model.embed(params["ends"], batch, tp), params["layers"])
        return model.loss(params["ends"], x, batch, tp)

    (loss, weight), grads = jax.value_and_grad(loss_sum, has_aux=True)(state["params"])
    scale = jnp.minimum(1, training.clip_norm / (optax.tree.norm(grads) / weight)) / weight
    grads = jax.tree.map(lambda grad: grad * scale, grads)
    updates, opt_state = training.optimizer.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss / weight


def first_losses(side: Side) -> tuple[State, list[float]]:
    """The state after the first steps, and their losses, which are printed."""
    state, losses = side.state, []
    for _ in range(NUM_COMPARED):
        state, loss = side.step(state)
        losses.append(float(loss))
    print(f"losses of {side.name}: {' '.join(f'{loss:.6f}' for loss in losses)}", flush=True)
    return state, losses


def require_equal(losses: Sequence[float], expected: Sequence[float]) -> None:
    """Raises SystemExit if losses differ by more than `LOSS_TOLERANCE`, relatively."""
    difference = float(np.max(np.abs(np.subtract(losses, expected)) / np.abs(expected)))
    print(f"worst relative difference of the losses {difference:.1e}", flush=True)
    # Not `>`, which a NaN passes.
    if not difference <= LOSS_TOLERANCE:
        raise SystemExit(f"the losses differ by {difference:.1e}, relatively; at most {LOSS_TOLERANCE:.0e} is allowed")


def memory_ratio(sides: tuple[Side, Side]) -> float:
    """Most bytes on a device in a step of ours over those in one of GSPMD; the parts are printed."""
    for side in sides:
        for name, memory in side.memory.items():
            parts = " ".join(f"{part} {num_bytes / 1e6:.2f}" for part, num_bytes in asdict(memory).items())
            print(f"{side.name} {name}, MB a device: {parts} total {memory.total / 1e6:.2f}", flush=True)
    mine, theirs = (max(memory.total for memory in side.memory.values()) for side in sides)
    return mine / theirs


def time_ratio(sides: tuple[Side, Side], states: Sequence[State], sizes: Sizes) -> float:
    """The median over rounds of the time of ours over that of GSPMD; each round is printed."""
    states, ratios = list(states), []
    for turn in range(sizes.num_rounds):
        step_times_s, cpu_times_s = [0.0, 0.0], [0.0, 0.0]
        # Who is first changes, in case the machine is getting faster or slower.
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            start_s, cpu_start_s = time.perf_counter(), time.process_time()
            for _ in range(sizes.steps_in_round):
                states[which], _ = sides[which].step(states[which])
            jax.block_until_ready(states[which])
            step_times_s[which] = (time.perf_counter() - start_s) / sizes.steps_in_round
            cpu_times_s[which] = (time.process_time() - cpu_start_s) / sizes.steps_in_round
        ratios.append(step_times_s[0] / step_times_s[1])
        columns = zip(sides, step_times_s, cpu_times_s, strict=True)
        times = ", ".join(f"{side.name} {s:.3f} s ({cpu_s:.3f} s of all cores)" for side, s, cpu_s in columns)
        print(f"round {turn + 1} of {sizes.num_rounds}: {times} a step, ratio {ratios[-1]:.3f}", flush=True)
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a step costs while all replicas are healthy, against GSPMD.")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: seconds, and nothing is learned from them")
    sizes = TINY if parser.parse_args().tiny else FULL
    emulate_cpu_devices(sum(DEGREES))
    training, batch = training_of(sizes.config), random_batch(sizes)
    print(f"compiling both sides: {sizes}", flush=True)
    params = jax.jit(TransformerFunctions(sizes.config).init)(jax.random.key(1))
    sides = ours(training, params, batch), gspmd(training, params, batch)
    states, losses = zip(*map(first_losses, sides), strict=True)
    require_equal(*losses)
    memory = memory_ratio(sides)
    tax = time_ratio(sides, states, sizes)
    print(f"healthy_tax {tax:.3f} memory_ratio {memory:.3f}")


if __name__ == "__main__":
    main()
