"""`python -m ntpjax aot`: the step of a configuration compiled for GPUs that are not there, and what is read from it.

Layer 3. For each TP degree it compiles the gradient step as a process of that degree runs it, and prints its
collectives, how many matmuls each of them is hidden under, and its memory.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from ntpjax.describe import format_bytes, format_seconds
from ntpjax.forecast import Blueprint
from ntpjax.hlo import Collective, collectives, exposed, least_hidden, syncs_in_loop
from ntpjax.mesh import Device
from ntpjax.program import add_program_arguments, load_blueprint
from ntpjax.targets import TARGETS, compile_for_cuda, target_devices
from ntpjax.topology import Topology, format_degrees


def add_aot(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to those of `ntpjax.cli`."""
    parser = commands.add_parser(
        "aot",
        help="compile the step of a configuration for GPUs, without one",
        description="Compiles the gradient step, once for each TP degree, for GPUs that need not be there, and prints "
        "its collectives, how many matmuls are scheduled between the start and the end of each, and its memory.",
    )
    parser.add_argument("--target", required=True, help=f"{' or '.join(TARGETS)}")
    parser.add_argument("--degrees", required=True, metavar="n,n,...", help="TP degree of each replica, such as 8,7")
    add_program_arguments(parser)
    parser.set_defaults(command=aot)


@dataclass(frozen=True)
class Memory:
    """Bytes on a device; `total` counts what is both argument and output once."""

    arguments: int
    outputs: int
    temporaries: int
    aliases: int
    total: int


@dataclass(frozen=True)
class StepReport:
    """The compiled gradient step of a process whose replica has this TP degree.

    Attributes:
      exposed_in_loop: of `num_syncs_in_loop`, how many hide under no matmul; `ntpjax.hlo.exposed`.
      least_matmuls_hidden_under: `ntpjax.hlo.least_hidden`.
    """

    degree: int
    compile_time_s: float
    memory: Memory
    num_syncs_in_loop: int
    exposed_in_loop: int
    least_matmuls_hidden_under: int | None
    collectives: tuple[Collective, ...]


def aot(args: argparse.Namespace) -> None:
    """Prints the reports. Raises ValueError for what cannot be used."""
    degrees = _degrees(args.degrees)
    # Nothing runs here, and without a GPU JAX loads its compiler for CUDA only if it is not to look for one.
    jax.config.update("jax_platforms", "cpu")
    blueprint = load_blueprint(args.program, args.config, args.set)
    _require_nominal(degrees, max(blueprint.degrees))
    devices = target_devices(args.target, sum(degrees))
    progress, console = Console(stderr=True), Console()
    # Off a terminal a table must not be squeezed into 80 columns.
    console.width = console.width if console.is_terminal else 160
    reports = []
    for degree in sorted(set(degrees), reverse=True):
        progress.print(f"compiling the step of a TP-{degree} replica for {args.target}, {format_degrees(degrees)} ...")
        reports.append(_report(_trace_grad_step(blueprint, devices, degrees, degree), degree))
        if not args.json:
            _print(console, reports[-1])
    if args.json:
        programs = [asdict(report) for report in reports]
        print(json.dumps({"target": args.target, "degrees": degrees, "programs": programs}, indent=2))


def _degrees(text: str) -> tuple[int, ...]:
    try:
        degrees = tuple(map(int, text.split(",")))
    except ValueError as error:
        raise ValueError(
            f"--degrees (={text!r}) must be whole numbers with commas between them, such as 8,7"
        ) from error
    if min(degrees) < 1:
        raise ValueError(f"--degrees (={text!r}) must each be at least 1; leave out a replica that is dropped")
    return degrees


def _require_nominal(degrees: Sequence[int], nominal_tp: int) -> None:
    if max(degrees) > nominal_tp:
        rule = f"must each be at most the nominal TP of the configuration (={nominal_tp})"
        raise ValueError(f"--degrees (={','.join(map(str, degrees))}) {rule}; lower them or raise topology.tp")


def _trace_grad_step(
    blueprint: Blueprint, devices: Sequence[Device], degrees: tuple[int, ...], own_degree: int
) -> jax.stages.Traced:
    """Returns the gradient step of a process of TP degree `own_degree`, in a job with replicas of these degrees."""
    if blueprint.training_on is None or blueprint.num_rows is None:
        raise ValueError("the program's blueprint must have `training_on`, `row` and `num_rows`; train.py sets them")
    topology = Topology.of_degrees(degrees, nominal_tp=max(blueprint.degrees))
    generation = blueprint.training_on(devices).on(topology, topology.devices_of_degree(own_degree))
    return generation.traced(blueprint.row, blueprint.num_rows(degrees)).grad_step


def _report(traced: jax.stages.Traced, degree: int) -> StepReport:
    start_s = time.perf_counter()
    compiled = compile_for_cuda(traced)
    compile_time_s = time.perf_counter() - start_s
    found = collectives(compiled.as_text() or "")
    return StepReport(
        degree=degree,
        compile_time_s=compile_time_s,
        memory=_memory(compiled.memory_analysis()),
        num_syncs_in_loop=len(syncs_in_loop(found)),
        exposed_in_loop=len(exposed(found)),
        least_matmuls_hidden_under=least_hidden(found),
        collectives=found,
    )


def _memory(stats: Any) -> Memory:
    arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
    temporaries, aliases = stats.temp_size_in_bytes, stats.alias_size_in_bytes
    return Memory(arguments, outputs, temporaries, aliases, total=arguments + outputs + temporaries - aliases)


def _print(console: Console, report: StepReport) -> None:
    console.print(_collectives_table(report))
    memory = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in asdict(report.memory).items())
    console.print(f"memory a device: {memory}")
    console.print(f"compiled in {format_seconds(report.compile_time_s)}")
    least = report.least_matmuls_hidden_under
    console.print(
        f"TP {report.degree}: syncs_in_loop {report.num_syncs_in_loop} exposed_in_loop {report.exposed_in_loop} "
        f"least_matmuls_hidden_under {'none' if least is None else least}\n"
    )


def _collectives_table(report: StepReport) -> Table:
    table = Table(title=f"Collectives of a TP-{report.degree} replica", title_justify="left")
    for column in ("scope", "kind", "shape"):
        table.add_column(column)
    for column in ("bytes", "times", "in a loop", "asynchronous", "matmuls until done"):
        table.add_column(column, justify="right")
    for one in report.collectives:
        times = "unknown" if one.executions is None else str(one.executions)
        yes_no = ("yes" if answer else "no" for answer in (one.in_loop, one.asynchronous))
        table.add_row(
            one.scope, one.kind, one.shape, format_bytes(one.num_bytes), times, *yes_no, str(len(one.matmuls))
        )
    table.caption = "In the order in which they run; bytes of one time, on one device."
    table.caption_justify = "left"
    return table
