"""What each TP degree means for a model, before any device is touched: balance, memory, and bytes moved.

Bytes are those of the layouts, so they are exact. Work is counted in weights: the matmuls of a block cost in proportion
to the weights of the units that a rank holds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from ntpjax.layout import REPLICATED, Copied, Family, Layout
from ntpjax.mesh import Device
from ntpjax.optimizer import state_partitions
from ntpjax.partition import Partition, families_in
from ntpjax.plan import exchange, plan_change
from ntpjax.policy import fullest_work, needed_speedup
from ntpjax.topology import Topology
from ntpjax.training import Training

PyTree = Any
UnitBytes = Mapping[Family, int]
"""Bytes of one unit of each family, over all arrays that are cut into it."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of a buffer, how many of them are for copied units, and the least that any method must carry."""

    num_bytes: int
    copies_bytes: int
    least_bytes: int


@dataclass(frozen=True)
class DegreeForecast:
    """One TP degree of a replica, in a job in which no replica has a smaller one.

    Attributes:
      degree: devices of the replica.
      units: for each family the fewest and the most units on a rank.
      padding: part of the buffers' bytes that holds nothing.
      work_over_ideal: work of the fullest rank over an even share of all units, each counted once.
      needed_speedup: how many times faster its devices must be to keep up with a healthy replica.
      state_bytes: parameters and optimizer state on a device.
      moved, moved_worst: what moves when a replica comes to this degree by losing its last rank, and when it loses
        another one; nothing for a healthy replica.
      pre_sync, post_sync: traffic of a step in each healthy replica of the job.
      cross_replica: traffic of a step on each core rank.
    """

    degree: int
    units: dict[str, tuple[int, int]]
    padding: float
    work_over_ideal: float
    needed_speedup: float
    state_bytes: int
    moved: Traffic
    moved_worst: Traffic
    pre_sync: Traffic
    cross_replica: Traffic
    post_sync: Traffic


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A training without its devices.

    Attributes:
      shapes: logical shapes of `params` and `opt_state`.
      partitions: how they are cut.
      degrees: TP degrees of the replicas at the start.
      tp_min: the smallest TP degree to go on with.
      training_on: devices to the training on them.
      row: shapes and types of one row of its batch.
      num_rows: TP degrees to the rows of each replica. These last three are for compiling, not for a forecast.
    """

    shapes: Mapping[str, PyTree]
    partitions: Mapping[str, PyTree]
    degrees: tuple[int, ...]
    tp_min: int
    training_on: Callable[[Sequence[Device]], Training] | None = None
    row: PyTree = None
    num_rows: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None

    @classmethod
    def of(
        cls,
        params: PyTree,
        partitions: PyTree,
        optimizer: optax.GradientTransformation,
        degrees: tuple[int, ...],
        tp_min: int = 1,
    ) -> "Blueprint":
        """The blueprint of parameters (shapes), cut as `partitions` say, with an optimizer."""
        shapes = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
        cut = {"params": partitions, "opt_state": state_partitions(optimizer, params, partitions)}
        return cls(shapes, cut, degrees, tp_min)

    @property
    def num_parameters(self) -> int:
        return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(self.shapes["params"]))


def forecast(plan: Blueprint) -> list[DegreeForecast]:
    """A forecast for each TP degree from the nominal one down to `tp_min`."""
    params, partitions, nominal_tp = plan.shapes["params"], plan.partitions["params"], max(plan.degrees)
    state, grads = unit_bytes(plan.shapes, plan.partitions), unit_bytes(params, partitions)
    shares = work_shares(params, partitions)
    degrees = range(nominal_tp, max(plan.tp_min, 1) - 1, -1)
    return [_forecast(degree, nominal_tp, state, grads, shares) for degree in degrees]


def unit_bytes(shapes: PyTree, partitions: PyTree) -> dict[Family, int]:
    """Bytes of one unit of each family, over all arrays of a tree of logical shapes."""
    sizes = dict.fromkeys(families_in(partitions), 0)

    def add(leaf: jax.ShapeDtypeStruct, part: Partition) -> None:
        sizes[part.family] += int(np.prod(leaf.shape)) * leaf.dtype.itemsize // part.family.num_units

    jax.tree.map(add, shapes, partitions)
    return sizes


def work_shares(params: PyTree, partitions: PyTree) -> dict[Family, float]:
    """The part of a layer's matmul work that falls to each unit family: its part of the weights of `layers`."""
    sizes = unit_bytes(params["layers"], partitions["layers"])
    totals = {family: size * family.num_units for family, size in sizes.items() if family != REPLICATED}
    return {family: total / sum(totals.values()) for family, total in totals.items()}


