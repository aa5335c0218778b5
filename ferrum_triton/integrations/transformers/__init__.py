"""transformers' models on this package's ops.

    from ferrum_triton.integrations.transformers import convert, keep_packed

    keep_packed()
    model = AutoModelForCausalLM.from_pretrained(
        directory, gguf_file="model.gguf", quantization_config=GgufConfig(), dtype=torch.float32
    )
    print(convert(model))

Architectures whose weights transformers unpacks take them from the file again:
``convert(model, gguf_file="model.gguf")``.
"""

from ferrum_triton.integrations.transformers.convert import convert, revert
from ferrum_triton.integrations.transformers.kernel import keep_packed
from ferrum_triton.integrations.transformers.report import Report

__all__ = ["Report", "convert", "keep_packed", "revert"]
