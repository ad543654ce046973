"""Compiled programs kept in a folder, so that a topology that was there before, or was foreseen, is not compiled again.

Layer 1. A program's key says which one it is; the store's identity says of which code, versions and machine. Both are
hashed into the file's name, and a file that does not match is not found. Several processes may share a folder: a file
gets its name when it is whole. It holds code that will be run, so only files that nobody else can have written are
read, and the folder is made for its owner alone.
"""

import contextlib
import hashlib
import json
import logging
import os
import pickle
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, final

import jax

from ntpjax.executables import from_bytes, to_bytes
from ntpjax.mesh import Device

_log = logging.getLogger(__name__)
_WRITABLE_BY_OTHERS = 0o022
_NUM_LOADERS = 3
_JAX_CACHE_HIT = "/jax/compilation_cache/cache_hits"
_DIGEST_SIZE = hashlib.sha256().digest_size


class Program(NamedTuple):
    """A program that can be compiled: `key` says which one, for devices in the order of the mesh."""

    key: str
    devices: Sequence[Device]
    compile: Callable[[], jax.stages.Compiled]


@final
class ProgramStore:
    """Programs of one identity in one folder. Without a folder nothing is kept."""

    def __init__(self, folder: Path | None, identity: str = "") -> None:
        self.identity = identity
        self._folder = folder
        self._loading: dict[tuple[Path, tuple[Device, ...]], Future[jax.stages.Compiled]] = {}
        self._loaders = ThreadPoolExecutor(_NUM_LOADERS)

    def __contains__(self, program: Program) -> bool:
        return self._folder is not None and self._path(self._folder, program).exists()

    def get(self, program: Program) -> jax.stages.Compiled:
        """The compiled program: from the folder, or else compiled now and kept.

        A file that cannot be used is reported as a warning, and replaced.
        """
        if self._folder is None:
            return program.compile()
        path = self._path(self._folder, program)
        loading = self._loading.pop((path, tuple(program.devices)), None)
        try:
            return loading.result() if loading else _load(path, program)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, pickle.UnpicklingError, jax.errors.JaxRuntimeError) as error:
            _log.warning("%s cannot be used (%s); the program is compiled anew", path, error)
        return self._keep(path, program)

    def begin_loading(self, program: Program) -> None:
        """Loads the program in the background if it is there, for a `get` that follows soon."""
        if self._folder is not None and program in self:
            path = self._path(self._folder, program)
            self._loading[path, tuple(program.devices)] = self._loaders.submit(_load, path, program)

    def add(self, program: Program) -> None:
        """Compiles the program and keeps it, unless it is there."""
        if self._folder is not None and program not in self:
            self._keep(self._path(self._folder, program), program)

    def _keep(self, path: Path, program: Program) -> jax.stages.Compiled:
        compiled, is_from_jax_cache = _compile(program)
        if is_from_jax_cache:
            return compiled
        try:
            _write(path, to_bytes(compiled, program.devices))
        except OSError as error:
            _log.warning("a compiled program cannot be kept as %s (%s); it will be compiled again", path, error)
        return compiled

    def _path(self, folder: Path, program: Program) -> Path:
        return folder / hashlib.sha256(f"{self.identity} {program.key}".encode()).hexdigest()


NOWHERE = ProgramStore(None)
"""Keeps nothing."""


def identity_of(settings: Mapping[str, Any], sources: Iterable[Path]) -> str:
    """A text that differs where a program could: by settings, source files, versions, compiler flags, or machine.

    Args:
      settings: plain values, those of the configuration that programs depend on.
      sources: Python files beside those of `ntpjax`, with what the model is made of.
    """
    device = jax.devices()[0]
    files = sorted({*Path(__file__).parent.glob("*.py"), *sources})
    found = {
        "settings": settings,
        "sources": [hashlib.sha256(file.read_bytes()).hexdigest() for file in files],
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flax", "optax")},
        "flags": os.environ.get("XLA_FLAGS", ""),
        "x64": jax.config.read("jax_enable_x64"),
        "device": [device.platform, device.device_kind, device.client.platform_version, _cpu()],
    }
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _cpu() -> str:
    """What a program compiled for this CPU needs of another one."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return platform.processor()


def _compile(program: Program) -> tuple[jax.stages.Compiled, bool]:
    """The program, and whether it came from JAX's own cache: on the CPU such a one would lose code if kept again."""
    hits: list[str] = []

    def listen(event: str, **kwargs: str | int) -> None:
        if event == _JAX_CACHE_HIT:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        return program.compile(), bool(hits)
    finally:
        jax.monitoring.unregister_event_listener(listen)


def _load(path: Path, program: Program) -> jax.stages.Compiled:
    return from_bytes(_read(path), program.devices)


def _read(path: Path) -> bytes:
    """The bytes of `_write`. Raises ValueError if they are not whole, or another user could have written them."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & _WRITABLE_BY_OTHERS:
            raise ValueError("another user could have written it")
        data = file.read()
    digest, data = data[:_DIGEST_SIZE], data[_DIGEST_SIZE:]
    if hashlib.sha256(data).digest() != digest:
        raise ValueError("its checksum is wrong")
    return data


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(hashlib.sha256(data).digest() + data)
    temporary.replace(path)
