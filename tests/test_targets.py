"""A toy step compiled for 15 GPUs that are not there: what hides its collectives, and what exposes them."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ntpjax.hlo import Collective, collectives, exposed, least_hidden, syncs_in_loop
from ntpjax.targets import OVERLAP_OPTIONS, TARGETS, compile_for_cuda, target_devices

NUM_LAYERS, SIZE = 6, 2048
TP_GROUPS = [list(range(8)), *([device] for device in range(8, 15))]
ACROSS_GROUPS = [*([rank, 8 + rank] for rank in range(7)), [7]]


def _toy_step(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A scan of matmuls that carries three gradients, each at another stage of its way through the collectives."""

    def psum(scope: str, gradient: jax.Array, groups: list[list[int]]) -> jax.Array:
        with jax.named_scope(scope):
            return lax.psum(gradient, "devices", axis_index_groups=groups)

    def layer(carry: tuple[jax.Array, ...], w: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        x, computed, presynced, summed, done = carry
        done = jnp.tanh(done) + psum("post_sync", summed, TP_GROUPS)
        summed = psum("sum_over_replicas", presynced, ACROSS_GROUPS)
        presynced = psum("pre_sync", computed, TP_GROUPS)
        y = jax.nn.relu(x @ w)
        computed = y.T @ x
        return (jax.nn.relu(y @ w.T), computed, presynced, summed, done), None

    nothing = jnp.zeros_like(weights[0, 0])
    (x, *_, done), _ = lax.scan(layer, (x[0], nothing, nothing, nothing, nothing), weights[0])
    return x[None], done[None]


def _compiled(devices: list[Any], **options: Any) -> jax.stages.Compiled:
    mesh = Mesh(np.array(devices), ("devices",))
    spec = PartitionSpec("devices")
    step = jax.jit(jax.shard_map(_toy_step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    shapes = ((len(devices), NUM_LAYERS, SIZE, SIZE), (len(devices), SIZE, SIZE))
    sharding = NamedSharding(mesh, spec)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    return compile_for_cuda(step.trace(*arguments), **options)


def _syncs(**options: Any) -> tuple[Collective, ...]:
    # The toy's gradients are so small that the compiler would combine the two syncs of a TP group.
    options = {"xla_gpu_all_reduce_combine_threshold_bytes": 0, **options}
    return collectives(_compiled(target_devices("h200", 15), **options).as_text() or "")


def test_the_collectives_of_the_toy_step_hide_under_its_matmuls() -> None:
    found = syncs_in_loop(_syncs())
    assert sorted(one.scope for one in found) == ["post_sync", "pre_sync", "sum_over_replicas"]
    for one in found:
        groups = ACROSS_GROUPS if one.scope == "sum_over_replicas" else TP_GROUPS
        assert one.groups == tuple(map(tuple, groups))
        assert (one.kind, one.shape, one.executions) == ("all-reduce", f"bf16[{SIZE},{SIZE}]", NUM_LAYERS)
        assert one.num_bytes == 2 * SIZE**2
        assert one.asynchronous
        assert 1 <= len(one.matmuls) <= 3  # A layer has three.
    assert exposed(found) == ()


def test_collectives_that_the_compiler_may_not_start_early_are_exposed() -> None:
    found = _syncs(xla_gpu_disable_async_collectives="ALLREDUCE")
    assert {one.scope for one in exposed(found)} == {"post_sync", "pre_sync", "sum_over_replicas"}
    assert not any(one.asynchronous for one in syncs_in_loop(found))
    assert least_hidden(found) == 0


def test_without_the_overlap_option_some_collective_is_exposed() -> None:
    (option,) = OVERLAP_OPTIONS
    assert exposed(_syncs(**{option: 1}))


def test_collectives_that_the_compiler_combines_are_one_with_all_the_bytes() -> None:
    combined, alone = sorted(
        syncs_in_loop(_syncs(xla_gpu_all_reduce_combine_threshold_bytes=2**30)), key=lambda one: -one.num_bytes
    )
    assert (combined.num_bytes, alone.num_bytes) == (2 * 2 * SIZE**2, 2 * SIZE**2)
    assert combined.scope in ("pre_sync", "post_sync")
    assert alone.scope == "sum_over_replicas"


def test_small_sums_over_uneven_groups_compile() -> None:
    devices = target_devices("h100", 7)
    mesh = Mesh(np.array(devices), ("devices",))
    spec = PartitionSpec("devices")
    groups = [[0, 1, 2, 3], [4, 5, 6]]
    step = jax.jit(
        jax.shard_map(
            lambda x: lax.psum(x, "devices", axis_index_groups=groups),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )
    argument = jax.ShapeDtypeStruct((7, 4), jnp.float32, sharding=NamedSharding(mesh, spec))
    (found,) = collectives(compile_for_cuda(step.trace(argument)).as_text() or "")
    assert (found.groups, found.num_bytes) == (((0, 1, 2, 3), (4, 5, 6)), 16)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_has_as_many_devices_as_asked_for(name: str) -> None:
    devices = target_devices(name, 17)
    assert len(devices) == 17
    assert {device.platform for device in devices} == {"gpu"}
    assert name.upper() in devices[0].device_kind


def test_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"`target` \(='b300'\) must be one of 'h100', 'h200'"):
        target_devices("b300", 8)
    with pytest.raises(ValueError, match=r"`num_devices` \(=0\) must be at least 1"):
        target_devices("h200", 0)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name.startswith("jax_plugins.") else find_spec(name)
    )
    with pytest.raises(ValueError, match=r"no compiler for CUDA; install ntpjax\[aot\]"):
        target_devices("h200", 8)
