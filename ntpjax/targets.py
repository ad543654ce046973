"""GPUs that are not there: devices to compile for, and the options that a program of ntpjax is compiled with on CUDA.

Layer 1. The compiler for CUDA needs no GPU, only a description of one, and the package `jax-cuda12-pjrt`. What it gives
cannot run here, but its schedule and its memory can be read: see `ntpjax.hlo` and `python -m ntpjax aot`.
"""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

GPUS_A_HOST = 8
OVERLAP_OPTIONS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 3}
"""Lets the three collectives of the backward pass run at once: the pre-sync of one block, the sum over replicas of the
one before, and the post-sync of the one before that. With the compiler's own limit of 1 they wait for each other."""

UNEVEN_GROUPS_OPTIONS = {"xla_gpu_unsupported_use_all_reduce_one_shot_kernel": False}
"""Leaves small all-reduces to NCCL. XLA's own kernel for them is built for the size of the first group, so that with
groups of 8 and 7 devices jax 0.10 does not compile it; openxla/xla#45332 is about what it does where it compiles."""

UNMERGED_OPTIONS = {"xla_gpu_all_reduce_combine_threshold_bytes": 0}
"""Leaves every sum alone. The step has joined what belongs together already, and what one process joins the others
would have to join too. A small pre-sync and post-sync that are made one wait for each other's data."""

CUDA_OPTIONS: Mapping[str, Any] = {**OVERLAP_OPTIONS, **UNEVEN_GROUPS_OPTIONS, **UNMERGED_OPTIONS}

_GPUS = {
    "h100": {"name": "NVIDIA H100 80GB HBM3", "memory": 84_942_979_072, "memory_bandwidth": 3_352_320_000_000},
    "h200": {"name": "NVIDIA H200 141GB HBM3e", "memory": 151_397_597_184, "memory_bandwidth": 4_800_000_000_000},
}
TARGETS = tuple(_GPUS)
"""The names of all targets."""

# From XLA's own descriptions, xla/backends/gpu/target_config/specs; both parts are the same chip with other memory.
_HOPPER = """
gpu_device_info {{
  name: "{name}" device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a"
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: {memory} memory_bandwidth: {memory_bandwidth} l2_cache_size: 52428800 ecc_enabled: true
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_address_bits: 64 pcie_bandwidth: 34359738368 device_interconnect_info {{ active_links: 18 }}
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0" cub_version: "3.1.2"
  scalar_unit_description {{ {scalar_rates} }}
  matrix_unit_description {{ {matrix_rates} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
# (number of XLA's element types, as in xla_data.proto), clock in GHz, units a core, operations a clock.
_SCALAR_RATES = (
    ((4, 8, 12), 1.98, 64, 1),
    ((10, 16), 1.98, 128, 2),
    ((11,), 1.98, 128, 1),
)
_MATRIX_RATES = (
    ((2, 6, 19, 20, 23, 24, 25, 28, 29, 33, 35, 36), 1.8295201, 4, 1024),
    ((10, 16), 1.8295201, 4, 512),
    ((11,), 1.8295201, 4, 256),
    ((12,), 1.98, 4, 32),
)


def target_devices(name: str, num_devices: int) -> list[Any]:
    """Returns devices of hosts with 8 GPUs each, to build a mesh of and to compile for.

    On a machine without a GPU, JAX must have been told so (`JAX_PLATFORMS=cpu`) before it first looked for devices.

    Raises:
      ValueError: if there is no such target, or no compiler for CUDA.
    """
    if name not in TARGETS:
        raise ValueError(f"`target` (={name!r}) must be one of {', '.join(map(repr, TARGETS))}.")
    if num_devices < 1:
        raise ValueError(f"`num_devices` (={num_devices}) must be at least 1.")
    _require_compiler()
    spec = _HOPPER.format(**_GPUS[name], scalar_rates=_rates(_SCALAR_RATES), matrix_rates=_rates(_MATRIX_RATES))
    num_hosts = math.ceil(num_devices / GPUS_A_HOST)
    # Slices, hosts of a slice, GPUs of a host: hosts are joined by a network, not by NVLink.
    shape = f"{num_hosts}x1x{GPUS_A_HOST}"
    try:
        found = topologies.get_topology_desc(platform="cuda", target_config=spec, topology=shape)
    except NotImplementedError as error:
        raise ValueError("JAX has not loaded its compiler for CUDA; set JAX_PLATFORMS=cpu before it starts.") from error
    return found.devices[:num_devices]


def compile_for_cuda(traced: jax.stages.Traced, **options: Any) -> jax.stages.Compiled:
    """Returns a program, traced for `target_devices`, compiled with `CUDA_OPTIONS` and further compiler options."""
    lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options={**CUDA_OPTIONS, **options})


def _require_compiler() -> None:
    plugins = importlib.util.find_spec("jax_plugins")
    names = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
    if plugins is None or not any(importlib.util.find_spec(name) for name in names):
        raise ValueError("there is no compiler for CUDA; install ntpjax[aot].")


def _rates(rates: Sequence[tuple[tuple[int, ...], float, int, int]]) -> str:
    form = "rate_infos {{ key: {} value {{ clock_rate_ghz: {} units_per_core: {} ops_per_clock: {} }} }}"
    return " ".join(form.format(key, *rate) for keys, *rate in rates for key in keys)
