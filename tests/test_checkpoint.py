"""Checkpoints on disk with the real Orbax: layout-free, bit for bit, and no failure of a save goes unnoticed."""

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from models.transformer import TransformerConfig, TransformerFunctions
from ntpjax.checkpoint import CheckpointError, Checkpoints, named_leaves
from ntpjax.layout import Split
from ntpjax.mesh import FlatMesh, flat_mesh
from ntpjax.optimizer import adamw, state_partitions
from ntpjax.packing import pack, unpack
from ntpjax.partition import Partition, partition_tree
from ntpjax.topology import Topology

PyTree = Any


def mesh_of(degrees: tuple[int, ...]) -> FlatMesh:
    return flat_mesh(Topology.of_degrees(degrees, nominal_tp=8), jax.devices())


def random_bits(leaf: Any, seed: int = 0) -> np.ndarray:
    """An array of any bit patterns, NaNs with payloads among them, with the shape and type of `leaf`."""
    dtype = np.dtype(leaf.dtype)
    raw = np.random.default_rng((seed, int(np.prod(leaf.shape)))).bytes(int(np.prod(leaf.shape)) * dtype.itemsize)
    return np.frombuffer(raw, dtype).reshape(leaf.shape).copy()


def assert_same_bits(found: PyTree, expected: PyTree) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for name, value in named_leaves(expected).items():
        leaf = named_leaves(found)[name]
        assert isinstance(leaf, np.ndarray), name
        assert (leaf.shape, leaf.dtype) == (value.shape, value.dtype), name
        assert leaf.tobytes() == value.tobytes(), name


def tiny(value: float) -> PyTree:
    return {"params": {"a": np.full((3, 2), value, np.float32)}, "opt_state": {"n": np.array(int(value), np.int32)}}


def save(checkpoints: Checkpoints, step: int, state: PyTree) -> None:
    checkpoints.save(step, state, {"step": step})
    assert checkpoints.wait() == step


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    with closing(Checkpoints(tmp_path / "checkpoints", keep_last=3)) as opened:
        yield opened


# -- layout-free ----------------------------------------------------------------------------------------------------


