"""The commands of `python -m ntpjax`: what can be done without a device and without a model. `train.py` trains.

Layer 3. A command is a function of its arguments that prints its result; it says what it cannot use with a
`ValueError`, which becomes a short message and exit code 2 (`ntpjax.exit_codes`). To add one, write the function and
its `_add_...`.
"""

import argparse
import os
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from pydantic import ConfigDict
from rich.console import Console
from rich.progress import Progress

from ntpjax import text
from ntpjax.aot_command import add_aot
from ntpjax.bpe import FileTokenizer, paragraphs, read_tokenizer, train_bpe
from ntpjax.config import Section, load
from ntpjax.describe import format_bytes, format_seconds
from ntpjax.exit_codes import ExitCode
from ntpjax.plan_command import add_plan
from ntpjax.sections import DataConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line; returns its exit code."""
    args = _parser().parse_args(arguments)
    try:
        args.command(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return ExitCode.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ntpjax", description="Nonuniform tensor parallelism for JAX.")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_tokenize(commands)
    add_plan(commands)
    add_aot(commands)
    return parser


# `argparse` has no public name for what `add_subparsers` returns.
def _add_tokenize(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "tokenize",
        help="learn a byte-level BPE from the text of a configuration",
        description="Learns a byte-level BPE from the text in the `data` section of a configuration, all of it once, "
        "whatever the weights of a mixture, and encodes the text with it into data.cache_dir, ready for training.",
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file; only its `data` section is read")
    parser.add_argument("--set", action="append", default=[], metavar="data.b=c", help="change one setting")
    parser.add_argument("--vocab-size", type=int, required=True, help="tokens: 256 bytes, end of document, merges")
    parser.add_argument("--out", type=Path, required=True, help="the tokenizer.json to write, for data.tokenizer")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    parser.set_defaults(command=tokenize)


class _DataOnly(Section):
    """A configuration of which only the `data` section matters; the other sections are not looked at."""

    model_config = ConfigDict(extra="ignore")

    data: DataConfig


def tokenize(args: argparse.Namespace) -> None:
    """Learns a BPE from the configured text, writes it, and encodes the text; prints sizes and times.

    Raises:
      ValueError: the configuration, its text or `--vocab-size` cannot be used, or `--out` exists or cannot be written.
    """
    data = load(_DataOnly, args.config, args.set).data
    sources = data.find_sources()
    _require_writable(args.out, overwrite=args.force)
    start_s, text_sizes = time.perf_counter(), []
    with _progress() as progress:
        content = train_bpe(_paragraphs(sources, text_sizes, progress), vocab_size=args.vocab_size)
    _write(args.out, content)
    tokenizer, learned_s = read_tokenizer(args.out), time.perf_counter()
    origin = f"{format_bytes(sum(text_sizes))} of text in {len(text_sizes):,} documents"
    print(f"{tokenizer.vocab_size:,} tokens learned from {origin} in {format_seconds(learned_s - start_s)}")
    if tokenizer.vocab_size < args.vocab_size:
        print(f"no more than that: the text has no pairs left to merge into the {args.vocab_size:,} asked for")
    with _progress() as progress:
        num_tokens = _num_tokens(sources, tokenizer, data.cache_dir, progress) - len(text_sizes)
    encoded_s = format_seconds(time.perf_counter() - learned_s)
    print(f"{sum(text_sizes) / num_tokens:.2f} bytes a token, {num_tokens:,} tokens encoded in {encoded_s}")
    print(f"wrote {args.out}; train with data.tokenizer: {args.out}, model.vocab_size: {tokenizer.vocab_size} or more")


def _progress() -> Progress:
    console = Console(stderr=True)
    # Off a terminal rich shows nothing before the end.
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def _require_writable(out: Path, *, overwrite: bool) -> None:
    if out.exists() and not overwrite:
        raise ValueError(f"--out {out} exists; choose another name, or overwrite it with --force")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {error.strerror}; choose another folder") from error


def _write(out: Path, content: str) -> None:
    temporary = out.with_name(f"{out.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, out)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {error.strerror}; choose another folder") from error
    finally:
        temporary.unlink(missing_ok=True)


def _paragraphs(sources: Sequence[text.Source], text_sizes: list[int], progress: Progress) -> Iterator[str]:
    """Yields the paragraphs of all documents, and appends the size of each document, in bytes, to `text_sizes`."""
    total = sum(file.stat().st_size for source in sources for file in source.files)
    task = progress.add_task("reading", total=total)
    for source in sources:
        for document in text.documents(source):
            text_sizes.append(len(document.text))
            try:
                yield from paragraphs(document.text.decode())
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{source.key}.files: {document.place} is not UTF-8 at byte {error.start}; convert it"
                ) from error
            progress.advance(task, document.num_bytes)
    progress.add_task("learning", total=None)


def _num_tokens(sources: Sequence[text.Source], tokenizer: FileTokenizer, cache_dir: Path, progress: Progress) -> int:
    """Encodes the sources; returns the number of their tokens, with those at the ends of documents."""
    num_tokens = 0
    for source in sources:
        task = progress.add_task(f"encoding {source.key}", total=None)
        path = text.tokenize(
            source,
            tokenizer=tokenizer,
            cache_dir=cache_dir,
            progress=lambda done, total, task=task: progress.update(task, completed=done, total=total),
        )
        num_tokens += len(np.load(path, mmap_mode="r"))
    return num_tokens
