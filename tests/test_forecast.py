"""Forecasts say what really happens: bytes that move, memory that is held, and who is the fullest."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.transformer import TransformerConfig, TransformerFunctions
from ntpjax.forecast import Blueprint, Traffic, forecast, work_shares
from ntpjax.layout import Copied, Split
from ntpjax.partition import Partition, partition_tree
from ntpjax.policy import fullest_work, needed_speedup
from ntpjax.topology import Topology
from ntpjax.training import Training

SMALL = TransformerConfig(
    vocab_size=19, d_model=8, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=2, ffn_dim=10, ffn_unit=2
)
LLAMA_8B = TransformerConfig(
    vocab_size=128256,
    d_model=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_dim=14336,
    ffn_unit=64,
    tie_embeddings=False,
)


def blueprint_of(config: TransformerConfig, degrees: tuple[int, ...], tp_min: int = 1) -> Blueprint:
    model = TransformerFunctions(config)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    return Blueprint.of(params, partition_tree(params, model.rules, max(degrees)), optax.adam(1e-3), degrees, tp_min)


@pytest.mark.parametrize("rank", [0, 3])
def test_the_bytes_that_a_loss_moves_are_the_forecast_ones(rank: int) -> None:
    plan = blueprint_of(SMALL, (4, 4))
    model, params = TransformerFunctions(SMALL), plan.shapes["params"]
    training = Training.of(model, params, plan.partitions["params"], optax.adam(1e-3))
    here = training.on(Topology.of_degrees((4, 4)))
    smaller = training.on(here.flat.topology.lose(replica=1, rank=rank))
    _, moved = smaller.take(here.draw(model.init, jax.random.key(0)), here)
    expected = forecast(plan)[1]
    assert moved.num_bytes == (expected.moved if rank == 3 else expected.moved_worst).num_bytes
    assert moved.num_bytes > 0


def test_state_bytes_are_those_of_a_devices_buffers_when_all_replicas_have_that_degree() -> None:
    plan = blueprint_of(SMALL, (4, 4))
    model = TransformerFunctions(SMALL)
    training = Training.of(model, plan.shapes["params"], plan.partitions["params"], optax.adam(1e-3))
    for row in forecast(plan):
        state = training.on(Topology.of_degrees((row.degree,), nominal_tp=4)).draw(model.init, jax.random.key(0))
        held = sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(state))
        assert row.state_bytes == held, row.degree


def test_a_healthy_job_moves_nothing_and_reshards_nothing() -> None:
    healthy = forecast(blueprint_of(replace_heads(SMALL, 8, 8), (4, 4)))[0]
    assert healthy.degree == 4
    assert healthy.moved == healthy.moved_worst == healthy.pre_sync == healthy.post_sync == Traffic(0, 0, 0)
    assert healthy.needed_speedup == 1


def replace_heads(config: TransformerConfig, num_heads: int, num_kv_heads: int) -> TransformerConfig:
    return config.model_copy(update={"num_heads": num_heads, "num_kv_heads": num_kv_heads})


def test_pre_sync_carries_the_extra_units_and_nothing_else() -> None:
    # 8 heads on 4, KV heads not shared: at degree 3 the extra rank has 2 heads, 1 FFN block, 4 rows of the vocabulary.
    row = forecast(blueprint_of(replace_heads(SMALL, 8, 8), (4, 4)))[1]
    head, ffn_block, vocab_row = 2 * 2 * (2 * 8) * 4, 2 * 3 * (2 * 8) * 4, 8 * 4
    assert row.pre_sync.least_bytes == 2 * head + 1 * ffn_block + 4 * vocab_row
    copies = 2 * head  # a KV head has as many weights as a query head with its output
    assert row.pre_sync == Traffic(row.pre_sync.least_bytes + copies, copies, row.pre_sync.least_bytes)


def test_llama_8b_has_its_published_size_and_fits_a_gpu_at_every_degree_down_to_five() -> None:
    plan = blueprint_of(LLAMA_8B, (8, 8), tp_min=5)
    assert plan.num_parameters == 8_030_261_248
    rows = forecast(plan)
    assert [row.degree for row in rows] == [8, 7, 6, 5]
    assert rows[0].units == {"heads": (4, 4), "kv": (1, 1), "ffn": (28, 28), "vocab": (16032, 16032)}
    assert rows[1].units == {"heads": (4, 5), "kv": (1, 2), "ffn": (32, 32), "vocab": (18322, 18323)}
    # Parameters and two moments in float32, an eighth on each of 8 devices (norm scales and counters are whole).
    assert rows[0].state_bytes == pytest.approx(12 * 8_030_261_248 / 8, rel=1e-3)
    assert rows[0].padding == 0
    assert all(row.state_bytes < 80e9 for row in rows)


def test_attention_of_64_query_heads_on_7_costs_1_17_of_the_ideal_and_not_1_75() -> None:
    heads = Split("heads", 64, 8, group_size=8)
    shares = {heads: 128 / 144, Copied("kv", heads): 16 / 144}
    assert fullest_work(shares, 7) * 7 == pytest.approx(7 / 6)
    assert fullest_work({Split("kv", 8, 8): 1.0}, 7) * 7 == pytest.approx(1.75)
    assert needed_speedup(shares, 7, 8) == pytest.approx((7 / 6) * 8 / 7)


def test_shares_of_work_are_the_shares_of_a_layers_weights() -> None:
    plan = blueprint_of(SMALL, (4,))
    shares = {
        family.name: share for family, share in work_shares(plan.shapes["params"], plan.partitions["params"]).items()
    }
    weights = {"heads": 2 * 6 * 2 * 8, "kv": 2 * 2 * 2 * 8, "ffn": 3 * 10 * 8}
    assert shares == pytest.approx({name: size / sum(weights.values()) for name, size in weights.items()})


def test_padding_is_the_part_of_the_buffers_that_holds_nothing() -> None:
    params = {"layers": {"w": jax.ShapeDtypeStruct((1, 5, 3), jnp.float32)}}
    part = Partition(Split("units", 5, 4), 1, 1)
    row = forecast(replace(Blueprint.of(params, {"layers": {"w": part}}, optax.sgd(1.0), (4,)), tp_min=4))[0]
    assert row.padding == pytest.approx(3 / 8)  # 5 units in 4 x 2 slots
    assert row.state_bytes == 2 * 3 * np.dtype(np.float32).itemsize
