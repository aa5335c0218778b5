"""The ``ferrum-triton`` command. Subcommands import what they need when they run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, NoReturn

from ferrum_triton.cli.terminal import (
    accept_any_text,
    complain,
    drop_output,
    flush_output,
    interrupts_noted,
    note,
)
from ferrum_triton.errors import FerrumError

# Libraries the commands use and the package itself does not.
EXTRA = ("tokenizers", "jinja2", "tqdm")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0 is success, 1 what a check found wanting, 2 a wrong argument, file or machine, or output that
    cannot be written, 130 Ctrl-C.
    """
    with interrupts_noted() as interrupts:
        try:
            status = _run(argv)
        except Exception:
            if not interrupts:
                raise
    return 130 if interrupts else status  # whatever a library made of them


def _run(argv: Sequence[str] | None) -> int:
    try:
        accept_any_text()
        try:
            options = _parser().parse_args(argv)
            return options.run(options)
        finally:
            flush_output()
    except FerrumError as error:
        complain(error)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        complain(f"this command needs {error.name}: pip install {error.name}")
        return 2
    except BrokenPipeError:
        drop_output()
        return 0  # whoever read the output has seen enough
    except OSError as error:
        drop_output()
        complain(f"input or output failed: {error}")
        return 2
    except KeyboardInterrupt:
        note()
        return 130


def is_this_process() -> bool:
    """Whether Python was started to run the command line, not a program that imports the package.

    It is told by how Python was started: as ``ferrum-triton`` or ``python -m ferrum_triton``.
    """
    words = sys.orig_argv[1:3]
    return words == ["-m", "ferrum_triton"] or PurePath(*words[:1]).stem == "ferrum-triton"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, not the usage as well."""
        complain(f"{message}; see {self.prog} --help")
        sys.exit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        """As argparse's, which is silent where help or version cannot be written."""
        print(message, end="", file=file)


def _parser() -> argparse.ArgumentParser:
    from ferrum_triton import __version__
    from ferrum_triton.cli import doctor, generate, inspect, ops, quantize

    parser = _Parser(
        prog="ferrum-triton",
        description="Triton kernels for LLM inference in PyTorch: run a model, look at the ops.",
    )
    parser.add_argument("--version", action="version", version=f"ferrum-triton {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (generate, inspect, quantize, doctor, ops):
        name = command.__name__.rpartition(".")[2]
        summary = command.SUMMARY
        sub = commands.add_parser(name, help=summary, description=summary)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser
