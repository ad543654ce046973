"""Nonuniform training of any model, as a library: `Training` is made once, a `Generation` for each topology.

    training = Training.of(model, params, partition_tree(params, rules, nominal_tp=4), optax.adam(1e-3))
    here = training.on(Topology.of_degrees((4, 4)))
    state = here.start(params)
    state, sums = here.step(state, deal_rows(batch, (8, 8)))
    smaller = training.on(here.topology.lose(replica=1, rank=2))
    state, moved = smaller.take(state, here)                        # survivors keep theirs, lost units move
    state, sums = smaller.step(state, deal_rows(batch, split_batch("keep_global", 16, (4, 3), 4)))

`ntpjax.trainer` is built on the same two, with data, checkpoints and failures around them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax

from ntpjax.mesh import Device, FlatMesh, flat_mesh
from ntpjax.move import Moved, move_state
from ntpjax.optimizer import require_elementwise, state_partitions
from ntpjax.packing import pack, unpack
from ntpjax.partition import Partition, path_name
from ntpjax.step import Model, StepSums, make_apply_step, make_eval_step, make_grad_step, make_init, make_optimizer_init
from ntpjax.topology import Topology

PyTree = Any
State = dict[str, PyTree]
"""`params` and `opt_state`: arrays [num_devices, ...] on a flat mesh, or logical ones."""


@dataclass(frozen=True, eq=False)
class Training:
    """A model and how it is trained: what does not depend on which devices there are.

    Attributes:
      model: see `ntpjax.step.Model`.
      optimizer: an elementwise one.
      partitions: how `params` and `opt_state` are cut.
      shapes: their logical shapes and types.
      clip_norm: the gradient of the mean loss is clipped to this global norm; None for no clipping.
      devices: all devices; the numbers in a topology count them.
    """

    model: Model
    optimizer: optax.GradientTransformation
    partitions: State
    shapes: State
    clip_norm: float | None
    devices: tuple[Device, ...]

    @classmethod
    def of(
        cls,
        model: Model,
        params: PyTree,
        partitions: PyTree,
        optimizer: optax.GradientTransformation,
        *,
        clip_norm: float | None = None,
        devices: Sequence[Device] | None = None,
    ) -> "Training":
        """The training of a model with parameters like `params` (arrays or shapes), cut as `partitions` say.

        Raises:
          ValueError: if the optimizer may not run on shards, or the parameters are not `ends` and stacked `layers`.
        """
        _require_ends_and_layers(params, partitions)
        require_elementwise(optimizer, params)
        shapes = jax.eval_shape(lambda tree: tree, params)
        return cls(
            model=model,
            optimizer=optimizer,
            partitions={"params": partitions, "opt_state": state_partitions(optimizer, params, partitions)},
            shapes={"params": shapes, "opt_state": jax.eval_shape(optimizer.init, shapes)},
            clip_norm=clip_norm,
            devices=tuple(jax.devices() if devices is None else devices),
        )

    def on(self, topology: Topology) -> "Generation":
        """The programs for a topology; they are compiled when they are first used."""
        flat, partitions = flat_mesh(topology, self.devices), self.partitions["params"]
        return Generation(
            training=self,
            flat=flat,
            grad_step=make_grad_step(self.model, flat, partitions),
            apply_step=make_apply_step(self.optimizer, flat, self.clip_norm),
            eval_step=make_eval_step(self.model, flat, partitions),
        )


@dataclass(frozen=True, eq=False)
class Generation:
    """A training on one topology.

    Attributes:
      grad_step: (params, batch) to gradients and `StepSums`; all collectives, donates nothing.
      apply_step: (params, opt_state, grads, sums) to the next parameters and optimizer state; local, donates the first
        two.
      eval_step: (params, batch) to the sum of the losses and of the weights.
    """

    training: Training
    flat: FlatMesh
    grad_step: Any
    apply_step: Any
    eval_step: Any

    @property
    def topology(self) -> Topology:
        return self.flat.topology

    def start(self, params: PyTree) -> State:
        """The first state, from logical parameters."""
        return self._with_moments(pack(params, self.training.partitions["params"], self.flat))

    def draw(self, key: jax.Array) -> State:
        """The first state, from the model's own `init(key, units)`: each device draws only what it holds."""
        init: Any = getattr(self.training.model, "init")  # noqa: B009 - a model that is never drawn needs none
        return self._with_moments(make_init(init, self.flat, self.training.partitions["params"])(key))

    def place(self, logical: State) -> State:
        """A state from logical arrays, such as those of a checkpoint."""
        return pack(logical, self.training.partitions, self.flat)

    def gather(self, state: State, positions: Sequence[int] | None = None) -> State:
        """The state's logical arrays on the host, read from the devices at `positions` (by default one whole replica).

        Raises:
          NoHolderError: if these devices do not hold every unit.
        """
        return unpack(state, self.training.partitions, self.flat, positions)

    def take(self, state: State, old: "Generation") -> tuple[State, Moved]:
        """A state of another generation on these devices; buffers of devices that are gone are not read.

        Raises:
          NoHolderError: if some unit was on lost devices only.
        """
        return move_state(state, self.training.partitions, old.flat, self.flat)

    def batch(self, rows: PyTree) -> PyTree:
        """Rows of each replica, arrays [num_replicas, rows, ...] by replica id, on the devices of the replicas.

        Raises:
          ValueError: if an array is not of as many replicas as the topology has.
        """
        num_replicas = len(self.topology.replicas)

        def place(array: np.ndarray) -> jax.Array:
            if np.shape(array)[:1] != (num_replicas,):
                raise ValueError(
                    f"an array of the batch has shape {np.shape(array)}, but its dimension 0 must be the "
                    f"{num_replicas} replicas; see `deal_rows`."
                )
            return self.flat.place([array[replica] for replica in self.flat.replica_of])

        return jax.tree.map(place, rows)

    def step(self, state: State, rows: PyTree) -> tuple[State, StepSums]:
        """One step on a batch given as rows of each replica; the sums are ready when the step is committed."""
        grads, sums = self.grad_step(state["params"], self.batch(rows))
        jax.block_until_ready(sums)
        params, opt_state = self.apply_step(state["params"], state["opt_state"], grads, sums)
        return {"params": params, "opt_state": opt_state}, sums

    def compiled(self, state: State, rows: PyTree) -> "Generation":
        """The same with `grad_step` and `apply_step` compiled now, for arrays like these."""
        grad_step = self.grad_step.lower(state["params"], self.batch(rows)).compile()
        # Gradients have the shapes and shardings of their parameters.
        operands = (state["params"], state["opt_state"], state["params"], grad_step.out_info[1])
        return replace(self, grad_step=grad_step, apply_step=self.apply_step.lower(*operands).compile())

    def _with_moments(self, params: PyTree) -> State:
        return {"params": params, "opt_state": make_optimizer_init(self.training.optimizer, self.flat)(params)}


