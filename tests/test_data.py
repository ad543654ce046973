"""Tests of `ntpjax.data`: the one order of samples, batches for any split, and the stream of batches."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from ntpjax import data
from ntpjax.data import Batch, BatchStream, SampleOrder, batch_at, split_held_out

pytestmark = pytest.mark.timeout(60)

SPLITS = [(8, 8), (8, 7), (16, 0), (0, 16), (5, 5, 6), (1,), (0, 0, 3)]


def make_order(num_samples: int = 37, seq_len: int = 4, seed: int = 3) -> SampleOrder:
    """An order whose token at place `p` is `p`, so that a sample shows where it comes from."""
    return SampleOrder(np.arange(num_samples * seq_len + 1, dtype=np.uint16), seq_len=seq_len, seed=seed)


def assert_equal_batches(left: Batch, right: Batch) -> None:
    np.testing.assert_array_equal(left.tokens, right.tokens)
    np.testing.assert_array_equal(left.weights, right.weights)
    assert left.sample_ids == right.sample_ids
    assert left.samples_seen_after == right.samples_seen_after


def grain_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")]


def assert_no_grain_threads() -> None:
    for thread in grain_threads():
        thread.join(timeout=10)
    assert grain_threads() == []


# The order of samples.


def test_a_sample_holds_its_inputs_and_the_next_token() -> None:
    order = make_order(num_samples=37, seq_len=4)
    ids = order.sample_ids(5, 9)
    rows = order.rows(5, 9)
    assert (ids.dtype, ids.shape, rows.dtype, rows.shape) == (np.int64, (9,), np.int32, (9, 5))
    assert rows.tolist() == [list(range(4 * i, 4 * i + 5)) for i in ids]
    assert order.rows(5, 0).shape == (0, 5)


@pytest.mark.parametrize(("num_tokens", "num_samples"), [(5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_the_tail_without_a_next_token_is_no_sample(num_tokens: int, num_samples: int) -> None:
    order = SampleOrder(np.arange(num_tokens), seq_len=4, seed=0)
    assert order.num_samples == num_samples
    assert order.read(np.arange(num_samples)).max() < num_tokens


@pytest.mark.parametrize("num_samples", [1, 2, 37, 1000])
def test_every_epoch_is_a_new_permutation(num_samples: int) -> None:
    order = make_order(num_samples)
    epochs = [order.sample_ids(epoch * num_samples, num_samples) for epoch in range(4)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(num_samples))
    across = order.sample_ids(num_samples // 2, num_samples)
    np.testing.assert_array_equal(across, np.concatenate(epochs[:2])[num_samples // 2 :][:num_samples])
    if num_samples >= 37:
        assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_seed_alone_sets_the_order() -> None:
    assert make_order(seed=3).sample_ids(0, 37).tolist() == make_order(seed=3).sample_ids(0, 37).tolist()
    assert make_order(seed=3).sample_ids(0, 37).tolist() != make_order(seed=4).sample_ids(0, 37).tolist()


def test_an_order_needs_a_sample_and_sane_numbers() -> None:
    tokens = np.arange(8)
    with pytest.raises(ValueError, match=r"`seq_len` \(=8\) cuts 8 tokens into 0 samples.*lower seq_len or add text"):
        SampleOrder(tokens, seq_len=8, seed=0)
    with pytest.raises(ValueError, match=r"`seq_len` \(=0\)"):
        SampleOrder(tokens, seq_len=0, seed=0)
    for seed in (-1, 1 << 32):
        with pytest.raises(ValueError, match=rf"`seed` \(={seed}\)"):
            SampleOrder(tokens, seq_len=4, seed=seed)
    endless = np.broadcast_to(np.uint16(0), (1 << 32) + 2)
    with pytest.raises(ValueError, match="raise seq_len"):
        SampleOrder(endless, seq_len=1, seed=0)
    assert SampleOrder(endless[:-1], seq_len=1, seed=0).num_samples == 1 << 32


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("seq_len", [1, 7])  # With 1 every token is in a sample, so one too many shows.
def test_training_and_held_out_share_no_token(fraction: float, seq_len: int, tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(1000, dtype=np.uint16))
    tokens = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    training, held_out = split_held_out(tokens, fraction=fraction, seq_len=seq_len)
    assert np.shares_memory(training, tokens) and np.shares_memory(held_out, tokens)
    assert (len(held_out), held_out[-1]) == (round(1000 * fraction), 999)
    seen = [SampleOrder(side, seq_len=seq_len, seed=0) for side in (training, held_out)]
    trained, evaluated = (set(order.rows(0, order.num_samples).flat) for order in seen)
    assert max(trained) < min(evaluated)


@pytest.mark.parametrize("fraction", [0.0, 0.004, 0.996, 1.0, 1.5, -0.5])
def test_each_side_needs_a_sample(fraction: float) -> None:
    held = round(1000 * fraction)
    sizes = rf"1000 tokens into {1000 - held} for training and {held} held out"
    with pytest.raises(ValueError, match=rf"data\.held_out \(={fraction}\) cuts {sizes}.*\(=8\)"):
        split_held_out(np.arange(1000), fraction=fraction, seq_len=7)


# Batches.


@pytest.mark.parametrize("rows", SPLITS)
def test_the_order_is_the_same_for_any_split(rows: tuple[int, ...]) -> None:
    order = make_order()
    seen, ids = 0, []
    while seen < 3 * order.num_samples:
        batch = batch_at(order, samples_seen=seen, rows=rows)
        seen = batch.samples_seen_after
        ids += batch.sample_ids
    assert len(ids) == seen
    assert ids == order.sample_ids(0, seen).tolist()


def steps_of(order: SampleOrder, schedule: Sequence[tuple[int, tuple[int, ...]]]) -> Iterator[Batch]:
    """Batches of `schedule`, pairs of (number of steps, rows), with a new stream at each change."""
    seen = 0
    for num_steps, rows in schedule:
        with BatchStream(order, samples_seen=seen, rows=rows, prefetch=3) as stream:
            for _ in range(num_steps):
                batch = next(stream)
                seen = batch.samples_seen_after
                yield batch


def test_no_sample_is_lost_or_repeated_when_replicas_come_and_go() -> None:
    order = make_order(num_samples=101)
    schedule = [(3, (4, 4, 4, 4)), (5, (8, 8)), (2, (4, 4, 4, 4)), (4, (6, 5, 5)), (1, (16, 0, 0)), (3, (5, 5, 6))]
    batches = list(steps_of(order, schedule))
    ids = [sample for batch in batches for sample in batch.sample_ids]
    # Every step has 16 samples, so a run without failures sees the same global batches.
    assert ids == [sample for batch in steps_of(order, [(18, (16,))]) for sample in batch.sample_ids]
    assert sorted(ids[:101]) == list(range(101))
    assert sorted(ids[101:202]) == list(range(101))
    rows = np.concatenate([batch.tokens[batch.weights == 1] for batch in batches])
    np.testing.assert_array_equal(rows, order.rows(0, len(ids)))


def test_replicas_take_consecutive_rows_and_padding_weighs_nothing() -> None:
    order = make_order()
    batch = batch_at(order, samples_seen=30, rows=(2, 0, 3))
    rows = order.rows(30, 5)
    assert (batch.tokens.shape, batch.tokens.dtype, batch.weights.dtype) == ((3, 3, 5), np.int32, np.float32)
    np.testing.assert_array_equal(batch.tokens[0, :2], rows[:2])
    np.testing.assert_array_equal(batch.tokens[2], rows[2:])
    assert batch.weights.tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
    assert not batch.tokens[batch.weights == 0].any()
    assert batch.sample_ids == tuple(order.sample_ids(30, 5).tolist())
    assert batch.samples_seen_after == 35


@pytest.mark.parametrize(
    ("samples_seen", "rows", "message"),
    [
        (0, (0, 0), r"`rows` \(=\(0, 0\)\)"),
        (0, (), "`rows`"),
        (0, (2, -1), "`rows`"),
        (-1, (1,), r"`samples_seen` \(=-1"),
    ],
)
def test_impossible_batches_are_refused(samples_seen: int, rows: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch_at(make_order(), samples_seen=samples_seen, rows=rows)
    with pytest.raises(ValueError, match=message):
        BatchStream(make_order(), samples_seen=samples_seen, rows=rows)


# The stream.


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_the_stream_gives_the_batches_in_turn(prefetch: int) -> None:
    order = make_order()
    with BatchStream(order, samples_seen=11, rows=(5, 0, 2), prefetch=prefetch) as stream:
        assert iter(stream) is stream
        for step in range(12):
            assert_equal_batches(next(stream), batch_at(order, samples_seen=11 + 7 * step, rows=(5, 0, 2)))


def test_batches_are_made_before_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = threading.Semaphore(0)

    def counted(order: SampleOrder, *, samples_seen: int, rows: Sequence[int]) -> Batch:
        made.release()
        return batch_at(order, samples_seen=samples_seen, rows=rows)

    monkeypatch.setattr(data, "batch_at", counted)
    with BatchStream(make_order(), samples_seen=0, rows=(1,), prefetch=3):
        assert all(made.acquire(timeout=10) for _ in range(3))
        assert not made.acquire(timeout=0.2)


def test_close_leaves_no_thread() -> None:
    for num_steps in (0, 1, 4):
        stream = BatchStream(make_order(), samples_seen=0, rows=(2, 2))
        for _ in range(num_steps):
            next(stream)
        assert grain_threads() != []
        stream.close()
        stream.close()
        assert_no_grain_threads()
        with pytest.raises(ValueError, match="this BatchStream is closed"):
            next(stream)


def test_close_does_not_wait_for_a_slow_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(order: SampleOrder, *, samples_seen: int, rows: Sequence[int]) -> Batch:
        started.set()
        go_on.wait(timeout=30)
        return batch_at(order, samples_seen=samples_seen, rows=rows)

    monkeypatch.setattr(data, "batch_at", slow)
    stream = BatchStream(make_order(), samples_seen=0, rows=(1,))
    assert started.wait(timeout=10)
    before_s = time.monotonic()
    stream.close()
    assert time.monotonic() - before_s < 5
    go_on.set()
    assert_no_grain_threads()


def test_an_error_in_the_thread_surfaces_and_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(order: SampleOrder, *, samples_seen: int, rows: Sequence[int]) -> Batch:
        if samples_seen == 4:
            raise OSError("disk gone")
        return batch_at(order, samples_seen=samples_seen, rows=rows)

    monkeypatch.setattr(data, "batch_at", failing)
    stream = BatchStream(make_order(), samples_seen=0, rows=(1, 1))
    assert [next(stream).samples_seen_after for _ in range(2)] == [2, 4]
    with pytest.raises(OSError, match="disk gone"):
        next(stream)
    # Grain alone would go on with the batch after the one that failed.
    with pytest.raises(ValueError, match="this BatchStream is closed"):
        next(stream)
    assert_no_grain_threads()


def test_a_stream_needs_to_be_ahead() -> None:
    with pytest.raises(ValueError, match=r"`prefetch` \(=0\)"):
        BatchStream(make_order(), samples_seen=0, rows=(1,), prefetch=0)


def test_a_process_that_does_not_close_its_stream_still_ends() -> None:
    code = (
        "import numpy as np; from ntpjax.data import BatchStream, SampleOrder\n"
        "stream = BatchStream(SampleOrder(np.arange(99), seq_len=4, seed=0), samples_seen=0, rows=(2, 1))\n"
        "print(next(stream).samples_seen_after)\n"
    )
    repository = Path(__file__).parents[1]
    ended = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "3\n", "")