def transformer_state(*, tied: bool, dtype: Any = jnp.float32) -> tuple[PyTree, PyTree]:
    """Random state of a transformer whose units fit no degree, and its partitions."""
    config = TransformerConfig(
        vocab_size=67,
        d_model=4,
        num_layers=2,
        num_heads=12,
        num_kv_heads=4,
        head_dim=2,
        ffn_dim=13,
        ffn_unit=1,
        tie_embeddings=tied,
    )
    model = TransformerFunctions(config, dtype)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    partitions = partition_tree(shapes, model.rules, nominal_tp=8)
    optimizer = adamw(optax.constant_schedule(0.1), partitions, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    state = {"params": shapes, "opt_state": jax.eval_shape(optimizer.init, shapes)}
    parts = {"params": partitions, "opt_state": state_partitions(optimizer, shapes, partitions)}
    return jax.tree.map(random_bits, state), parts


@pytest.mark.parametrize(("tied", "dtype"), [(True, jnp.float32), (False, jnp.bfloat16)], ids=["tied", "bfloat16"])
def test_a_state_comes_back_bit_for_bit_on_any_topology(checkpoints: Checkpoints, tied: bool, dtype: Any):
    logical, partitions = transformer_state(tied=tied, dtype=dtype)
    state = pack(logical, partitions, mesh_of((4, 3)))
    last = mesh_of((4, 3))
    for step, degrees in enumerate([(3, 3), (8,), (7,), (1,), (4, 3)], start=1):
        save(checkpoints, step, unpack(state, partitions, last))
        last = mesh_of(degrees)
        restored = checkpoints.restore(step, logical)
        assert_same_bits(restored, logical)
        state = pack(restored, partitions, last)
        for group in last.tp_groups:
            assert_same_bits(unpack(state, partitions, last, group), logical)


def test_a_tied_head_is_saved_once_and_moments_have_the_types_of_the_optimizer(checkpoints: Checkpoints):
    (tied, _), (untied, _) = transformer_state(tied=True), transformer_state(tied=False)
    save(checkpoints, 1, tied)
    found = ocp.PyTreeCheckpointer().restore(checkpoints.path(1) / "state")
    assert "ends.embedding" in found["params"]
    assert not [name for tree in found.values() for name in tree if "head" in name.rsplit(".", 1)[-1]]
    assert {name: leaf.dtype for name, leaf in found["opt_state"].items() if name.endswith("count")} == {
        "0.count": np.int32,
        "2.count": np.int32,
    }
    assert {leaf.dtype for name, leaf in found["opt_state"].items() if ".mu." in name} == {np.dtype(np.float32)}
    with pytest.raises(CheckpointError) as caught:
        checkpoints.restore(1, untied)
    missing = "the checkpoint has nothing, this run has ((67, 4), 'float32')"
    assert sorted(str(caught.value).splitlines()[1:]) == [
        f"  opt_state '0.mu.ends.head': {missing}",
        f"  opt_state '0.nu.ends.head': {missing}",
        f"  params 'ends.head': {missing}",
    ]


@pytest.mark.parametrize("reader", [ocp.PyTreeCheckpointer, ocp.StandardCheckpointer])
def test_plain_orbax_reads_an_unpadded_vocabulary_that_8_devices_saved_and_7_load(
    checkpoints: Checkpoints, reader: Any
):
    part = {"params": {"table": Partition(Split("vocab", 65535, nominal_tp=8), 0)}, "opt_state": {"n": Partition()}}
    shape = jax.ShapeDtypeStruct((65535, 2), np.float32)
    logical = {"params": {"table": random_bits(shape)}, "opt_state": {"n": np.array(7, np.int32)}}
    eight, seven = mesh_of((8,)), mesh_of((7,))
    packed = pack(logical, part, eight)
    assert packed["params"]["table"].shape == (8, 8192, 2)
    save(checkpoints, 5, unpack(packed, part, eight))
    with closing(reader()) as checkpointer:
        found = checkpointer.restore(checkpoints.path(5) / "state")
    assert found["params"]["table"].shape == (65535, 2)
    assert found["params"]["table"].tobytes() == logical["params"]["table"].tobytes()
    assert_same_bits(unpack(pack(checkpoints.restore(5, logical), part, seven), part, seven), logical)


READ_ALONE = """
import hashlib, json, sys
from pathlib import Path
import jax
import orbax.checkpoint as ocp
from ntpjax import Checkpoints
folder = Path(sys.argv[1])
with_orbax = ocp.PyTreeCheckpointer().restore(folder / "20" / "state")
checkpoints = Checkpoints(folder, keep_last=3)
step = checkpoints.latest_step()
restored = checkpoints.restore(step, {name: dict(tree) for name, tree in with_orbax.items()})
digests = [
    {key: hashlib.sha256(leaf.tobytes()).hexdigest() for tree in state.values() for key, leaf in tree.items()}
    for state in (with_orbax, restored)
]
print(json.dumps([jax.device_count(), step, checkpoints.meta(step), *digests]))
checkpoints.close()
"""


def run_alone(program: str, folder: Path, **environment: str) -> Any:
    """What a process of its own prints last, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_one_device_reads_what_eight_saved(checkpoints: Checkpoints):
    assert jax.device_count() == 8
    logical, partitions = transformer_state(tied=True)
    save(checkpoints, 20, unpack(pack(logical, partitions, mesh_of((8,))), partitions, mesh_of((8,))))
    folder = checkpoints.path(20).parent
    num_devices, step, meta, *digests = run_alone(READ_ALONE, folder, JAX_NUM_CPU_DEVICES="1")
    expected = {
        name: hashlib.sha256(leaf.tobytes()).hexdigest()
        for tree in logical.values()
        for name, leaf in named_leaves(tree).items()
    }
    assert (num_devices, step, meta) == (1, 20, {"step": 20})
    assert digests == [expected, expected]


# -- which steps there are ------------------------------------------------------------------------------------------


def test_only_the_last_checkpoints_are_kept(tmp_path: Path):
    with closing(Checkpoints(tmp_path, keep_last=2)) as checkpoints:
        assert checkpoints.latest_step() is None
        for step in (1, 2, 10, 11):
            save(checkpoints, step, tiny(step))
        assert checkpoints.latest_step() == 11
        assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "11"]
        assert_same_bits(checkpoints.restore(10, tiny(0)), tiny(10))


def test_leftover_folders_neither_count_as_the_newest_step_nor_block_saving(tmp_path: Path):
    leftovers = [tmp_path / "40", tmp_path / "30.orbax-checkpoint-tmp-0"]
    for folder in leftovers:
        folder.mkdir()
    with closing(Checkpoints(tmp_path, keep_last=5)) as checkpoints:
        assert checkpoints.latest_step() is None
        for step in (20, 30, 50):
            save(checkpoints, step, tiny(step))
            assert checkpoints.latest_step() == step
            assert_same_bits(checkpoints.restore(step, tiny(0)), tiny(step))


@pytest.mark.parametrize("left", [(), ("state",)], ids=["an empty folder", "a folder without meta"])
def test_an_incomplete_step_can_be_saved_again(tmp_path: Path, left: tuple[str, ...]):
    with closing(Checkpoints(tmp_path, keep_last=5)) as checkpoints:
        for step in (15, 20):
            save(checkpoints, step, tiny(step))
        for item in set(os.listdir(tmp_path / "20")) - set(left):
            path = tmp_path / "20" / item
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with closing(Checkpoints(tmp_path, keep_last=5)) as checkpoints:
        assert checkpoints.latest_step() == 15
        save(checkpoints, 20, tiny(21))
        assert checkpoints.latest_step() == 20
        assert_same_bits(checkpoints.restore(20, tiny(0)), tiny(21))


def test_a_save_is_never_skipped_in_silence(checkpoints: Checkpoints):
    for step in (10, 20):
        save(checkpoints, step, tiny(step))
    with pytest.raises((CheckpointError, ValueError), match="20"):
        checkpoints.save(20, tiny(21), {"step": 20})
    assert_same_bits(checkpoints.restore(20, tiny(0)), tiny(20))
    # A step below the newest one, as after going back, is written.
    save(checkpoints, 15, tiny(15))
    assert_same_bits(checkpoints.restore(15, tiny(0)), tiny(15))
    save(checkpoints, 30, tiny(30))
    assert checkpoints.latest_step() == 30


def test_a_step_that_exists_is_refused_with_a_checkpoint_error(checkpoints: Checkpoints):
    save(checkpoints, 20, tiny(20))
    with pytest.raises(CheckpointError, match="20"):
        checkpoints.save(20, tiny(21), {"step": 20})


def test_a_save_that_has_ended_is_reported_once(checkpoints: Checkpoints):
    assert checkpoints.saved() is None
    checkpoints.save(10, tiny(10), {"step": 10})
    reported = []
    deadline = time.monotonic() + 60
    while not reported and time.monotonic() < deadline:
        reported += [step for step in (checkpoints.saved(),) if step is not None]
    assert reported == [10]
    assert checkpoints.saved() is None
    assert checkpoints.wait() is None


def test_a_relative_folder_is_fixed_when_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with closing(Checkpoints(Path("run/checkpoints"), keep_last=3)) as checkpoints:
        monkeypatch.chdir(tmp_path / "elsewhere")
        save(checkpoints, 10, tiny(10))
        assert checkpoints.path(10) == tmp_path / "here" / "run" / "checkpoints" / "10"
        assert checkpoints.latest_step() == 10
    assert list((tmp_path / "elsewhere").iterdir()) == []
    with closing(Checkpoints(Path("../here/run/checkpoints"), keep_last=3)) as checkpoints:
        assert checkpoints.latest_step() == 10
        assert_same_bits(checkpoints.restore(10, tiny(0)), tiny(10))


# -- contents -------------------------------------------------------------------------------------------------------


def test_meta_comes_back_as_it_was(checkpoints: Checkpoints):
    meta = {
        "step": 3,
        "samples_seen": 2**53 + 1,
        "rng": {"impl": "fry", "data": [0, 2**32 - 1]},
        "config": {
            "text": "Prärie, 草原",
            "rate": 1e-300,
            "third": 1 / 3,
            "none": None,
            "on": True,
            "empty": [],
            "": {},
        },
    }
    checkpoints.save(3, tiny(3), meta)
    checkpoints.wait()
    assert checkpoints.meta(3) == meta


def test_an_array_of_negative_zeros_keeps_its_signs(checkpoints: Checkpoints):
    # Storage that leaves out what equals its fill value would read back as 0.0.
    state = {"params": {"a": np.full((4, 4), -0.0, np.float32)}, "opt_state": {"b": np.zeros((4, 4), np.float32)}}
    save(checkpoints, 1, state)
    assert_same_bits(checkpoints.restore(1, state), state)


def test_all_arrays_that_do_not_fit_are_listed(checkpoints: Checkpoints):
    f32 = np.dtype(np.float32)
    saved = {"a": np.ones(2, f32), "b": np.ones((2, 3), f32), "c": np.ones(4, f32), "same": np.ones(1, f32)}
    save(checkpoints, 8, {"params": saved, "opt_state": {"n": np.array(1, np.int32)}})
    here = {"b": np.ones((3, 2), f32), "c": np.ones(4, np.float64), "d": np.ones(5, f32), "same": np.ones(1, f32)}
    with pytest.raises(CheckpointError) as caught:
        checkpoints.restore(8, {"params": here, "opt_state": {"n": np.array(1, np.int64)}})
    assert str(caught.value).splitlines() == [
        f"{checkpoints.path(8)} does not fit this run:",
        "  opt_state 'n': the checkpoint has ((), 'int32'), this run has ((), 'int64')",
        "  params 'a': the checkpoint has ((2,), 'float32'), this run has nothing",
        "  params 'b': the checkpoint has ((2, 3), 'float32'), this run has ((3, 2), 'float32')",
        "  params 'c': the checkpoint has ((4,), 'float32'), this run has ((4,), 'float64')",
        "  params 'd': the checkpoint has nothing, this run has ((5,), 'float32')",
    ]


# -- saves that fail ------------------------------------------------------------------------------------------------


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow beyond 64 KiB: writing more fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def too_large() -> PyTree:
    noise = np.random.default_rng(0).normal(size=1 << 17)  # does not compress
    return {"params": {"a": noise}, "opt_state": {"n": np.array(20, np.int32)}}


# Writes that end after the first one that failed find Orbax's event loop closed, which TensorStore reports.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seen_by", ["saved", "wait", "save", "latest_step", "close"])
def test_a_full_disk_in_mid_save_surfaces_and_the_step_can_be_saved_again(tmp_path: Path, seen_by: str):
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    save(checkpoints, 15, tiny(15))
    with full_disk():
        checkpoints.save(20, too_large(), {"step": 20})
        with pytest.raises(CheckpointError, match=rf"the checkpoint of step 20 in {re.escape(str(tmp_path))} was not"):
            if seen_by == "saved":
                deadline = time.monotonic() + 60
                while time.monotonic() < deadline:
                    assert checkpoints.saved() is None
            elif seen_by == "save":
                checkpoints.save(30, tiny(30), {"step": 30})
            else:
                getattr(checkpoints, seen_by)()
    if seen_by == "close":
        checkpoints = Checkpoints(tmp_path, keep_last=3)
    with closing(checkpoints):
        # The failure is told once, the step before is still there, and this one is not taken for done.
        assert checkpoints.wait() is None
        assert checkpoints.latest_step() == 15
        save(checkpoints, 20, tiny(20))
        assert checkpoints.latest_step() == 20
        assert_same_bits(checkpoints.restore(20, tiny(0)), tiny(20))


SAVE_WHERE_THE_FOLDER_IS_GONE = """
import json, os, shutil, sys, threading, time
from pathlib import Path
import numpy as np
from ntpjax import CheckpointError, Checkpoints
folder, error = Path(sys.argv[1]) / "checkpoints", ""
checkpoints = Checkpoints(folder, keep_last=3)
state = {"params": {"a": np.ones(3)}, "opt_state": {"n": np.array(1)}}
checkpoints.save(10, state, {})
checkpoints.wait()
shutil.rmtree(folder)
folder.write_text("in the way")
try:
    checkpoints.save(20, state, {})
    checkpoints.wait()
except CheckpointError as failure:
    error = str(failure)
checkpoints.close()
for _ in range(60):
    left = [thread.name for thread in threading.enumerate() if not thread.daemon][1:]
    if not left:
        break
    time.sleep(0.05)
print(json.dumps({"error": error, "left": left}), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def folder_gone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process tells whose folder is gone in mid-run; it may not be this one, which its threads would hold up."""
    return run_alone(SAVE_WHERE_THE_FOLDER_IS_GONE, tmp_path_factory.mktemp("gone"))


def test_a_folder_that_is_gone_in_mid_run_surfaces(folder_gone: dict[str, Any]):
    assert "step 20" in folder_gone["error"]


def test_no_thread_holds_up_the_end_of_a_process_whose_save_failed(folder_gone: dict[str, Any]):
    assert folder_gone["left"] == []
