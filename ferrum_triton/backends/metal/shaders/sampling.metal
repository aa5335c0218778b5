// One threadgroup a row. SCALAR is the type of the logits.

struct Argmax {
    long vocab_size;
    long mask_size;  // -1 without one
};

// Threads are a power of two.
kernel void argmax_rows(
    device int* y [[buffer(0)]],
    device const SCALAR* logits [[buffer(1)]],
    device const char* mask [[buffer(2)]],
    constant Argmax& p [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_id [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
    threadgroup float tops[MOST_THREADS];
    threadgroup uint places[MOST_THREADS];
    const ulong first = ulong(row) * ulong(p.vocab_size);
    float top = -INFINITY;
    uint place = NOWHERE;
    for (ulong j = thread_id; j < ulong(p.vocab_size); j += threads) {
        float value = float(logits[first + j]);
        if (isnan(value)) {
            value = -INFINITY;
        }
        const bool allowed = p.mask_size < 0 || (j < ulong(p.mask_size) && mask[j] && isfinite(value));
        if (allowed && (place == NOWHERE || value > top)) {
            top = value;
            place = uint(j);
        }
    }
    place = place_of_top(top, place, tops, places, thread_id, threads);
    if (thread_id == 0) {
        y[row] = int(place);
    }
}
