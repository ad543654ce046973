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

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ntpjax.backward import DEFAULTS, Model, StepOptions, StepSums
from ntpjax.layout import REPLICATED
from ntpjax.mesh import Device, FlatMesh, flat_mesh
from ntpjax.move import Moved, collect, compile_moves, move_state
from ntpjax.optimizer import require_elementwise, state_partitions
from ntpjax.packing import pack, unpack
from ntpjax.partition import Partition, path_name
from ntpjax.program_store import NOWHERE, Program, ProgramStore
from ntpjax.replicas import sums_over_replicas
from ntpjax.step import make_apply_step, make_eval_step, make_grad_step, make_init, make_optimizer_init
from ntpjax.targets import CUDA_OPTIONS
from ntpjax.topology import Topology

PyTree = Any
Init = Callable[[jax.Array, Mapping[str, jax.Array]], PyTree]
State = dict[str, PyTree]
"""`params` and `opt_state`: arrays [num_devices, ...] on a flat mesh, or logical ones."""


@dataclass(frozen=True, eq=False)
class Training:
    """A model and how it is trained: what does not depend on which devices there are.

    Attributes:
      model: see `ntpjax.backward.Model`.
      optimizer: an elementwise one.
      partitions: how `params` and `opt_state` are cut.
      shapes: their logical shapes and types.
      options: how a step computes.
      clip_norm: the gradient of the mean loss is clipped to this global norm; None for no clipping.
      devices: all devices; the numbers in a topology count them.
      store: where compiled programs are kept.
    """

    model: Model
    optimizer: optax.GradientTransformation
    partitions: State
    shapes: State
    options: StepOptions
    clip_norm: float | None
    devices: tuple[Device, ...]
    store: ProgramStore = NOWHERE

    @classmethod
    def of(
        cls,
        model: Model,
        params: PyTree,
        partitions: PyTree,
        optimizer: optax.GradientTransformation,
        *,
        options: StepOptions = DEFAULTS,
        clip_norm: float | None = None,
        devices: Sequence[Device] | None = None,
        store: ProgramStore = NOWHERE,
    ) -> "Training":
        """The training of a model with parameters like `params` (arrays or shapes), cut as `partitions` say.

        Args:
          devices: by default all that JAX finds.
          store: of an identity that differs where any of the others do (see `ntpjax.program_store`).

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
            options=options,
            clip_norm=clip_norm,
            devices=tuple(jax.devices() if devices is None else devices),
            store=store,
        )

    def on(
        self,
        topology: Topology,
        own_devices: Collection[int] | None = None,
        process_of: Sequence[int] | None = None,
    ) -> "Generation":
        """The programs for a topology; they are compiled when they are first used.

        Args:
          own_devices, process_of: to compile what another process runs (see `flat_mesh`).
        """
        flat, partitions = flat_mesh(topology, self.devices, own_devices, process_of), self.partitions["params"]
        return Generation(
            training=self,
            flat=flat,
            grad_step=make_grad_step(self.model, flat, partitions, self.options),
            apply_step=make_apply_step(self.optimizer, flat, self.clip_norm),
            eval_step=make_eval_step(self.model, flat, partitions, self.options),
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

    @property
    def sums(self) -> tuple[str, ...] | None:
        """What the compiled `grad_step` sums over replicas, in order; the same in the programs of all processes.

        None where it is not compiled, as in a process without devices.
        """
        is_compiled = isinstance(self.grad_step, jax.stages.Compiled)
        return sums_over_replicas(self.grad_step.as_text() or "") if is_compiled else None

    @property
    def is_leader(self) -> bool:
        return self.flat.leader == jax.process_index()

    def start(self, params: PyTree) -> State:
        """The first state, from logical parameters."""
        return self._with_moments(pack(params, self.training.partitions["params"], self.flat))

    def draw(self, init: Init, key: jax.Array) -> State:
        """The first state, from the model's `init(key, units)`: each device draws only what it holds.

        Args:
          init: (key, unit ids for each family: [slots] int32, -1 for padding) to a rank's shard of the parameters.
        """
        program, data = make_init(init, self.flat, self.training.partitions["params"]), jax.random.key_data(key)
        data, impl = np.asarray(data), jax.random.key_impl(key)
        # Inside the program, because an argument would be sent to the devices of other processes.
        return self._with_moments(jax.jit(lambda: program(jax.random.wrap_key_data(jnp.asarray(data), impl=impl)))())

    def place(self, logical: State) -> State:
        """A state from logical arrays, such as those of a checkpoint."""
        return pack(logical, self.training.partitions, self.flat)

    def gather(self, state: State, positions: Sequence[int] | None = None, *, keep: bool = True) -> State:
        """The state's logical arrays on the host, read from the devices at `positions` (by default one whole replica).

        All processes that have devices make this call. One that does not `keep` the arrays gets None for each.

        Raises:
          NoHolderError: if these devices do not hold every unit.
        """
        if len(self.flat.processes) == 1:
            return unpack(state, self.training.partitions, self.flat, positions)
        positions = self.flat.tp_groups[0] if positions is None else positions
        return collect(state, self.training.partitions, self.flat, positions, keep=keep)

    def take(self, state: State, old: "Generation") -> tuple[State, Moved]:
        """A state of another generation on these devices; buffers of devices that are gone are not read.

        Raises:
          NoHolderError: if some unit was on lost devices only.
        """
        return move_state(state, self.training.partitions, old.flat, self.flat, self.training.store)

    def batch(self, rows: PyTree, num_rows: Sequence[int] | None = None) -> PyTree:
        """Rows of each replica, arrays [num_replicas, rows, ...] by replica id, on the devices of the replicas.

        Args:
          num_rows: how many rows of each replica count; the others are padding, and no device gets more of that than it
            must. By default all rows count.

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
            size = self.own_rows(num_rows or (np.shape(array)[1],) * num_replicas)

            def rows_at(position: int) -> np.ndarray:
                own = array[self.flat.replica_of[position]][:size]
                return np.pad(own, [(0, size - len(own)), *[(0, 0)] * (own.ndim - 1)])

            return self.flat.place(rows_at)

        return jax.tree.map(place, rows)

    def own_rows(self, num_rows: Sequence[int]) -> int:
        """Rows of this process's batch, from those of each replica: the most that one of its own replicas has.

        At least one, and a multiple of the number of microbatches: a replica without rows takes part in the sums too.
        """
        parts = self.training.options.num_microbatches
        most = max([num_rows[replica] for replica in self.flat.own_replicas], default=0)
        return max(-(-most // parts), 1) * parts

    def step(self, state: State, rows: PyTree) -> tuple[State, StepSums]:
        """One step on a batch given as rows of each replica; the sums are ready when the step is committed."""
        grads, sums = self.grad_step(state["params"], self.batch(rows))
        jax.block_until_ready(sums)
        params, opt_state = self.apply_step(state["params"], state["opt_state"], grads, sums)
        return {"params": params, "opt_state": opt_state}, sums

    def traced(self, row: PyTree, num_rows: Sequence[int]) -> "Programs":
        """The programs traced, to be compiled: no array is needed.

        Args:
          row: shapes and types of one row of a batch.
          num_rows: rows of each replica.
        """
        state = jax.tree.map(self.resting, self.training.shapes, self.training.partitions)
        size, sharding, shape = self.own_rows(num_rows), self.flat.sharding, jax.ShapeDtypeStruct
        batch = jax.tree.map(lambda x: shape((self.flat.num_devices, size, *x.shape), x.dtype, sharding=sharding), row)
        grad_step = self.grad_step.trace(state["params"], batch)
        grads, sums = grad_step.out_info
        grads = jax.tree.map(lambda x: shape(x.shape, x.dtype, sharding=sharding), grads)
        whole = NamedSharding(self.flat.mesh, PartitionSpec())
        sums = jax.tree.map(lambda x: shape(x.shape, x.dtype, sharding=whole), sums)
        apply_step = self.apply_step.trace(state["params"], state["opt_state"], grads, sums)
        return Programs(grad_step, apply_step, self.eval_step.trace(state["params"], batch))

    def compiled(self, row: PyTree, num_rows: Sequence[int]) -> "Generation":
        """The same with the programs compiled now, or found in the store; arguments as those of `traced`."""
        programs = Programs(*map(self.training.store.get, self._programs(row, num_rows)))
        return replace(self, **programs._asdict())

    def is_compiled(self, row: PyTree, num_rows: Sequence[int]) -> bool:
        """Whether the store has all that `compiled` needs."""
        return all(program in self.training.store for program in self._programs(row, num_rows))

    def begin_loading(self, row: PyTree, num_rows: Sequence[int]) -> None:
        """Loads in the background what `compiled` needs, as far as it is in the store."""
        for program in self._programs(row, num_rows):
            self.training.store.begin_loading(program)

    def compile_ahead(self, row: PyTree, num_rows: Sequence[int], old: "Generation") -> None:
        """Compiles for the store what `compiled` needs, and what `take` needs for a state of `old`."""
        training = self.training
        for program in self._programs(row, num_rows):
            training.store.add(program)
        state = jax.tree.map(old.resting, training.shapes, training.partitions)
        compile_moves(state, training.partitions, old.flat, self.flat, training.store)

    def _programs(self, row: PyTree, num_rows: Sequence[int]) -> "Programs":
        options = dict(CUDA_OPTIONS) if self.flat.mesh.devices[0].platform == "gpu" else {}
        traced = functools.cache(lambda: self.traced(row, num_rows))
        # Which devices the replicas have does not matter: their degrees do, and which of them are this process's.
        of = f"of TP {self.flat.degrees} for {self.flat.own_degrees} with {self.own_rows(num_rows)} rows of {row}"

        def program(name: str) -> Program:
            def compile_now() -> jax.stages.Compiled:
                return getattr(traced(), name).lower().compile(compiler_options=options)

            return Program(f"{name} {of}", self.flat.mesh.devices.tolist(), compile_now)

        return Programs(*map(program, Programs._fields))

    def resting(self, leaf: jax.ShapeDtypeStruct, part: Partition) -> jax.ShapeDtypeStruct:
        """How an array of the state lies on the flat mesh, from its logical shape."""
        shape = list(leaf.shape)
        if part.family != REPLICATED:
            shape[part.dim] = self.flat.slots(part.family) * part.unit_size
        return jax.ShapeDtypeStruct((self.flat.num_devices, *shape), leaf.dtype, sharding=self.flat.sharding)

    def _with_moments(self, params: PyTree) -> State:
        return {"params": params, "opt_state": make_optimizer_init(self.training.optimizer, self.flat)(params)}


class Programs(NamedTuple):
    """The programs of a generation, in one of the forms that they take until they run."""

    grad_step: Any
    apply_step: Any
    eval_step: Any


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
