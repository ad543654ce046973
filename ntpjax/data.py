"""Tokens to batches: the one global order of samples, and the batch of each step.

Layer 1. Text is one row of tokens, a memory-mapped file (`ntpjax.text`); a sample is a window of `seq_len + 1` of them.
Grain shuffles the samples into one endless order that knows nothing of replicas, and a step takes the next samples of
it, replica by replica. So one saved integer, `samples_seen`, says where a run is, and no change of batch split loses or
repeats a sample.

Example: at `samples_seen` 0, rows (2, 1) give positions 0 and 1 of the order to replica 0 and position 2 to replica 1.
When replica 1 is gone, rows (3, 0) at `samples_seen` 3 give positions 3, 4 and 5 to replica 0.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

import grain
import numpy as np


def _num_samples(num_tokens: int, seq_len: int) -> int:
    # Samples overlap by one token: the last of a sample is only a target, and the first input of the next one.
    return max(num_tokens - 1, 0) // seq_len


def split_held_out(tokens: np.ndarray, *, fraction: float, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `(training, held_out)`, views of `tokens` [num_tokens]; the last `fraction` of them is held out.

    Raises:
      ValueError: a side has not one sample, as with any `fraction` that is not between 0 and 1.
    """
    cut = len(tokens) - round(len(tokens) * fraction)
    if min(_num_samples(cut, seq_len), _num_samples(len(tokens) - cut, seq_len)) < 1:
        raise ValueError(
            f"data.held_out (={fraction}) cuts {len(tokens)} tokens into {cut} for training and {len(tokens) - cut} "
            f"held out; each needs at least `seq_len` + 1 (={seq_len + 1}); change it, lower seq_len or add text."
        )
    return tokens[:cut], tokens[cut:]


@dataclass(frozen=True, eq=False)
class SampleOrder:
    """The one global order of samples: endless, shuffled, random access. Each epoch is a new permutation of them all.

    Attributes:
      tokens: integers [num_tokens], usually a view of a memory-mapped file.
      seq_len: sample `i` is `tokens[i * seq_len : i * seq_len + seq_len + 1]`.
      seed: of the shuffle, in `[0, 2**32)`.

    Raises:
      ValueError: `seq_len` or `seed` is out of range, or `tokens` hold no sample, or more than Grain can shuffle.
    """

    tokens: np.ndarray
    seq_len: int
    seed: int

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise ValueError(f"`seq_len` (={self.seq_len}) must be at least 1.")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"`seed` (={self.seed}) must be in [0, 2**32).")
        # Grain shuffles 32-bit indices: above this number it repeats samples without an error.
        if not 1 <= self.num_samples <= 1 << 32:
            raise ValueError(
                f"`seq_len` (={self.seq_len}) cuts {len(self.tokens)} tokens into {self.num_samples} samples (of "
                "seq_len + 1); there must be 1 to 2**32: for more, lower seq_len or add text; for fewer, raise seq_len."
            )

    @property
    def num_samples(self) -> int:
        """Number of samples in an epoch."""
        return _num_samples(len(self.tokens), self.seq_len)

    def sample_ids(self, start: int, count: int) -> np.ndarray:
        """Returns the ids of the samples at positions `start` to `start + count - 1` of the order, int64 [count]."""
        order = grain.MapDataset.range(self.num_samples).seed(self.seed).shuffle().repeat()
        return np.fromiter((order[position] for position in range(start, start + count)), np.int64, count)

    def read(self, sample_ids: np.ndarray) -> np.ndarray:
        """Returns the tokens of the samples `sample_ids` [count], int32 [count, seq_len + 1]."""
        offsets = sample_ids[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        return np.asarray(self.tokens)[offsets].astype(np.int32)

    def rows(self, start: int, count: int) -> np.ndarray:
        """Returns the tokens of the samples at those positions of the order, int32 [count, seq_len + 1]."""
        return self.read(self.sample_ids(start, count))


@dataclass(frozen=True, eq=False)
class Batch:
    """The global batch of one step; each replica's rows are padded to those of the fullest.

    Attributes:
      tokens: int32 [num_replicas, max_rows, seq_len + 1]; padding is token 0.
      weights: float32 [num_replicas, max_rows]; 1 for a sample, 0 for padding.
      sample_ids: ids of the samples in the global order: those of replica 0, then of replica 1, and so on.
      samples_seen_after: where the next step goes on.
    """

    tokens: np.ndarray
    weights: np.ndarray
    sample_ids: tuple[int, ...]
    samples_seen_after: int


def _check_request(samples_seen: int, rows: Sequence[int]) -> None:
    if samples_seen < 0:
        raise ValueError(f"`samples_seen` (={samples_seen}) must be at least 0.")
    if min(rows, default=0) < 0 or not any(rows):
        raise ValueError(f"`rows` (={tuple(rows)}) must be 0 or more for each replica, and not 0 for all.")


def batch_at(order: SampleOrder, *, samples_seen: int, rows: Sequence[int]) -> Batch:
    """Returns the batch of the step that starts at `samples_seen`: replica `r` takes the next `rows[r]` samples.

    Raises:
      ValueError: `samples_seen` or one of `rows` is negative, or all of `rows` are 0.
    """
    _check_request(samples_seen, rows)
    sample_ids = order.sample_ids(samples_seen, sum(rows))
    is_sample = np.arange(max(rows)) < np.asarray(rows)[:, None]
    tokens = np.zeros((*is_sample.shape, order.seq_len + 1), np.int32)
    # A mask is filled replica by replica and row by row, which is the order of the samples.
    tokens[is_sample] = order.read(sample_ids)
    return Batch(tokens, is_sample.astype(np.float32), tuple(sample_ids.tolist()), samples_seen + sum(rows))


@final
class BatchStream:
    """The batches from `samples_seen` on, `prefetch` of them made ahead by a Grain thread; close it after use.

    `rows` are fixed. When they change, make another stream from the `samples_seen_after` of the last batch that was
    used: batches made ahead are dropped, and no sample is lost or repeated. Not for use from several threads at once.

    Raises:
      ValueError: as `batch_at`, or `prefetch` is below 1.
    """

    def __init__(self, order: SampleOrder, *, samples_seen: int, rows: Sequence[int], prefetch: int = 2) -> None:
        _check_request(samples_seen, rows)
        if prefetch < 1:
            raise ValueError(f"`prefetch` (={prefetch}) must be at least 1.")
        rows = tuple(rows)
        steps = grain.MapDataset.range(sys.maxsize).map(
            lambda step: batch_at(order, samples_seen=samples_seen + step * sum(rows), rows=rows)
        )
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
        self._batches = iter(steps.to_iter_dataset(options))
        self._batches.start_prefetch()
        self._closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Returns the next batch, or raises what making it raised, and ValueError once the stream is closed."""
        if self._closed:
            raise ValueError("this BatchStream is closed; make another from the last batch's `samples_seen_after`.")
        try:
            return next(self._batches)
        except BaseException:
            # Grain forgets a batch that failed or was interrupted: going on would skip its samples without an error.
            self.close()
            raise

    def close(self) -> None:
        """Drops the batches made ahead; the thread ends with the batch that it is making. May be called again."""
        self._closed = True
        self._batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
