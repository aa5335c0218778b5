// What families share. The includes and the types that sources name go before it.

// Lanes of a simdgroup.
constant constexpr uint LANES = 32;

// The sum of a threadgroup's values, for each thread. room holds a value a simdgroup, LANES of them.
inline float group_sum(float value, threadgroup float* room, uint thread_id, uint threads) {
    const uint lane = thread_id % LANES;
    value = simd_sum(value);
    if (lane == 0) {
        room[thread_id / LANES] = value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    value = simd_sum(lane < threads / LANES ? room[lane] : 0.0f);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the room may be written again
    return value;
}

// Threads of a group that looks for a place.
constant constexpr uint MOST_THREADS = 256;
constant constexpr uint NOWHERE = 0xFFFFFFFF;

// Where the greatest of a threadgroup's values is, for each thread: the lowest place of equal ones.
// Threads are a power of two; tops and places hold MOST_THREADS.
inline uint place_of_top(
    float top, uint place, threadgroup float* tops, threadgroup uint* places, uint thread_id,
    uint threads) {
    tops[thread_id] = top;
    places[thread_id] = place;
    for (uint reach = threads / 2; reach > 0; reach /= 2) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (thread_id < reach) {
            const float other = tops[thread_id + reach];
            const uint there = places[thread_id + reach];
            if (other > top || (other == top && there < place)) {
                top = other;
                place = there;
            }
            tops[thread_id] = top;
            places[thread_id] = place;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    place = places[0];
    threadgroup_barrier(mem_flags::mem_threadgroup);  // they may be written again
    return place;
}
