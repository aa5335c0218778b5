"""Packed weights of a GGUF file for a model that transformers loaded from it unpacked."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ferrum_triton.errors import FerrumError, InputError
from ferrum_triton.integrations.transformers.kernel import KINDS
from ferrum_triton.integrations.transformers.library import part
from ferrum_triton.quant import QuantizedTensor, dequantize_rows
from ferrum_triton.quant.kinds import format_of

SAMPLED_ROWS = 16  # of each weight are held against the model's
# Differences between a float32 weight and the model's, in its own dtype.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class Stored(NamedTuple):
    """One tensor of the file, in place.

    Attributes:
        name: the file's name of it.
        kind: the format of its blocks.
        data: uint8 [(num_experts,) rows, row_bytes], mapped from the file.
        order: which row of the file each row of the model is; None if they lie in one order.
    """

    name: str
    kind: str
    data: Any
    order: Tensor | None

    def load(self, device: torch.device) -> QuantizedTensor:
        """The blocks on ``device``, rows in the model's order."""
        blocks = torch.from_numpy(self.data.copy())
        if self.order is not None:
            blocks = blocks[self.order]
        return QuantizedTensor(blocks.to(device), self.kind)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the decoded tensor."""
        return (*self.data.shape[:-1], format_of(self.kind).row_weights(self.data.shape[-1]))


class File:
    """The packed weights of a file, by the parameters of the model that was loaded from it.

    Attributes:
        path: the file.
        reasons: why a parameter's weight cannot be taken from the file, by the parameter's name.

    Raises:
        InputError: there is no such file, or transformers has no names for such a model's weights.
        FerrumError: the library ``gguf`` is absent.
    """

    def __init__(self, path: str | Path, model: nn.Module) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            self.reject(f"{str(path)!r}, which is no file", "Pass the path of the file itself.")
        try:
            gguf = import_module("gguf")
        except ImportError as error:
            raise FerrumError("gguf is not installed; pip install gguf") from error
        loader = part("modeling_gguf_pytorch_utils")
        try:
            reader = gguf.GGUFReader(self.path)
            (architecture,) = loader.read_field(reader, "general.architecture")
        except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
            self.reject(f"{str(path)!r}, which cannot be read ({error})", "Download it again.")
        config = model.config.get_text_config().to_dict()
        processor = loader.TENSOR_PROCESSORS.get(architecture, loader.TensorProcessor)(config)
        try:
            names = loader.get_gguf_hf_weights_map(model, processor)
        except (NotImplementedError, AttributeError) as error:
            advice = "Call keep_packed(), load the file again, and convert without gguf_file."
            self.reject(f"given for a model whose weights it does not name ({error})", advice)
        self.reasons: dict[str, str] = {}
        self._stored: dict[str, dict[str, Stored]] = {}
        for tensor in reader.tensors:
            # Experts are named as the model's parameters are, which are no modules' weights.
            short = tensor.name.removesuffix(".weight")
            parameter, number = names.get(tensor.name, names.get(short)), int(tensor.tensor_type)
            if parameter is None:
                continue
            if number not in KINDS:
                self.reasons[parameter] = f"the file has it as {tensor.tensor_type.name}"
            else:
                self._add(parameter, tensor, KINDS[number], processor)

    def take(self, parameter: str, weight: Tensor) -> Stored | None:
        """The packed form of ``weight``, or None; ``reasons`` may say why.

        Raises:
            InputError: the file holds another weight under this name.
        """
        found = [*self._stored.get(parameter, {}).values()]
        if len(found) != 1 or parameter in self.reasons:
            return None
        self._compare(parameter, found[0], weight)
        return found[0]

    def take_experts(
        self, prefix: str, gate_up: Tensor, down: Tensor
    ) -> tuple[Stored, Stored, Stored] | None:
        """Gate, up and down of a layer's experts, or None.

        Raises:
            InputError: the file holds other experts under this name.
        """
        pair = self._stored.get(f"{prefix}.gate_up_proj", {})
        last = [*self._stored.get(f"{prefix}.down_proj", {}).values()]
        first = [s for s in pair.values() if "ffn_gate_exps" in s.name]
        second = [s for s in pair.values() if "ffn_up_exps" in s.name]
        if [len(first), len(second), len(last)] != [1, 1, 1]:
            return None
        num_inner = gate_up.shape[1] // 2
        for stored, weight in (
            (first[0], gate_up[:, :num_inner]),
            (second[0], gate_up[:, num_inner:]),
            (last[0], down),
        ):
            self._compare(prefix, stored, weight)
        return first[0], second[0], last[0]

    def reject(self, got: str, advice: str) -> Any:
        allowed = "the GGUF file that the model was loaded from"
        raise InputError("convert", "gguf_file", got, allowed, advice)

    def _add(self, parameter: str, tensor: Any, kind: str, processor: Any) -> None:
        try:
            order = _row_order(tensor, processor)
        except ValueError:
            self.reasons[parameter] = "transformers rearranges it as it loads it"
            return
        stored = Stored(tensor.name, kind, tensor.data, order)
        self._stored.setdefault(parameter, {})[tensor.name] = stored

    def _compare(self, parameter: str, stored: Stored, weight: Tensor) -> None:
        """Reject a file whose weight is of another shape, or whose rows are others."""
        if stored.shape != weight.shape:
            sizes = f"{[*stored.shape]}, where {parameter} is {[*weight.shape]}"
            got = f"one whose {stored.name} is {sizes}"
            self.reject(got, "Is it another size of the model?")
        matrix = stored.data[0] if stored.data.ndim == 3 else stored.data
        weight = weight[0] if weight.dim() == 3 else weight
        rows = torch.linspace(0, len(weight) - 1, min(SAMPLED_ROWS, len(weight))).long()
        origin = rows if stored.order is None else stored.order[rows]
        want = dequantize_rows(torch.from_numpy(matrix[origin.numpy()].copy()), stored.kind)
        have = weight.detach()[rows.to(weight.device)].cpu().float()
        tolerance = TOLERANCES[weight.dtype] * max(float(want.abs().max()), 1e-30)
        if not bool(((have - want).abs() <= tolerance).all()):
            got = f"one whose {stored.name} is not the model's {parameter}"
            self.reject(got, "Was the model loaded from another file, or changed since?")


def _row_order(tensor: Any, processor: Any) -> Tensor | None:
    """Which row of the file each row of the model is, by what transformers makes of row numbers.

    Raises:
        ValueError: it makes something other than another order of them.
    """
    numpy = import_module("numpy")
    if tensor.data.ndim != 2:
        return None
    num_rows = len(tensor.data)
    made = processor.process(weights=numpy.arange(num_rows)[:, None], name=tensor.name)
    rows = torch.from_numpy(numpy.ascontiguousarray(made.weights))
    if made.name != tensor.name or rows.shape != (num_rows, 1):
        raise ValueError("the rows are not rows any more")
    rows, known = rows[:, 0], torch.arange(num_rows)
    if torch.equal(rows, known):
        return None
    if rows.is_floating_point() or not torch.equal(rows.sort().values, known):
        raise ValueError("the rows are changed")
    return rows
