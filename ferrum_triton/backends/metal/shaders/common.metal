#include <metal_stdlib>
using namespace metal;

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