def _forecast(
    degree: int, nominal_tp: int, state: UnitBytes, grads: UnitBytes, shares: Mapping[Family, float]
) -> DegreeForecast:
    layouts = {family: family.compute_layout(degree) for family in state}
    held = sum(size * sum(map(len, layouts[family].ranks)) for family, size in state.items())
    state_bytes = sum(size * layouts[family].slots for family, size in state.items())
    return DegreeForecast(
        degree=degree,
        units={family.name: _fewest_and_most(layouts[family]) for family in state if family != REPLICATED},
        padding=1 - held / (state_bytes * degree),
        work_over_ideal=fullest_work(shares, degree) * degree,
        needed_speedup=needed_speedup(shares, degree, nominal_tp),
        state_bytes=state_bytes,
        moved=_moved(degree, nominal_tp, state, lost_rank=degree),
        moved_worst=_moved(degree, nominal_tp, state, lost_rank=0),
        pre_sync=_resharded(degree, nominal_tp, grads, to_sync=True),
        cross_replica=_summed(degree, grads),
        post_sync=_resharded(degree, nominal_tp, grads, to_sync=False),
    )


def _fewest_and_most(layout: Layout) -> tuple[int, int]:
    counts = [len(units) for units in layout.ranks]
    return min(counts), max(counts)


def _moved(degree: int, nominal_tp: int, state: UnitBytes, lost_rank: int) -> Traffic:
    """What moves when one of two replicas of `degree + 1` loses a rank; the least is what that rank held."""
    if degree == nominal_tp:
        return Traffic(0, 0, 0)
    old = Topology.of_degrees((degree + 1, degree + 1), nominal_tp)
    new = old.lose(replica=1, rank=lost_rank)
    num_bytes = {family: size * len(plan_change(family, old, new).moves) for family, size in state.items()}
    lost = {family: size * len(family.compute_layout(degree + 1).ranks[lost_rank]) for family, size in state.items()}
    copies = sum(num for family, num in num_bytes.items() if isinstance(family, Copied))
    least = sum(num for family, num in lost.items() if family != REPLICATED and not isinstance(family, Copied))
    return Traffic(sum(num_bytes.values()), copies, least)


def _resharded(sync_degree: int, nominal_tp: int, grads: UnitBytes, *, to_sync: bool) -> Traffic:
    """The shared buffer of a healthy replica's pre-sync or post-sync. The least is what its extra ranks hold."""
    num_bytes = copies = least = 0
    for family, size in grads.items():
        compute, sync = family.compute_layout(nominal_tp), family.sync_layout(nominal_tp, sync_degree)
        table = exchange(compute, sync, add_copies=family.add_copies) if to_sync else exchange(sync, compute)
        num_bytes += size * len(table.shared)
        if isinstance(family, Copied):
            copies += size * len(table.shared)
        elif family != REPLICATED:
            least += size * sum(len(units) for units in compute.ranks[sync_degree:])
    return Traffic(num_bytes, copies, least)


def _summed(sync_degree: int, grads: UnitBytes) -> Traffic:
    """The buffers that a core rank sums over replicas, padding too. The least is an even share of all units."""
    slots = {family: family.sync_layout(sync_degree, sync_degree).slots for family in grads}
    num_bytes = sum(size * slots[family] for family, size in grads.items())
    whole = sum(size * family.num_units for family, size in grads.items() if family != REPLICATED)
    return Traffic(num_bytes, 0, whole // sync_degree + grads.get(REPLICATED, 0))
