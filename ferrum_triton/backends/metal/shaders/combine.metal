// Sums over a token's slots, in their order, in float32. SCALAR is the slots' type, STREAM that of
// the residual.

struct Sum {
    long hidden_size;
    long top_k;
    long count;
    long eps;
};

inline float sum_of_slots(
    device const SCALAR* slots, device const float* weights, ulong token, ulong column, ulong top_k,
    ulong hidden_size) {
    float sum = 0.0f;
    for (ulong k = 0; k < top_k; k++) {
        const ulong pair = token * top_k + k;
        sum += weights[pair] * float(slots[pair * hidden_size + column]);
    }
    return sum;
}

kernel void weighted_sum(
    device SCALAR* y [[buffer(0)]],
    device const SCALAR* slots [[buffer(1)]],
    device const float* weights [[buffer(2)]],
    constant Sum& p [[buffer(3)]],
    uint i [[thread_position_in_grid]]) {
    if (i < ulong(p.count)) {
        const ulong hidden_size = ulong(p.hidden_size);
        y[i] = SCALAR(sum_of_slots(
            slots, weights, i / hidden_size, i % hidden_size, ulong(p.top_k), hidden_size));
    }
}

kernel void weighted_sum_residual(
    device STREAM* residual [[buffer(0)]],
    device const SCALAR* slots [[buffer(1)]],
    device const float* weights [[buffer(2)]],
    constant Sum& p [[buffer(3)]],
    uint i [[thread_position_in_grid]]) {
    if (i < ulong(p.count)) {
        const ulong hidden_size = ulong(p.hidden_size);
        const float sum = sum_of_slots(
            slots, weights, i / hidden_size, i % hidden_size, ulong(p.top_k), hidden_size);
        residual[i] = STREAM(float(residual[i]) + sum);
    }
}

// One threadgroup a token.
kernel void weighted_sum_residual_norm(
    device SCALAR* y [[buffer(0)]],
    device STREAM* residual [[buffer(1)]],
    device const SCALAR* slots [[buffer(2)]],
    device const float* weights [[buffer(3)]],
    device const float* norm_weight [[buffer(4)]],
    constant Sum& p [[buffer(5)]],
    uint token [[threadgroup_position_in_grid]],
    uint thread_id [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
    threadgroup float room[LANES];
    const ulong hidden_size = ulong(p.hidden_size);
    const ulong first = ulong(token) * hidden_size;
    float squares = 0.0f;
    for (ulong h = thread_id; h < hidden_size; h += threads) {
        const float sum = sum_of_slots(slots, weights, token, h, ulong(p.top_k), hidden_size);
        const STREAM stored = STREAM(float(residual[first + h]) + sum);
        residual[first + h] = stored;
        squares += float(stored) * float(stored);
    }
    squares = group_sum(squares, room, thread_id, threads);
    const float inverse = rsqrt(squares / float(p.hidden_size) + as_type<float>(int(p.eps)));
    for (ulong h = thread_id; h < hidden_size; h += threads) {
        y[first + h] = SCALAR(float(residual[first + h]) * inverse * norm_weight[h]);
    }
}
