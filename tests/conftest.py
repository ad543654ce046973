"""What every test shares: eight CPU devices, the Hypothesis profile, and the `x64` fixture."""

import os
from collections.abc import Iterator

import hypothesis
import jax
import pytest

from ntpjax.mesh import emulate_cpu_devices

# Before JAX starts its backend, which the first call for devices or arrays does. Most of a test's time is compiling:
# what LLVM would make of a program matters little for a few small steps.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
emulate_cpu_devices(8)

# The same examples in every run; compiling makes the first one slow, hence no deadline for each.
hypothesis.settings.register_profile("ntpjax", deadline=None, derandomize=True, max_examples=100)
hypothesis.settings.load_profile("ntpjax")


@pytest.fixture
def x64() -> Iterator[None]:
    """Lets the test that asks for it use 64-bit arrays; all others keep JAX's 32-bit default."""
    with jax.enable_x64(True):
        yield
