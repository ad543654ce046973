"""Tests of `ntpjax.bpe`: what a tokenizer.json is read as, the training of one, and its use in a run."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from ntpjax.bpe import paragraphs, read_tokenizer, train_bpe
from ntpjax.config import ConfigError
from ntpjax.text import Source, tokenize
from train import Config, read_tokens

pytestmark = pytest.mark.timeout(60)

TEXT = "\n\n".join(f"{n} bottles of beer on the wall,\n {n} bottles of \u00e4pple beer!  " for n in range(99, 0, -1))


@pytest.fixture(scope="module")
def content() -> str:
    """A BPE of 300 tokens: the end of a document, 256 bytes, 43 merges."""
    return train_bpe(paragraphs(TEXT), vocab_size=300)


@pytest.fixture
def written(content: str, tmp_path: Path) -> Callable[..., Path]:
    """Writes the tokenizer with changes to the top level of its JSON."""

    def write(**changes: Any) -> Path:
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps({**json.loads(content), **changes}))
        return path

    return write


def end_token(name: str, *, special: bool = True, number: int = 0) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, "special": special, **flags}


# Reading.


def test_a_tokenizer_has_the_vocabulary_and_the_end_of_its_file(written: Callable[..., Path]) -> None:
    tokenizer = read_tokenizer(written())
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (300, 0)
    ids = tokenizer.encode(TEXT.encode())
    assert len(ids) < len(TEXT) / 3
    assert 1 <= ids.min() <= ids.max() < 300
    assert len(np.unique(ids[ids > 256])) > 20  # merges


@given(text=st.text() | st.text(alphabet="ab \n\t.<|>1\u00a0\u3000"))
def test_every_text_survives_a_round_trip(content: str, tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.json"
    path.write_text(content)
    ids = read_tokenizer(path).encode(text.encode()).tolist()
    assert tokenizers.Tokenizer.from_str(content).decode(ids, skip_special_tokens=False) == text


def test_a_document_cannot_end_another_one(written: Callable[..., Path]) -> None:
    tokenizer = read_tokenizer(written())
    ids = tokenizer.encode(b"beer<|endoftext|>beer")
    assert tokenizer.end_of_document not in ids
    assert tokenizers.Tokenizer.from_file(str(written())).decode(ids.tolist()) == "beer<|endoftext|>beer"
    assert tokenizers.Tokenizer.from_file(str(written())).encode("beer<|endoftext|>beer").ids.count(0) == 1


def test_nothing_in_the_file_cuts_pads_or_frames_a_document(written: Callable[..., Path]) -> None:
    plain = read_tokenizer(written()).encode(TEXT.encode())
    frame = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    single = [frame, {"Sequence": {"id": "A", "type_id": 0}}, frame]
    processor = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    truncation = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 9000}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    padding |= {"pad_type_id": 0, "pad_token": "<|endoftext|>"}
    path = written(truncation=truncation, padding=padding, post_processor=processor)
    assert len(tokenizers.Tokenizer.from_file(str(path)).encode(TEXT).ids) == 9000
    np.testing.assert_array_equal(read_tokenizer(path).encode(TEXT.encode()), plain)


@pytest.mark.parametrize("name", ["<|end_of_text|>", "</s>", "<eos>", "[EOS]"])
def test_the_end_of_a_document_is_found_by_its_name(written: Callable[..., Path], name: str) -> None:
    tokenizer = read_tokenizer(written(added_tokens=[end_token("<pad>", number=300), end_token(name, number=301)]))
    assert (tokenizer.end_of_document, tokenizer.vocab_size) == (301, 302)


def test_the_usual_name_comes_first(written: Callable[..., Path]) -> None:
    path = written(added_tokens=[end_token("</s>", number=300), end_token("<|endoftext|>", number=0)])
    assert read_tokenizer(path).end_of_document == 0


def test_a_vocabulary_with_gaps_ends_after_its_last_id(written: Callable[..., Path], content: str) -> None:
    model = json.loads(content)["model"]
    model["vocab"]["<reserved>"] = 511
    assert read_tokenizer(written(model=model)).vocab_size == 512


@pytest.mark.parametrize(
    ("added", "found"),
    [
        ([], "none"),
        ([end_token("<pad>", number=300)], "<pad>"),
        ([end_token("</s>", special=False, number=300)], "none"),
    ],
)
def test_a_file_without_an_end_of_a_document_is_refused(
    written: Callable[..., Path], added: list[dict[str, Any]], found: str
) -> None:
    message = rf"tokenizer\.json must have a special token .*one of <\|endoftext\|>, .*\(its special tokens: {found}\)"
    with pytest.raises(ValueError, match=message):
        read_tokenizer(written(added_tokens=added))


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.json cannot be read: No such file.*python -m ntpjax tokenize"):
        read_tokenizer(tmp_path / "absent.json")
    for content in (b"", b"{}", b"\xff\xfe", b"[1]"):
        (tmp_path / "wrong.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"wrong\.json is not a tokenizer\.json of the library"):
            read_tokenizer(tmp_path / "wrong.json")


def test_a_missing_library_says_what_to_do(monkeypatch: pytest.MonkeyPatch, written: Callable[..., Path]) -> None:
    path = written()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for use in (lambda: read_tokenizer(path), lambda: train_bpe(["a"], vocab_size=300)):
        with pytest.raises(ValueError, match=re.escape('`pip install "ntpjax[bpe]"`')):
            use()


def test_the_name_follows_the_content(written: Callable[..., Path]) -> None:
    first = read_tokenizer(written())
    assert read_tokenizer(written().rename(written().with_name("moved.json"))).name == first.name
    assert read_tokenizer(written(truncation=None, version="1.0")).name == first.name
    assert read_tokenizer(written(added_tokens=[end_token("</s>", number=300)])).name != first.name


def test_text_that_is_not_utf8_is_refused_by_place(written: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("beer \u00e4".encode("latin-1"))
    source, tokenizer = Source("data", (tmp_path / "latin.txt",)), read_tokenizer(written())
    with pytest.raises(ValueError, match=r"data\.files: .*latin\.txt is not UTF-8 at byte 5.*data\.tokenizer: null"):
        tokenize(source, tokenizer=tokenizer, cache_dir=tmp_path, progress=lambda done, total: None)


# Training.


@given(text=st.text(alphabet="ab \n\t.1\u00a0\u3000\u2028'"))
def test_paragraphs_are_cut_where_tokens_end(text: str) -> None:
    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    parts = list(paragraphs(text))
    assert "".join(parts) == text
    assert [word for part in parts for word, _ in split(part)] == [word for word, _ in split(text)]


def test_paragraphs_and_whole_texts_give_the_same_tokenizer(content: str) -> None:
    assert len(list(paragraphs(TEXT))) == 198
    assert train_bpe([TEXT], vocab_size=300) == content


def test_training_does_not_depend_on_threads(content: str) -> None:
    code = (
        "from ntpjax.bpe import paragraphs, train_bpe; import sys\n"
        "sys.stdout.write(train_bpe(paragraphs(sys.stdin.read()), vocab_size=300))\n"
    )
    alone = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUTF8": "1"},
        input=TEXT,
        capture_output=True,
        encoding="utf-8",
    )
    assert (alone.stdout, alone.stderr) == (content, "")


def test_without_merges_a_token_is_a_byte(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_text(train_bpe(["abc"], vocab_size=257))
    tokenizer = read_tokenizer(tmp_path / "bytes.json")
    assert tokenizer.vocab_size == 257
    ids = tokenizer.encode(("ab" + TEXT).encode())
    assert len(ids) == 2 + len(TEXT.encode())
    assert len({*ids.tolist()}) == len({*("ab" + TEXT).encode()})


def test_a_small_text_gives_a_small_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text(train_bpe(["beer"], vocab_size=1000))
    assert read_tokenizer(tmp_path / "small.json").vocab_size == 257 + 3


@pytest.mark.parametrize("vocab_size", [256, 0, -1])
def test_a_vocabulary_holds_all_bytes_and_the_end(vocab_size: int) -> None:
    with pytest.raises(ValueError, match=rf"`vocab_size` \(={vocab_size}\) must be at least 257"):
        train_bpe([TEXT], vocab_size=vocab_size)


# In a run.


def config(folder: Path, tokenizer: Path | None, vocab_size: int) -> Config:
    (folder / "text.txt").write_text(TEXT)
    heads = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 2}
    sections = {
        "run": {"dir": folder / "run", "steps": 1, "compile_ahead": False},
        "topology": {"replicas": 1, "tp": 1},
        "model": {"vocab_size": vocab_size, "d_model": 4, "num_layers": 1, "ffn_dim": 4, "ffn_unit": 2, **heads},
        "batch": {"size": 1},
        "optimizer": {"learning_rate": 1e-3},
        "data": {"source": "files", "files": (f"{folder}/text.txt",), "seq_len": 8, "cache_dir": folder / "cache"},
    }
    sections["data"] |= {"tokenizer": tokenizer}
    return Config.model_validate(sections)


def test_a_run_reads_its_text_with_its_tokenizer(written: Callable[..., Path], tmp_path: Path) -> None:
    path = written()
    tokens = read_tokens(config(tmp_path, path, vocab_size=300).data, seed=0)
    ids = read_tokenizer(path).encode(TEXT.encode())
    cut = len(ids) + 1 - round(0.02 * (len(ids) + 1))
    np.testing.assert_array_equal(tokens.training.texts[0], ids[:cut])
    np.testing.assert_array_equal(tokens.held_out.texts[0], [*ids[cut:], 0])


def test_another_tokenizer_is_another_text(written: Callable[..., Path], tmp_path: Path) -> None:
    names = [read_tokens(config(tmp_path, path, vocab_size=400).data, seed=0).name for path in (None, written())]
    path = written(added_tokens=[end_token("</s>", number=300), end_token("<|endoftext|>")])
    names.append(read_tokens(config(tmp_path, path, vocab_size=400).data, seed=0).name)
    assert len(set(names)) == 3


def test_a_model_needs_a_row_for_each_token(written: Callable[..., Path], tmp_path: Path) -> None:
    path = written()
    for tokenizer, name, needed in ((path, rf"data\.tokenizer \({path}\)", 300), (None, "the byte tokenizer", 257)):
        message = rf"model\.vocab_size: must be at least {needed}, the tokens of {name} \(got {needed - 1}\)"
        with pytest.raises(ValueError, match=message):
            config(tmp_path, tokenizer, vocab_size=needed - 1)
        assert config(tmp_path, tokenizer, vocab_size=needed).model.vocab_size == needed
    with pytest.raises(ValueError, match=r"data\.tokenizer: absent\.json cannot be read"):
        config(tmp_path, Path("absent.json"), vocab_size=300)
    path.unlink()
    lost = config(tmp_path, None, vocab_size=300).data.model_copy(update={"tokenizer": path})
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_tokens(lost, seed=0)
