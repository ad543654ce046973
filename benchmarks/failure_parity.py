"""A run with losses and returns against the same run without, in float64: `python benchmarks/failure_parity.py`.

Trains a configuration (by default the demo's) twice for 60 steps: undisturbed, and with three losses and two returns.
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
from ntpjax.records import Record, StepDone, TopologyChanged
from train import Config, Trained, read_tokens, run, set_up_jax

NUM_STEPS = 60
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


def train_once(
    path: Path, run_dir: Path, losses: tuple[str, ...], returns: tuple[str, ...]
) -> tuple[Trained, Recorder]:
    overrides = [
        f"run.dir={run_dir}",
        f"run.steps={NUM_STEPS}",
        "run.dtype=float64",
        "eval.every=0",
        f"schedule.fail={list(losses)}",
        f"schedule.restore={list(returns)}",
    ]
    config, recorder = load(Config, path, overrides), Recorder()
    processes = set_up_jax(config.run)
    return run(config, read_tokens(config.data, config.run.seed), processes, recorder), recorder


def replicas_differ(trained: Trained) -> bool:
    """Whether any device has another bit than the first replica, laid out anew, would give it; padding counts too."""
    arrays, generation = trained.state.arrays, trained.state.generation
    anew = generation.place(generation.gather(arrays))
    same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), arrays, anew)
    return not all(jax.tree.leaves(same))


def main() -> None:
    parser = argparse.ArgumentParser(description="Losses and returns against none.")
    parser.add_argument("--config", type=Path, default=Path(__file__).parent.parent / "configs" / "demo.yaml")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _, calm = train_once(args.config, Path(folder, "calm"), (), ())
        trained, rough = train_once(args.config, Path(folder, "rough"), LOSSES, RETURNS)
    assert [step.step for step in calm.steps] == list(range(1, NUM_STEPS + 1)), "the calm run has other steps"
    ids = "identical" if [s.sample_ids for s in calm.steps] == [s.sample_ids for s in rough.steps] else "different"
    pairs = zip(calm.steps, rough.steps, strict=True)
    difference = float(np.max([abs(a.loss - b.loss) for a, b in pairs]))
    if replicas_differ(trained):
        sys.exit("the replicas of the run with failures are not bit-equal at the end")
    print(f"loss {calm.steps[0].loss:.4f} -> {calm.steps[-1].loss:.4f}; replicas bit-equal at the end")
    lost_steps = trained.ended.num_lost_steps
    print(f"max_loss_difference {difference:.2e} lost_steps {lost_steps} sample_ids {ids}")


if __name__ == "__main__":
    main()
