"""The step on the flat mesh against one device, the same bits on every replica, and what its programs contain.

Sums are compared in float64 at a relative 1e-12. The sizes fit no degree: 12 query heads, 4 KV heads that are copied
where they are needed, 13 FFN units, 257 rows of the vocabulary.
"""

import functools
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from models.one_device import loss_sum
from models.transformer import Batch, Ends, TransformerConfig, TransformerFunctions
from ntpjax.job import row_shapes
from ntpjax.layout import Split
from ntpjax.mesh import FlatMesh, Groups, flat_mesh
from ntpjax.move import move_state
from ntpjax.optimizer import adamw, state_partitions
from ntpjax.packing import pack, unpack
from ntpjax.partition import Partition, partition_tree
from ntpjax.step import (
    make_apply_step,
    make_eval_step,
    make_grad_step,
    make_init,
    make_optimizer_init,
)
from ntpjax.topology import Topology
from ntpjax.training import Training

PyTree = Any

SEQ_LEN, NUM_ROWS, VOCAB_SIZE = 5, 4, 257
TIED = TransformerConfig(
    vocab_size=VOCAB_SIZE,
    d_model=8,
    num_layers=2,
    num_heads=12,
    num_kv_heads=4,
    head_dim=2,
    ffn_dim=26,
    ffn_unit=2,
)
UNTIED = TIED.model_copy(update={"tie_embeddings": False})
HEALTHY = Topology.of_degrees((4, 4))


@dataclass(frozen=True)
class Setup:
    """A model on a topology, with the programs that a test asks for."""

    config: TransformerConfig
    topology: Topology
    dtype: Any

    @functools.cached_property
    def model(self) -> TransformerFunctions:
        return TransformerFunctions(self.config, jnp.dtype(self.dtype))

    @functools.cached_property
    def flat(self) -> FlatMesh:
        return flat_mesh(self.topology, jax.devices())

    @functools.cached_property
    def logical(self) -> PyTree:
        """Parameters large enough that every part of the model shows in the gradients."""
        rng, shapes = np.random.default_rng(0), jax.eval_shape(self.model.init, jax.random.key(0))
        return jax.tree.map(lambda leaf: rng.normal(scale=0.4, size=leaf.shape).astype(leaf.dtype), shapes)

    @functools.cached_property
    def partitions(self) -> PyTree:
        return partition_tree(self.logical, self.model.rules, self.topology.nominal_tp)

    @functools.cached_property
    def params(self) -> PyTree:
        return pack(self.logical, self.partitions, self.flat)

    def own_params(self) -> PyTree:
        """Parameters that may be donated."""
        return pack(self.logical, self.partitions, self.flat)

    @functools.cached_property
    def traced(self) -> jax.stages.Traced:
        rows = even_rows(self.topology)
        return make_grad_step(self.model, self.flat, self.partitions).trace(self.params, self.batch(0, rows))

    @functools.cached_property
    def text(self) -> str:
        """The program of `grad_step` before XLA, without source locations."""
        return self.traced.lower().as_text()

    @functools.cached_property
    def grad_step(self) -> jax.stages.Compiled:
        return self.traced.lower().compile()

    def batch(self, seed: int, rows: tuple[int, ...]) -> PyTree:
        """The global batch dealt to replicas: `rows[r]` rows for replica `r`, padded with rows of weight 0."""
        batch, ends = global_batch(seed), np.cumsum(rows)
        placed = {}
        for name in ("tokens", "weights"):
            values = np.asarray(batch[name])
            padded = np.zeros((len(rows), NUM_ROWS, values.shape[1]), values.dtype)
            for replica, (num, end) in enumerate(zip(rows, ends, strict=True)):
                padded[replica, :num] = values[end - num : end]
            placed[name] = self.flat.place(lambda position, padded=padded: padded[self.flat.replica_of[position]])
        return placed


def setup(topology: Topology, dtype: str = "float32", *, tied: bool = True) -> Setup:
    """What is compiled for one test serves the others. Callers that want float64 have it enabled."""
    return _setup(topology, dtype, tied)


@functools.cache
def _setup(topology: Topology, dtype: str, tied: bool) -> Setup:
    return Setup(TIED if tied else UNTIED, topology, dtype)


