"""Collectives and FLOPs of small programs, read from their text and compared with what was counted by hand."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ntpjax.hlo import collectives, exposed, least_hidden, matmul_flops
from ntpjax.targets import compile_for_cuda, target_devices

UNEVEN = ((0, 1, 2, 3), (4, 5, 6))
BACKENDS = ("cpu", "cuda")
DTYPES = (jnp.float32, jnp.bfloat16)
NUM_LAYERS, ROWS, SIZE = 5, 8, 16
DIMS_W, DIMS_X = (NUM_LAYERS, SIZE, SIZE), (ROWS, SIZE)


def _text(
    backend: str, function: Callable[..., Any], *dims: tuple[int, ...], dtype: Any = jnp.float32, num: int = 7
) -> str:
    """The text of a program over `num` devices, each of which calls the function with an array of each of `dims`."""
    devices = jax.devices()[:num] if backend == "cpu" else target_devices("h200", num)
    mesh = Mesh(np.array(devices), ("devices",))
    spec = PartitionSpec("devices")

    def on_each(*arrays: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: leaf[None], function(*(array[0] for array in arrays)))

    step = jax.jit(jax.shard_map(on_each, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    sharding = NamedSharding(mesh, spec)
    traced = step.trace(*(jax.ShapeDtypeStruct((num, *each), dtype, sharding=sharding) for each in dims))
    return (traced.lower().compile() if backend == "cpu" else compile_for_cuda(traced)).as_text() or ""


def _psum(x: jax.Array) -> jax.Array:
    return lax.psum(x, "devices", axis_index_groups=[list(group) for group in UNEVEN])


def _layers(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A scan with a matmul and a sum, and two sums after it that the compiler combines."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope("layers"), jax.named_scope("tp_sum"):
            y = _psum(x @ w)
        return jnp.tanh(y), y.sum()

    x, sums = lax.scan(layer, x, w)
    with jax.named_scope("norms"):
        return lax.psum((x.sum(0), sums), "devices")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_a_scan_over_uneven_groups_and_after_it(backend: str, dtype: Any) -> None:
    in_loop, *after = collectives(_text(backend, _layers, DIMS_W, DIMS_X, dtype=dtype))
    # The CPU adds up 16-bit numbers in 32 bits.
    name, size = ("bf16", 2) if (backend, dtype) == ("cuda", jnp.bfloat16) else ("f32", 4)
    assert (in_loop.kind, in_loop.scope, in_loop.shape) == ("all-reduce", "layers/tp_sum", f"{name}[8,16]")
    assert (in_loop.num_bytes, in_loop.groups) == (8 * 16 * size, UNEVEN)
    assert (in_loop.executions, in_loop.in_loop, in_loop.matmuls) == (NUM_LAYERS, True, ())
    assert sum(one.num_bytes for one in after) == (16 + 5) * size
    assert {(one.scope, one.groups, one.executions) for one in after} == {("norms", (tuple(range(7)),), 1)}
    assert not any(one.in_loop for one in after)


def test_a_combined_sum_has_all_its_shapes() -> None:
    (_, combined) = collectives(_text("cpu", _layers, DIMS_W, DIMS_X))
    assert (combined.shape, combined.num_bytes) == ("f32[16], f32[5]", 84)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_flops_of_a_scan(backend: str, dtype: Any) -> None:
    assert matmul_flops(_text(backend, _layers, DIMS_W, DIMS_X, dtype=dtype)) == 5 * 2 * 8 * 16 * 16


@pytest.mark.parametrize("backend", BACKENDS)
def test_flops_of_a_large_batched_matmul_with_its_gradients(backend: str) -> None:
    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.einsum("nij,njk->nik", a, b)).sum()

    text = _text(backend, jax.grad(loss, (0, 1)), (3, 128, 64), (3, 64, 96))
    assert matmul_flops(text) == 3 * (2 * 3 * 128 * 64 * 96)


def test_flops_of_library_calls_on_cuda_are_those_of_its_fusions() -> None:
    devices = target_devices("h200", 1)
    sharding = NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec())
    arguments = [jax.ShapeDtypeStruct(dims, jnp.float32, sharding=sharding) for dims in ((3, 128, 64), (3, 64, 96))]
    traced = jax.jit(lambda a, b: jnp.einsum("nij,njk->nik", a, b)).trace(*arguments)
    texts = [compile_for_cuda(traced, xla_gpu_enable_triton_gemm=use).as_text() or "" for use in (True, False)]
    assert ["__cublas" in text for text in texts] == [False, True]
    assert [matmul_flops(text) for text in texts] == [2 * 3 * 128 * 64 * 96] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_executions_multiply_in_nested_loops(backend: str) -> None:
    def outer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return lax.scan(lambda x, _: (jnp.tanh(_psum(x @ w)), None), x, length=3)

    text = _text(backend, lambda w, x: lax.scan(outer, x, w)[0], DIMS_W, DIMS_X)
    assert [(one.executions, one.in_loop) for one in collectives(text)] == [(15, True)]
    assert matmul_flops(text) == 15 * 2 * 8 * 16 * 16


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loop_without_a_known_trip_count(backend: str) -> None:
    def go_on(x: jax.Array) -> jax.Array:
        return x.sum() > 1

    text = _text(backend, lambda x: lax.while_loop(go_on, lambda x: _psum(jnp.tanh(x)), x), DIMS_X)
    assert [(one.executions, one.in_loop) for one in collectives(text)] == [(None, True)]
    assert matmul_flops(text) == 0
    text = _text(backend, lambda x: lax.while_loop(go_on, lambda x: jnp.tanh(x @ x), x), (SIZE, SIZE))
    with pytest.raises(ValueError, match="is a loop with matmuls and no known trip count"):
        matmul_flops(text)


@pytest.mark.parametrize("backend", BACKENDS)
def test_branches_are_walked_and_cost_what_the_most_expensive_does(backend: str) -> None:
    def function(x: jax.Array) -> jax.Array:
        branches = [lambda x: x, lambda x: _psum(x) @ x, lambda x: jnp.tanh(x @ x) @ x]
        return lax.fori_loop(0, 3, lambda _, x: lax.switch(lax.axis_index("devices") % 3, branches, x), x)

    text = _text(backend, function, (SIZE, SIZE))
    assert [(one.executions, one.in_loop, one.groups) for one in collectives(text)] == [(3, True, UNEVEN)]
    assert matmul_flops(text) == 3 * 2 * (2 * 16**3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_kinds_are_counted_by_what_a_device_puts_in(backend: str) -> None:
    def function(x: jax.Array) -> jax.Array:
        with jax.named_scope("scatter"):
            x = lax.psum_scatter(x, "devices", tiled=True)
        with jax.named_scope("shift"):
            x = lax.ppermute(x, "devices", [(0, 1), (1, 0)])
        with jax.named_scope("gather"):
            return lax.all_gather(x, "devices")

    found = collectives(_text(backend, function, (16, 8), num=8))
    sizes = [(one.kind, one.scope, one.num_bytes) for one in found]
    assert sizes == [
        ("reduce-scatter", "scatter", 512),
        ("collective-permute", "shift", 64),
        ("all-gather", "gather", 64),
    ]
    assert [one.groups for one in found] == [(tuple(range(8)),), ((0, 1), (1, 0)), (tuple(range(8)),)]


def test_scopes_are_found_under_gradients() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        with jax.named_scope("block"):
            return jnp.tanh(_psum(x @ w)).sum()

    text = _text("cpu", jax.grad(loss), (SIZE, SIZE), DIMS_X)
    assert {one.scope for one in collectives(text)} == {"block"}


HEADER = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0), metadata={op_name="combined/psum"}
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused (p: f32[8], q: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %t = f32[8]{0} tanh(%p)
  ROOT %all = f32[8]{0} all-reduce(%t), replica_groups=[2,2]<=[2,2]T(1,0), metadata={op_name="jit(f)/pre_sync/psum"}
}

%gemm (a.1: f32[4,8], b.1: f32[8,2]) -> f32[4,2] {
  %a.1 = f32[4,8]{1,0} parameter(0)
  %b.1 = f32[8,2]{1,0} parameter(1)
  ROOT %product = f32[4,2]{1,0} dot(%a.1, %b.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%plain (c: f32[8]) -> f32[8] {
  %c = f32[8]{0} parameter(0)
  ROOT %tanh = f32[8]{0} tanh(%c)
}

ENTRY %main (x: f32[8], a.2: f32[4,8], b.2: f32[8,2]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %a.2 = f32[4,8]{1,0:T(8,128)} parameter(1)
  %b.2 = f32[8,2]{1,0} parameter(2)
"""


