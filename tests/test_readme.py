"""What README shows works as printed."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["y"].shape == (4, 4096)


def test_commands_exist():
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
