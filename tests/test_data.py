"""Tests of `ntpjax.data`: the one order of samples, batches for any split, and the stream of batches."""

import itertools
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntpjax import data
from ntpjax.config import ConfigError
from ntpjax.data import Batch, BatchStream, SampleOrder, batch_at, split_held_out, take_turns
from ntpjax.sections import DataConfig, SourceConfig
from train import read_tokens

pytestmark = pytest.mark.timeout(60)

SPLITS = [(8, 8), (8, 7), (16, 0), (0, 16), (5, 5, 6), (1,), (0, 0, 3)]


def make_order(num_samples: int = 37, seq_len: int = 4, seed: int = 3) -> SampleOrder:
    """An order whose token at place `p` is `p`, so that a sample shows where it comes from."""
    return SampleOrder((np.arange(num_samples * seq_len + 1, dtype=np.uint16),), seq_len=seq_len, seed=seed)


def make_mixture(
    sizes: Sequence[int] = (37, 35, 61), weights: tuple[int, ...] = (3, 1, 7), seed: int = 3
) -> SampleOrder:
    """An order of texts with `sizes` samples of 4 tokens; the token at place `p` of text `i` is `1000 * i + p`."""
    texts = tuple(1000 * i + np.arange(4 * size + 1, dtype=np.uint16) for i, size in enumerate(sizes))
    return SampleOrder(texts, seq_len=4, seed=seed, weights=weights)


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
    order = SampleOrder((np.arange(num_tokens),), seq_len=4, seed=0)
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


def test_the_order_of_one_text_is_what_it_was_when_older_checkpoints_were_written() -> None:
    assert make_order(seed=3).sample_ids(0, 8).tolist() == [29, 30, 31, 7, 26, 3, 18, 19]
    assert make_order(seed=3).sample_ids(37_000, 8).tolist() == [24, 16, 28, 26, 20, 32, 19, 7]


def test_an_order_needs_a_sample_and_sane_numbers() -> None:
    tokens = (np.arange(8),)
    message = r"`seq_len` \(=8\) cuts 8 tokens of text 1 into 0 samples.*lower seq_len or add text"
    with pytest.raises(ValueError, match=message):
        SampleOrder((np.arange(9), np.arange(8)), seq_len=8, seed=0, weights=(1, 1))
    with pytest.raises(ValueError, match=r"`seq_len` \(=8\)"):
        SampleOrder(tokens, seq_len=8, seed=0)
    with pytest.raises(ValueError, match=r"`seq_len` \(=0\)"):
        SampleOrder(tokens, seq_len=0, seed=0)
    for seed in (-1, 1 << 32):
        with pytest.raises(ValueError, match=rf"`seed` \(={seed}\)"):
            SampleOrder(tokens, seq_len=4, seed=seed)
    endless = np.broadcast_to(np.uint16(0), (1 << 32) + 2)
    with pytest.raises(ValueError, match="raise seq_len"):
        SampleOrder((endless,), seq_len=1, seed=0)
    assert SampleOrder((endless[:-1],), seq_len=1, seed=0).num_samples == 1 << 32


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("seq_len", [1, 7])  # With 1 every token is in a sample, so one too many shows.
def test_training_and_held_out_share_no_token(fraction: float, seq_len: int, tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(1000, dtype=np.uint16))
    tokens = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    training, held_out = split_held_out(tokens, fraction=fraction, seq_len=seq_len)
    assert np.shares_memory(training, tokens) and np.shares_memory(held_out, tokens)
    assert (len(held_out), held_out[-1]) == (round(1000 * fraction), 999)
    seen = [SampleOrder((side,), seq_len=seq_len, seed=0) for side in (training, held_out)]
    trained, evaluated = (set(order.rows(0, order.num_samples).flat) for order in seen)
    assert max(trained) < min(evaluated)


@pytest.mark.parametrize("fraction", [0.0, 0.004, 0.996, 1.0, 1.5, -0.5])
def test_each_side_needs_a_sample(fraction: float) -> None:
    held = round(1000 * fraction)
    sizes = rf"1000 tokens into {1000 - held} for training and {held} held out"
    message = rf"data\.held_out \(={fraction}\) cuts {sizes}.*\(=8\).*add text to data\.mixture\[2\]\.files"
    with pytest.raises(ValueError, match=message):
        split_held_out(np.arange(1000), fraction=fraction, seq_len=7, key="data.mixture[2]")


