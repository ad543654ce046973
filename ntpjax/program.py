"""The training program, as the commands that ask about a configuration see it.

Layer 3. What model a configuration means is known to the training program only, a Python file with a function
`blueprint(path, overrides) -> ntpjax.forecast.Blueprint`. By default it is `train.py` in the current folder.
"""

import argparse
import runpy
from collections.abc import Sequence
from pathlib import Path

from ntpjax.forecast import Blueprint


def add_program_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what says which configuration of which program to look at, and how to print."""
    parser.add_argument("--config", type=Path, required=True, help="YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="change one setting")
    parser.add_argument("--program", type=Path, default=Path("train.py"), help="file with the function `blueprint`")
    parser.add_argument("--json", action="store_true", help="print JSON")


def load_blueprint(program: Path, config: Path, overrides: Sequence[str]) -> Blueprint:
    """Returns what the program makes of a configuration.

    Raises:
      ValueError: if there is no such program, it has no function `blueprint`, or the configuration cannot be used.
    """
    if not program.is_file():
        raise ValueError(f"--program {program} is not a file; run in the folder of your train.py, or name it")
    names = runpy.run_path(str(program))
    if "blueprint" not in names:
        raise ValueError(f"--program {program} has no function `blueprint(path, overrides)`; train.py has one")
    return names["blueprint"](config, overrides)