def even_rows(topology: Topology) -> tuple[int, ...]:
    return tuple(len(block) for block in np.array_split(range(NUM_ROWS), len(topology.degrees)))


def global_batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(VOCAB_SIZE, size=(NUM_ROWS, SEQ_LEN + 1), dtype=np.int32)
    return {"tokens": jnp.asarray(tokens), "weights": jnp.asarray(rng.uniform(0.5, 2, size=(NUM_ROWS, SEQ_LEN)))}


@functools.partial(jax.jit, static_argnames="model")
def one_device(model: TransformerFunctions, params: PyTree, batch: Batch) -> Any:
    """((loss, weight), gradients) on one device."""
    return jax.value_and_grad(functools.partial(loss_sum, model), has_aux=True)(params, batch)


def norm_of(tree: PyTree) -> float:
    return float(np.sqrt(sum(np.sum(np.asarray(leaf) ** 2) for leaf in jax.tree.leaves(tree))))


def assert_close(found: Any, expected: Any) -> None:
    """Everything within 1e-12 of the largest expected value."""
    found, expected = np.asarray(found), np.asarray(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def assert_same_on_every_device(tree: PyTree, partitions: PyTree, flat: FlatMesh) -> None:
    """Every replica has the same bits, so has every holder of a copy, and padding is zero."""
    first, *others = (unpack(tree, partitions, flat, group) for group in flat.tp_groups)
    for other in others:
        assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), first, other)))
    # Compared as numbers, for a zero in padding may have a sign.
    jax.tree.map(np.testing.assert_array_equal, tree, pack(first, partitions, flat))


# -- one device, in float64 -----------------------------------------------------------------------------------------

# The canonical order puts replica 1 first; a mean of means over 1 and 3 rows would be wrong.
SMALLER_FIRST = Topology.of_degrees((3, 4))
THREE_REPLICAS = Topology.of_degrees((3, 3, 2))


@pytest.mark.parametrize(
    ("topology", "rows", "tied"),
    [
        pytest.param(SMALLER_FIRST, (1, 3), True, id="3|4 rows 1|3"),
        pytest.param(THREE_REPLICAS, (2, 1, 1), False, id="3|3|2 untied"),
        pytest.param(HEALTHY, (4, 0), True, id="4|4 rows 4|0"),
        pytest.param(Topology.of_degrees((7,)), (4,), True, id="7"),
    ],
)
def test_losses_and_gradients_on_every_device_are_those_of_one_device(
    x64: None, topology: Topology, rows: tuple[int, ...], tied: bool
):
    s = setup(topology, "float64", tied=tied)
    (loss, weight), expected = one_device(s.model, s.logical, global_batch(0))
    grads, sums = s.grad_step(s.params, s.batch(0, rows))
    assert sums.loss.dtype == sums.squared_norm.dtype == np.float64
    assert_close(sums.loss, loss)
    assert_close(sums.weight, weight)
    jax.tree.map(assert_close, grads, pack(expected, s.partitions, s.flat))
    assert_same_on_every_device(grads, s.partitions, s.flat)
    # Each unit counts once in the norm, however many devices and replicas hold it.
    assert sums.grad_norm() == pytest.approx(norm_of(expected) / float(weight), rel=1e-12)
    assert sums.mean_loss() == pytest.approx(float(loss / weight), rel=1e-12)


def test_the_update_is_clipped_to_the_given_norm(x64: None):
    s, optimizer, clip_norm = setup(SMALLER_FIRST, "float64"), optax.sgd(1.0), 0.01
    grads, sums = s.grad_step(s.params, s.batch(0, (1, 3)))
    assert sums.grad_norm() > 10 * clip_norm
    params = s.own_params()
    opt_state = make_optimizer_init(optimizer, s.flat)(params)
    after, _ = make_apply_step(optimizer, s.flat, clip_norm)(params, opt_state, grads, sums)
    scale = clip_norm / norm_of(unpack(grads, s.partitions, s.flat))
    for group in s.flat.tp_groups:
        new, grad = (unpack(tree, s.partitions, s.flat, group) for tree in (after, grads))
        jax.tree.map(lambda new, old, grad: assert_close(new, old - scale * grad), new, s.logical, grad)


