// SCALAR is the type of queries and results, CACHE that of keys and values; if QUANTISED those are
// codes, and SCALE is the type of their scales. LENGTH, BLOCK, OFFSET and START are types of integers.
// A piece of K_PIECE or V_PIECE elements of a cached vector lies side by side; pieces are a stride apart.
//
// Rows of a sequence are its queries, each once for every head that reads the same KV head.

struct Attend {
    long num_heads;
    long num_kv_heads;
    long is_packed;  // the sequences' queries lie one after the other, q_len of them in all
    long num_seqs;
    long q_len;
    long head_dim;
    long value_dim;
    long capacity;  // keys of a sequence, at most
    long kv_len;
    long has_kv_lens;
    long pos_offset;
    long has_pos_offset;
    long is_causal;
    long sliding_window;
    long softmax_scale;
    long softcap;
    long has_sinks;
    long has_lse;
    long has_tables;  // without, a sequence's keys are the block of its number
    long num_blocks;
    long block_size;
    long stride_table;
    long splits;
    long stride_q_batch;
    long stride_q_head;
    long stride_q_query;
    long stride_y_batch;
    long stride_y_head;
    long stride_y_query;
    long stride_lse_batch;
    long stride_lse_head;
    long stride_lse_query;
    long stride_k_block;
    long stride_k_head;
    long stride_k_slot;
    long stride_k_piece;
    long stride_v_block;
    long stride_v_head;
    long stride_v_slot;
    long stride_v_piece;
    long stride_k_scales_block;
    long stride_k_scales_head;
    long stride_k_scales_slot;
    long stride_v_scales_block;
    long stride_v_scales_head;
    long stride_v_scales_slot;
};

// Where a key lies in the pool. There are less than 2^32: a GPU divides 64 bits by many instructions.
struct Slot {
    long block;
    long offset;

    // Unsigned, so that one comparison holds an entry to the pool's blocks, negative ones too.
    Slot(long n, long batch, device const BLOCK* block_tables, constant Attend& p) {
        block = batch;
        offset = n;
        if (p.has_tables) {
            const uint page = uint(n) / uint(p.block_size);
            const uint entry = uint(block_tables[batch * p.stride_table + page]);
            block = long(min(entry, uint(p.num_blocks - 1)));
            offset = long(uint(n) % uint(p.block_size));
        }
    }

    long key(long kv_head, constant Attend& p) const {
        return block * p.stride_k_block + kv_head * p.stride_k_head + offset * p.stride_k_slot;
    }

    long value(long kv_head, constant Attend& p) const {
        return block * p.stride_v_block + kv_head * p.stride_v_head + offset * p.stride_v_slot;
    }

    float key_scale(device const SCALE* scales, long kv_head, constant Attend& p) const {
        return QUANTISED ? float(scales[block * p.stride_k_scales_block +
                                        kv_head * p.stride_k_scales_head +
                                        offset * p.stride_k_scales_slot])
                         : 1.0f;
    }

    float value_scale(device const SCALE* scales, long kv_head, constant Attend& p) const {
        return QUANTISED ? float(scales[block * p.stride_v_scales_block +
                                        kv_head * p.stride_v_scales_head +
                                        offset * p.stride_v_scales_slot])
                         : 1.0f;
    }
};

inline long key_element(uint d, constant Attend& p) {
    return long(d / K_PIECE) * p.stride_k_piece + d % K_PIECE;
}

inline long value_element(uint d, constant Attend& p) {
    return long(d / V_PIECE) * p.stride_v_piece + d % V_PIECE;
}

// A sequence's queries, and the keys [low, high) that each sees.
struct Sight {
    long start;    // of the queries, in those of all sequences
    long queries;  // of which some may not be there
    long length;
    long first;  // position of query 0

    Sight(
        long batch, device const LENGTH* kv_lens, device const OFFSET* pos_offsets,
        device const START* cu_seqlens_q, constant Attend& p) {
        if (p.is_packed) {
            start = long(cu_seqlens_q[batch]);
            queries = long(cu_seqlens_q[batch + 1]) - start;
            length = min(long(pos_offsets[batch]) + queries, p.capacity);
            first = length - queries;
        } else {
            start = 0;
            queries = p.q_len;
            length = p.has_kv_lens ? clamp(long(kv_lens[batch]), 0l, p.capacity) : p.kv_len;
            first = p.has_pos_offset ? p.pos_offset : length - queries;
        }
    }

    bool has(long query, constant Attend& p) const {
        return query < queries && start + query >= 0 && start + query < p.q_len;
    }

    long low(long query, constant Attend& p) const {
        const bool has_window = p.is_causal && p.sliding_window > 0;
        return has_window ? max(first + query + 1 - p.sliding_window, 0l) : 0l;
    }

    long high(long query, constant Attend& p) const {
        return p.is_causal ? min(first + query + 1, length) : length;
    }
};

// The fast tanh may give NaN for large scores.
inline float capped(float score, constant Attend& p) {
    const float cap = as_type<float>(int(p.softcap));
    return cap > 0.0f ? cap * precise::tanh(score / cap) : score;
}

// What a greatest score is subtracted as: -inf, where there is none, would make NaN.
inline float base_of(float top) {
    return top == -INFINITY ? 0.0f : top;
}

// A row's softmax so far: the greatest score, and the sum of exp(score - top).
struct Softmax {
    float top;
    float sum;

    // What the values so far are multiplied by for a greatest score of new_top.
    float rise(float new_top) {
        const float factor = exp(top - base_of(new_top));
        top = new_top;
        sum *= factor;
        return factor;
    }
};

inline Softmax with_sink(device const float* sinks, long head, bool has_sink) {
    const float sink = has_sink ? sinks[head] : -INFINITY;
    return {sink, sink > -INFINITY ? 1.0f : 0.0f};
}