def _entry(*lines: str) -> str:
    return HEADER + "".join(f"  {line}\n" for line in lines) + "}\n"


def test_a_collective_in_an_asynchronous_fusion_is_found_with_the_matmuls_until_its_end() -> None:
    text = _entry(
        "%before = f32[4,2]{1,0} fusion(%a.2, %b.2), kind=kCustom, calls=%gemm",
        "%start = ((f32[8]{0}, f32[8]{0}), f32[8]{0}, u32[]) fusion-start(%x, %x), kind=kCustom, calls=%fused",
        "%one = f32[8]{0} fusion(%x), kind=kLoop, calls=%plain",
        "%two = f32[4,2]{1,0} fusion(%a.2, %b.2), kind=kCustom, calls=%gemm",
        "%update = ((f32[8]{0}, f32[8]{0}), f32[8]{0}, u32[]) fusion-update(%start)",
        '%three = (f32[4,2]{1,0}, s8[64]{0}) custom-call(%a.2, %b.2), custom_call_target="__cublas$lt$matmul", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
        "%done = f32[8]{0} fusion-done(%update)",
        "ROOT %after = f32[4,2]{1,0} fusion(%a.2, %b.2), kind=kCustom, calls=%gemm",
    )
    (found,) = collectives(text)
    assert (found.name, found.kind, found.scope) == ("start", "all-reduce", "pre_sync")
    assert (found.shape, found.groups, found.asynchronous) == ("f32[8]", ((0, 2), (1, 3)), True)
    assert found.matmuls == ("two", "three")
    assert matmul_flops(text) == 4 * (2 * 4 * 2 * 8)