def test_evaluation_gives_the_loss_of_the_step(x64: None):
    s = setup(SMALLER_FIRST, "float64")
    batch = s.batch(0, (1, 3))
    loss, weight = make_eval_step(s.model, s.flat, s.partitions)(s.params, batch)
    _, sums = s.grad_step(s.params, batch)
    assert_close(loss, sums.loss)
    assert_close(weight, sums.weight)


# -- bits, in float32 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [HEALTHY.lose(0, 3), THREE_REPLICAS], ids=["3|4", "3|3|2"])
def test_after_three_steps_every_replica_has_the_same_bits_and_padding_is_zero(topology: Topology):
    s = setup(topology)
    optimizer = adamw(optax.constant_schedule(0.01), s.partitions, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.5)
    params = s.own_params()
    opt_state = make_optimizer_init(optimizer, s.flat)(params)
    apply_step = make_apply_step(optimizer, s.flat, clip_norm=0.1)
    for step in range(3):
        grads, sums = s.grad_step(params, s.batch(step, even_rows(topology)))
        params, opt_state = apply_step(params, opt_state, grads, sums)
    opt_partitions = state_partitions(optimizer, s.logical, s.partitions)
    assert_same_on_every_device(params, s.partitions, s.flat)
    assert_same_on_every_device(opt_state, opt_partitions, s.flat)
    # All of it took part: every array changed, every moment has a value, the counters counted.
    after = unpack(
        {"params": params, "opt_state": opt_state}, {"params": s.partitions, "opt_state": opt_partitions}, s.flat
    )
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).all(), after["params"], s.logical)))
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(after["opt_state"]))
    counters = [leaf for leaf in jax.tree.leaves(opt_state) if leaf.dtype == np.int32]
    assert counters
    assert all((np.asarray(counter) == 3).all() for counter in counters)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))


def test_a_nan_in_one_replica_is_seen_by_every_device():
    s = setup(HEALTHY.lose(0, 3))
    assert s.flat.tp_groups[1] == (4, 5, 6)
    head = s.params["ends"]["embedding"]
    parts = [np.asarray(shard.data)[0] for shard in head.addressable_shards]
    parts[4] = np.full_like(parts[4], np.nan)
    params = {"ends": {**s.params["ends"], "embedding": s.flat.place(parts.__getitem__)}, "layers": s.params["layers"]}
    _, sums = s.grad_step(params, s.batch(0, even_rows(s.topology)))
    for value in (sums.loss, sums.squared_norm):
        assert len(value.addressable_shards) == 7
        assert all(np.isnan(shard.data) for shard in value.addressable_shards)


# -- initial values -------------------------------------------------------------------------------------------------


def test_initial_values_are_the_same_bits_on_every_topology():
    vocab = Split("vocab", VOCAB_SIZE, nominal_tp=8)
    partitions = {"embedding": Partition(vocab, 0), "final_norm": {"scale": Partition()}}

    def init(key: jax.Array, units: Any) -> PyTree:
        return nnx.to_pure_dict(nnx.split(Ends(TIED, key, units, jnp.float32))[1])

    drawn = []
    for degrees in ((8,), (7,), (1,), (4, 3)):
        flat = flat_mesh(Topology.of_degrees(degrees, nominal_tp=8), jax.devices())
        params = make_init(init, flat, partitions)(jax.random.key(5))
        assert_same_on_every_device(params, partitions, flat)
        drawn.append(unpack(params, partitions, flat))
    assert len(np.unique(drawn[0]["embedding"])) > VOCAB_SIZE
    for other in drawn[1:]:
        assert other["embedding"].tobytes() == drawn[0]["embedding"].tobytes()
        assert (other["final_norm"]["scale"] == 1).all()


# -- programs -------------------------------------------------------------------------------------------------------


def test_which_device_of_which_replica_is_lost_does_not_change_the_program():
    texts = {setup(HEALTHY.lose(*lost)).text for lost in ((0, 3), (1, 1))}
    assert len(texts) == 1
    assert setup(HEALTHY).text not in texts


def shapes_with(dim: int, text: str) -> set[tuple[int, ...]]:
    """The shapes of two or more dimensions in a program's text, one of which is `dim`."""
    shapes = {tuple(map(int, dims.split("x")[:-1])) for dims in re.findall(r"tensor<((?:\d+x)+)\w+>", text)}
    return {shape for shape in shapes if dim in shape and len(shape) > 1}