# Mixtures.


def worst_difference(weights: Sequence[int]) -> float:
    """Returns how far a text's turns are from its share, at most, over all prefixes of a period."""
    had = np.cumsum(take_turns(weights)[:, None] == np.arange(len(weights)), axis=0)
    assert had[-1].tolist() == list(weights)
    return np.abs(had - np.arange(1, sum(weights) + 1)[:, None] * np.array(weights) / sum(weights)).max()


@pytest.mark.parametrize("num_texts", [1, 2, 3, 4])
def test_every_prefix_is_within_one_turn_of_the_weights(num_texts: int) -> None:
    # Tijdeman's bound, 1 - 1/(2n-2), is 1/2 for two texts and 5/6 for four.
    bound = 1 - 1 / (2 * num_texts - 2) if num_texts > 1 else 0
    for weights in itertools.product(range(1, 8), repeat=num_texts):
        assert worst_difference(weights) <= bound + 1e-12, weights


@given(weights=st.lists(st.integers(1, 300), min_size=1, max_size=9))
def test_every_prefix_is_within_one_turn_of_many_weights(weights: list[int]) -> None:
    assert worst_difference(weights) < 1


def test_an_order_follows_its_weights_over_all_its_epochs() -> None:
    order = make_mixture(sizes=(240, 50, 110), weights=(3, 1, 7))
    texts = order.rows(0, 1100)[:, 0] // 1000
    had = np.cumsum(texts[:, None] == np.arange(3), axis=0)
    assert np.abs(had - np.arange(1, 1101)[:, None] * np.array([3, 1, 7]) / 11).max() <= 0.75
    assert had[-1].tolist() == [300, 100, 700]


def test_every_epoch_of_every_text_of_a_mixture_is_a_new_permutation() -> None:
    order = make_mixture(sizes=(240, 50, 110), weights=(3, 1, 7))
    ids = order.sample_ids(0, 2700)
    for first, size in ((0, 240), (240, 50), (290, 110)):
        mine = ids[(ids >= first) & (ids < first + size)]
        epochs = mine[: len(mine) // size * size].reshape(-1, size)
        assert len(epochs) >= 3
        assert all(sorted(epoch) == list(range(first, first + size)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_an_id_is_one_sample_of_one_text() -> None:
    order = make_mixture(sizes=(37, 5, 11))
    assert order.num_samples == 53
    rows = order.read(np.arange(53))
    starts = [1000 * text + 4 * i for text, size in enumerate((37, 5, 11)) for i in range(size)]
    assert rows.tolist() == [list(range(start, start + 5)) for start in starts]
    shuffled = np.array([52, 0, 37, 36, 41, 42, 0])
    np.testing.assert_array_equal(order.read(shuffled), rows[shuffled])
    assert order.read(np.arange(0)).shape == (0, 5)


def test_a_mixture_is_random_access_far_out() -> None:
    order = make_mixture()
    far = 10**12 + 7
    whole = order.sample_ids(far, 60)
    assert [int(order.sample_ids(far + i, 1)[0]) for i in range(60)] == whole.tolist()
    assert make_mixture().sample_ids(far, 60).tolist() == whole.tolist()
    assert make_mixture(seed=4).sample_ids(far, 60).tolist() != whole.tolist()


def test_a_text_of_a_mixture_has_an_order_of_its_own_whatever_the_weights() -> None:
    def samples_of_second(weights: tuple[int, ...]) -> list[int]:
        ids = make_mixture(sizes=(90, 90), weights=weights).sample_ids(0, 700)
        return ids[ids >= 90][:100].tolist()

    assert samples_of_second((1, 1)) == samples_of_second((5, 2)) == samples_of_second((1, 6))
    # And texts of one size are not shuffled alike.
    ids = make_mixture(sizes=(90, 90), weights=(1, 1)).sample_ids(0, 180)
    assert ids[ids < 90].tolist() != (ids[ids >= 90] - 90).tolist()


@pytest.mark.parametrize("weights", [(), (1,), (1, 2, 3), (1, 0), (2, -1)])
def test_each_text_needs_a_weight(weights: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"`weights` (={weights}) must be one of 1 or more for each of 2")):
        make_mixture(sizes=(9, 9), weights=weights)


# The configured text.


def data_config(folder: Path, weights: Sequence[float] = (2.0, 1.0), **settings: Any) -> DataConfig:
    """Two sources: 30 lines of "a" in a .jsonl file under `body`, and a .txt file of 600 "b"."""
    (folder / "a.jsonl").write_text('{"body": "aaaaaaaaa"}\n' * 30)
    (folder / "b.txt").write_text("b" * 600)
    mixture = (
        SourceConfig(source="files", files=(f"{folder}/a.jsonl",), text_key="body", weight=weights[0]),
        SourceConfig(source="files", files=(f"{folder}/b.txt",), weight=weights[1]),
    )
    given = {"source": "mixture", "mixture": mixture, "seq_len": 9, "cache_dir": folder / "cache", "held_out": 0.1}
    return DataConfig.model_validate({**given, **settings})


def test_each_source_of_the_configured_mixture_holds_out_its_own_part(tmp_path: Path) -> None:
    tokens = read_tokens(data_config(tmp_path), seed=1)
    # 300 and 601 tokens: a tenth is held out, the rest cut into samples of 9 and the token that follows.
    assert tokens.training.num_samples == (270 - 1) // 9 + (541 - 1) // 9 == 89
    assert tokens.held_out.num_samples == (30 - 1) // 9 + (60 - 1) // 9 == 9
    assert tokens.training.weights == tokens.held_out.weights == (2, 1)
    for order in (tokens.training, tokens.held_out):
        is_a = (order.rows(0, 30) == ord("a")).any(axis=1)
        assert is_a.sum() == 20
        assert ((order.rows(0, 30) == ord("b")).any(axis=1) == ~is_a).all()


def test_the_name_of_the_text_covers_all_that_changes_the_samples(tmp_path: Path) -> None:
    names = [read_tokens(data_config(tmp_path, weights), seed=1).name for weights in ((2.0, 1.0), (4.0, 2.0))]
    assert names[0] == names[1]
    names += [read_tokens(data_config(tmp_path, (1.0, 1.0)), seed=1).name]
    forward = data_config(tmp_path, (1.0, 1.0))
    names += [read_tokens(forward.model_copy(update={"mixture": forward.mixture[::-1]}), seed=1).name]
    single = {"source": "files", "files": (f"{tmp_path}/b.txt",), "mixture": ()}
    names += [read_tokens(data_config(tmp_path, **single), seed=1).name]
    (tmp_path / "c.txt").write_text("b" * 599 + "c")
    changed = {**single, "files": (f"{tmp_path}/c.txt",)}
    names += [read_tokens(data_config(tmp_path, **changed), seed=1).name]
    assert len(set(names[1:])) == 5


def test_a_source_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.mixture\[1\]\.files \(=\['nothing\.txt'\]\)"):
        data = data_config(tmp_path)
        lost = data.mixture[1].model_copy(update={"files": ("nothing.txt",)})
        read_tokens(data.model_copy(update={"mixture": (data.mixture[0], lost)}), seed=1)
    with pytest.raises(ConfigError, match=r"300 tokens into 297 .*add text to data\.mixture\[0\]\.files"):
        read_tokens(data_config(tmp_path, held_out=0.01), seed=1)


# Batches.


@pytest.mark.parametrize("order", [make_order(), make_mixture()], ids=["one text", "mixture"])
@pytest.mark.parametrize("rows", SPLITS)
def test_the_order_is_the_same_for_any_split(rows: tuple[int, ...], order: SampleOrder) -> None:
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
        "stream = BatchStream(SampleOrder((np.arange(99),), seq_len=4, seed=0), samples_seen=0, rows=(2, 1))\n"
        "print(next(stream).samples_seen_after)\n"
    )
    repository = Path(__file__).parents[1]
    ended = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "3\n", "")
