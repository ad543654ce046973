"""Units moved on a loss, and bytes a step: `python benchmarks/traffic.py`.

First, in integers, for every pair of degrees up to 72 and several unit counts: the units that move when a replica goes
from one degree to the other, over the least that leads to the chain's next layout whichever device takes which rank (an
assignment problem). Copied KV heads are counted apart. Then, for steps compiled for uneven topologies, the bytes of
each kind of collective, read from the compiled program, beside what an all-to-all would carry.
"""

import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import optax
from scipy.optimize import linear_sum_assignment

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.parity import SEQ_LEN, Case
from models.transformer import TransformerFunctions
from ntpjax.forecast import Blueprint, forecast
from ntpjax.hlo import SYNC_SCOPES, collectives
from ntpjax.job import row_shapes
from ntpjax.layout import Copied, Family, Split
from ntpjax.mesh import emulate_cpu_devices
from ntpjax.partition import partition_tree
from ntpjax.plan import plan_change
from ntpjax.topology import Topology
from ntpjax.training import Training

MAX_DEGREE = 72
UNIT_COUNTS = (64, 129, 224)


def moved_and_least(family: Family, nominal_tp: int, degree: int, smaller: int, lost_rank: int) -> tuple[int, int]:
    """Units moved when one of two replicas of `degree` loses `degree - smaller` devices, and the least possible.

    The first device lost is `lost_rank`, the others are last ranks.
    """
    old = Topology.of_degrees((degree, degree), nominal_tp)
    new = old.lose(replica=1, rank=lost_rank)
    for _ in range(degree - smaller - 1):
        new = new.lose(replica=1, rank=len(new.replicas[1]) - 1)
    moved = len(plan_change(family, old, new).moves)
    held = dict(zip(old.replicas[1], family.compute_layout(degree).ranks, strict=True))
    survivors = [set(held[device]) for device in new.replicas[1]]
    wanted = [set(units) for units in family.compute_layout(smaller).ranks]
    kept = np.array([[len(have & want) for want in wanted] for have in survivors])
    chosen = linear_sum_assignment(kept, maximize=True)
    return moved, sum(map(len, wanted)) - int(kept[chosen].sum())


def print_moves() -> float:
    """Prints totals for each unit count, and returns the worst moved over least."""
    worst = 0.0
    for num_units in UNIT_COUNTS:
        total_moved = total_least = 0
        for degree in range(2, MAX_DEGREE + 1):
            family = Split("units", num_units, MAX_DEGREE)
            for smaller in range(1, degree):
                moved, least = moved_and_least(family, MAX_DEGREE, degree, smaller, lost_rank=degree - 1)
                total_moved, total_least = total_moved + moved, total_least + least
                worst = max(worst, moved / least if least else 1.0 if moved == 0 else float("inf"))
            moved, least = moved_and_least(family, MAX_DEGREE, degree, degree - 1, lost_rank=0)
            worst = max(worst, moved / least if least else 1.0 if moved == 0 else float("inf"))
        print(f"{num_units} units, all pairs up to {MAX_DEGREE}: moved {total_moved}, least {total_least}", flush=True)
    return worst


def print_copies() -> None:
    heads = Split("heads", 64, 8, group_size=8)
    for degree in (8, 7, 6):
        heads_moved, _ = moved_and_least(heads, 8, degree, degree - 1, lost_rank=degree - 1)
        copies, _ = moved_and_least(Copied("kv", heads), 8, degree, degree - 1, lost_rank=degree - 1)
        print(
            f"64 query heads, 8 KV heads, {degree} to {degree - 1}: {heads_moved} query heads move, {copies} KV copies"
        )


def collective_bytes(hlo: str) -> Counter[str]:
    """Bytes of the collectives of a compiled program, each counted once, by the name scope that they come from."""
    found: Counter[str] = Counter()
    for one in collectives(hlo):
        kind = next((name for name in SYNC_SCOPES if name in one.scope.split("/")), "tensor parallel")
        found[kind] += one.num_bytes
    return found


def print_step(case: Case) -> None:
    """Prints the bytes of each kind of collective in the program of one step, for a model of one layer."""
    model = TransformerFunctions(case.config.model_copy(update={"num_layers": 1}))
    params = jax.eval_shape(model.init, jax.random.key(0))
    training = Training.of(model, params, partition_tree(params, model.rules, max(case.degrees)), optax.sgd(1e-3))
    generation = training.on(Topology.of_degrees(case.degrees))
    hlo = generation.compiled(row_shapes(SEQ_LEN), (2,) * len(case.degrees)).grad_step.as_text()
    row = forecast(Blueprint(training.shapes, training.partitions, case.degrees, min(case.degrees)))[-1]
    print(f"step of TP {'|'.join(map(str, case.degrees))}, bytes of buffers: {dict(collective_bytes(hlo))}")
    print(
        f"  by the layouts: pre-sync {row.pre_sync}, post-sync {row.post_sync}; an all-to-all of the extra units would "
        f"carry {row.pre_sync.least_bytes} bytes each way"
    )


def main() -> None:
    emulate_cpu_devices(16)
    print_copies()
    for case in (Case((4, 3)), Case((8, 7), num_heads=64, num_kv_heads=8, ffn_units=56)):
        print_step(case)
    print(f"moved_over_bound {print_moves():.3f}")


if __name__ == "__main__":
    main()
