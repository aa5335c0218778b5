"""Where every name of the Rust ``Backend`` trait family went: the table behind docs/coverage.md.

    python -m ferrum_triton.coverage

writes the document. To move a name from planned to mapped, take it out of its :func:`_plan` row and
give it a :func:`_does` row; tests/test_coverage.py checks that the call can be made as written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NAMES = Path(__file__).parent / "data" / "trait_methods.txt"
DOCUMENT = Path(__file__).parent.parent / "docs" / "coverage.md"

OPS_TEST = "test_ops.py"
RUNTIME_TEST = "test_runtime.py"
CACHE_TEST = "test_runtime_kv_cache.py"
GRAPH_TEST = "test_graph.py"
COLLECTIVE_TEST = "test_collective.py"
PAGED_TEST = "test_paged_attention.py"
LOAD_TEST = "test_quant_load.py"

ROOTS = {
    "backend": 'ferrum_triton.get_backend("auto"): the ops',
    "context": "ferrum_triton.runtime.context.Context(device)",
    "device_scope": "ferrum_triton.runtime.context.device_scope",
    "timer": "ferrum_triton.runtime.timer.Timer(context)",
    "Timer": "ferrum_triton.runtime.timer.Timer",
    "Context": "ferrum_triton.runtime.context.Context",
    "buffers": "ferrum_triton.runtime.buffers",
    "graph": "ferrum_triton.runtime.graph.Graph(device)",
    "cache": "ferrum_triton.runtime.kv_cache.KvCache(...): one sequence, contiguous",
    "paged": "ferrum_triton.runtime.kv_cache.PagedKvCache(...): many sequences, in blocks",
    "KvCache": "ferrum_triton.runtime.kv_cache.KvCache",
    "PagedKvCache": "ferrum_triton.runtime.kv_cache.PagedKvCache",
    "collective": "ferrum_triton.runtime.collective.Collective()",
    "types": "ferrum_triton.types",
    "quant": "ferrum_triton.quant",
    "QuantizedTensor": "ferrum_triton.quant.QuantizedTensor",
    "experts": "a QuantizedTensor of blocks [num_experts, rows, row_bytes]",
    "Backend": "ferrum_triton.Backend",
    "get_backend": "ferrum_triton.get_backend",
    "torch": "torch",
}
"""What the first name of each call stands for."""


@dataclass(frozen=True)
class Entry:
    """One name of the trait family.

    Attributes:
        name, where: the name, and the trait or type it belongs to.
        call: what does it here; empty while planned.
        absorbs: where its offsets, strides, layouts and scratch arguments went.
        test: file in tests/ that holds it to its meaning; empty while planned.
        family: the family of ops it will come with; empty once mapped.
    """

    name: str
    where: str
    call: str = ""
    absorbs: str = ""
    test: str = ""
    family: str = ""


def read_names() -> dict[tuple[str, str], str]:
    """(name, where) to ``"required"`` or ``"later"``, in the order of the data file."""
    lines = [line for line in NAMES.read_text().splitlines() if line and line[0] != "#"]
    rows = [line.split("\t") for line in lines]
    return {(name, where): status for name, where, status in rows}


def _does(where: str, names: str, call: str, absorbs: str = "", test: str = "") -> list[Entry]:
    test = test or (OPS_TEST if call.startswith("backend.") else RUNTIME_TEST)
    return [Entry(name, where, call, absorbs, test) for name in names.split()]


def _plan(where: str, family: str, names: str) -> list[Entry]:
    return [Entry(name, where, family=family) for name in names.split()]


def _expert_products(where: str, suffix: str) -> list[Entry]:
    gemv, silu, gemm = f"gemv_{suffix}", f"gemv_{suffix}_gate_up_silu", f"gemm_{suffix}"
    strides = "strides: a row a token or a row a slot; offsets: slices; one token: ids[None]"
    stacks = "a, gate_blocks, up_blocks, ids, gate_kind, up_kind"
    return [
        *_does(where, f"{gemv} {gemv}_offset {gemv}_batched",
               "backend.gemv_quant_moe_id(a, blocks, ids, kind)", strides),
        *_does(where, f"{silu} {silu}_batched",
               f"backend.gemv_quant_moe_id_gate_up_silu({stacks})", strides),
        *_does(where, f"{gemm} {gemm}_indirect",
               "backend.gemm_quant_moe_id(a, blocks, bucket_ids, tpe, kind, top_k)",
               "ne11: a row a token or a row a pair; args_buf: the grid needs none"),
    ]  # fmt: skip


LINEAR_ATTENTION = "linear attention"
GPTQ, MOE_MATMULS = "GPTQ/AWQ", "MoE matmuls"

SHAPES = "sizes: the tensors' shapes"
PROBE = "one question for all: whether the op of that name runs here"
ROPE_VIEWS = "position of each token: positions, or pos_offset counted up"

WRITE = (
    "backend.split_qkv_norm_rope_into_paged_cache(qkv, q_weight, k_weight, cos, sin, "
    "k_cache, v_cache, num_heads, "
)

# fmt: off
TABLE: tuple[Entry, ...] = tuple(entry for row in (
    _does("Backend", "make_timer", "Timer(context)"),
    _does("Backend", "new_context", "Context(device)"),
    _does("Backend", "with_device_ordinal supports_device_ordinal_scope", "device_scope(ordinal)",
          "a no-op where there is no CUDA, so there is nothing to ask first"),
    _does("Backend", "sync", "context.sync()"),
    _does("Backend", "graph_capture_in_flight", "context.graph_capture_in_flight"),
    _does("Backend", "sync_before_host_readback", "context.sync_before_host_readback()"),
    _does("Backend", "activation_elem_size_bytes", "types.Dtype.F16.bytes_per_elem",
          "or tensor.element_size(); byte offsets: views, which count elements"),
    _does("Backend",
          "supports_llama_family_batched_decode supports_qk_norm_rope_batched_per_item "
          "supports_kv_cache_append_batched_per_cache supports_flash_attention_batched_per_cache "
          "supports_qwen35_indexed_recurrent_state supports_qwen35_packed_gdn_decode_prepare "
          "supports_qwen35_packed_gdn_prefill_prepare supports_qwen35_packed_gdn_recurrent_decode "
          "supports_device_f32_residual_shadow",
          "backend.supports(name)", PROBE, "test_backends.py"),
    _does("Backend", "zero_buffer", "buffers.zero_buffer(buffer, n)"),
    _does("Backend", "alloc_typed", "buffers.alloc_typed(dtype, n, device)"),
    _does("Backend", "from_slice_typed", "buffers.from_slice_typed(data, dtype, device)"),
    _does("Backend", "write_typed", "buffers.write_typed(dst, data)"),
    _does("Backend", "gemm", "backend.gemm(a, b)", SHAPES),
    _does("Backend", "rms_norm", "backend.rms_norm(x, weight, eps)", SHAPES + "; rows strided"),
    _does("Backend", "fused_add_rms_norm", "backend.fused_add_rms_norm(residual, x, weight, eps)",
          SHAPES + "; residual may be float32"),
    _does("Backend", "flash_attention", "backend.flash_attention(q, k, v, kv_len, pos_offset=p)",
          "kv_seq_stride: strides of k and v; cfg: **config.keywords"),
    _does("Backend", "mla_attention",
          "backend.mla_attention(q, cache, block_tables, kv_lens, kv_lora_rank, softmax_scale)",
          "q_rope and kv_rope: the last columns of q and of the cache; cfg: **config.keywords"),
    _plan("Backend", LINEAR_ATTENTION,
          "recurrent_gated_delta_rule_f32 recurrent_gated_delta_rule_batch_f32 "
          "qwen35_indexed_recurrent_state_dtype recurrent_gated_delta_rule_batch_indexed_f32 "
          "recurrent_gated_delta_rule_batch_indexed_packed_f32 "
          "recurrent_gated_delta_rule_varlen_f32 linear_attention_prepare_f32 "
          "linear_attention_prepare_varlen_f32 linear_attention_prepare_varlen_packed_qkvz_ba_f32 "
          "linear_attention_decode_prepare_f32 linear_attention_decode_prepare_batch_f32 "
          "linear_attention_decode_prepare_batch_indexed_f32 "
          "linear_attention_decode_prepare_batch_indexed_packed_qkvz_ba_f32 "
          "linear_attention_decode_prepare_batch_indexed_packed_qkvz_to_mixed_f32 "
          "qwen35_apply_attention_gate qwen35_apply_token_gate "
          "qwen35_apply_token_gate_and_add_inplace"),
    _does("Backend", "gated_rms_norm_f32", "backend.gated_rms_norm(core, z, weight, eps)",
          "tokens, heads: leading dimensions"),
    _does("Backend", "copy_slice",
          "backend.copy_slice(src, dst, src_offset, dst_offset, length)", "converts dtypes"),
    _does("Backend", "embedding_lookup", "backend.embedding_lookup(table, ids)", SHAPES),
    _does("Backend", "embedding_lookup_dev", "backend.embedding_lookup_dev(table, ids)",
          SHAPES + "; table rows strided"),
    _does("Backend", "split_qkv", "backend.split_qkv(qkv, q_dim, kv_dim)", SHAPES),
    _does("Backend", "fused_silu_mul_split", "backend.fused_silu_mul_split(gate_up)", SHAPES),
    _does("Backend", "fused_gelu_tanh_mul_split", "backend.fused_gelu_tanh_mul_split(gate_up)",
          SHAPES),
    _does("Backend", "scale_inplace", "backend.scale_inplace(x, scale)", "len: a view"),
    _does("Backend", "qk_norm_rope",
          "backend.qk_norm_rope(x, weight, cos, sin, pos_offset=p, eps=eps, qk_mode=mode)",
          ROPE_VIEWS),
    _does("Backend", "qk_norm_rope_partial",
          "backend.qk_norm_rope(x, weight, cos, sin, pos_offset=p, eps=eps, qk_mode=mode)",
          "input strides, offset: x is a view; rope_dim: the tables' width; its mode 3, which "
          "normalises too: rms_norm first"),
    _does("Backend", "qwen35_interleave_gate_up", "torch.cat((gate, up), dim=-1)",
          "a concatenation of rows, whatever its name says", "test_coverage.py"),
    _does("Backend", "kv_cache_append_batched_per_cache",
          "backend.kv_cache_append_paged(k_cache, v_cache, k, v, block_tables=rows, "
          "pos_offsets=cache_lens)",
          "cache pointers: the caches stacked, pages of a pool; rows: arange(m)[:, None]; K and V "
          "in one launch"),
    _does("Backend", "flash_attention_batched_per_cache",
          "backend.flash_attention(q, k, v, kv_lens=kv_lens, softmax_scale=scale)",
          "cache pointers, slot: k and v are [batch, ...] of any stride; max_valid_kv: not needed"),
    _does("Backend", "qk_norm_rope_batched_per_item",
          "backend.qk_norm_rope(x, weight, cos, sin, positions, eps=eps, qk_mode=mode, out=out)",
          "item-major output: out=buffer.transpose(0, 1)"),
    _does("Backend", "split_qkv_norm_rope",
          "backend.split_qkv_norm_rope(qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads)",
          ROPE_VIEWS),
    _does("Backend", "split_qkv_norm_rope_into_cache",
          "backend.split_qkv_norm_rope_into_cache(qkv, q_weight, k_weight, cos, sin, "
          "k_cache, v_cache, num_heads, cache_len)",
          ROPE_VIEWS + "; cache_capacity: the caches' shape and strides"),
    _does("Backend", "kv_cache_append_head_major",
          "backend.kv_cache_append_head_major(k_cache, v_cache, k, v, cache_len)",
          "cache_capacity: the caches' shape and strides; cache_len on the device: slots"),
    _does("Backend", "transpose_head_to_token", "backend.transpose_head_to_token(x)", SHAPES),
    _does("Backend", "transpose_token_to_head", "backend.transpose_token_to_head(x)", SHAPES),
    _does("Backend", "add_inplace", "backend.add_inplace(residual, x)", "len: views"),
    _does("Backend", "scaled_add_inplace", "backend.scaled_add_inplace(dst, src, scale)",
          "len: views"),
    _does("Backend", "fused_silu_mul_split_strided",
          "backend.fused_silu_mul_split(gate_up, out=out)",
          "row offsets: slices, gate_up[a:b] and out=buffer[c:d]"),
    _does("Backend", "add_bias", "backend.add_bias(x, bias)", SHAPES),
    _does("Backend", "layer_norm", "backend.layer_norm(x, weight, bias, eps)", SHAPES),
    _does("Backend", "gelu", "backend.gelu(x)", "len: a view"),
    _does("Backend", "alloc", "buffers.alloc(n, dtype, device)"),
    _does("Backend", "to_vec", "buffers.to_vec(buffer, n)"),
    _does("Backend", "from_slice", "buffers.from_slice(data, dtype, device)"),
    _does("Backend", "write_f32_to_activation", "buffers.write_f32_to_activation(dst, data)"),
    _does("Backend", "f32_to_activation", "backend.copy_slice(shadow, x)", "converts dtypes"),
    _does("Backend", "activation_to_f32_shadow", "backend.copy_slice(x, shadow)",
          "converts dtypes"),
    _does("Backend", "activation_add_to_f32_shadow", "backend.add_inplace(shadow, x)",
          "scratch: not needed"),
    _does("Backend", "rms_norm_activation_to_f32",
          "backend.rms_norm_to(x, weight, torch.float32, eps)", SHAPES),
    _does("Backend", "rms_norm_activation_add_to_f32",
          "backend.rms_norm_add_inplace(shadow, x, weight, eps)", "scratch: not needed"),
    _does("Backend", "rms_norm_f32_to_activation",
          "backend.rms_norm_to(shadow, weight, x.dtype, eps)", SHAPES),
    _does("Backend", "argmax_rows_f16", "backend.argmax_rows(logits)",
          "any float dtype; the ids stay on the device"),
    _does("Backend", "argmax_rows_f16_masked", "backend.argmax_rows(logits, mask)",
          "mask_len: the mask's shape"),
    _does("Backend", "argmax_rows_f16_sparse_repetition_penalty",
          "backend.repetition_penalty_inplace(logits, row_offsets, token_ids, penalties)",
          "then argmax_rows(logits, mask)"),
    _does("Backend", "from_weight_bytes", "buffers.from_weight_bytes(raw, src, device)",
          "kept in its own dtype, without a second copy"),

    _does("BackendPagedKv",
          "supports_paged_kv supports_varlen_qkv supports_vllm_paged_attn "
          "supports_qwen35_paged_qkv supports_qwen35_paged_qkv_vllm",
          "backend.supports(name)", PROBE, "test_backends.py"),
    _does("BackendPagedKv", "populate_batched_pointers", "paged.block_tables",
          "pointers: block numbers in device memory, which a captured graph may read", CACHE_TEST),
    _does("BackendPagedKv",
          "split_qkv_norm_rope_into_paged_cache split_qkv_norm_rope_into_paged_cache_vllm",
          WRITE + "block_tables=block_tables, pos_offsets=pos_offsets, layout=layout)",
          "byte offsets: slices; vllm: layout='vllm_x'; cache_len: pos_offsets, with positions for "
          "another rotation"),
    _does("BackendPagedKv",
          "split_qkv_norm_rope_into_paged_cache_varlen "
          "split_qkv_norm_rope_into_paged_cache_varlen_vllm",
          WRITE + "block_tables=block_tables, pos_offsets=pos_offsets, "
          "cu_seqlens_q=cu_seqlens_q, layout=layout)",
          "vllm: layout='vllm_x'; one launch"),
    _does("BackendPagedKv",
          "qwen35_split_qkv_norm_rope_into_paged_cache_varlen "
          "qwen35_split_qkv_norm_rope_into_paged_cache_varlen_vllm",
          "backend.kv_cache_append_paged(k_cache, v_cache, k, v, block_tables=block_tables, "
          "pos_offsets=pos_offsets, cu_seqlens_q=cu_seqlens_q, layout=layout)",
          "after qk_norm_rope of q and of k, views of their projections; token_seq_indices: not "
          "needed"),
    _does("BackendPagedKv",
          "paged_decode_attention paged_batched_decode_attention paged_decode_attention_v2 "
          "paged_varlen_attention_vllm_layout",
          "backend.paged_decode_attention(q, k_cache, v_cache, block_tables, kv_lens, "
          "layout=layout)",
          "q_len: q's shape; vllm and v2: layout='vllm_x'; longest length, partials: not needed; "
          "head-major output: out=buffer.transpose(1, 2)", PAGED_TEST),
    _does("BackendPagedKv",
          "paged_varlen_attention paged_varlen_attention_fa2_ffi paged_varlen_attention_vllm "
          "paged_varlen_attention_vllm_tiled_q4",
          "backend.paged_varlen_attention(q, k_cache, v_cache, cu_seqlens_q, pos_offsets, "
          "block_tables, lse=lse, layout=layout)",
          "vllm: layout='vllm_x'; seq_lens: pos_offsets; tile lists: worked out on the device",
          PAGED_TEST),

    _does("BackendInt8KvOps", "alloc_paged_int8_layer",
          "PagedKvCache(num_layers=n, num_blocks=b, block_size=16, num_seqs=s, "
          "max_blocks_per_seq=m, num_kv_heads=h, head_dim=d, kind=types.KvDtypeKind.INT8)",
          "all layers at once; scales come with the kind", CACHE_TEST),
    _does("BackendInt8KvOps", "int8_kv_append_paged",
          "backend.kv_cache_append_paged(k_cache, v_cache, k, v, block_tables=block_tables, "
          "pos_offsets=pos_offsets, k_scales=k_scales, v_scales=v_scales)",
          "cache_len_before: pos_offsets; block indices: a row of block_tables"),
    _does("BackendInt8KvOps", "int8_paged_decode_attention",
          "backend.paged_decode_attention(q, k_cache, v_cache, block_tables, kv_lens, k_scales, "
          "v_scales, softmax_scale=scale)", "any number of queries, and FP8 as well"),

    _does("BackendGraph", "set_decode_state", "graph.set_decode_state(token, step)", "",
          GRAPH_TEST),
    _does("BackendGraph", "set_dev_state_mode", "graph.device_state_mode",
          "no twin ops: ids, positions, slots and kv_lens take the state's tensors", GRAPH_TEST),
    _does("BackendGraph", "begin_graph_capture end_graph_capture",
          "graph.capture(key, step, owners)",
          "one call, which runs the step first: no capture stays open, none compiles", GRAPH_TEST),
    _does("BackendGraph", "replay_graph", "graph.replay(key)", "", GRAPH_TEST),
    _does("BackendGraph", "reset_graph", "graph.reset(key)", "", GRAPH_TEST),
    _does("BackendGraph", "reset_all_graphs", "graph.reset_all()", "", GRAPH_TEST),

    _does("BackendCollective", "world_size", "collective.world_size", "", COLLECTIVE_TEST),
    _does("BackendCollective", "rank", "collective.rank", "", COLLECTIVE_TEST),
    _does("BackendCollective", "all_reduce", "collective.all_reduce(x, op)", "len: a view",
          COLLECTIVE_TEST),
    _does("BackendCollective", "all_gather", "collective.all_gather(local, out)", SHAPES,
          COLLECTIVE_TEST),
    _does("BackendCollective", "broadcast", "collective.broadcast(x, src)", "len: a view",
          COLLECTIVE_TEST),

    _plan("BackendQuantMarlin", GPTQ, "load_gptq load_gptq_stacked pregrow_marlin_gather_scratch"),

    _does("BackendQuantGguf", "load_quant", "quant.load_quant(kind, data, num_rows, num_cols)",
          "nothing is repacked: the kernels read the file's blocks", LOAD_TEST),
    _does("BackendQuantGguf", "load_quant_fused", "quant.load_quant_fused(parts, num_cols)",
          "models.linear.matmul: each part writes its columns of one output", LOAD_TEST),
    _does("BackendQuantGguf", "load_quant_experts",
          "quant.load_quant_experts(kind, data, num_experts, num_rows, num_cols)",
          "expert stride: the first dimension", LOAD_TEST),

    _does("BackendMoeFused", "upload_moe_routing",
          "types.MoeRouting.upload(sorted_token_ids, expert_ids, num_tokens_past_padded)"),
    _does("BackendMoeFused", "route_topk_softmax",
          "backend.route_topk_softmax(logits, top_k, norm_topk_prob)", SHAPES),
    _does("BackendMoeFused", "try_gpu_route_topk_into_host",
          "backend.route_topk_softmax(logits, top_k, norm_topk_prob)",
          "host copies: .tolist() of the results"),
    _does("BackendMoeFused", "moe_build_pairs_by_token",
          "backend.moe_build_pairs_by_token(ids, num_experts)", SHAPES),
    _does("BackendMoeFused", "moe_align_block_size",
          "backend.moe_align_block_size(ids, num_experts, block_size, pair_ids=False)",
          "sorted_max_size: the worst case, known from the shapes"),
    _does("BackendMoeFused", "moe_align_block_size_pair_ids",
          "backend.moe_align_block_size(ids, num_experts, block_size, pair_ids=True)",
          "sorted_max_size: the worst case, known from the shapes"),
    _does("BackendMoeFused", "compute_ids_tpe_gpu",
          "backend.compute_ids_tpe(ids, num_experts, gate_up_rows, down_rows)", SHAPES),
    _does("BackendMoeFused", "silu_mul_batched silu_mul_stacked", "backend.silu_mul(gate, up)",
          SHAPES),
    _does("BackendMoeFused", "weighted_sum_residual_stacked",
          "backend.weighted_sum_residual(slots, weights, residual)", SHAPES),
    _does("BackendMoeFused", "weighted_sum_residual_norm_stacked",
          "backend.weighted_sum_residual_norm(slots, weights, residual, norm_weight, eps)", SHAPES),
    _does("BackendMoeFused", "weighted_sum_batched weighted_sum_stacked",
          "backend.weighted_sum(slots, weights)", "one token: a batch of one"),
    _does("BackendMoeFused", "weighted_sum_batched_offset",
          "backend.weighted_sum(slots, weights, out=out)",
          "offsets: slices, weights[a:b] and out=buffer[c:d]"),
    _does("BackendMoeFused",
          "supports_fused_moe_gate_up_silu supports_batched_moe_gemv "
          "supports_batched_moe_gate_up_silu",
          "backend.supports(name)", PROBE, "test_backends.py"),
    _does("BackendMoeFused", "moe_combine", "backend.moe_combine(packed, pairs, weights)", SHAPES),

    _does("StackedExpertGgufLinear", "num_experts n_rows n_cols", "experts.shape", "",
          "test_coverage.py"),
    _expert_products("StackedExpertGgufLinear", "moe_id"),
    _plan("MarlinExpertStack", MOE_MATMULS,
          "n_per_expert k num_experts requires_vllm_moe zero_workspace gemm_phase_batched "
          "gemm_phase_vllm make_expert_linear"),

    _does("KvLayer", "alloc_paged",
          "PagedKvCache(num_layers=n, num_blocks=b, block_size=16, num_seqs=s, "
          "max_blocks_per_seq=m, num_kv_heads=h, head_dim=d)", "all layers at once", CACHE_TEST),
    _does("KvLayer", "alloc_contig", "KvCache(num_kv_heads, head_dim, capacity, kind, device)", "",
          CACHE_TEST),
    _does("KvLayer", "len", "cache.length", "paged.lengths[seq]", CACHE_TEST),
    _does("KvLayer", "set_len", "cache.set_len(length)", "paged.set_lens({seq: length})",
          CACHE_TEST),
    _does("KvLayer", "capacity", "cache.capacity", "paged.capacity", CACHE_TEST),
    _does("KvLayer", "block_size", "paged.block_size", "", CACHE_TEST),
    _does("KvLayer", "num_kv_heads", "cache.num_kv_heads", "paged.num_kv_heads", CACHE_TEST),
    _does("KvLayer", "head_dim", "cache.head_dim", "paged.head_dim", CACHE_TEST),
    _does("KvLayer", "block_table", "paged.block_tables", "a sequence: row seq", CACHE_TEST),
    _does("KvLayer", "block_table_mut paged_block_indices_mut", "paged.reserve(lengths)",
          "table and mirror change together, by reserve and free", CACHE_TEST),
    _does("KvLayer", "context_lens", "paged.kv_lens", "a sequence: entry seq", CACHE_TEST),
    _does("KvLayer", "context_lens_mut", "paged.set_lens(lengths)", "", CACHE_TEST),
    _does("KvLayer", "paged_block_indices", "paged.blocks", "a sequence: entry seq", CACHE_TEST),
    _does("KvLayer", "ensure_contig_capacity", "cache.ensure_contig_capacity(required)", "",
          CACHE_TEST),
    _does("KvLayer", "is_paged", "PagedKvCache", "isinstance: the two are two classes",
          CACHE_TEST),
    _does("KvLayer", "paged_write",
          WRITE + "block_tables=block_tables, pos_offsets=pos_offsets, k_scales=k_scales, "
          "v_scales=v_scales)", "scratch: not needed"),
    _does("KvLayer", "paged_decode_attention",
          "backend.paged_decode_attention(q, k_cache, v_cache, block_tables, kv_lens)",
          "k_cache, v_cache: paged.k[layer], paged.v[layer]", PAGED_TEST),
    _does("KvLayer", "contig_write",
          "backend.split_qkv_norm_rope_into_cache(qkv, q_weight, k_weight, cos, sin, "
          "cache.k, cache.v, num_heads, cache.length)", "scratch: not needed"),
    _does("KvLayer", "contig_decode_attention",
          "backend.flash_attention(q, cache.k, cache.v, cache.length)",
          "attn_cfg: **config.keywords; the batch dimension: cache.k[None]"),

    _does("BackendTimer", "new", "Timer(context)"),
    _does("BackendTimer", "record_start", "timer.record_start()"),
    _does("BackendTimer", "record_end", "timer.record_end()"),
    _does("BackendTimer", "elapsed_ms", "timer.elapsed_ms()"),

    _plan("removed", GPTQ, "gemm_gptq"),
    _does("removed", "replay_last_graph", "graph.replay(key)", "", GRAPH_TEST),
    _does("removed", "gemm_quant", "backend.gemm_quant(a, blocks, kind)", SHAPES),
    _expert_products("removed", "quant_moe_id"),
    _does("removed", "from_slice_i32", "buffers.from_slice_typed(data, types.Dtype.I32)"),
    _does("removed", "write_i32_into write_f32_into write_u32", "buffers.write_typed(dst, data)"),
    _does("removed", "alloc_u32", "buffers.alloc_typed(types.Dtype.U32, n)"),
    _does("removed", "is_metal_backend", "backend.name", "", "test_backends.py"),

    _does("type", "AttnConfig", "types.AttnConfig(num_heads, num_kv_heads, head_dim)",
          "kv_seq_stride: strides of k and v"),
    _does("type", "KvCache", "KvCache(num_kv_heads, head_dim, capacity)",
          "in blocks: PagedKvCache", CACHE_TEST),
    _does("type", "KvCacheQuant",
          "KvCache(num_kv_heads, head_dim, capacity, types.KvDtypeKind.INT8)",
          "scales: k_scales and v_scales beside k and v", CACHE_TEST),
    _does("type", "KvFp16", "types.KvDtypeKind.FP16"),
    _does("type", "KvBf16", "types.KvDtypeKind.BF16"),
    _does("type", "KvFp8", "types.KvDtypeKind.FP8"),
    _does("type", "KvInt8", "types.KvDtypeKind.INT8"),
    _does("type", "KvDtypeKind", "types.KvDtypeKind"),
    _does("type", "MoeRouting",
          "types.MoeRouting(sorted_token_ids, expert_ids, num_tokens_past_padded)"),
    _does("type", "QuantWeights", "QuantizedTensor(blocks, kind)", "GGUF's; others come with "
          "GPTQ/AWQ", "test_quant_formats.py"),
    _does("type", "QuantKind", "types.QuantKind", "Gptq | Awq | Gguf"),
    _does("type", "GgufQuantType", "types.GgufQuantType", "members are the ops' kind strings"),
    _does("type", "ReduceOp", "types.ReduceOp", "", COLLECTIVE_TEST),
    _does("type", "SrcDtype", "types.SrcDtype"),
    _does("type", "Dtype", "types.Dtype", "U32 is I32: no index needs bit 31"),
    _does("type", "MAX_LAYERS_FOR_GRAPH", "graph.capture",
          "no limit: there are no slots to stage pointers in", GRAPH_TEST),
    _does("type", "KvLayer", "PagedKvCache", "or KvCache", CACHE_TEST),
    _does("type", "BackendTimer", "Timer"),
    _does("type", "LlmBackend QuantLlmBackend MoeLlmBackend", "Backend",
          "one object has every op; backend.supports(name) asks", "test_backends.py"),
    _does("type", "CpuBackend", 'get_backend("cpu")', "", "test_backends.py"),
) for entry in row)
# fmt: on


def counts() -> dict[str, dict[str, int]]:
    """Names mapped and planned, for those ``required`` and those that came ``later``."""
    statuses = read_names()
    result = {status: {"mapped": 0, "planned": 0} for status in ("required", "later")}
    for entry in TABLE:
        kind = "mapped" if entry.call else "planned"
        result[statuses[entry.name, entry.where]][kind] += 1
    return result


def render() -> str:
    """The text of docs/coverage.md."""
    statuses = read_names()
    return "\n".join([*_head(), *_sections(statuses), *_plans(statuses)]) + "\n"


def _head() -> list[str]:
    totals = counts()
    lines = [
        "# From the trait to here",
        "",
        "Every name of the Rust `Backend` trait family, the call that does it here, and where its",
        "offsets, strides and layouts went. Ops take torch tensors: a size is a shape, an offset a",
        "slice, a layout a view, and results are returned, or written to `out=`.",
        "Generated by `python -m ferrum_triton.coverage`; do not edit.",
        "",
        "| names | mapped | planned |",
        "|---|---|---|",
    ]
    lines += [f"| {k} | {v['mapped']} | {v['planned']} |" for k, v in totals.items()]
    lines += ["", "The first word of a call stands for:", "", "| word | is |", "|---|---|"]
    return lines + [f"| `{name}` | {meaning} |" for name, meaning in ROOTS.items()]


def _sections(statuses: dict[tuple[str, str], str]) -> list[str]:
    lines = []
    for where in dict.fromkeys(where for _, where in statuses):
        rows = [entry for entry in TABLE if entry.where == where]
        title = {"type": "Types", "removed": "Names of earlier versions"}.get(where, where)
        lines += ["", f"## {title}", ""]
        lines += ["| name | here | absorbed by | test |", "|---|---|---|---|"]
        for entry in rows:
            call = f"`{entry.call}`".replace("|", "\\|") if entry.call else "planned: "
            cells = (f"`{entry.name}`", call + entry.family, entry.absorbs.replace("|", "\\|"))
            lines.append(f"| {' | '.join(cells)} | {entry.test} |")
    return lines


def _plans(statuses: dict[tuple[str, str], str]) -> list[str]:
    lines = ["", "## Planned", "", "| family | required | later |", "|---|---|---|"]
    for family in sorted({entry.family for entry in TABLE if entry.family}):
        members = [entry for entry in TABLE if entry.family == family]
        split = {
            status: sum(statuses[entry.name, entry.where] == status for entry in members)
            for status in ("required", "later")
        }
        lines.append(f"| {family} | {split['required']} | {split['later']} |")
    return lines


if __name__ == "__main__":
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(render())
