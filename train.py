"""Trains a transformer with nonuniform tensor parallelism: `python train.py --config configs/demo.yaml`.

The only place where the configuration, `models/` and `ntpjax` meet.
"""

import argparse
import functools
import json
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import yaml
from pydantic import model_validator
from rich.console import Console
from rich.progress import Progress

from models.transformer import TransformerConfig, TransformerFunctions
from ntpjax.ahead import Ahead, ThreadWorker, compile_ahead
from ntpjax.ahead_process import ProcessWorker
from ntpjax.boost import ReportNeededSpeedup
from ntpjax.bpe import read_tokenizer
from ntpjax.checkpoint import CheckpointError, Checkpoints
from ntpjax.config import ConfigError, Section, load
from ntpjax.data import SampleOrder, split_held_out
from ntpjax.display import make_display
from ntpjax.exit_codes import ExitCode
from ntpjax.forecast import Blueprint, work_shares
from ntpjax.job import Job, Services, fresh_state, restored_state, row_shapes
from ntpjax.mesh import Device, emulate_cpu_devices
from ntpjax.metrics import MetricsFile
from ntpjax.optimizer import adamw, warmup_cosine
from ntpjax.partition import partition_tree
from ntpjax.policy import split_batch
from ntpjax.processes import Place, Processes, ProcessesDifferError, exit_with
from ntpjax.program_store import ProgramStore, identity_of
from ntpjax.records import Note, Record, Sink
from ntpjax.schedule import Event, FailureSource, Loss, Return, Schedule, schedule_problems, topology_after
from ntpjax.sections import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    StepConfig,
    TopologyConfig,
)
from ntpjax.text import ByteTokenizer, Source, Tokenizer, tokenize
from ntpjax.topology import Topology
from ntpjax.trainer import Trained, train
from ntpjax.training import Training

_CONFIG_FILE = "config.yaml"


class Config(Section):
    """A whole run."""

    run: RunConfig
    topology: TopologyConfig
    model: TransformerConfig
    data: DataConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    step: StepConfig = StepConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    command_line: ScheduleConfig = ScheduleConfig()

    @model_validator(mode="after")
    def _check(self) -> "Config":
        problems = [f"schedule: {problem}" for problem in schedule_problems(self.start, self.events)]
        if self.run.cpu_devices is not None and self.topology.num_devices > self.run.cpu_devices:
            problems.append(_too_few_devices(self.topology, self.run.cpu_devices))
        problems += _vocabulary_problems(self.data, self.model.vocab_size)
        if self.batch.policy == "shrink" and self.batch.size < self.topology.replicas:
            rule = f"must be at least topology.replicas (={self.topology.replicas}) when batch.policy is 'shrink'"
            problems.append(f"batch.size: {rule} (got {self.batch.size})")
        if problems:
            raise ConfigError(problems)
        return self

    @property
    def start(self) -> Topology:
        """The topology before any loss."""
        return Topology.of_degrees(self.topology.degrees, spares=self.topology.spares)

    @property
    def events(self) -> tuple[Event, ...]:
        """Losses and returns, from the file and from the command line."""
        losses = (Loss(e.step, e.replica, e.rank) for e in self.schedule.fail + self.command_line.fail)
        returns = (Return(e.step, e.replica) for e in self.schedule.restore + self.command_line.restore)
        return (*losses, *returns)


def _vocabulary_problems(data: DataConfig, vocab_size: int) -> list[str]:
    try:
        needed = _tokenizer(data).vocab_size
    except ValueError as error:
        return [f"data.tokenizer: {error}"]
    if vocab_size >= needed:
        return []
    name = "the byte tokenizer" if data.tokenizer is None else f"data.tokenizer ({data.tokenizer})"
    return [f"model.vocab_size: must be at least {needed}, the tokens of {name} (got {vocab_size})"]


