"""Tokens to batches: the one global order of samples, and the batch of each step.

Layer 1. A text is one row of tokens, a memory-mapped file (`ntpjax.text`); a sample is a window of `seq_len + 1` of
them. Grain shuffles the samples of each text into an endless order, and the texts take turns by their weights. The one
order that this gives knows nothing of replicas, and a step takes the next samples of it, replica by replica. So one
saved integer, `samples_seen`, says where a run is, and no change of batch split loses or repeats a sample.

Example: at `samples_seen` 0, rows (2, 1) give positions 0 and 1 of the order to replica 0 and position 2 to replica 1.
When replica 1 is gone, rows (3, 0) at `samples_seen` 3 give positions 3, 4 and 5 to replica 0.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Self, final

import grain
import numpy as np


def _num_samples(num_tokens: int, seq_len: int) -> int:
    # Samples overlap by one token: the last of a sample is only a target, and the first input of the next one.
    return max(num_tokens - 1, 0) // seq_len


def split_held_out(
    tokens: np.ndarray, *, fraction: float, seq_len: int, key: str = "data"
) -> tuple[np.ndarray, np.ndarray]:
    """Returns `(training, held_out)`, views of `tokens` [num_tokens]; the last `fraction` of them is held out.

    Raises:
      ValueError: a side has not one sample, as with any `fraction` that is not between 0 and 1; names the text's `key`.
    """
    cut = len(tokens) - round(len(tokens) * fraction)
    if min(_num_samples(cut, seq_len), _num_samples(len(tokens) - cut, seq_len)) < 1:
        raise ValueError(
            f"data.held_out (={fraction}) cuts {len(tokens)} tokens into {cut} for training and {len(tokens) - cut} "
            f"held out; each needs at least `seq_len` + 1 (={seq_len + 1}); change it, lower seq_len or add text to "
            f"{key}.files."
        )
    return tokens[:cut], tokens[cut:]


def take_turns(weights: Sequence[int]) -> np.ndarray:
    """Returns the text that has each turn of a period, integers [sum(weights)]; text `i` has `weights[i]` turns.

    After any number of turns a text has had its share of them to within less than one. This is the rule of Tijdeman,
    "The chairman assignment problem" (1980), in whole numbers. (Grain's `mix` is off by 2.2 turns for weights 7, 1, 1
    and 7, and takes 1.0 and 1.009 for equal.)

    >>> take_turns((3, 1)).tolist()
    [0, 0, 1, 0]
    """
    period, scale = sum(weights), max(2 * len(weights) - 2, 1)
    shares, owed = np.asarray(weights, np.int64), np.zeros(len(weights), np.int64)
    turns = np.empty(period, np.int64)
    for turn in range(period):
        owed += shares  # `owed` is in turns times the period
        # Of the texts that are owed enough for a turn, the one whose share would be missed first.
        time_left = np.where(scale * owed >= period, ((scale - 1) * period - scale * owed) / shares, np.inf)
        turns[turn] = np.argmin(time_left)
        owed[turns[turn]] -= period
    return turns


@dataclass(frozen=True, eq=False)
class SampleOrder:
    """The one global order of samples: endless, shuffled, random access.

    The texts take turns by weight, and each of them gives its samples in a shuffled order of its own, in which every
    epoch is a new permutation of them all. Where a text is in its epochs depends on the position alone.

    Attributes:
      texts: each integers [num_tokens], usually a view of a memory-mapped file.
      seq_len: sample `i` of a text is `text[i * seq_len : i * seq_len + seq_len + 1]`.
      seed: of the shuffles, in `[0, 2**32)`.
      weights: for each text, its part of the order; whole numbers, of which only the ratios matter.

    Raises:
      ValueError: `seq_len`, `seed` or `weights` are out of range, or a text holds no sample, or more than Grain can
        shuffle.
    """

    texts: tuple[np.ndarray, ...]
    seq_len: int
    seed: int
    weights: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise ValueError(f"`seq_len` (={self.seq_len}) must be at least 1.")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"`seed` (={self.seed}) must be in [0, 2**32).")
        if not self.texts or len(self.weights) != len(self.texts) or min(self.weights) < 1:
            raise ValueError(
                f"`weights` (={self.weights}) must be one of 1 or more for each of {len(self.texts)} texts."
            )
        for i, text in enumerate(self.texts):
            # Grain shuffles 32-bit indices: above this number it repeats samples without an error.
            if not 1 <= (num_samples := _num_samples(len(text), self.seq_len)) <= 1 << 32:
                raise ValueError(
                    f"`seq_len` (={self.seq_len}) cuts {len(text)} tokens of text {i} into {num_samples} samples (of "
                    "seq_len + 1); there must be 1 to 2**32: for more, lower seq_len or add text; for fewer, raise "
                    "seq_len."
                )

    @cached_property
    def _first_ids(self) -> tuple[int, ...]:
        """The id of the first sample of each text, and after them the number of samples."""
        return tuple(accumulate((_num_samples(len(text), self.seq_len) for text in self.texts), initial=0))

    @cached_property
    def _turns(self) -> tuple[np.ndarray, np.ndarray]:
        """For each turn of a period, the text that has it, and how many it had before."""
        turns = take_turns(self.weights)
        had = np.empty_like(turns)
        for text, weight in enumerate(self.weights):
            had[turns == text] = np.arange(weight)
        return turns, had

    @property
    def num_samples(self) -> int:
        """Number of samples in all texts; ids are below it."""
        return self._first_ids[-1]

    def sample_ids(self, start: int, count: int) -> np.ndarray:
        """Returns the ids of the samples at positions `start` to `start + count - 1` of the order, int64 [count]."""
        turns, had = self._turns
        period, turn = np.divmod(np.arange(start, start + count), len(turns))
        texts = turns[turn]
        places = period * np.asarray(self.weights)[texts] + had[turn]
        # Texts of one size get seeds of their own, or their shuffles would be the same.
        orders = [
            grain.MapDataset.range(first, end).seed((self.seed + i) % (1 << 32)).shuffle().repeat()
            for i, (first, end) in enumerate(pairwise(self._first_ids))
        ]
        pairs = zip(texts.tolist(), places.tolist(), strict=True)
        return np.fromiter((orders[text][place] for text, place in pairs), np.int64, count)

    def read(self, sample_ids: np.ndarray) -> np.ndarray:
        """Returns the tokens of the samples `sample_ids` [count], int32 [count, seq_len + 1]."""
        rows = np.empty((len(sample_ids), self.seq_len + 1), np.int32)
        texts = np.searchsorted(self._first_ids, sample_ids, side="right") - 1
        for i, text in enumerate(self.texts):
            starts = (sample_ids[texts == i] - self._first_ids[i]) * self.seq_len
            rows[texts == i] = np.asarray(text)[starts[:, None] + np.arange(self.seq_len + 1)]
        return rows

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
