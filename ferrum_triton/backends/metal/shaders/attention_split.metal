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
