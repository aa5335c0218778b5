"""The ``ferrum-triton`` command. Subcommands import what they need when they run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ferrum_triton.errors import FerrumError

# Libraries the commands use and the package itself does not: its extra ``cli``.
EXTRA = ("tokenizers", "jinja2", "tqdm")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0 is success, 1 what a check found wanting, 2 a wrong argument, file or machine, 130 Ctrl-C.
    """
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except FerrumError as error:
        print(f"ferrum-triton: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        print(
            f"ferrum-triton: this command needs {error.name}: pip install 'ferrum-triton[cli]'",
            file=sys.stderr,
        )
        return 2
    except BrokenPipeError:
        return 0  # whoever read the output has seen enough
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    from ferrum_triton.cli import doctor, generate, inspect, ops

    parser = argparse.ArgumentParser(
        prog="ferrum-triton",
        description="Triton kernels for LLM inference in PyTorch: run a model, look at the ops.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (generate, inspect, doctor, ops):
        name = command.__name__.rpartition(".")[2]
        summary = command.SUMMARY
        sub = commands.add_parser(name, help=summary, description=summary)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser
