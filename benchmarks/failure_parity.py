"""A run with losses and returns against the same run without, in float64: `python benchmarks/failure_parity.py`.

Trains a configuration (by default the demo's) twice for 60 steps: undisturbed, and with three losses and two returns.
With several processes: `python -m ntpjax.launch --processes 4 --program benchmarks/failure_parity.py`.
Compared are the ids of the samples of every step, the loss of every step, and at the end the replicas with each
other, bit by bit.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import final

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from ntpjax.config import load
from ntpjax.describe import describe
from ntpjax.move import collect
from ntpjax.processes import exit_with
from ntpjax.records import Record, StepDone, TopologyChanged
from train import Config, Trained, read_tokens, run, set_up_jax

NUM_STEPS = 60
BOUND = 1e-9
LOSSES = ("step=8 replica=1 rank=1", "step=17 replica=0 rank=3", "step=26 replica=1 rank=0")
RETURNS = ("step=40 replica=1", "step=49 replica=0")


@final
class Recorder:
    """Keeps the steps, and prints what happened to the topology."""

    def __init__(self) -> None:
        self.steps: list[StepDone] = []

    def emit(self, record: Record) -> None:
        if isinstance(record, StepDone):
            self.steps.append(record)
        elif isinstance(record, TopologyChanged):
            print(describe(record), flush=True)

    def close(self) -> None:
        pass


def load_config(path: Path, run_dir: Path, losses: tuple[str, ...], returns: tuple[str, ...]) -> Config:
    overrides = [
        f"run.dir={run_dir}",
        f"run.steps={NUM_STEPS}",
        "run.dtype=float64",
        "run.compile_ahead=false",
        "eval.every=0",
        f"schedule.fail={list(losses)}",
        f"schedule.restore={list(returns)}",
    ]
    return load(Config, path, overrides)


def replicas_differ(trained: Trained) -> bool:
    """Whether any device has another bit than the first replica, laid out anew, would give it; padding counts too.

    Each process looks at its own devices.
    """
    arrays, generation = trained.state.arrays, trained.state.generation
    flat, partitions = generation.flat, generation.training.partitions
    anew = generation.place(collect(arrays, partitions, flat, flat.tp_groups[0], keep=True))

    def differ(a: jax.Array, b: jax.Array) -> bool:
        pairs = zip(flat.shards(a).values(), flat.shards(b).values(), strict=True)
        return any(np.asarray(x).tobytes() != np.asarray(y).tobytes() for x, y in pairs)

    return any(jax.tree.leaves(jax.tree.map(differ, arrays, anew)))


def main() -> int:
    parser = argparse.ArgumentParser(description="Losses and returns against none.")
    parser.add_argument("--config", type=Path, default=Path(__file__).parent.parent / "configs" / "demo.yaml")
    args = parser.parse_args()
    calm, rough = Recorder(), Recorder()
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(args.config, Path(folder, "calm"), (), ())
        processes = set_up_jax(config.run)
        tokens = read_tokens(config.data, config.run.seed)
        run(config, tokens, processes, calm)
        trained = run(load_config(args.config, Path(folder, "rough"), LOSSES, RETURNS), tokens, processes, rough)
    if replicas_differ(trained):
        print("the replicas of the run with failures are not bit-equal at the end", file=sys.stderr)
        return 1
    return report(calm.steps, rough.steps, trained.ended.num_lost_steps) if processes.index == 0 else 0


def report(calm: list[StepDone], rough: list[StepDone], lost_steps: int) -> int:
    """Prints how the two runs differ; returns 1 if they differ by more than rounding."""
    assert [step.step for step in calm] == list(range(1, NUM_STEPS + 1)), "the calm run has other steps"
    same_ids = [s.sample_ids for s in calm] == [s.sample_ids for s in rough]
    difference = float(np.max([abs(a.loss - b.loss) for a, b in zip(calm, rough, strict=True)]))
    print(f"loss {calm[0].loss:.4f} -> {calm[-1].loss:.4f}; replicas bit-equal at the end")
    ids = "identical" if same_ids else "different"
    print(f"max_loss_difference {difference:.2e} lost_steps {lost_steps} sample_ids {ids}")
    return 0 if same_ids and difference <= BOUND and not lost_steps else 1


if __name__ == "__main__":
    exit_with(main)
