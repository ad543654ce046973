"""What a healthy replica pays when another one is reduced: `python benchmarks/reduced_tax.py`.

Read from its compiled programs: the one in a job where the other replica has lost a device, over the one where all are
healthy. Compared are FLOPs of the matmuls, bytes of collectives, temporary memory, and that of the state.
For 4 with 3 devices they are compiled for the CPU, for 8 with 7 for the H200, without one (needs the extra `aot`). The
units divide by both degrees, so that nothing is due to an uneven share. The last line has the worst of both.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from models.transformer import TransformerConfig, TransformerFunctions
from ntpjax.backward import StepOptions
from ntpjax.hlo import collectives, matmul_flops
from ntpjax.job import row_shapes
from ntpjax.mesh import Device, emulate_cpu_devices
from ntpjax.optimizer import adamw, warmup_cosine
from ntpjax.partition import partition_tree
from ntpjax.targets import compile_for_cuda, target_devices
from ntpjax.topology import Topology
from ntpjax.training import Training


@dataclass(frozen=True)
class Cost:
    """Of one step on one device: FLOPs, and bytes."""

    matmul_flops: int
    collectives: int
    temporaries: int
    state: int


def training_of(nominal_tp: int, devices: list[Device], *, scale: int) -> Training:
    """A model whose units divide by `nominal_tp` and by one less."""
    units = nominal_tp * (nominal_tp - 1)
    config = TransformerConfig(
        vocab_size=16 * units,
        d_model=32 * scale,
        num_layers=4,
        num_heads=units,
        num_kv_heads=units,
        head_dim=max(scale, 2),
        ffn_dim=4 * scale * units,
        ffn_unit=4 * scale,
    )
    model = TransformerFunctions(config)
    params = jax.eval_shape(model.init, jax.random.key(0))
    partitions = partition_tree(params, model.rules, nominal_tp)
    schedule = warmup_cosine(learning_rate=1e-3, warmup_steps=0, num_steps=10, final_fraction=0.1)
    optimizer = adamw(schedule, partitions, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    return Training.of(model, params, partitions, optimizer, options=StepOptions(remat="full"), devices=devices)


def cost(training: Training, degrees: tuple[int, ...], seq_len: int) -> Cost:
    """The cost of the program of a healthy replica in a job with these degrees; the other replica has no fewer rows."""
    topology = Topology.of_degrees(degrees)
    generation = training.on(topology, topology.devices_of_degree(topology.nominal_tp))
    traced = generation.traced(row_shapes(seq_len), (2,) * len(degrees)).grad_step
    on_cpu = training.devices[0].platform == "cpu"
    compiled = traced.lower().compile() if on_cpu else compile_for_cuda(traced)
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    assert memory is not None
    slots = jax.tree.map(generation.resting, training.shapes, training.partitions)
    state = sum(int(np.prod(leaf.shape[1:])) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(slots))
    bytes_summed = sum(one.num_bytes * (one.executions or 1) for one in collectives(text))
    return Cost(matmul_flops(text), bytes_summed, memory.temp_size_in_bytes, state)


def main() -> None:
    emulate_cpu_devices(8)
    worst = {"matmul_flops": 0.0, "state": 0.0}
    cases = (("CPU", 4, jax.devices(), 2, 32), ("H200", 8, target_devices("h200", 16), 32, 1024))
    for name, nominal_tp, devices, scale, seq_len in cases:
        training = training_of(nominal_tp, list(devices), scale=scale)
        healthy = cost(training, (nominal_tp, nominal_tp), seq_len)
        beside_reduced = cost(training, (nominal_tp, nominal_tp - 1), seq_len)
        print(f"{name}, a replica of {nominal_tp} beside one of {nominal_tp - 1}, over beside one of {nominal_tp}:")
        for what in ("matmul_flops", "collectives", "temporaries", "state"):
            before, after = getattr(healthy, what), getattr(beside_reduced, what)
            print(f"  {what:14} {after:>16,} / {before:>16,} = {after / before:.4f}", flush=True)
            if what in worst:
                worst[what] = max(worst[what], after / before)
    print(f"matmul_flops_ratio {worst['matmul_flops']:.2f} state_memory_ratio {worst['state']:.2f}")


if __name__ == "__main__":
    main()
