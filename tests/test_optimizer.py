"""The optimizer: its schedule, what it decays, padding that stays zero, and what is refused for mixing elements."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

from ntpjax.layout import Split
from ntpjax.mesh import flat_mesh
from ntpjax.optimizer import adamw, require_elementwise, state_partitions, warmup_cosine
from ntpjax.packing import pack, unpack
from ntpjax.partition import Partition
from ntpjax.topology import Topology

pytestmark = pytest.mark.timeout(60)

PyTree = Any
MakeOptimizer = Callable[[], optax.GradientTransformation]

SHAPES = {
    "gate": jax.ShapeDtypeStruct((2, 12, 8), np.float32),
    "norm": jax.ShapeDtypeStruct((2, 8), np.float32),
    "table": jax.ShapeDtypeStruct((17, 8), np.float32),
}
PARTITIONS = {
    "gate": Partition(Split("ffn", 6, nominal_tp=4), 1, 2),
    "norm": Partition(),
    "table": Partition(Split("vocab", 17, nominal_tp=4), 0, 1),
}


def make_adamw(schedule: optax.Schedule | None = None, *, weight_decay: float = 0.1) -> optax.GradientTransformation:
    schedule = schedule or optax.constant_schedule(0.1)
    return adamw(schedule, PARTITIONS, b1=0.9, b2=0.95, eps=1e-8, weight_decay=weight_decay)


def random_params(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=leaf.shape) for name, leaf in SHAPES.items()}


def updated(optimizer: optax.GradientTransformation, params: PyTree, gradients: list[PyTree]) -> PyTree:
    """The parameters after one update for each of the gradients."""

    @jax.jit
    def update(params: PyTree, state: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for grads in gradients:
        params, state = update(params, state, grads)
    return params


# -- schedule -------------------------------------------------------------------------------------------------------


def rates(*, warmup_steps: int, num_steps: int = 20, final_fraction: float = 0.1) -> list[float]:
    """The learning rate of every step and of three more."""
    schedule = warmup_cosine(
        learning_rate=2.0, warmup_steps=warmup_steps, num_steps=num_steps, final_fraction=final_fraction
    )
    return [float(np.asarray(schedule(step))) for step in range(num_steps + 3)]


@pytest.mark.parametrize("warmup_steps", [1, 2, 5])
def test_the_rate_rises_in_equal_steps_from_above_zero_to_its_peak(warmup_steps: int):
    expected = [2.0 * (step + 1) / warmup_steps for step in range(warmup_steps)]
    assert rates(warmup_steps=warmup_steps)[:warmup_steps] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("warmup_steps", [0, 1, 5])
def test_the_rate_falls_as_a_cosine_from_its_peak_to_the_final_fraction(warmup_steps: int):
    after = rates(warmup_steps=warmup_steps)[warmup_steps:20]
    progress = np.arange(20 - warmup_steps) / (20 - warmup_steps)
    assert after[0] == pytest.approx(2.0, rel=1e-6)
    assert after == pytest.approx(2.0 * (0.1 + 0.9 * (1 + np.cos(np.pi * progress)) / 2), rel=1e-6)


@pytest.mark.parametrize("warmup_steps", [0, 5])
@pytest.mark.parametrize("final_fraction", [0.0, 0.1, 1.0])
def test_the_rate_ends_at_the_final_fraction_and_stays_there(warmup_steps: int, final_fraction: float):
    ended = rates(warmup_steps=warmup_steps, final_fraction=final_fraction)[20:]
    assert ended == pytest.approx([2.0 * final_fraction] * 3, abs=1e-6)


def test_a_run_that_ends_in_its_warmup_never_falls():
    rising = rates(warmup_steps=30)[:20]
    assert rising == sorted(rising)
    assert rising[0] == pytest.approx(2.0 / 30, rel=1e-6)


# -- AdamW ----------------------------------------------------------------------------------------------------------


def test_weights_decay_in_what_is_sharded_and_not_in_what_is_replicated(x64: None):
    params = random_params(0)
    decayed = updated(make_adamw(weight_decay=0.5), params, [jax.tree.map(np.zeros_like, params)])
    np.testing.assert_array_equal(decayed["norm"], params["norm"])
    for name in ("gate", "table"):
        np.testing.assert_allclose(decayed[name], params[name] * (1 - 0.1 * 0.5), rtol=1e-14)


def test_shards_train_like_the_whole_and_padding_stays_exactly_zero(x64: None):
    flat = flat_mesh(Topology.of_degrees((4, 3)), jax.devices())
    params, *gradients = (random_params(seed) for seed in range(6))
    optimizer = make_adamw(weight_decay=0.5)
    on_shards = updated(
        optimizer, pack(params, PARTITIONS, flat), [pack(grads, PARTITIONS, flat) for grads in gradients]
    )
    whole = updated(optimizer, params, gradients)
    is_unit = pack(jax.tree.map(np.ones_like, params), PARTITIONS, flat)
    for name, array in on_shards.items():
        padding = np.asarray(array)[np.asarray(is_unit[name]) == 0]
        assert padding.size > 0 or name == "norm"
        # Compared as bytes: -0.0 is not what padding was.
        assert not any(padding.tobytes()), name
        for positions in flat.tp_groups:
            logical = unpack(array, PARTITIONS[name], flat, positions)
            np.testing.assert_allclose(logical, whole[name], rtol=1e-12, atol=1e-15)


def test_moments_are_cut_like_their_parameters_and_counters_are_replicated():
    optimizer = make_adamw(optax.linear_schedule(1.0, 0.5, 10))
    state = jax.eval_shape(optimizer.init, SHAPES)
    cut = state_partitions(optimizer, SHAPES, PARTITIONS)
    assert jax.tree.structure(cut) == jax.tree.structure(state)
    adam, _, schedule = cut
    assert adam.mu == adam.nu == PARTITIONS
    assert adam.count == schedule.count == Partition()
    assert len(jax.tree.leaves(cut)) == 2 * len(PARTITIONS) + 2


def test_optimizer_state_is_packed_and_unpacked_with_its_partitions():
    flat = flat_mesh(Topology.of_degrees((4, 3)), jax.devices())
    optimizer, rng = make_adamw(), np.random.default_rng(0)
    shapes = jax.eval_shape(optimizer.init, SHAPES)
    state = jax.tree.map(lambda leaf: rng.integers(1, 99, leaf.shape).astype(leaf.dtype), shapes)
    cut = state_partitions(optimizer, SHAPES, PARTITIONS)
    restored = unpack(pack(state, cut, flat), cut, flat)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


# -- only elementwise optimizers ------------------------------------------------------------------------------------

# Few and small arrays: each new shape is compiled.
CHECKED = {"matrix": jax.ShapeDtypeStruct((6, 8), np.float32), "vector": jax.ShapeDtypeStruct((4,), np.float32)}

ELEMENTWISE: dict[str, MakeOptimizer] = {
    "adamw of ntpjax": lambda: adamw(
        optax.cosine_decay_schedule(0.1, 10),
        {"matrix": Partition(Split("ffn", 6, nominal_tp=4)), "vector": Partition()},
        b1=0.9,
        b2=0.95,
        eps=1e-8,
        weight_decay=0.1,
    ),
    "sgd with momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam with a schedule": lambda: optax.adam(optax.linear_schedule(0.1, 0.01, 2)),
    "lion": lambda: optax.lion(0.1),
    "clipping by value": lambda: optax.chain(optax.clip(1.0), optax.sgd(0.1)),
    "one for matrices and one for vectors": lambda: optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"matrix": "a", "vector": "b"}
    ),
}

MIXING: dict[str, MakeOptimizer] = {
    "lamb": lambda: optax.lamb(0.1),
    "lars": lambda: optax.lars(0.1),
    "prodigy": lambda: optax.contrib.prodigy(),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=5),
    "clipping by a high global norm": lambda: optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(0.1)),
    "clipping by global norm": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "adaptive gradient clipping": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
}

FACTORED: dict[str, MakeOptimizer] = {
    "adafactor": lambda: optax.adafactor(0.1),
    "adafactor of small arrays": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "muon": lambda: optax.contrib.muon(0.1),
}

PADDING_MOVERS: dict[str, MakeOptimizer] = {
    "noise": lambda: optax.chain(optax.add_noise(eta=0.1, gamma=0.5, key=0), optax.adam(0.1)),
    "centralized gradients": lambda: optax.chain(optax.centralize(), optax.sgd(0.1)),
}

MIXES = r"^the optimizer is not elementwise: .* use an elementwise one such as adamw, lion or sgd, and the step's own"
HAS_OTHER_SHAPES = (
    r"^the optimizer keeps an array of shape \(.*\), which no parameter has .* use an elementwise optimizer"
)
MOVES_PADDING = r"^the optimizer moves parameters that are zero and have no gradient, so padding would not stay zero\.$"


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_are_accepted(name: str):
    require_elementwise(ELEMENTWISE[name](), CHECKED)


@pytest.mark.parametrize("name", MIXING)
def test_optimizers_that_mix_elements_are_refused(name: str):
    with pytest.raises(ValueError, match=MIXES):
        require_elementwise(MIXING[name](), CHECKED)


@pytest.mark.parametrize("name", FACTORED)
def test_optimizers_whose_state_is_not_shaped_like_parameters_are_refused(name: str):
    with pytest.raises(ValueError, match=HAS_OTHER_SHAPES):
        require_elementwise(FACTORED[name](), CHECKED)


def test_a_factored_optimizer_is_refused_too_when_a_parameter_has_the_shape_of_its_state():
    params = {"matrix": CHECKED["matrix"], "one": jax.ShapeDtypeStruct((1,), np.float32)}
    with pytest.raises(ValueError, match=MIXES):
        require_elementwise(optax.adafactor(0.1), params)


@pytest.mark.parametrize("name", PADDING_MOVERS)
def test_optimizers_that_move_padding_are_refused(name: str):
    with pytest.raises(ValueError, match=MOVES_PADDING):
        require_elementwise(PADDING_MOVERS[name](), CHECKED)
