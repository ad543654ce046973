"""What a step hides under its matmuls, for 8+7 GPUs of type H200, without a GPU: `python benchmarks/overlap.py`.

Compiles the programs that training runs for configs/llama_8b_2x8.yaml: of a healthy replica of 8 and of a reduced one
of 7, each with the least and the most rematerialization. Prints where the collectives of the backward pass stand in the
compiler's schedule; that is not a measurement of time. Needs the extra `aot`.

The last line counts over all programs: collectives of the backward loop (pre-sync, sum over replicas, post-sync) that
no matmul hides, and the fewest matmuls that one of them hides under.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parent.parent))

from ntpjax.hlo import SYNC_SCOPES, Collective, collectives, exposed, least_hidden, syncs_in_loop
from ntpjax.targets import compile_for_cuda, target_devices
from ntpjax.topology import Topology
from train import blueprint

CONFIG = Path(__file__).parent.parent / "configs" / "llama_8b_2x8.yaml"
SETTINGS = ("step.compute_dtype=bfloat16", "batch.size=2")


@dataclass(frozen=True)
class Overlap:
    """What one program hides: numbers of collectives and matmuls, and bytes summed in a step."""

    num_exposed: int
    least_hidden: int
    num_bytes: int
    num_bytes_outside: int

    @classmethod
    def of(cls, found: Sequence[Collective]) -> "Overlap":
        least = least_hidden(found)
        assert least is not None, "the backward loop has no collectives"
        ours = [one for one in found if not set(SYNC_SCOPES).isdisjoint(one.scope.split("/"))]
        num_bytes = sum(one.num_bytes * (one.executions or 1) for one in ours)
        return cls(len(exposed(found)), least, num_bytes, sum(one.num_bytes for one in ours if not one.in_loop))


def compiled_collectives(
    degrees: tuple[int, ...], own_degree: int, settings: Sequence[str], **options: object
) -> tuple[Collective, ...]:
    """The collectives of the gradient step that a process of `own_degree` runs, compiled for H200."""
    plan = blueprint(CONFIG, settings)
    assert plan.training_on is not None and plan.num_rows is not None
    training = plan.training_on(target_devices("h200", sum(degrees)))
    topology = Topology.of_degrees(degrees)
    generation = training.on(topology, topology.devices_of_degree(own_degree))
    grad_step = generation.traced(plan.row, plan.num_rows(degrees)).grad_step
    return collectives(compile_for_cuda(grad_step, **options).as_text() or "")


def main() -> None:
    parser = argparse.ArgumentParser(description="What a step hides under its matmuls.")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="change one setting")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    programs = []
    for remat in ("none", "full"):
        for own_degree in (8, 7):
            found = compiled_collectives((8, 7), own_degree, [*SETTINGS, f"step.remat={remat}", *args.set])
            program = Overlap.of(found)
            programs.append(program)
            print(f"remat {remat}, program of the TP-{own_degree} replica:")
            for one in syncs_in_loop(found):
                kind = "asynchronous" if one.asynchronous else "synchronous"
                print(
                    f"  {one.scope:26} {one.num_bytes / 1e6:8.1f} MB, {kind}, hidden under {len(one.matmuls)} matmuls"
                )
            share = program.num_bytes_outside / program.num_bytes
            outside = f"{program.num_bytes_outside / 1e9:.2f} GB of {program.num_bytes / 1e9:.2f} GB"
            print(f"  outside the loop (last layers, embedding, head): {outside}, {100 * share:.0f} %", flush=True)
    num_exposed, least = sum(p.num_exposed for p in programs), min(p.least_hidden for p in programs)
    print(f"exposed_in_loop {num_exposed} least_matmuls_hidden_under {least}")


if __name__ == "__main__":
    main()
