"""The overlap benchmark on a shorter model: what the compiler hides for H200, and that it would notice what is not."""

import pytest

from benchmarks.overlap import SETTINGS, Overlap, compiled_collectives
from ntpjax.hlo import syncs_in_loop

SHORT = (*SETTINGS, "model.num_layers=4", "model.vocab_size=8192", "step.remat=full")
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("degrees", "own_degree", "scopes"),
    [
        ((8, 7), 8, {"pre_sync", "sum_over_replicas/layers", "post_sync"}),
        # Copied KV heads have a pre-sync and a post-sync here too.
        ((8, 7), 7, {"pre_sync", "sum_over_replicas/layers", "post_sync"}),
        ((8, 8), 8, {"sum_over_replicas/layers"}),
    ],
)
def test_every_sync_of_the_backward_loop_is_hidden(degrees: tuple[int, ...], own_degree: int, scopes: set[str]):
    found = compiled_collectives(degrees, own_degree, SHORT)
    assert {one.scope for one in syncs_in_loop(found)} == scopes
    assert all(one.asynchronous for one in syncs_in_loop(found))
    overlap = Overlap.of(found)
    assert overlap.num_exposed == 0
    assert overlap.least_hidden >= 2
    # The last layers and the ends are summed outside the loop, and are not all.
    assert 0 < overlap.num_bytes_outside < overlap.num_bytes


def test_without_asynchronous_collectives_everything_is_exposed():
    found = compiled_collectives((8, 7), 8, SHORT, xla_gpu_disable_async_collectives="ALLREDUCE")
    overlap = Overlap.of(found)
    assert overlap.num_exposed == 3
    assert overlap.least_hidden == 0
