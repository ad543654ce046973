"""The overlapped backward pass against one device, for every choice of how it computes, and the order of its sums.

In float64 at a relative 1e-12. Degrees (4, 4) have one stage, (3, 3) of nominal 4 have all three: KV heads are copied.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.one_device import loss_sum
from models.transformer import TransformerConfig, TransformerFunctions
from ntpjax import backward
from ntpjax.backward import DEFAULTS, Blocks, Pipeline, StepOptions, StepSums
from ntpjax.job import row_shapes
from ntpjax.mesh import AXIS, flat_mesh
from ntpjax.optimizer import adamw, warmup_cosine
from ntpjax.packing import unpack
from ntpjax.partition import partition_tree
from ntpjax.replicas import sum_scope, sums_over_replicas
from ntpjax.targets import compile_for_cuda, target_devices
from ntpjax.topology import Topology
from ntpjax.training import Generation, Training, deal_rows

PyTree = Any
SEQ_LEN, VOCAB_SIZE = 5, 67
EVEN, REDUCED = Topology.of_degrees((4, 4)), Topology.of_degrees((3, 3), nominal_tp=4)


def config(num_layers: int = 2) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=VOCAB_SIZE,
        d_model=8,
        num_layers=num_layers,
        num_heads=12,
        num_kv_heads=4,
        head_dim=2,
        ffn_dim=26,
        ffn_unit=2,
        tie_embeddings=False,
    )


def training(options: StepOptions, num_layers: int = 2, dtype: str = "float64") -> tuple[Training, PyTree]:
    """The training, and parameters large enough that every part of the model shows in the gradients."""
    model, rng = TransformerFunctions(config(num_layers), jnp.dtype(dtype)), np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: rng.normal(scale=0.4, size=leaf.shape).astype(leaf.dtype), shapes)
    partitions = partition_tree(params, model.rules, 4)
    schedule = warmup_cosine(learning_rate=1e-3, warmup_steps=0, num_steps=10, final_fraction=0.1)
    optimizer = adamw(schedule, partitions, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    return Training.of(model, params, partitions, optimizer, options=options), params


def batch(num_rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    tokens = rng.integers(VOCAB_SIZE, size=(num_rows, SEQ_LEN + 1), dtype=np.int32)
    return {"tokens": tokens, "weights": rng.uniform(0.5, 2, size=(num_rows, SEQ_LEN)).astype(np.float32)}


def expected(model: Any, params: PyTree, rows: dict[str, np.ndarray]) -> tuple[jax.Array, PyTree]:
    (loss, _), grads = jax.value_and_grad(functools.partial(loss_sum, model), has_aux=True)(params, rows)
    return loss, grads


def gradients(here: Generation, params: PyTree, rows: tuple[int, ...]) -> tuple[PyTree, StepSums]:
    dealt = deal_rows(batch(sum(rows)), rows)
    return here.grad_step(here.start(params)["params"], here.batch(dealt, rows))


def test_stages_without_a_collective_are_left_out():
    def num_stages(topology: Topology) -> int:
        trained, _ = training(DEFAULTS, dtype="float32")
        flat = flat_mesh(topology, jax.devices())
        return len(Pipeline(Blocks.of(trained.model, flat, trained.partitions["params"], DEFAULTS)).stages)

    assert num_stages(EVEN) == 1
    assert num_stages(REDUCED) == 3
    assert num_stages(Topology.of_degrees((4, 3))) == 3


@pytest.mark.parametrize(
    ("topology", "num_layers", "options", "rows"),
    [
        # Fewer layers than stages, as many, and more.
        pytest.param(REDUCED, 1, DEFAULTS, (2, 2), id="3|3 1 layer"),
        pytest.param(REDUCED, 2, StepOptions(remat="none"), (2, 2), id="3|3 2 layers none"),
        pytest.param(REDUCED, 3, StepOptions(remat="dots"), (2, 2), id="3|3 3 layers dots"),
        pytest.param(EVEN, 1, StepOptions(remat="none"), (2, 2), id="4|4 1 layer none"),
        pytest.param(EVEN, 5, StepOptions(remat="none"), (1, 3), id="4|4 5 layers none"),
        # Rows that do not divide by the microbatches, in an own program and in one with branches.
        pytest.param(REDUCED, 5, StepOptions(num_microbatches=3), (5, 2), id="3|3 5 layers microbatches"),
        pytest.param(Topology.of_degrees((4, 3)), 2, StepOptions(num_microbatches=2), (3, 2), id="4|3 microbatches"),
    ],
)
def test_gradients_are_those_of_one_device(
    x64: None, topology: Topology, num_layers: int, options: StepOptions, rows: tuple[int, ...]
):
    trained, params = training(options, num_layers)
    here = trained.on(topology)
    grads, sums = gradients(here, params, rows)
    loss, of_one_device = expected(trained.model, params, batch(sum(rows)))
    np.testing.assert_allclose(sums.loss, loss, rtol=1e-12)
    for group in here.flat.tp_groups:
        logical = unpack(grads, trained.partitions["params"], here.flat, group)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max()), logical, of_one_device
        )
    squares = sum(float(np.sum(np.asarray(leaf) ** 2)) for leaf in jax.tree.leaves(of_one_device))
    assert float(sums.squared_norm) == pytest.approx(squares, rel=1e-12)


def test_only_the_last_microbatch_is_summed_over_replicas():
    def sums(num_microbatches: int) -> tuple[str, ...] | None:
        trained, _ = training(StepOptions(num_microbatches=num_microbatches), dtype="float32")
        return trained.on(REDUCED).compiled(row_shapes(SEQ_LEN), (4, 4)).sums

    assert sums(4) == sums(1)


def shapes_kept(remat: Any) -> list[tuple[int, ...]]:
    """Shapes of what the forward loop stacks over the layers, of which there are 7."""
    trained, _ = training(StepOptions(remat=remat), num_layers=7, dtype="float32")
    traced = trained.on(EVEN).traced(row_shapes(SEQ_LEN), (2, 2)).grad_step
    found: list[tuple[int, ...]] = []

    def visit(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "scan" and not eqn.params["reverse"]:
                found.extend(out.aval.shape for out in eqn.outvars)
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(traced.jaxpr.jaxpr)
    return [shape for shape in found if shape[:1] == (7,)]


def test_the_forward_pass_keeps_inputs_only_or_more_but_never_the_weights():
    weights = {(7, 3, 2, 8), (7, 8, 8)}  # heads, and blocks of FFN columns, of one rank
    full, none = shapes_kept("full"), shapes_kept("none")
    assert full == [(7, 2, SEQ_LEN, 8)]
    assert len(none) > 5
    assert weights.isdisjoint(none)


def test_types_of_computation_and_sums():
    options = StepOptions(compute_dtype="bfloat16", sum_dtype="bfloat16")
    exact, params = training(DEFAULTS, dtype="float32")
    rough = dataclasses.replace(exact, options=options)
    wanted, _ = gradients(exact.on(REDUCED), params, (2, 2))
    found, _ = gradients(rough.on(REDUCED), params, (2, 2))
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.bfloat16.dtype}
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        difference = np.linalg.norm(np.asarray(a, np.float32) - np.asarray(b)) / np.linalg.norm(np.asarray(b))
        assert 0 < difference < 0.1
    # Every holder of a unit has the same bits.
    logical = [
        unpack(found, rough.partitions["params"], rough.on(REDUCED).flat, group) for group in ((0, 1, 2), (3, 4, 5))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16)), *logical)


def test_masters_stay_in_float32():
    trained, params = training(StepOptions(compute_dtype="bfloat16", sum_dtype="bfloat16"), dtype="float32")
    here = trained.on(EVEN)
    state, _ = here.step(here.start(params), deal_rows(batch(4), (2, 2)))
    floats = {leaf.dtype for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert floats == {np.dtype(np.float32)}


# -- the order of sums ------------------------------------------------------------------------------------------------


def of_process(degree: int, devices: Any) -> tuple[str, ...]:
    """What a process of an 8|7 job sums over replicas, in the program compiled for H200."""
    trained, _ = training(DEFAULTS, dtype="float32")
    model = trained.model
    shapes, partitions = trained.shapes["params"], partition_tree(trained.shapes["params"], model.rules, 8)  # type: ignore
    schedule = warmup_cosine(learning_rate=1e-3, warmup_steps=0, num_steps=10, final_fraction=0.1)
    optimizer = adamw(schedule, partitions, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    topology = Topology.of_degrees((8, 7))
    trained = Training.of(model, shapes, partitions, optimizer, devices=devices)
    here = trained.on(topology, topology.devices_of_degree(degree))
    return sums_over_replicas(compile_for_cuda(here.traced(row_shapes(SEQ_LEN), (2, 2)).grad_step).as_text() or "")


def test_processes_of_unequal_degree_sum_the_same_in_the_same_order():
    devices = target_devices("h200", 15)
    healthy, reduced = of_process(8, devices), of_process(7, devices)
    assert healthy == reduced
    assert [line.split()[0] for line in healthy] == ["layers", "layers", "layers", "ends", "scalars"]


def toy_sums(degree: int, devices: Any, *, chained: bool) -> tuple[str, ...]:
    """Three gradients of equal shape, summed over the replicas of an 8|7 job one after the other."""
    mesh = Mesh(np.array(devices), (AXIS,))
    across = [*([rank, 8 + rank] for rank in range(7)), [7]]
    within = [list(range(8)), *([rank] for rank in range(8, 15))]

    def step(a: jax.Array, b: jax.Array, c: jax.Array, x: jax.Array) -> list[jax.Array]:
        a, b, c, x = a[0], b[0], c[0], x[0]
        grads = jax.grad(lambda a, b, c: (((x @ a) @ b) @ c).astype(jnp.float32).sum(), (0, 1, 2))(a, b, c)
        before, summed = None, []
        for name, grad in zip("abc", grads, strict=True):
            if degree == 8 and name != "b":
                grad = grad + lax.psum(jnp.where(lax.axis_index(AXIS) == 7, grad, 0), AXIS, axis_index_groups=within)
            if chained and before is not None:
                grad, _ = lax.optimization_barrier((grad, before))
            with sum_scope(name):
                before = lax.psum(grad, AXIS, axis_index_groups=across)
            summed.append(before[None])
        return summed

    spec = PartitionSpec(AXIS)
    program = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    sharding = NamedSharding(mesh, spec)
    shapes = [jax.ShapeDtypeStruct((15, n, 1024), jnp.bfloat16, sharding=sharding) for n in (1024, 1024, 1024, 512)]
    return sums_over_replicas(compile_for_cuda(program.trace(*shapes)).as_text() or "")


def test_sums_of_equal_shape_that_are_not_chained_are_found_in_another_order():
    devices = target_devices("h200", 15)
    assert toy_sums(8, devices, chained=True) == toy_sums(7, devices, chained=True)
    assert toy_sums(8, devices, chained=False) != toy_sums(7, devices, chained=False)


def test_the_backward_pass_without_its_chain_would_be_found(monkeypatch: pytest.MonkeyPatch):
    with_chain = of_process(8, target_devices("h200", 15))
    monkeypatch.setattr(backward.lax, "optimization_barrier", lambda x: x)
    assert of_process(8, target_devices("h200", 15)) != with_chain
