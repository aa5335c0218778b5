"""Thirty calls of attention for a memory checker to watch, on a CUDA device.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        --kernel-name kns=_paged --kernel-name kns=_flash --kernel-name kns=_merge \\
        --kernel-name kns=_mla --error-exitcode 1 python -m tests.sanitize_attention

and again with ``--tool racecheck``. Without torch's caching every tensor is an allocation of its
own, so that a read past its end is seen. Results are checked by the other tests.
"""

import random

import torch

from ferrum_triton import OPS, get_backend
from tests.harness import sample
from tests.test_attention_fuzz import decode_call, varlen_call

SAMPLES = 30
LONGEST, DIMS = 1500, (64, 80, 128, 256)


def contiguous_call(pick, backend, dtype, seed):
    """A call of one of the ops whose axes say themselves what they take."""
    op = OPS[pick.choice(("flash_attention", "mla_attention", "merge_attention_states"))]
    axes = {name: pick.choice(values) for name, values in op.axes.items()}
    return op.name, sample(op, dtype, backend.device, seed, **axes)


def main() -> None:
    backend = get_backend("cuda")
    for seed in range(SAMPLES):
        pick = random.Random(seed)
        dtype = pick.choice((torch.float16, torch.bfloat16, torch.float32))
        if seed % 3 == 2:
            name, call = contiguous_call(pick, backend, dtype, seed)
        else:
            make_call = (decode_call, varlen_call)[seed % 3]
            name, call = make_call(pick, backend, dtype, LONGEST, DIMS, seed)
        getattr(backend, name)(**call)
        torch.cuda.synchronize()
        print(f"{seed:>2} {name} {dtype}", flush=True)


if __name__ == "__main__":
    main()
