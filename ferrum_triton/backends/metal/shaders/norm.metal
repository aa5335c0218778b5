// One threadgroup a row; sums in float32. SCALAR is the type of x and y, STREAM of the residual.

struct RmsNorm {
    long hidden_size;
    long eps;
};

kernel void rms_norm(
    device SCALAR* y [[buffer(0)]],
    device const SCALAR* x [[buffer(1)]],
    device const float* weight [[buffer(2)]],
    constant RmsNorm& p [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_id [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
    threadgroup float room[LANES];
    const ulong first = ulong(row) * ulong(p.hidden_size);
    float sum = 0.0f;
    for (ulong i = thread_id; i < ulong(p.hidden_size); i += threads) {
        const float value = float(x[first + i]);
        sum += value * value;
    }
    sum = group_sum(sum, room, thread_id, threads);
    const float inverse = rsqrt(sum / float(p.hidden_size) + as_type<float>(int(p.eps)));
    for (ulong i = thread_id; i < ulong(p.hidden_size); i += threads) {
        y[first + i] = SCALAR(float(x[first + i]) * inverse * weight[i]);
    }
}

kernel void fused_add_rms_norm(
    device SCALAR* y [[buffer(0)]],
    device STREAM* residual [[buffer(1)]],
    device const SCALAR* x [[buffer(2)]],
    device const float* weight [[buffer(3)]],
    constant RmsNorm& p [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_id [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
    threadgroup float room[LANES];
    const ulong first = ulong(row) * ulong(p.hidden_size);
    float sum = 0.0f;
    for (ulong i = thread_id; i < ulong(p.hidden_size); i += threads) {
        const STREAM stored = STREAM(float(residual[first + i]) + float(x[first + i]));
        residual[first + i] = stored;
        sum += float(stored) * float(stored);
    }
    sum = group_sum(sum, room, thread_id, threads);
    const float inverse = rsqrt(sum / float(p.hidden_size) + as_type<float>(int(p.eps)));
    for (ulong i = thread_id; i < ulong(p.hidden_size); i += threads) {
        y[first + i] = SCALAR(float(residual[first + i]) * inverse * weight[i]);
    }
}

struct LayerNorm {
    long hidden_size;
    long has_bias;
    long eps;
};

kernel void layer_norm(
    device SCALAR* y [[buffer(0)]],
    device const SCALAR* x [[buffer(1)]],
    device const float* weight [[buffer(2)]],
    device const float* bias [[buffer(3)]],
    constant LayerNorm& p [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_id [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
    threadgroup float room[LANES];
    const ulong first = ulong(row) * ulong(p.hidden_size);
    float sum = 0.0f;
    for (ulong i = thread_id; i < ulong(p.hidden_size); i += threads) {
        sum += float(x[first + i]);
    }
    const float mean = group_sum(sum, room, thread_id, threads) / float(p.hidden_size);
    float squares = 0.0f;
    for (ulong i = thread_id; i < ulong(p.hidden_size); i += threads) {
        const float centered = float(x[first + i]) - mean;
        squares += centered * centered;
    }
    squares = group_sum(squares, room, thread_id, threads);
    const float inverse = rsqrt(squares / float(p.hidden_size) + as_type<float>(int(p.eps)));
    for (ulong i = thread_id; i < ulong(p.hidden_size); i += threads) {
        const float scaled = (float(x[first + i]) - mean) * inverse * weight[i];
        y[first + i] = SCALAR(p.has_bias ? scaled + bias[i] : scaled);
    }
}
