"""Which kernels calls over pages launch: queries of long sequences share tiles, few are decoded."""

import pytest
import torch

from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.kernels.attention.paged import FEW_QUERIES
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.registry import OPS
from ferrum_triton.testing import TensorFactory

load_kernels("interpret")


@pytest.mark.parametrize("told", [None, 1, FEW_QUERIES, FEW_QUERIES + 1, 500])
@pytest.mark.parametrize("q_lens", [(3,), (FEW_QUERIES,), (FEW_QUERIES + 1,), (1, 20, 3), (300,)])
def test_prefill_is_launched_where_a_sequence_may_be_long(q_lens, told):
    """By the bound that the caller tells, or the number of all tokens."""
    op = OPS["paged_varlen_attention"]
    axes = {"num_kv_heads": 2, "group_size": 4, "head_dim": 64, "block_size": 16, "q_lens": q_lens}
    call = op.make_sample(TensorFactory(torch.bfloat16, "meta"), **axes)
    with record_launches((9, 0)) as launches:
        op.impls["triton"](**call | {"max_q_len": told})
    names = [launch.kernel.name for launch in launches]
    longest = min(told or sum(q_lens), call["q"].shape[0])
    assert ("_paged_prefill_kernel" in names) == (longest > FEW_QUERIES)
    assert "_paged_decode_kernel" in names
