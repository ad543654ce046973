"""What to do with a reduced replica: how many samples it gets, and how much faster it would have to be.

Source: arXiv 2504.06095, section 4 (fewer samples, or more power). `keep_global` is ours: the paper's `shrink` changes
the global batch, and with it the optimisation.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from ntpjax.layout import Copied, Family, even_blocks

BatchPolicy = Literal["keep_global", "shrink", "equal"]


def split_batch(policy: BatchPolicy, size: int, degrees: Sequence[int], nominal_tp: int) -> tuple[int, ...]:
    """Samples that each replica takes of a global batch of `size`; a replica of degree 0 takes none.

    * `keep_global`: `size` in all, each sample to the replica that would finish it first, at a speed in proportion to
      the TP degree.
    * `shrink`: each replica keeps its nominal share, cut in proportion to its degree, rounded down, but not to 0; fewer
      than `size`.
    * `equal`: `size` in all, evenly; for when power makes up for the lost devices.

    Samples left over by the first and the last go to replicas of higher degree first, then to earlier ones: what the
    replicas of a degree take does not depend on which of them are reduced.

    >>> split_batch("keep_global", 16, (4, 3), 4)
    (9, 7)
    >>> split_batch("shrink", 16, (4, 3), 4)
    (8, 6)
    >>> split_batch("equal", 15, (4, 3), 4)
    (8, 7)

    Raises:
      ValueError: if no replica is active, or if `shrink` leaves no sample at all.
    """
    order = sorted(range(len(degrees)), key=lambda r: (-degrees[r], r))
    active = [r for r in order if degrees[r]]
    if not active:
        raise ValueError(f"`degrees` (={tuple(degrees)}) must have at least one active replica.")
    rows = [0] * len(degrees)
    if policy == "keep_global":
        for _ in range(size):
            # Exact: cross-multiplied, no floating point.
            first = active[0]
            for r in active[1:]:
                if (rows[r] + 1) * degrees[first] < (rows[first] + 1) * degrees[r]:
                    first = r
            rows[first] += 1
    elif policy == "equal":
        for r, share in zip(active, even_blocks(size, len(active)), strict=True):
            rows[r] = len(share)
    elif policy == "shrink":
        for r, share in enumerate(even_blocks(size, len(degrees))):
            rows[r] = max(len(share) * degrees[r] // nominal_tp, min(degrees[r], len(share), 1))
    else:
        raise ValueError(f"`policy` (='{policy}') must be one of {', '.join(get_args(BatchPolicy))}.")
    if sum(rows) == 0:
        raise ValueError(
            f"`batch.size` (={size}) leaves no sample for degrees {tuple(degrees)} under policy '{policy}'."
        )
    return tuple(rows)


def fullest_work(shares: Mapping[Family, float], degree: int) -> float:
    """Work of the fullest rank of a replica of `degree`, as a part of the work that counts every unit once.

    A block ends in a sum, so each block takes as long as its fullest rank.

    Args:
      shares: the part of the work that falls to each family, each unit counted once; they sum to 1.
    """
    return sum(_fullest(block, degree) for block in _blocks(shares))


def needed_speedup(shares: Mapping[Family, float], degree: int, nominal_tp: int) -> float:
    """How many times faster the devices of a replica of `degree` must be to keep up with a healthy one.

    The sum over blocks of share x (work of the fullest rank now / when healthy).

    Args:
      shares: the part of a healthy step's time that the work on each family takes; they sum to 1.

    >>> from ntpjax.layout import Split
    >>> shares = {Split("kv", 8, nominal_tp=8): 0.25, Split("ffn", 224, nominal_tp=8): 0.75}
    >>> round(needed_speedup(shares, 7, 8), 3)  # attention does twice the work, FFN 32 blocks for 28
    1.357
    """
    return sum(sum(block.values()) * _fullest(block, degree) / _fullest(block, nominal_tp) for block in _blocks(shares))


def _blocks(shares: Mapping[Family, float]) -> list[dict[Family, float]]:
    """The shares of the families of each block: copied units belong to the block of their users."""
    blocks: dict[Family, dict[Family, float]] = {}
    for family, share in shares.items():
        blocks.setdefault(family.users if isinstance(family, Copied) else family, {})[family] = share
    return list(blocks.values())


def _fullest(block: Mapping[Family, float], degree: int) -> float:
    """Work of a block's fullest rank, every copy counted."""
    work_of_unit = {family: share / family.num_units for family, share in block.items()}
    ranks = {family: family.compute_layout(degree).ranks for family in block}
    return max(sum(work * len(ranks[family][rank]) for family, work in work_of_unit.items()) for rank in range(degree))