def deal_rows(batch: PyTree, rows: Sequence[int]) -> PyTree:
    """A global batch as rows of each replica: arrays [sum(rows), ...] to [num_replicas, max(rows), ...].

    Replica `r` gets the next `rows[r]` rows; missing ones are zeros, which count nothing where the weights are among
    them.

    >>> deal_rows({"weights": np.ones(3)}, (2, 1))
    {'weights': array([[1., 1.],
           [1., 0.]])}

    Raises:
      ValueError: if an array has another number of rows.
    """
    is_row = np.arange(max(rows)) < np.asarray(rows)[:, None]

    def deal(array: np.ndarray) -> np.ndarray:
        array = np.asarray(array)
        if array.shape[:1] != (sum(rows),):
            raise ValueError(
                f"an array of the batch has shape {array.shape}, but must have the {sum(rows)} rows dealt."
            )
        dealt = np.zeros((*is_row.shape, *array.shape[1:]), array.dtype)
        # A mask is filled replica by replica and row by row.
        dealt[is_row] = array
        return dealt

    return jax.tree.map(deal, batch)


def _require_ends_and_layers(params: PyTree, partitions: PyTree) -> None:
    if not isinstance(params, dict) or params.keys() != {"ends", "layers"}:
        found = sorted(params) if isinstance(params, dict) else type(params).__name__
        raise ValueError(f"`params` must be a dict of 'ends' and 'layers' (got {found}).")
    paths, _ = jax.tree_util.tree_flatten_with_path(params["layers"])
    for (path, leaf), part in zip(paths, jax.tree.leaves(partitions["layers"]), strict=True):
        if part.dim == 0 and part != Partition():
            raise ValueError(
                f"parameter 'layers.{path_name(path)}' of shape {tuple(leaf.shape)} has its units on dimension 0, "
                "which counts the layers; stack the layers, and give the rule another dimension."
            )
