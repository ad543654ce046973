"""Compiled programs in a folder: loaded on other devices than those compiled for, and never a wrong or foreign one."""

import functools
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import lax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ntpjax.program_store import NOWHERE, Program, ProgramStore, identity_of

NUM_DEVICES = 5
GROUPS = ((0, 1, 2), (3, 4))


class Toy:
    """A program over an uneven mesh: each position's number times the sum in its group. Counts its compilations."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:  # type: ignore[reportInvalidTypeForm]
        self.mesh = Mesh(np.array(devices), ("flat",))
        self.num_compiled = 0

    def program(self, key: str = "toy") -> Program:
        return Program(key, self.mesh.devices.tolist(), self._compile)

    def run(self, compiled: jax.stages.Compiled) -> list[float]:
        sharding = NamedSharding(self.mesh, PartitionSpec("flat"))
        return np.asarray(
            compiled(jax.device_put(np.arange(1.0, NUM_DEVICES + 1, dtype=np.float32), sharding))
        ).tolist()

    def _compile(self) -> jax.stages.Compiled:
        self.num_compiled += 1
        spec = PartitionSpec("flat")

        @functools.partial(jax.shard_map, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        def step(x: jax.Array) -> jax.Array:
            return lax.axis_index("flat") * lax.psum(x, "flat", axis_index_groups=GROUPS)

        shape = jax.ShapeDtypeStruct((NUM_DEVICES,), np.float32, sharding=NamedSharding(self.mesh, spec))
        return jax.jit(step).lower(shape).compile()


EXPECTED = [0.0, 6.0, 12.0, 27.0, 36.0]


@pytest.mark.parametrize("numbers", [(0, 1, 2, 3, 4), (7, 2, 0, 5, 1)], ids=["the same devices", "other devices"])
def test_a_kept_program_runs_without_compiling_on_any_devices(tmp_path: Path, numbers: tuple[int, ...]):
    first, second = Toy(jax.devices()[:NUM_DEVICES]), Toy([jax.devices()[number] for number in numbers])
    assert first.run(ProgramStore(tmp_path, "a").get(first.program())) == EXPECTED
    store = ProgramStore(tmp_path, "a")
    assert second.program() in store
    loaded = store.get(second.program())
    assert second.run(loaded) == EXPECTED
    assert (first.num_compiled, second.num_compiled) == (1, 0)
    # What it does can be read from it, as from one that was compiled here.
    assert "replica_groups={{0,1,2},{3,4}}" in (loaded.as_text() or "")


def test_a_program_that_was_loaded_in_the_background_is_the_one_that_is_got(tmp_path: Path):
    toy, store = Toy(jax.devices()[:NUM_DEVICES]), ProgramStore(tmp_path, "a")
    store.begin_loading(toy.program())  # it is not there: nothing to load
    store.add(toy.program())
    store.add(toy.program())
    other = Toy(jax.devices()[3:])
    store.begin_loading(other.program())
    assert other.run(store.get(other.program())) == EXPECTED
    assert toy.run(store.get(toy.program())) == EXPECTED
    assert (toy.num_compiled, other.num_compiled) == (1, 0)


def test_another_key_or_identity_is_another_program(tmp_path: Path):
    toy = Toy(jax.devices()[:NUM_DEVICES])
    ProgramStore(tmp_path, "a").add(toy.program())
    assert toy.program("other") not in ProgramStore(tmp_path, "a")
    assert toy.program() not in ProgramStore(tmp_path, "b")
    ProgramStore(tmp_path, "b").get(toy.program())
    assert toy.num_compiled == 2


def test_without_a_folder_nothing_is_kept():
    toy = Toy(jax.devices()[:NUM_DEVICES])
    NOWHERE.add(toy.program())
    assert toy.num_compiled == 0 and toy.program() not in NOWHERE
    assert toy.run(NOWHERE.get(toy.program())) == EXPECTED


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def let_others_write(path: Path) -> None:
    path.chmod(0o666)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (cut, "checksum"),
        (flip, "checksum"),
        (let_others_write, "another user"),
        (lambda p: p.write_bytes(b""), "checksum"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_reported_and_replaced(
    tmp_path: Path, spoil, reason: str, caplog: pytest.LogCaptureFixture
):
    toy, store = Toy(jax.devices()[:NUM_DEVICES]), ProgramStore(tmp_path / "programs", "a")
    store.add(toy.program())
    (file,) = (tmp_path / "programs").iterdir()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    spoil(file)
    with caplog.at_level(logging.WARNING):
        assert toy.run(store.get(toy.program())) == EXPECTED
    assert reason in caplog.text and str(file) in caplog.text
    assert toy.num_compiled == 2
    assert toy.run(store.get(toy.program())) == EXPECTED
    assert toy.num_compiled == 2


def test_a_folder_that_cannot_be_made_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").touch()
    toy = Toy(jax.devices()[:NUM_DEVICES])
    with caplog.at_level(logging.WARNING):
        assert toy.run(ProgramStore(tmp_path / "file" / "programs", "a").get(toy.program())) == EXPECTED
    assert "cannot be kept" in caplog.text


def test_the_identity_tells_settings_sources_flags_and_types_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = tmp_path / "model.py"
    source.write_text("x = 1\n")
    first = identity_of({"layers": 2}, [source])
    assert identity_of({"layers": 2}, [source]) == first
    found = {first, identity_of({"layers": 3}, [source])}
    with jax.enable_x64(True):
        found.add(identity_of({"layers": 2}, [source]))
    with monkeypatch.context() as patch:
        patch.setitem(os.environ, "XLA_FLAGS", "--xla_other=1")
        found.add(identity_of({"layers": 2}, [source]))
    source.write_text("x = 2\n")
    found.add(identity_of({"layers": 2}, [source]))
    assert len(found) == 5


@pytest.fixture
def jax_cache(tmp_path: Path) -> Iterator[Path]:
    """JAX's own cache of compiled programs, switched on."""
    changes = {"jax_compilation_cache_dir": str(tmp_path / "jax"), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in changes}
    for values in (changes, before):
        for name, value in values.items():
            jax.config.update(name, value)
        # JAX decides once whether there is a cache.
        compilation_cache.reset_cache()
        if values is changes:
            yield tmp_path / "jax"


def test_a_program_from_the_cache_of_jax_is_not_kept_again(tmp_path: Path, jax_cache: Path):
    # On the CPU it would be kept without its code, and fail when it runs.
    first, second, third = (Toy(jax.devices()[:NUM_DEVICES]) for _ in range(3))
    first.run(NOWHERE.get(first.program()))
    assert list(jax_cache.iterdir())
    jax.clear_caches()
    store = ProgramStore(tmp_path / "programs", "a")
    assert second.run(store.get(second.program())) == EXPECTED
    assert second.program() not in store
    jax.clear_caches()
    assert third.run(store.get(third.program())) == EXPECTED