def test_a_combined_asynchronous_sum_without_a_name_takes_it_from_its_reducer() -> None:
    start = "%start = (f32[8]{0}, f32[4,8]{1,0}) all-reduce-start(%x, %a.2), replica_groups={}, to_apply=%add"
    done = "ROOT %done = (f32[8]{0}, f32[4,8]{1,0}) all-reduce-done(%start)"
    (found,) = collectives(_entry(start, done))
    assert (found.scope, found.shape, found.num_bytes) == ("combined", "f32[8], f32[4,8]", 160)
    assert (found.groups, found.asynchronous) == (((0, 1, 2, 3),), True)
    (found,) = collectives(_entry(f'{start}, backend_config={{"collective_backend_config":{{"is_sync":true}}}}', done))
    assert not found.asynchronous


def test_only_a_conditional_with_a_matmul_in_each_branch_hides_something() -> None:
    def matmuls(branches: str) -> tuple[str, ...]:
        text = _entry(
            "%start = f32[8]{0} all-reduce-start(%x), replica_groups={}, to_apply=%add",
            f"%choice = f32[4,2]{{1,0}} conditional(%x, %x, %x), branch_computations={{{branches}}}",
            "ROOT %done = f32[8]{0} all-reduce-done(%start)",
        )
        return collectives(text)[0].matmuls

    assert matmuls("%gemm, %gemm") == ("choice",)
    assert matmuls("%gemm, %plain") == ()


def test_exposed_counts_only_the_syncs_in_loops() -> None:
    def loop(kind: str) -> str:
        start = '%start = f32[8]{0} all-reduce-start(%y), replica_groups={}, metadata={op_name="jit(f)/post_sync/psum"}'
        matmul = f"%product = f32[8]{{0}} {kind}(%y, %y), lhs_contracting_dims={{}}"
        body = (
            f"  %y = f32[8]{{0}} parameter(0)\n  {start}\n  {matmul}\n  %done = f32[8]{{0}} all-reduce-done(%start)\n"
        )
        head, _, entry = _entry(
            '%outside = f32[8]{0} all-reduce(%x), replica_groups={}, metadata={op_name="jit(f)/pre_sync/psum"}',
            "%loop = f32[8]{0} while(%x), condition=%plain, body=%body",
        ).partition("ENTRY")
        return f"{head}%body (y: f32[8]) -> f32[8] {{\n{body}}}\n\nENTRY{entry}"

    hidden, bare = collectives(loop("dot")), collectives(loop("add"))
    assert [one.name for one in hidden] == ["outside", "start"]
    assert (exposed(hidden), least_hidden(hidden)) == ((), 1)
    assert ([one.name for one in exposed(bare)], least_hidden(bare)) == (["start"], 0)
    assert (exposed(bare, ("tp_sum",)), least_hidden(bare, ("tp_sum",))) == ((), None)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("%c = f32[8]{0} convolution(%x, %x), dim_labels=b0f_0io->b0f", "`c` (convolution"),
        ('%f = f32[8]{0} custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"', "`f` (custom-call"),
    ],
)
def test_a_matmul_of_unknown_cost_is_refused(line: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(problem)}.*does not say what it contracts"):
        matmul_flops(_entry(line))


def test_text_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a scheduled HLO module"):
        collectives("module @jit_step {}")
    with pytest.raises(ValueError, match="written in a way that is not known"):
        collectives(_entry("%all = f32[8]{0} all-reduce(%x), replica_groups=[2,2]<=other, to_apply=%add"))
