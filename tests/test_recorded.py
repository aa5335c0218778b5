"""What the library decides is what tests/recorded/ says: ``python -m tests.record`` renews it."""

import pytest

from tests.record import FOLDER, TABLES


@pytest.mark.parametrize("name", TABLES)
def test_what_is_decided_is_what_was_recorded(name):
    made = TABLES[name]()
    recorded = {file.stem: file.read_text() for file in (FOLDER / name).glob("*.txt")}
    advice = f"If a change meant it: python -m tests.record {name}"
    assert made.keys() == recorded.keys(), advice
    for table, text in made.items():
        assert text.splitlines() == recorded[table].splitlines(), f"{table}. {advice}"
