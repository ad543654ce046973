"""Nonuniform tensor parallelism for JAX: replicas of unequal tensor-parallel degree train together.

The names below are the library, for use in your own model (README, "In your own model"). A run of the whole system is
`train.py`; how the files depend on each other is drawn in `ntpjax/README.md`.
"""

from ntpjax.backward import Model, StepOptions, StepSums
from ntpjax.boost import BoostHook
from ntpjax.checkpoint import CheckpointError, Checkpoints
from ntpjax.collectives import TensorParallel
from ntpjax.layout import REPLICATED, Copied, Family, Layout, Split, nested_layout
from ntpjax.mesh import FlatMesh, emulate_cpu_devices, flat_mesh
from ntpjax.move import Moved, move_state
from ntpjax.optimizer import require_elementwise, state_partitions
from ntpjax.packing import pack, unpack
from ntpjax.partition import Partition, Rule, partition_tree
from ntpjax.plan import Move, NoHolderError, plan_moves
from ntpjax.policy import split_batch
from ntpjax.step import make_apply_step, make_eval_step, make_grad_step, make_init, make_optimizer_init
from ntpjax.topology import Topology
from ntpjax.training import Generation, Training, deal_rows

__all__ = [
    "REPLICATED",
    "BoostHook",
    "CheckpointError",
    "Checkpoints",
    "Copied",
    "Family",
    "FlatMesh",
    "Generation",
    "Layout",
    "Model",
    "Move",
    "Moved",
    "NoHolderError",
    "Partition",
    "Rule",
    "Split",
    "StepOptions",
    "StepSums",
    "TensorParallel",
    "Topology",
    "Training",
    "deal_rows",
    "emulate_cpu_devices",
    "flat_mesh",
    "make_apply_step",
    "make_eval_step",
    "make_grad_step",
    "make_init",
    "make_optimizer_init",
    "move_state",
    "nested_layout",
    "pack",
    "partition_tree",
    "plan_moves",
    "require_elementwise",
    "split_batch",
    "state_partitions",
    "unpack",
]
