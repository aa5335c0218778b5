"""Tables of measured launches: where the files lie, and how they are read and written.

There is one file an op and architecture. A user's own come before those shipped. Every file is
outside input: its right rows are used, and what is wrong with the others is logged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ferrum_triton.kernels.parameters import Config, Dim

SHIPPED = Path(__file__).parent.parent / "tuned"

MAX_BYTES = 4 << 20
MAX_DIM = 1 << 40
MAX_US = 1e12
# Characters that a message quotes of a file.
MAX_QUOTED = 80

_log = logging.getLogger(__name__)
_told: set[str] = set()


@dataclass(frozen=True)
class Row:
    """The configuration measured best for one shape.

    Attributes:
        shape: dimensions, in the op's order.
        config: the configuration.
        us: microseconds with it.
        default_us: microseconds with the heuristic's, or of a decode step with what it replaces;
            None where that does not run.
        measured: the command, commit, versions, GPU and date of the measurement.
    """

    shape: tuple[Dim, ...]
    config: Config
    us: float
    default_us: float | None = None
    measured: Mapping[str, str] = field(default_factory=dict, compare=False)


class BadTable(ValueError):
    """What is wrong with a file or a row; the message says what it is."""


def user_directory() -> Path | None:
    """The tables of this user: ``~/.config/ferrum_triton/tuned``, by the XDG convention.

    None where there is no home directory.
    """
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if not Path(base).is_absolute():
        try:
            base = Path.home() / ".config"
        except RuntimeError:
            return None
    return Path(base) / "ferrum_triton" / "tuned"


def table_file(directory: Path, op: str, arch: str) -> Path:
    """The file of an op's measured launches on an architecture."""
    return directory / op / f"{arch}.json"


def read_rows(
    file: Path, op: str, arch: str, dims: Sequence[str]
) -> tuple[list[tuple[int, Row]], list[str]]:
    """The well-formed rows of a table with their numbers, and what is wrong with the others.

    Raises:
        BadTable: the file as a whole is not such a table.
    """
    table = _parse(_read(file))
    if table is None:
        return [], []
    for name, want in (("op", op), ("arch", arch)):
        if table.get(name) != want:
            raise BadTable(f"its {name} is {quoted(table.get(name))}, not {want!r}")
    entries = table.get("rows")
    if not isinstance(entries, list):
        raise BadTable("it has no list of rows")
    rows, reasons = [], []
    for number, entry in enumerate(entries, 1):
        try:
            rows.append((number, _row(entry, dims)))
        except BadTable as error:
            reasons.append(f"row {number}: {error}")
    return rows, reasons


def _read(file: Path) -> bytes | None:
    """The bytes of a regular file of reasonable size; None where there is no file."""
    try:
        # Not blocking: a pipe in the file's place would wait for a writer.
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        if file.is_symlink():
            raise BadTable("it is a link to nothing") from None
        return None
    except (OSError, ValueError) as error:
        raise BadTable(f"it cannot be opened: {quoted(str(error))}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BadTable("it is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as opened:
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadTable(f"it cannot be read: {quoted(str(error))}") from None
    finally:
        os.close(descriptor)
    if len(content) > MAX_BYTES:
        raise BadTable(f"it is larger than {MAX_BYTES >> 20} MiB")
    return content


def _parse(content: bytes | None) -> dict[str, Any] | None:
    if content is None:
        return None
    try:
        table = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadTable(f"it is not JSON: {quoted(str(error))}") from None
    if not isinstance(table, dict):
        raise BadTable("it is not a JSON object")
    return table


def _row(entry: Any, dims: Sequence[str]) -> Row:
    if not isinstance(entry, dict):
        raise BadTable("it is not an object")
    shape, config = entry.get("shape"), entry.get("config")
    if not isinstance(shape, dict) or set(shape) != set(dims):
        raise BadTable(f"its shape has not the dimensions {', '.join(dims)}")
    for name, value in shape.items():
        if type(value) not in (int, str, bool):
            raise BadTable(f"its {name} is {quoted(value)}")
        if type(value) is int and not 0 <= value <= MAX_DIM:
            raise BadTable(f"its {name} is out of range")
    if not isinstance(config, dict) or not config:
        raise BadTable("it has no config")
    for name, value in config.items():
        if value is not None and type(value) not in (int, str, bool):
            raise BadTable(f"its {quoted(name)} is {quoted(value)}")
    times = [entry.get("us"), entry.get("default_us")]
    for name, value in zip(("us", "default_us"), times, strict=True):
        absent = value is None and name == "default_us"
        if not absent and not (type(value) in (int, float) and 0 < value < MAX_US):
            raise BadTable(f"its {name} is {quoted(value)}, not a time")
    measured = entry.get("measured", {})
    if not isinstance(measured, dict) or not all(type(v) is str for v in measured.values()):
        raise BadTable("its measured is not an object of strings")
    return Row(tuple(shape[name] for name in dims), config, times[0], times[1], measured)


def write_rows(file: Path, op: str, arch: str, dims: Sequence[str], rows: Iterable[Row]) -> None:
    """Put a table in place of the one there is, in one step: a reader sees either of them."""
    table = {
        "op": op,
        "arch": arch,
        "rows": [
            {
                "shape": dict(zip(dims, row.shape, strict=True)),
                "config": dict(row.config),
                "us": row.us,
                "default_us": row.default_us,
                "measured": dict(row.measured),
            }
            for row in sorted(rows, key=_order)
        ],
    }
    file = file.resolve()  # a link stays one
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "w") as opened:
            opened.write(json.dumps(table, indent=1) + "\n")
        Path(name).chmod(0o644)
        Path(name).replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _order(row: Row) -> list[tuple[str, Dim]]:
    return [(type(value).__name__, value) for value in row.shape]


def quoted(value: Any) -> str:
    """What a message shows of a value: printable, on one line and not long."""
    text = ascii(value)
    return text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "..."


def tell(file: Path, message: str) -> None:
    """One line about a file, once a process."""
    if str(file) not in _told:
        _told.add(str(file))
        _log.warning("%s: %s", ascii(str(file))[1:-1], message)
