"""Tests of `python -m ntpjax`: what each command writes, prints and refuses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from ntpjax.bpe import read_tokenizer
from ntpjax.cli import main

pytestmark = pytest.mark.timeout(60)

WORDS = "\n\n".join(f"{n} bottles of beer on the wall, {n} bottles of beer!" for n in range(60, 20, -1))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with two sources of text and `config.yaml`, of which only `data` makes sense."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text(WORDS)
    (tmp_path / "rows.jsonl").write_text('{"body": "one more bottle"}\n{"body": "or two"}\n')
    mixture = [{"source": "files", "files": ["words.txt"], "weight": 3}]
    mixture += [{"source": "files", "files": ["*.jsonl"], "text_key": "body"}]
    # The tokenizer is not there yet: the command makes it.
    data = {"source": "mixture", "mixture": mixture, "seq_len": 8, "cache_dir": "cache", "tokenizer": "bpe/new.json"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"run": 3, "modle": {"typo": 1}, "data": data}))
    return tmp_path


def tokenize(*arguments: str, vocab_size: int = 300, out: str = "bpe/new.json") -> int:
    return main(["tokenize", "--config", "config.yaml", f"--vocab-size={vocab_size}", f"--out={out}", *arguments])


def test_tokenize_learns_from_the_data_section_and_touches_no_device(folder: Path) -> None:
    arguments = ("--config=config.yaml", "--vocab-size=300", "--out=bpe/new.json")
    done = subprocess.run(
        [sys.executable, "-m", "ntpjax", "tokenize", *arguments],
        # JAX fails when it looks for devices of this kind.
        env={**os.environ, "JAX_PLATFORMS": "none", "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    learned, encoded, wrote = done.stdout.splitlines()
    tokenizer = read_tokenizer(folder / "bpe/new.json")
    texts = [WORDS, "one more bottle", "or two"]
    num_bytes, num_tokens = len("".join(texts)), sum(len(tokenizer.encode(text.encode())) for text in texts)
    assert tokenizer.vocab_size == 300
    assert learned.startswith(f"300 tokens learned from {num_bytes / 1000:.1f} kB of text in 3 documents in ")
    assert encoded.startswith(f"{num_bytes / num_tokens:.2f} bytes a token, {num_tokens:,} tokens encoded in ")
    assert wrote == "wrote bpe/new.json; train with data.tokenizer: bpe/new.json, model.vocab_size: 300 or more"


def test_tokenize_leaves_the_tokens_in_the_cache(folder: Path) -> None:
    assert tokenize() == 0
    assert [path.name for path in (folder / "bpe").iterdir()] == ["new.json"]
    tokenizer = read_tokenizer(folder / "bpe/new.json")
    sizes = sorted(len(np.load(path)) for path in (folder / "cache").iterdir())
    rows = [len(tokenizer.encode(text)) + 1 for text in (b"one more bottle", b"or two")]
    assert sizes == [sum(rows), len(tokenizer.encode(WORDS.encode())) + 1]


def test_the_same_text_gives_the_same_file_and_all_of_it_is_used(folder: Path) -> None:
    assert tokenize() == tokenize(out="again.json") == 0
    assert (folder / "again.json").read_bytes() == (folder / "bpe/new.json").read_bytes()
    single = ("--set=data.source=files", "--set=data.files=[words.txt]", "--set=data.mixture=[]")
    assert tokenize(*single, out="single.json") == 0
    assert (folder / "single.json").read_bytes() != (folder / "bpe/new.json").read_bytes()


def test_a_text_too_small_for_the_vocabulary_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    single = ("--set=data.source=files", "--set=data.files=[rows.jsonl]", "--set=data.mixture=[]")
    assert tokenize(*single, "--set=data.text_key=body", vocab_size=5000) == 0
    size = read_tokenizer(folder / "bpe/new.json").vocab_size
    assert 257 < size < 280
    out = capsys.readouterr().out
    assert out.startswith(f"{size} tokens learned from 21 B of text in 2 documents")
    assert "no pairs left to merge into the 5,000 asked for" in out


def test_a_file_is_overwritten_only_when_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.json").write_text("precious")
    assert tokenize(out="mine.json") == 2
    assert capsys.readouterr().err == (
        "error: --out mine.json exists; choose another name, or overwrite it with --force\n"
    )
    assert (folder / "mine.json").read_text() == "precious"
    assert not (folder / "cache").exists()
    assert tokenize("--force", out="mine.json") == 0
    assert read_tokenizer(folder / "mine.json").vocab_size == 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config=absent.yaml",), "absent.yaml: cannot be read (No such file or directory)"),
        (("--set=data.seq_lne=8",), "data.seq_lne: is an unknown key (did you mean 'seq_len'?)"),
        (("--set=data=null",), "data: must be a mapping of keys to values"),
        (("--set=data.mixture=[{source: files, files: [no.txt]}]",), "data.mixture[0].files (=['no.txt']): each glob"),
        (("--set=data.mixture=[{source: files, files: [rows.jsonl]}]",), "rows.jsonl, line 1 has no key 'text'"),
        (("--set=data.mixture=[{source: files, files: [latin.txt]}]",), "latin.txt is not UTF-8 at byte 3"),
        (("--vocab-size=256",), "`vocab_size` (=256) must be at least 257"),
        (("--out=words.txt/new.json",), "--out words.txt/new.json cannot be written: File exists"),
        (("--out=cache.folder", "--force"), "--out cache.folder cannot be written: Is a directory"),
    ],
)
def test_bad_input_is_one_short_message_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    (folder / "latin.txt").write_bytes(b"abc\xff")
    (folder / "cache.folder").mkdir()
    assert tokenize(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert (captured.out, len(captured.err.splitlines()) <= 2) == ("", True)
    assert not list(folder.rglob("*.tmp"))
    assert not (folder / "bpe/new.json").exists()


@pytest.mark.parametrize("arguments", [[], ["tokenise"], ["tokenize"], ["tokenize", "--vocab-size=many"]])
def test_a_wrong_command_line_ends_with_exit_code_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert re.match(r"usage: python -m ntpjax", capsys.readouterr().err)
