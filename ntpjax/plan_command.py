"""`python -m ntpjax plan`: what each TP degree means for a configuration, with no device touched."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from ntpjax.describe import format_bytes
from ntpjax.forecast import DegreeForecast, Traffic, forecast
from ntpjax.program import add_program_arguments, load_blueprint


def add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to those of `ntpjax.cli`."""
    parser = commands.add_parser(
        "plan",
        help="balance, memory and traffic of each TP degree of a configuration",
        description="Prints, for each TP degree from the nominal one down: units a rank, padding, work of the fullest "
        "rank over the ideal, state a device, bytes moved on a loss, and bytes a step, beside the least possible.",
    )
    add_program_arguments(parser)
    parser.add_argument("--lost", type=int, default=None, metavar="k", help="only degrees down to nominal - k")
    parser.set_defaults(command=plan)


def plan(args: argparse.Namespace) -> None:
    """Prints the forecasts. Raises ValueError for what cannot be used."""
    blueprint = load_blueprint(args.program, args.config, args.set)
    rows = forecast(blueprint)
    if args.lost is not None:
        if not 0 <= args.lost < len(rows):
            raise ValueError(f"--lost must be between 0 and {len(rows) - 1}, down to topology.tp_min (got {args.lost})")
        rows = rows[: args.lost + 1]
    if args.json:
        degrees = [asdict(row) for row in rows]
        print(json.dumps({"num_parameters": blueprint.num_parameters, "degrees": degrees}, indent=2))
        return
    console = Console()
    # Off a terminal a table must not be squeezed into 80 columns.
    console.width = console.width if console.is_terminal else 160
    console.print(f"{blueprint.num_parameters:,} parameters, nominal TP {max(blueprint.degrees)}")
    for table in (_balance_table(rows), _traffic_table(rows)):
        console.print(table)


def _balance_table(rows: Sequence[DegreeForecast]) -> Table:
    table = Table(title="Balance and memory", title_justify="left")
    for column in ("TP", *rows[0].units, "padding", "work / ideal", "speed-up to keep up", "state a device"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.degree),
            *_units(row.units),
            f"{100 * row.padding:.1f} %",
            f"{row.work_over_ideal:.3f}",
            f"{row.needed_speedup:.3f}",
            format_bytes(row.state_bytes),
        )
    table.caption = "Units of each family on a rank, fewest to most. Work of the fullest rank over an even share."
    table.caption_justify = "left"
    return table


def _units(units: Mapping[str, tuple[int, int]]) -> list[str]:
    return [str(most) if fewest == most else f"{fewest}-{most}" for fewest, most in units.values()]


def _traffic_table(rows: Sequence[DegreeForecast]) -> Table:
    table = Table(title="Bytes moved", title_justify="left")
    steps = ("pre-sync a step", "over replicas a step", "post-sync a step")
    for column in ("TP", "on a loss", "on a loss, other rank", *steps):
        table.add_column(column, justify="right")
    for row in rows:
        traffic = (row.moved, row.moved_worst, row.pre_sync, row.cross_replica, row.post_sync)
        table.add_row(str(row.degree), *map(_traffic, traffic))
    table.caption = (
        "Bytes (the least possible; of which copies of KV heads). A loss leads to this degree, of the last rank or of "
        "another. Pre-sync and post-sync are those of a healthy replica, the sum over replicas that of a core rank."
    )
    table.caption_justify = "left"
    return table


def _traffic(traffic: Traffic) -> str:
    if traffic == Traffic(0, 0, 0):
        return "nothing"
    copies = f"; {format_bytes(traffic.copies_bytes)}" if traffic.copies_bytes else ""
    return f"{format_bytes(traffic.num_bytes)} ({format_bytes(traffic.least_bytes)}{copies})"