def _too_few_devices(topology: TopologyConfig, found: int) -> str:
    return (
        f"topology: {topology.replicas} replicas with TP {list(topology.degrees)} and {topology.spares} spares need "
        f"{topology.num_devices} devices, and there are {found}; lower topology.tp or topology.replicas, or raise "
        "run.cpu_devices to emulate more on the CPU"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code (see `ntpjax.exit_codes`)."""
    args = _parser().parse_args(arguments)
    try:
        config = load(
            Config, args.config, args.set, command_line={"fail": tuple(args.fail), "restore": tuple(args.restore)}
        )
        tokens = read_tokens(config.data, config.run.seed)
        processes = set_up_jax(config.run)
        with closing(make_display(num_steps=config.run.steps)) as display:
            return run(config, tokens, processes, display).ended.exit_code
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    except ProcessesDifferError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.PROCESSES_DIFFER
    except KeyboardInterrupt:
        print("interrupted; the same command resumes from the newest checkpoint of the run", file=sys.stderr)
        return ExitCode.INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="YAML file, see configs/")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="change one setting")
    parser.add_argument(
        "--fail", action="append", default=[], metavar='"step=30 replica=1 rank=2"', help="lose a device"
    )
    parser.add_argument("--restore", action="append", default=[], metavar='"step=90 replica=1"', help="give it back")
    return parser


@dataclass(frozen=True)
class Tokens:
    """The text as tokens; `name` identifies the text of all sources, their weights, and the tokenizer."""

    name: str
    training: SampleOrder
    held_out: SampleOrder


def read_tokens(data: DataConfig, seed: int) -> Tokens:
    """The configured text, tokenized or from the cache; each source holds out its own part. Raises ConfigError."""
    try:
        sources, tokenizer = data.find_sources(), _tokenizer(data)
        console = Console()
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            paths = [_token_file(source, tokenizer, data.cache_dir, progress) for source in sources]
        splits = [
            split_held_out(np.load(path, mmap_mode="r"), fraction=data.held_out, seq_len=data.seq_len, key=source.key)
            for source, path in zip(sources, paths, strict=True)
        ]
        training, held_out = zip(*splits, strict=True)
        return Tokens(
            name=" + ".join(f"{weight} x {path.stem}" for weight, path in zip(data.weights, paths, strict=True)),
            training=SampleOrder(training, data.seq_len, seed, data.weights),
            held_out=SampleOrder(held_out, data.seq_len, seed=0, weights=data.weights),
        )
    except ValueError as error:
        raise ConfigError([str(error)], source="data") from error
    except OSError as error:
        raise ConfigError([f"data.cache_dir: cannot be used ({error}); choose another folder"]) from error


def _token_file(source: Source, tokenizer: Tokenizer, cache_dir: Path, progress: Progress) -> Path:
    task = progress.add_task(f"tokenizing {source.key}", total=None)
    return tokenize(
        source,
        tokenizer=tokenizer,
        cache_dir=cache_dir,
        progress=lambda done, total: progress.update(task, completed=done, total=total),
    )


def _tokenizer(data: DataConfig) -> Tokenizer:
    """The configured tokenizer. Raises ValueError if it is a file that cannot be used."""
    return ByteTokenizer() if data.tokenizer is None else read_tokenizer(data.tokenizer)


def set_up_jax(run: RunConfig) -> Processes:
    """Settings that must be made before JAX looks for devices; returns the processes of the job.

    Raises:
      ConfigError: if the emulated devices cannot be shared out among the processes.
    """
    try:
        place = Place.from_environment()
    except ValueError as error:
        raise ConfigError([str(error)], source="environment") from error
    if run.cpu_devices is not None:
        if run.cpu_devices % place.count:
            raise ConfigError(
                [f"run.cpu_devices: must be a multiple of the {place.count} processes (got {run.cpu_devices})"]
            )
        emulate_cpu_devices(run.cpu_devices // place.count)
    jax.config.update("jax_enable_x64", run.dtype == "float64")
    # Orbax reports every step of every save there.
    logging.getLogger("absl").setLevel(logging.ERROR)
    return place.join()


def run(
    config: Config, tokens: Tokens, processes: Processes, *sinks: Sink, failures: FailureSource | None = None
) -> Trained:
    """Trains as `config` says, from its newest checkpoint if there is one. Every record goes to `sinks` and to a file.

    Of several processes, the first one reports.

    Args:
      failures: tells of losses and returns, by default those that are scheduled in `config`.

    Raises:
      ConfigError: if there are too few devices, or the checkpoint is of another run.
      CheckpointError: if the checkpoint cannot be read.
    """
    with closing(_open_checkpoints(config, processes)) as checkpoints:
        return _run(config, tokens, checkpoints, processes, sinks, failures or Schedule(config.events))


def _open_checkpoints(config: Config, processes: Processes) -> Checkpoints:
    try:
        folder, keep_last = config.run.dir / "checkpoints", config.checkpoint.keep_last
        return Checkpoints(folder, keep_last=keep_last, process=processes.index)
    except OSError as error:
        raise ConfigError([f"run.dir: cannot be used ({error}); choose another folder"]) from error


def _run(
    config: Config,
    tokens: Tokens,
    checkpoints: Checkpoints,
    processes: Processes,
    sinks: Sequence[Sink],
    failures: FailureSource,
) -> Trained:
    # What the first process sees, for it may save another before the others look.
    step = json.loads(processes.told_by(0, json.dumps(checkpoints.latest_step())))
    if step is not None:
        _require_same_run(checkpoints.meta(step)["config"], _saved_config(config, tokens), checkpoints.path(step))
    topology, remark = fit(config, len(jax.devices()), step)
    job = make_job(config, tokens)
    metrics = _open_metrics(config, step) if processes.index == 0 else None

    def emit(record: Record) -> None:
        for sink in (metrics, *sinks) if metrics else ():
            sink.emit(record)

    shares = work_shares(job.training.shapes["params"], job.training.partitions["params"])
    hook, ahead = ReportNeededSpeedup(shares, emit), _compile_ahead(config, job, processes, emit)
    services = Services(failures, hook, checkpoints, processes, emit, ahead)
    try:
        if remark:
            emit(Note(step or 0, remark, "warning"))
        if step is None:
            return train(job, fresh_state(job, topology), services)
        state = restored_state(job, topology, checkpoints, step)
        return train(job, state, services, resumed_from=str(checkpoints.path(step)))
    finally:
        if ahead:
            ahead.close()
        if metrics:
            metrics.close()


def _compile_ahead(config: Config, job: Job, processes: Processes, emit: Callable[[Record], None]) -> Ahead | None:
    """Who compiles ahead: on the CPU one process for all, otherwise each process for itself."""
    if not config.run.compile_ahead:
        return None
    process_of = [device.process_index for device in job.training.devices]
    if job.training.devices[0].platform != "cpu":
        compile_next = functools.partial(
            compile_ahead, job.training, job.row, job.num_rows, job.tp_min, process_of, [processes.index]
        )
        return Ahead(ThreadWorker(compile_next), emit)
    if processes.index > 0:
        return None
    worker = ProcessWorker(
        program=Path(__file__).absolute(),
        config=config.run.dir / _CONFIG_FILE,
        identity=job.training.store.identity,
        process_of=process_of,
        log=config.run.dir / "compile_ahead.log",
    )
    return Ahead(worker, emit)


def _open_metrics(config: Config, step: int | None) -> MetricsFile:
    """The metrics file of the run, beside a copy of its configuration."""
    (config.run.dir / _CONFIG_FILE).write_text(yaml.safe_dump(_one_file(config), sort_keys=False))
    try:
        return MetricsFile(config.run.dir / "metrics.jsonl", resume_step=step)
    except ValueError as error:
        raise ConfigError([f"run.dir: {error}"]) from error


@dataclass(frozen=True)
class Recipe:
    """What a configuration says of the model and its optimizer: shapes and rules, no arrays."""

    model: TransformerFunctions
    params: Any
    partitions: Any
    schedule: optax.Schedule
    optimizer: optax.GradientTransformation


def make_recipe(config: Config) -> Recipe:
    """The model and optimizer of a configuration. Touches no device."""
    model, settings = TransformerFunctions(config.model, jnp.dtype(config.run.dtype)), config.optimizer
    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    partitions = partition_tree(params, model.rules, config.topology.nominal_tp)
    schedule = warmup_cosine(
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        num_steps=config.run.steps,
        final_fraction=settings.final_fraction,
    )
    optimizer = adamw(
        schedule, partitions, b1=settings.b1, b2=settings.b2, eps=settings.eps, weight_decay=settings.weight_decay
    )
    return Recipe(model, params, partitions, schedule, optimizer)


def blueprint(path: Path, overrides: Sequence[str] = ()) -> Blueprint:
    """What `python -m ntpjax plan` asks of a training program. Touches no device. Raises ConfigError."""
    config = load(Config, path, overrides)
    recipe, topology, batch = make_recipe(config), config.topology, config.batch
    return replace(
        Blueprint.of(recipe.params, recipe.partitions, recipe.optimizer, topology.degrees, topology.tp_min),
        training_on=functools.partial(make_training, config, recipe),
        row=row_shapes(config.data.seq_len),
        num_rows=lambda degrees: split_batch(batch.policy, batch.size, degrees, topology.nominal_tp),
    )


def make_training(config: Config, recipe: Recipe, devices: Sequence[Device]) -> Training:
    sources = [Path(__file__), *Path(__file__).with_name("models").glob("*.py")]
    settings = config.model_dump(mode="json", include={"model", "optimizer", "step"})
    settings |= {"steps": config.run.steps, "dtype": config.run.dtype, "nominal_tp": config.topology.nominal_tp}
    return Training.of(
        recipe.model,
        recipe.params,
        recipe.partitions,
        recipe.optimizer,
        options=config.step.options,
        clip_norm=config.optimizer.clip_norm,
        devices=devices,
        store=ProgramStore(config.run.dir / "programs", identity_of(settings, sources)),
    )


def make_job(config: Config, tokens: Tokens) -> Job:
    recipe = make_recipe(config)
    return Job(
        training=make_training(config, recipe, jax.devices()),
        init=recipe.model.init,
        row=row_shapes(config.data.seq_len),
        schedule=recipe.schedule,
        order=tokens.training,
        held_out=tokens.held_out,
        batch_size=config.batch.size,
        batch_policy=config.batch.policy,
        num_steps=config.run.steps,
        eval_every=config.eval.every,
        eval_samples=config.eval.samples,
        checkpoint_every=config.checkpoint.every,
        tp_min=config.topology.tp_min,
        seed=config.run.seed,
        config=_saved_config(config, tokens),
        run_dir=str(config.run.dir),
    )


def fit(config: Config, found: int, resumed_step: int | None) -> tuple[Topology, str | None]:
    """The topology to start with on `found` devices, and what to tell the user about it.

    A new run needs all its devices. A run that resumes goes on with those that are there: the last replicas are
    reduced, down to `topology.tp_min`. Devices that its schedule had lost by then are still lost.

    Raises:
      ConfigError: if there are too few, or the schedule is impossible with those that are there.
    """
    missing, spares = config.topology.num_devices - found, config.topology.spares
    if missing <= 0:
        return topology_after(config.start, config.events, resumed_step or 0), None
    degrees, spares, missing = list(config.topology.degrees), max(spares - missing, 0), max(missing - spares, 0)
    for replica in reversed(range(len(degrees))):
        taken = min(missing, degrees[replica] - config.topology.tp_min)
        degrees[replica], missing = degrees[replica] - taken, missing - taken
    if missing or resumed_step is None:
        raise ConfigError([_too_few_devices(config.topology, found)])
    topology = Topology.of_degrees(tuple(degrees), config.topology.nominal_tp, spares)
    problems = schedule_problems(topology, [event for event in config.events if event.step > resumed_step])
    if problems:
        raise ConfigError([f"schedule, starting with TP {degrees}: {problem}" for problem in problems])
    return topology, (
        f"{config.topology.num_devices} devices are configured and {found} are there: going on with TP {degrees}"
    )


def _one_file(config: Config) -> dict[str, Any]:
    """The configuration as one file that says it all, the events of the command line too."""
    values = config.model_dump(mode="json", exclude={"command_line"})
    for name, events in config.command_line.model_dump(mode="json").items():
        values["schedule"][name] += events
    return values


def _saved_config(config: Config, tokens: Tokens) -> dict[str, Any]:
    return {**_one_file(config), "text": tokens.name}


def _require_same_run(saved: dict[str, Any], here: dict[str, Any], path: Path) -> None:
    """Refuses to resume where it would mean another model or another order of samples. Raises ConfigError."""
    fixed = {"model": None, "batch": ["size"], "data": ["seq_len", "held_out"], "run": ["seed", "dtype"]}
    problems = [
        f"{section}.{key}: the checkpoint has {saved[section].get(key)!r}, this run {here[section].get(key)!r}"
        for section, keys in fixed.items()
        for key in keys or sorted(saved[section].keys() | here[section].keys())
        if saved[section].get(key) != here[section].get(key)
    ]
    if saved["text"] != here["text"]:
        problems.append(
            f"data: the checkpoint was made with text {saved['text']}, this configuration reads {here['text']}; "
            "the name covers text, tokenizer and weights"
        )
    if problems:
        problems.append("set them back to resume, or choose another run.dir to start anew")
        raise ConfigError(problems, source=f"resuming from {path}")


if __name__ == "__main__":
    exit_with(main)
