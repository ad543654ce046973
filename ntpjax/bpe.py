"""Tokenizers of the Hugging Face library `tokenizers`: a tokenizer.json as a `Tokenizer`, and the training of one.

Layer 1. The library is an extra of this package (`pip install "ntpjax[bpe]"`); nothing here goes to a network. Whatever
text it is given, a byte-level BPE can encode it, and its tokens give the text back.
"""

import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

END_OF_DOCUMENT = "<|endoftext|>"
# What the files of widely used models call it; the first of these that a file has is taken.
_END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>")
_MIN_VOCAB_SIZE = 257
# White space that begins a line belongs to what follows.
_PARAGRAPH_START = re.compile(r"(?<=\S)(?=\s*\n)")


@dataclass(frozen=True)
class FileTokenizer:
    """The tokenizer in a tokenizer.json; its name contains a hash of the file."""

    name: str
    vocab_size: int
    end_of_document: int
    _encode: Callable[[str], Sequence[int]] = field(repr=False, compare=False)

    def encode(self, text: bytes) -> np.ndarray:
        """Returns the token ids of `text`, int64 [num_tokens]. Raises UnicodeDecodeError if it is not UTF-8."""
        return np.asarray(self._encode(text.decode()), np.int64)


def read_tokenizer(path: Path) -> FileTokenizer:
    """Returns the tokenizer in the file at `path`, a tokenizer.json of the library `tokenizers`.

    It adds no token to a document, cuts none off, and takes the names of special tokens in a text for text, whatever
    the file says: a document cannot end another one.

    Raises:
      ValueError: the file cannot be read, is no tokenizer, or has no special token for the end of a document, or the
        library is not installed.
    """
    _require_library()
    from tokenizers import Tokenizer

    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; `python -m ntpjax tokenize` makes one") from error
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"{path} is not a tokenizer.json of the library `tokenizers`: {error}") from error
    special = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ends = [special[name] for name in _END_NAMES if name in special]
    if not ends:
        raise ValueError(
            f"{path} must have a special token for the end of a document, one of {', '.join(_END_NAMES)} (its special "
            f"tokens: {', '.join(special) or 'none'}); add one"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True

    def encode(text: str) -> Sequence[int]:
        # Alone in a batch, for there is no `encode_fast`, which leaves out the places in the text.
        return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    name = f"tokenizers-{hashlib.sha256(content).hexdigest()}"
    return FileTokenizer(name, max(tokenizer.get_vocab().values()) + 1, ends[0], encode)


def paragraphs(text: str) -> Iterator[str]:
    """Yields the paragraphs of `text`, cut where the tokens of a byte-level BPE end anyway; together they are `text`.

    >>> list(paragraphs("One.\\nTwo. \\n\\nThree."))
    ['One.', '\\nTwo.', ' \\n\\nThree.']
    """
    yield from _PARAGRAPH_START.split(text)


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> str:
    """Returns the content of a tokenizer.json: a byte-level BPE with the most frequent merges in `texts`.

    Its tokens are the end of a document, the 256 byte values, and merges: `vocab_size` of them, or fewer when `texts`
    have no more pairs to merge. The same texts give the same content. Cut them into paragraphs: they are worked on in
    parallel.

    Raises:
      ValueError: `vocab_size` is below 257, or the library is not installed.
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        rule = f"must be at least {_MIN_VOCAB_SIZE}: the 256 byte values and the end of a document"
        raise ValueError(f"`vocab_size` (={vocab_size}) {rule}.")
    _require_library()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True)


def _require_library() -> None:
    if importlib.util.find_spec("tokenizers") is None:
        raise ValueError('the library `tokenizers` is not installed; run `pip install "ntpjax[bpe]"`.')
