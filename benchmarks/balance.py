"""Balance of attention on reduced replicas of Llama-like shapes: `python benchmarks/balance.py`.

Work of the fullest rank over an even share, for the projections of an attention block: query and output of its query
heads, key and value of each KV head that it holds, copies included. Beside it what a split by whole KV heads would
cost.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from ntpjax.layout import Copied, Split, nested_layout
from ntpjax.policy import fullest_work

NOMINAL_TP = 8
SHAPES = ((64, 8), (32, 8))  # query heads, KV heads


def imbalance(num_heads: int, num_kv_heads: int, degree: int) -> float:
    """Work of the fullest rank over an even share, when query heads are the units."""
    heads = Split("heads", num_heads, NOMINAL_TP, num_heads // num_kv_heads)
    whole = 2 * num_heads + 2 * num_kv_heads
    shares = {heads: 2 * num_heads / whole, Copied("kv", heads): 2 * num_kv_heads / whole}
    return fullest_work(shares, degree) * degree


def main() -> None:
    worst = 0.0
    for num_heads, num_kv_heads in SHAPES:
        heads = Split("heads", num_heads, NOMINAL_TP, num_heads // num_kv_heads)
        for degree in (8, 7, 6, 5):
            counts = [len(units) for units in heads.compute_layout(degree).ranks]
            copies = [len(units) for units in Copied("kv", heads).compute_layout(degree).ranks]
            by_kv_head = nested_layout(num_kv_heads, NOMINAL_TP, degree).slots * degree / num_kv_heads
            found = imbalance(num_heads, num_kv_heads, degree)
            worst = max(worst, found)
            print(
                f"{num_heads} heads, {num_kv_heads} KV heads on {degree}: query heads a rank {counts}, "
                f"KV heads {copies}; fullest over ideal {found:.3f}, split by KV head {by_kv_head:.3f}"
            )
    print(f"worst_imbalance {worst:.3f}")


if __name__ == "__main__":
    main()
