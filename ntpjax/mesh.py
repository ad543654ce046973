"""The flat mesh: one 1-D mesh axis over all live devices of all replicas.

Replicas of unequal TP degree do not fit a rectangular (replica, tp) mesh. On the flat mesh a tensor-parallel group is a
set of neighbouring positions, and every collective names its groups by `axis_index_groups`, which may be uneven. CPU
and GPU take uneven groups; the TPU compiler refuses them.

Example: degrees (4, 3) make a mesh of 7 positions, TP groups (0 1 2 3)(4 5 6) and, with sync degree 3, sum groups
(0 4)(1 5)(2 6)(3).
"""

import functools
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ntpjax.layout import Family
from ntpjax.topology import Topology

AXIS = "flat"
_NUM_THREADS_PER_DEVICE = 4
# XLA's kernels for products on the CPU set themselves up in each program's first run: a step of the demo then takes 4
# times as long. Without them it takes as long as the others.
_NO_YNN = "--xla_cpu_experimental_ynn_fusion_type="

Groups = tuple[tuple[int, ...], ...]
Device = Any  # a jax.Device, which type checkers do not accept as a type


@dataclass(frozen=True)
class FlatMesh:
    """The mesh of one generation. Positions count the devices in canonical order: replica by replica, rank by rank.

    Attributes:
      mesh: a JAX mesh with the one axis `AXIS`.
      topology: what the mesh was made from.
      own_positions: the positions of this process's devices.
      own_replicas: the replicas that run the program of this process: those of its devices and, where one is spread
        over several processes, those of the devices of all of these. A process compiles its programs for the TP degrees
        of these only, and its arrays have room for what these hold and no more: their shapes differ from process to
        process.
    """

    mesh: Mesh
    topology: Topology
    own_positions: tuple[int, ...]
    own_replicas: frozenset[int]

    @property
    def num_devices(self) -> int:
        return len(self.topology.devices)

    @property
    def sync_degree(self) -> int:
        return self.topology.sync_degree

    @functools.cached_property
    def degrees(self) -> tuple[int, ...]:
        """TP degree of each active replica, in canonical order: never rising."""
        return self.topology.ordered_degrees

    @functools.cached_property
    def tp_groups(self) -> Groups:
        """The positions of each replica."""
        ends = np.cumsum(self.degrees)
        return tuple(tuple(range(end - degree, end)) for end, degree in zip(ends.tolist(), self.degrees, strict=True))

    @functools.cached_property
    def sum_groups(self) -> Groups:
        """Core rank `i` of every replica together, each extra rank alone: who sums gradients with whom."""
        core = tuple(tuple(group[i] for group in self.tp_groups) for i in range(self.sync_degree))
        extra = tuple((position,) for group in self.tp_groups for position in group[self.sync_degree :])
        return core + extra

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """The TP rank of each position."""
        return tuple(rank for degree in self.degrees for rank in range(degree))

    @functools.cached_property
    def replica_of(self) -> tuple[int, ...]:
        """The id of each position's replica."""
        return self.topology.owners

    @functools.cached_property
    def own_degrees(self) -> tuple[int, ...]:
        """The TP degrees of this process's program, lowest first; of all devices if it has none."""
        degrees = self.topology.degrees
        return tuple(sorted({degrees[replica] for replica in self.own_replicas} or set(self.degrees)))

    @property
    def processes(self) -> set[int]:
        """The processes that have devices here."""
        return {device.process_index for device in self.mesh.devices}

    @property
    def leader(self) -> int:
        """The process that speaks for all: the one with the lowest index that has devices here."""
        return min(self.processes)

    def slots(self, family: Family) -> int:
        """Slots of this process's buffers: the most units that a rank of its TP degrees computes with."""
        return max(family.compute_layout(degree).slots for degree in self.own_degrees)

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of every array on the flat mesh: [num_devices, ...] over its first dimension."""
        return NamedSharding(self.mesh, PartitionSpec(AXIS))

    def assemble(self, shards: Sequence[jax.Array], part: jax.ShapeDtypeStruct | None = None) -> jax.Array:
        """The array [num_devices, ...] whose parts at the own positions are `shards`, [1, ...], each on its device.

        Args:
          part: shape and type of what one device has, without the leading 1; needed where there are no shards.
        """
        if part is None:
            part = jax.ShapeDtypeStruct(shards[0].shape[1:], shards[0].dtype)
        shape = (self.num_devices, *part.shape)
        return jax.make_array_from_single_device_arrays(shape, self.sharding, list(shards), dtype=part.dtype)

    def shards(self, array: jax.Array) -> dict[int, jax.Array]:
        """The parts [1, ...] of an array [num_devices, ...] at the own positions: the inverse of `assemble`."""
        parts = {shard.device: shard.data for shard in array.addressable_shards}
        return {position: parts[self.mesh.devices[position]] for position in self.own_positions}

    def place(self, value_at: Callable[[int], np.ndarray]) -> jax.Array:
        """The array [num_devices, ...] whose part at each own position `p` is `value_at(p)`, sent to its device."""
        values = {position: value_at(position) for position in self.own_positions or (0,)}
        part = next(iter(values.values()))
        shards = [jax.device_put(values[p][None], self.mesh.devices[p]) for p in self.own_positions]
        return self.assemble(shards, jax.ShapeDtypeStruct(part.shape, jax.dtypes.canonicalize_dtype(part.dtype)))


def emulate_cpu_devices(num_devices: int) -> None:
    """Makes JAX emulate devices on the CPU. Call it before JAX looks for devices."""
    # A collective in flight blocks a thread of XLA's pool. A device may have several in flight, so that a pool of one
    # thread a device can be used up before all devices have joined: a deadlock. XLA takes the pool's size from here.
    os.environ["NPROC"] = str(_NUM_THREADS_PER_DEVICE * num_devices)
    flags = os.environ.get("XLA_FLAGS", "")
    if _NO_YNN not in flags:
        os.environ["XLA_FLAGS"] = f"{_NO_YNN} {flags}".strip()
    # The compiler for CUDA (the extra `aot`) would report, whenever JAX starts, that there is no GPU.
    logging.getLogger("jax_plugins.xla_cuda12").setLevel(logging.ERROR)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def flat_mesh(
    topology: Topology,
    devices: Sequence[Device],
    own_devices: Collection[int] | None = None,
    process_of: Sequence[int] | None = None,
) -> FlatMesh:
    """The flat mesh of `topology`, whose device number `k` is `devices[k]`.

    Args:
      own_devices: what the process that has the devices of these numbers sees, to compile for it. By default they are
        those of this process.
      process_of: the process of each device, by number. By default JAX's.

    Raises:
      ValueError: if there are too few devices, or on TPU with replicas of unequal degree, which its compiler refuses.
    """
    if max(topology.devices) >= len(devices):
        raise ValueError(f"the topology has device {max(topology.devices)}, but there are only {len(devices)} devices.")
    if devices[0].platform == "tpu" and len({degree for degree in topology.degrees if degree}) > 1:
        raise ValueError(
            f"TP degrees {topology.degrees} are uneven, and the TPU compiler refuses collectives over uneven groups; "
            "use GPUs or CPUs, or give every replica the same degree."
        )
    if process_of is None:
        process_of = [device.process_index for device in devices]
    if own_devices is None:
        own_devices = {n for n in topology.devices if process_of[n] == jax.process_index()}
    own_positions = tuple(position for position, number in enumerate(topology.devices) if number in own_devices)
    mesh = Mesh(np.array([devices[n] for n in topology.devices]), (AXIS,))
    return FlatMesh(mesh, topology, own_positions, _linked_replicas(topology, own_devices, process_of))


def _linked_replicas(topology: Topology, own_devices: Collection[int], process_of: Sequence[int]) -> frozenset[int]:
    """The replicas of these devices, and of all devices of a process that has a part of one of them."""
    members, found = set(own_devices), frozenset[int]()
    while True:
        linked = frozenset(replica for replica, held in enumerate(topology.replicas) if not members.isdisjoint(held))
        if linked == found:
            return found
        found = linked
        shared = {process_of[n] for replica in found for n in topology.replicas[replica] if n not in own_devices}
        members |= {n for n in topology.devices if process_of[n] in shared}
