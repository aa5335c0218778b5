// One threadgroup a row. SCALAR is the type of the logits.

constant constexpr uint MOST_THREADS = 256;
constant constexpr uint NOWHERE = 0xFFFFFFFF;

struct Argmax {
    long vocab_size;
    long mask_size;  // -1 without one
};

// Threads are a power of two. The lower index of two that are equal.
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
    tops[thread_id] = top;
    places[thread_id] = place;
    for (uint half_of = threads / 2; half_of > 0; half_of /= 2) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (thread_id < half_of) {
            const float other = tops[thread_id + half_of];
            const uint there = places[thread_id + half_of];
            if (other > top || (other == top && there < place)) {
                top = other;
                place = there;
                tops[thread_id] = top;
                places[thread_id] = place;
            }
        }
    }
    if (thread_id == 0) {
        y[row] = int(place);
    }
}
