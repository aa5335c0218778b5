// One threadgroup a token, or an expert. SCALAR is the type of the logits, ID that of ids.

constant constexpr uint MOST_EXPERTS = 1024;
constant constexpr uint MOST_CHOSEN = 32;

struct Route {
    long num_experts;
    long top_k;
    long norm_topk_prob;
};

// e^(value - top), 1 where both are the same infinity.
inline float share_of(float value, float top) {
    return value == top ? (top > -INFINITY ? 1.0f : 0.0f) : exp(value - top);
}

// Threads are a power of two. counts are zeros before.
kernel void route_topk_softmax(
    device int* ids [[buffer(0)]],
    device float* weights [[buffer(1)]],
    device atomic_int* counts [[buffer(2)]],
    device const SCALAR* logits [[buffer(3)]],
    constant Route& p [[buffer(4)]],
    uint token [[threadgroup_position_in_grid]],
    uint thread_id [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
    threadgroup float room[LANES];
    threadgroup float tops[MOST_THREADS];
    threadgroup uint places[MOST_THREADS];
    threadgroup float values[MOST_EXPERTS];  // NaN once chosen
    threadgroup float chosen[MOST_CHOSEN];
    const ulong first = ulong(token) * ulong(p.num_experts);
    for (uint e = thread_id; e < ulong(p.num_experts); e += threads) {
        const float value = float(logits[first + e]);
        values[e] = isnan(value) ? -INFINITY : value;
    }
    float sum = 0.0f;
    for (uint k = 0; k < ulong(p.top_k); k++) {
        float top = -INFINITY;
        uint place = NOWHERE;
        for (uint e = thread_id; e < ulong(p.num_experts); e += threads) {
            // A thread reads what it wrote itself.
            if (!isnan(values[e]) && (place == NOWHERE || values[e] > top)) {
                top = values[e];
                place = e;
            }
        }
        place = place_of_top(top, place, tops, places, thread_id, threads);
        if (k == 0) {
            // All of them have this top.
            const float all_top = tops[0];
            for (uint e = thread_id; e < ulong(p.num_experts); e += threads) {
                sum += share_of(values[e], all_top);
            }
            sum = group_sum(sum, room, thread_id, threads);
        }
        if (place % threads == thread_id) {
            chosen[k] = values[place];
            values[place] = NAN;
            ids[ulong(token) * ulong(p.top_k) + k] = int(place);
            atomic_fetch_add_explicit(counts + place, 1, memory_order_relaxed);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (p.norm_topk_prob) {
        sum = 0.0f;
        for (uint k = 0; k < ulong(p.top_k); k++) {
            sum += share_of(chosen[k], chosen[0]);
        }
    }
    if (thread_id < ulong(p.top_k)) {
        const float none = p.norm_topk_prob ? 1.0f / float(p.top_k) : 0.0f;
        weights[ulong(token) * ulong(p.top_k) + thread_id] =
            sum > 0.0f ? share_of(chosen[thread_id], chosen[0]) / sum : none;
    }
}

struct Sort {
    long num_pairs;
    long gate_up_tiles;
    long down_tiles;
    long num_experts;
    long token_tile;
};

// One threadgroup an expert: its pairs in order, and -1 after them. grid[0] and grid[3] are 1 before.
kernel void compute_ids_tpe(
    device int* buckets [[buffer(0)]],
    device int* tpe [[buffer(1)]],
    device atomic_int* grid [[buffer(2)]],
    device const ID* ids [[buffer(3)]],
    constant Sort& p [[buffer(4)]],
    uint expert [[threadgroup_position_in_grid]],
    uint thread_id [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
    threadgroup uint room[LANES];
    device int* bucket = buckets + ulong(expert) * ulong(p.num_pairs);
    const uint lane = thread_id % LANES, simdgroup = thread_id / LANES;
    ulong found = 0;
    for (ulong start = 0; start < ulong(p.num_pairs); start += threads) {
        const ulong pair = start + thread_id;
        const uint mine = pair < ulong(p.num_pairs) && ids[pair] == ID(expert) ? 1 : 0;
        const uint before = simd_prefix_exclusive_sum(mine);
        if (lane == LANES - 1) {
            room[simdgroup] = before + mine;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint earlier = 0;
        uint all = 0;
        for (uint s = 0; s < threads / LANES; s++) {
            earlier += s < simdgroup ? room[s] : 0;
            all += room[s];
        }
        if (mine) {
            bucket[found + earlier + before] = int(pair);
        }
        found += all;
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the room is written again
    }
    for (ulong i = found + thread_id; i < ulong(p.num_pairs); i += threads) {
        bucket[i] = -1;
    }
    if (thread_id == 0) {
        tpe[expert] = int(found);
        const int tiles = int((found + ulong(p.token_tile) - 1) / ulong(p.token_tile));
        atomic_fetch_max_explicit(grid, tiles, memory_order_relaxed);
        atomic_fetch_max_explicit(grid + 3, tiles, memory_order_relaxed);
        if (expert == 0) {
            atomic_store_explicit(grid + 1, int(p.gate_up_tiles), memory_order_relaxed);
            atomic_store_explicit(grid + 4, int(p.down_tiles), memory_order_relaxed);
            atomic_store_explicit(grid + 2, int(p.num_experts), memory_order_relaxed);
            atomic_store_explicit(grid + 5, int(p.num_experts), memory_order_relaxed);
        }
    }
}