def test_full_logits_exist_on_no_device():
    s = setup(HEALTHY)
    alone = one_device.lower(s.model, s.logical, global_batch(0)).as_text()
    assert (NUM_ROWS * SEQ_LEN, VOCAB_SIZE) in shapes_with(VOCAB_SIZE, alone)
    assert shapes_with(VOCAB_SIZE, s.text) == set()
    assert (NUM_ROWS * SEQ_LEN, 65) in shapes_with(65, s.text)
    assert "all_gather" not in s.text


def groups_of_sums(jaxpr: Any, *, in_reverse_scans: bool) -> list[Groups]:
    """The groups of each sum in a program, or in its reverse scans; of a branch, those of the branch that has most."""
    found: list[Groups] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("psum") and not in_reverse_scans:
            found.append(eqn.params["axis_index_groups"])
        wanted = in_reverse_scans and not eqn.params.get("reverse", False)
        bodies = [groups_of_sums(body, in_reverse_scans=wanted) for body in inner_jaxprs(eqn)]
        found += max(bodies, key=len, default=[])
    return found


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The programs inside an equation: bodies of loops and branches."""
    params = [value for param in eqn.params.values() for value in (param if isinstance(param, tuple) else (param,))]
    return [getattr(value, "jaxpr", value) for value in params if hasattr(getattr(value, "jaxpr", value), "eqns")]


def test_the_backward_pass_of_a_layer_has_three_sums_beyond_those_of_tensor_parallelism():
    uneven = setup(HEALTHY.lose(0, 3))

    def within_replicas(topology: Topology, own_degree: int) -> int:
        training = Training.of(uneven.model, uneven.logical, uneven.partitions, optax.sgd(1.0))
        generation = training.on(topology, topology.devices_of_degree(own_degree))
        traced = generation.traced(row_shapes(SEQ_LEN), even_rows(topology)).grad_step
        groups = groups_of_sums(traced.jaxpr.jaxpr, in_reverse_scans=True)
        assert set(groups) == {generation.flat.tp_groups, generation.flat.sum_groups}
        return groups.count(generation.flat.tp_groups)

    # Pre-sync and post-sync.
    assert within_replicas(uneven.topology, own_degree=4) == within_replicas(HEALTHY, own_degree=4) + 2
    # The sum over replicas is one of each array, which XLA makes one collective.
    text = uneven.grad_step.as_text() or ""
    sums = [line for line in text.splitlines() if re.search(r" all-reduce(-start)?\(", line)]
    over_replicas = [line for line in sums if "replica_groups={{0,4},{1,5},{2,6},{3}}" in line]
    assert len([line for line in over_replicas if "while/body" in line]) == 1
    # And one each for the last two layers, and for the embedding with the last norm; on the CPU XLA joins some of them.
    sums_of_all = groups_of_sums(uneven.traced.jaxpr.jaxpr, in_reverse_scans=False)
    assert sums_of_all.count(uneven.flat.sum_groups) == 1 + 2 + 1


# -- the old mesh ---------------------------------------------------------------------------------------------------


def test_a_moved_state_has_nothing_of_the_old_mesh_in_a_users_own_program():
    old, new = setup(HEALTHY), setup(HEALTHY.lose(0, 3))
    params, _ = move_state(old.params, old.partitions, old.flat, new.flat)
    assert all(leaf.sharding == new.flat.sharding for leaf in jax.tree.leaves(params))

    def first_rows() -> np.ndarray:
        return np.asarray(jax.jit(lambda ends: 2 * ends["embedding"][:, 0])(params["ends"]))

    expected = 2 * np.asarray(new.params["ends"]["embedding"])[:, 0]
    np.testing.assert_array_equal(first_rows(), expected)
    with jax.set_mesh(new.flat.mesh):
        np.testing.assert_array_equal(first_rows(), expected)
    # JAX itself refuses arrays of other devices there, rather than move them in silence.
    with jax.set_mesh(old.flat.mesh), pytest.raises(ValueError, match="incompatible devices"):
        first_rows()
    np.testing.assert_array_equal(first_rows(), expected)
