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

// Rows of a tile that a simdgroup has; simdgroups; keys at a time; columns of them at a time.
constant constexpr uint ROWS_EACH = 4;
constant constexpr uint TILE_SIMDGROUPS = 4;
constant constexpr uint TILE = 16;
constant constexpr uint CHUNK = 64;
constant constexpr uint FEW = 8;
constant constexpr uint PITCH = 65;            // of keys in a tile, so that lanes meet different banks
constant constexpr uint TILE_ELEMENTS = 2080;  // LANES * PITCH
constant constexpr uint QUERY_ELEMENTS = 1024;  // TILE * CHUNK
constant constexpr uint WEIGHT_ELEMENTS = 512;  // TILE * LANES

// Many queries: a threadgroup has TILE rows of one sequence, a lane a key of LANES at a time,
// then columns of values. VALUE_CHUNKS cover value_dim.
kernel void attend_tiles(
    device SCALAR* y [[buffer(0)]],
    device float* lse [[buffer(1)]],
    device const SCALAR* q [[buffer(2)]],
    device const CACHE* k [[buffer(3)]],
    device const CACHE* v [[buffer(4)]],
    device const SCALE* k_scales [[buffer(5)]],
    device const SCALE* v_scales [[buffer(6)]],
    device const float* sinks [[buffer(7)]],
    device const LENGTH* kv_lens [[buffer(8)]],
    device const BLOCK* block_tables [[buffer(9)]],
    device const OFFSET* pos_offsets [[buffer(10)]],
    device const START* cu_seqlens_q [[buffer(11)]],
    constant Attend& p [[buffer(12)]],
    uint threadgroup_id [[threadgroup_position_in_grid]],
    uint thread_id [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
    threadgroup float tile[TILE_ELEMENTS];
    threadgroup float queries[QUERY_ELEMENTS];
    threadgroup float weights[WEIGHT_ELEMENTS];
    threadgroup long key_places[LANES];
    threadgroup long value_places[LANES];
    const long group_size = p.num_heads / p.num_kv_heads;
    const long kv_head = long(threadgroup_id) % p.num_kv_heads;
    long batch = 0, index = long(threadgroup_id) / p.num_kv_heads;  // of the tile, in the sequence
    for (; batch < p.num_seqs; batch++) {
        const long rows = Sight(batch, kv_lens, pos_offsets, cu_seqlens_q, p).queries * group_size;
        const long tiles = max((rows + TILE - 1) / TILE, 0l);
        if (index < tiles) {
            break;
        }
        index -= tiles;
    }
    if (batch == p.num_seqs) {
        return;
    }
    const Sight sight(batch, kv_lens, pos_offsets, cu_seqlens_q, p);
    const long first = index * TILE, last = min(first + TILE, sight.queries * group_size) - 1;
    const uint lane = thread_id % LANES, first_row = thread_id / LANES * ROWS_EACH;
    const float scale = as_type<float>(int(p.softmax_scale));
    q += batch * p.stride_q_batch + kv_head * group_size * p.stride_q_head +
         sight.start * p.stride_q_query;

    Softmax state[ROWS_EACH];
    float acc[ROWS_EACH][2 * VALUE_CHUNKS] = {};
    for (uint r = 0; r < ROWS_EACH; r++) {
        const long head = kv_head * group_size + (first + first_row + r) % group_size;
        state[r] = with_sink(sinks, head, p.has_sinks);
    }
    const long end = sight.high(last / group_size, p);
    for (long start = sight.low(first / group_size, p); start < end; start += LANES) {
        const long n = start + lane;
        if (thread_id < LANES && n < end) {
            const Slot slot(n, batch, block_tables, p);
            key_places[lane] = slot.key(kv_head, p);
            value_places[lane] = slot.value(kv_head, p);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float scores[ROWS_EACH] = {};
        for (uint column = 0; column < uint(p.head_dim); column += CHUNK) {
            for (uint i = thread_id; i < LANES * CHUNK; i += threads) {
                const uint key = i / CHUNK, d = column + i % CHUNK;
                float element = 0.0f;
                if (start + key < end && d < uint(p.head_dim)) {
                    element = float(k[key_places[key] + key_element(d, p)]);
                }
                tile[key * PITCH + i % CHUNK] = element;
            }
            for (uint i = thread_id; i < TILE * CHUNK; i += threads) {
                const uint row = uint(first) + i / CHUNK;
                const long query = row / uint(group_size), head = row % uint(group_size);
                const long at = head * p.stride_q_head + query * p.stride_q_query;
                const uint d = column + i % CHUNK;
                float element = 0.0f;
                if (sight.has(query, p) && d < uint(p.head_dim)) {
                    element = float(q[at + d]);
                }
                queries[i] = element;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            // Summed a few at a time: one sum over all columns rounds too often.
            for (uint few = 0; few < CHUNK; few += FEW) {
                float sums[ROWS_EACH] = {};
                for (uint d = few; d < few + FEW; d++) {
                    const float element = tile[lane * PITCH + d];
                    for (uint r = 0; r < ROWS_EACH; r++) {
                        sums[r] += queries[(first_row + r) * CHUNK + d] * element;
                    }
                }
                for (uint r = 0; r < ROWS_EACH; r++) {
                    scores[r] += sums[r];
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);  // the tile is written again
        }
        float key_scale = 1.0f, value_scale = 1.0f;
        if (QUANTISED && n < end) {
            const Slot slot(n, batch, block_tables, p);
            key_scale = slot.key_scale(k_scales, kv_head, p);
            value_scale = slot.value_scale(v_scales, kv_head, p);
        }
        for (uint r = 0; r < ROWS_EACH; r++) {
            const long query = (first + first_row + r) / group_size;
            const bool sees =
                sight.has(query, p) && n >= sight.low(query, p) && n < sight.high(query, p);
            const float score = sees ? capped(scores[r] * scale * key_scale, p) : -INFINITY;
            const float rise = state[r].rise(max(state[r].top, simd_max(score)));
            for (uint c = 0; c < 2 * VALUE_CHUNKS; c++) {
                acc[r][c] *= rise;
            }
            const float weight = exp(score - base_of(state[r].top));
            state[r].sum += simd_sum(weight);
            weights[(first_row + r) * LANES + lane] = weight * value_scale;
        }
        for (uint chunk = 0; chunk < VALUE_CHUNKS; chunk++) {
            for (uint i = thread_id; i < LANES * CHUNK; i += threads) {
                const uint key = i / CHUNK, d = chunk * CHUNK + i % CHUNK;
                float element = 0.0f;  // what no query sees may be anything
                if (start + key < end && d < uint(p.value_dim)) {
                    element = float(v[value_places[key] + value_element(d, p)]);
                }
                tile[key * PITCH + i % CHUNK] = element;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint key = 0; key < LANES; key++) {
                const float left = tile[key * PITCH + lane];
                const float right = tile[key * PITCH + lane + LANES];
                for (uint r = 0; r < ROWS_EACH; r++) {
                    const float weight = weights[(first_row + r) * LANES + key];
                    acc[r][2 * chunk] += weight * left;
                    acc[r][2 * chunk + 1] += weight * right;
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);  // the tile is written again
        }
    }
    for (uint r = 0; r < ROWS_EACH; r++) {
        const long row = first + first_row + r, query = row / group_size;
        const long head = kv_head * group_size + row % group_size, token = sight.start + query;
        if (!sight.has(query, p)) {
            continue;
        }
        device SCALAR* out =
            y + batch * p.stride_y_batch + head * p.stride_y_head + token * p.stride_y_query;
        const float inverse = state[r].sum == 0.0f ? 0.0f : 1.0f / state[r].sum;
        for (uint c = 0; c < 2 * VALUE_CHUNKS; c++) {
            const uint d = c * LANES + lane;
            if (d < uint(p.value_dim)) {
                out[d] = SCALAR(acc[r][c] * inverse);
            }
        }
        if (p.has_lse && lane == 0) {
            lse[batch * p.stride_lse_batch + head * p.stride_lse_head + token * p.stride_lse_query] =
                state[r].top + log(state[r].sum);
        }
    }
}

// Simdgroups that take a threadgroup's keys in turn.
constant constexpr uint SIMDGROUPS = 4;
constant constexpr uint MOST_VALUES = 256;
constant constexpr uint ROOM = 1024;  // SIMDGROUPS * MOST_VALUES

// Few queries: a threadgroup has ROWS rows of those that share a KV head, and one of p.splits ranges
// of the keys; a lane has columns of each. COLUMNS and VALUE_COLUMNS of a lane cover the vectors.
// partial has, for each row and split, top and sum of the softmax, and the sum of values after them.
kernel void attend_split(
    device SCALAR* y [[buffer(0)]],
    device float* lse [[buffer(1)]],
    device const SCALAR* q [[buffer(2)]],
    device const CACHE* k [[buffer(3)]],
    device const CACHE* v [[buffer(4)]],
    device const SCALE* k_scales [[buffer(5)]],
    device const SCALE* v_scales [[buffer(6)]],
    device const float* sinks [[buffer(7)]],
    device const LENGTH* kv_lens [[buffer(8)]],
    device const BLOCK* block_tables [[buffer(9)]],
    device const OFFSET* pos_offsets [[buffer(10)]],
    device const START* cu_seqlens_q [[buffer(11)]],
    device float* partial [[buffer(12)]],
    constant Attend& p [[buffer(13)]],
    uint threadgroup_id [[threadgroup_position_in_grid]],
    uint thread_id [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
    threadgroup float room[ROOM];
    threadgroup float tops[SIMDGROUPS];
    threadgroup float sums[SIMDGROUPS];
    const long group_size = p.num_heads / p.num_kv_heads, rows = p.q_len * group_size;
    const long tiles = (rows + ROWS - 1) / ROWS;
    const long split = long(threadgroup_id) % p.splits, task = long(threadgroup_id) / p.splits;
    const long first_row = task % tiles * ROWS, kv_head = task / tiles % p.num_kv_heads;
    const long batch = task / tiles / p.num_kv_heads;
    const uint lane = thread_id % LANES, simdgroup = thread_id / LANES;
    const float scale = as_type<float>(int(p.softmax_scale));

    const Sight sight(batch, kv_lens, pos_offsets, cu_seqlens_q, p);
    float queries[ROWS][COLUMNS] = {}, acc[ROWS][VALUE_COLUMNS] = {};
    long low[ROWS], high[ROWS];
    Softmax state[ROWS];
    for (uint r = 0; r < ROWS; r++) {
        const long row = min(first_row + r, rows - 1);  // past the end the last one again
        const long query = row / group_size, head = kv_head * group_size + row % group_size;
        low[r] = sight.low(query, p);
        high[r] = sight.high(query, p);
        state[r] = with_sink(sinks, head, p.has_sinks && split == 0 && simdgroup == 0);
        device const SCALAR* x =
            q + batch * p.stride_q_batch + head * p.stride_q_head + query * p.stride_q_query;
        for (uint c = 0; c < COLUMNS; c++) {
            const uint d = c * LANES + lane;
            queries[r][c] = d < uint(p.head_dim) ? float(x[d]) : 0.0f;
        }
    }
    // A split's share of the keys that a row sees: the first sees the earliest, the last the newest.
    const long seen = max(high[ROWS - 1] - low[0], 0l), share = (seen + p.splits - 1) / p.splits;
    const long start = low[0] + split * share, end = min(start + share, high[ROWS - 1]);
    for (long n = start + simdgroup; n < end; n += SIMDGROUPS) {
        const Slot slot(n, batch, block_tables, p);
        device const CACHE* key = k + slot.key(kv_head, p);
        device const CACHE* value = v + slot.value(kv_head, p);
        float keys[COLUMNS], values[VALUE_COLUMNS];
        for (uint c = 0; c < COLUMNS; c++) {
            const uint d = c * LANES + lane;
            keys[c] = d < uint(p.head_dim) ? float(key[key_element(d, p)]) : 0.0f;
        }
        const float value_scale = slot.value_scale(v_scales, kv_head, p);
        for (uint c = 0; c < VALUE_COLUMNS; c++) {
            const uint d = c * LANES + lane;
            values[c] = d < uint(p.value_dim) ? float(value[value_element(d, p)]) * value_scale : 0.0f;
        }
        const float key_scale = scale * slot.key_scale(k_scales, kv_head, p);
        for (uint r = 0; r < ROWS; r++) {
            if (n < low[r] || n >= high[r]) {
                continue;
            }
            float product = 0.0f;
            for (uint c = 0; c < COLUMNS; c++) {
                product += queries[r][c] * keys[c];
            }
            const float score = capped(simd_sum(product) * key_scale, p);
            const float rise = state[r].rise(max(state[r].top, score));
            const float weight = exp(score - base_of(state[r].top));
            state[r].sum += weight;
            for (uint c = 0; c < VALUE_COLUMNS; c++) {
                acc[r][c] = acc[r][c] * rise + weight * values[c];
            }
        }
    }
    for (uint r = 0; r < ROWS; r++) {
        if (lane == 0) {
            tops[simdgroup] = state[r].top;
            sums[simdgroup] = state[r].sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float top = tops[0];
        for (uint s = 1; s < SIMDGROUPS; s++) {
            top = max(top, tops[s]);
        }
        const float factor = exp(state[r].top - base_of(top));
        float sum = 0.0f;
        for (uint s = 0; s < SIMDGROUPS; s++) {
            sum += sums[s] * exp(tops[s] - base_of(top));
        }
        for (uint c = 0; c < VALUE_COLUMNS; c++) {
            room[simdgroup * MOST_VALUES + c * LANES + lane] = acc[r][c] * factor;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const long row = first_row + r;
        const long query = row / group_size, head = kv_head * group_size + row % group_size;
        device float* kept =
            partial + (((batch * p.num_kv_heads + kv_head) * rows + row) * p.splits + split) *
                          (p.value_dim + 2);
        for (uint d = thread_id; row < rows && d < uint(p.value_dim); d += threads) {
            float total = 0.0f;
            for (uint s = 0; s < SIMDGROUPS; s++) {
                total += room[s * MOST_VALUES + d];
            }
            if (p.splits > 1) {
                kept[2 + d] = total;
            } else {
                y[batch * p.stride_y_batch + head * p.stride_y_head + query * p.stride_y_query + d] =
                    SCALAR(sum == 0.0f ? 0.0f : total / sum);
            }
        }
        if (thread_id == 0 && row < rows) {
            if (p.splits > 1) {
                kept[0] = top;
                kept[1] = sum;
            } else if (p.has_lse) {
                lse[batch * p.stride_lse_batch + head * p.stride_lse_head +
                    query * p.stride_lse_query] = top + log(sum);
            }
        }
    }
}

// The splits of each row put together: a simdgroup a row.
kernel void merge_splits(
    device SCALAR* y [[buffer(0)]],
    device float* lse [[buffer(1)]],
    device const float* partial [[buffer(2)]],
    constant Attend& p [[buffer(3)]],
    uint threadgroup_id [[threadgroup_position_in_grid]],
    uint thread_id [[thread_position_in_threadgroup]]) {
    const long group_size = p.num_heads / p.num_kv_heads, rows = p.q_len * group_size;
    const long row = long(threadgroup_id) % rows, task = long(threadgroup_id) / rows;
    const long kv_head = task % p.num_kv_heads, batch = task / p.num_kv_heads;
    const long query = row / group_size, head = kv_head * group_size + row % group_size;
    const long pitch = p.value_dim + 2;
    partial += long(threadgroup_id) * p.splits * pitch;
    float top = -INFINITY;
    for (long split = 0; split < p.splits; split++) {
        top = max(top, partial[split * pitch]);
    }
    const float base = base_of(top);
    float sum = 0.0f;
    for (long split = 0; split < p.splits; split++) {
        sum += partial[split * pitch + 1] * exp(partial[split * pitch] - base);
    }
    device SCALAR* out =
        y + batch * p.stride_y_batch + head * p.stride_y_head + query * p.stride_y_query;
    for (long d = thread_id; d < p.value_dim; d += LANES) {
        float total = 0.0f;
        for (long split = 0; split < p.splits; split++) {
            total += partial[split * pitch + 2 + d] * exp(partial[split * pitch] - base);
        }
        out[d] = SCALAR(sum == 0.0f ? 0.0f : total / sum);
    }
    if (p.has_lse && thread_id == 0) {
        lse[batch * p.stride_lse_batch + head * p.stride_lse_head + query * p.stride_lse_query] =
            top + log(sum);
    }
}
