// Rows of a tile, and of each of its simdgroups; keys are LANES at a time, columns CHUNK.
constant constexpr uint TILE = 16;
constant constexpr uint ROWS_EACH = 4;
constant constexpr uint CHUNK = 64;
constant constexpr uint FEW = 8;
constant constexpr uint PITCH = 65;  // of keys in a tile, so that lanes meet different banks
constant constexpr uint TILE_ELEMENTS = 2080;   // LANES * PITCH
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
