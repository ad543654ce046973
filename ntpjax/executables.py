"""Compiled programs as bytes, which run on other devices than those that they were compiled for.

Layer 1, and the only file that reaches into JAX for it. `jax.experimental.serialize_executable` wants devices with the
ids of those compiled for. A program of the flat mesh depends on where a device stands in the mesh and not on which it
is: here each device of the program is replaced by the one that now has its position.
"""

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import serialize_executable

from ntpjax.mesh import Device


class _Executable(NamedTuple):
    """What is pickled. Trees of arguments and results hold a number for each leaf: JAX's own form cannot be pickled."""

    payload: bytes
    arguments: Any
    results: Any
    device_ids: tuple[int, ...]


def to_bytes(compiled: jax.stages.Compiled, devices: Sequence[Device]) -> bytes:
    """A compiled program, with the devices that it was compiled for in the order of its mesh."""
    payload, *trees = serialize_executable.serialize(compiled)
    arguments, results = (jax.tree.unflatten(tree, range(tree.num_leaves)) for tree in trees)
    return pickle.dumps(_Executable(payload, arguments, results, tuple(device.id for device in devices)))


def from_bytes(data: bytes, devices: Sequence[Device]) -> jax.stages.Compiled:
    """The program of `to_bytes` on these devices. Only for bytes of whom you trust: they may hold any code."""
    found = _Executable(*pickle.loads(data))
    executable, arguments, no_kwargs = _Unpickler(found, devices).load()
    arguments = jax.tree.unflatten(jax.tree.structure(found.arguments), arguments)
    return jax.stages.Compiled(executable.load(), [], arguments, jax.tree.structure(found.results), no_kwargs=no_kwargs)


class _Unpickler(serialize_executable._JaxPjrtUnpickler):
    """JAX's own, with other devices: a hook of `pickle`, and therefore a subclass."""

    def __init__(self, found: _Executable, devices: Sequence[Device]) -> None:
        super().__init__(io.BytesIO(found.payload), devices[0].client, tuple(devices))
        self.devices_by_id = dict(zip(found.device_ids, devices, strict=True))

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        if pid[0] != "exec":
            return super().persistent_load(pid)
        options = xla_client.CompileOptions()
        options.num_replicas, options.num_partitions = 1, len(self.devices_by_id)
        build = options.executable_build_options
        build.use_spmd_partitioning, build.num_partitions = True, options.num_partitions
        ids = [[device.id for device in self.devices_by_id.values()]]
        options.device_assignment = xla_client.DeviceAssignment.create(np.array(ids))
        return self.backend.deserialize_executable(pid[1], self.execution_devices, options)
