// Weights in GGUF's blocks, as they lie in the file, GROUP of them at a time, in float32. SCALAR is the
// type of activations and results, ID that of ids; WEIGHTS and UP_WEIGHTS are Groups of a kind. A
// simdgroup takes ROWS rows, and a threadgroup has SIMDGROUPS.

constant constexpr uint Q4_0 = 0;
constant constexpr uint Q4_1 = 1;
constant constexpr uint Q8_0 = 2;
constant constexpr uint Q4_K = 3;
constant constexpr uint Q5_K = 4;
constant constexpr uint Q6_K = 5;

// Blocks and what is in them lie at even addresses: two bytes are one load.
inline uint two_bytes(device const uchar* bytes) {
    return *(device const ushort*)bytes;
}

inline float float16_at(device const uchar* bytes) {
    return float(as_type<half>(ushort(two_bytes(bytes))));
}

// The scale and the minimum, six bits each, of one of eight groups: Q4_K's and Q5_K's twelve bytes.
inline uint scale_of(device const uchar* bytes, uint group) {
    return group < 4 ? bytes[group] & 63 : (bytes[group + 4] & 15) | (bytes[group - 4] >> 6) << 4;
}

inline uint minimum_of(device const uchar* bytes, uint group) {
    return group < 4 ? bytes[group + 4] & 63 : bytes[group + 4] >> 4 | (bytes[group] >> 6) << 4;
}

// A group of a block. Every product of its weights is exact: only a difference is rounded. Where d, m,
// the low and high bits of codes and the scales begin in a block, and what is taken from a code, are
// the format's description.
template <
    uint KIND, uint BLOCK_BYTES, uint BLOCK_GROUPS, uint D_AT, uint M_AT, uint Q_AT, uint H_AT,
    uint S_AT, uint OFFSET>
struct Group {
    device const uchar* block;
    uint group;
    float scale;
    float minimum;

    Group(device const uchar* row, ulong index) {
        block = row + index / BLOCK_GROUPS * BLOCK_BYTES;
        group = uint(index % BLOCK_GROUPS);
        minimum = 0.0f;
        if (KIND == Q4_1) {
            scale = float16_at(block + D_AT);
            minimum = float16_at(block + M_AT);
        } else if (KIND == Q4_K || KIND == Q5_K) {
            scale = float16_at(block + D_AT) * float(scale_of(block + S_AT, group));
            minimum = -float16_at(block + M_AT) * float(minimum_of(block + S_AT, group));
        } else {
            scale = float16_at(block + D_AT);
        }
    }

    // Codes 2 i and 2 i + 1, whose bits are in bytes that follow one another.
    float2 codes(uint i) const {
        uint at = Q_AT + 2 * i, shift = 0, upper = 0;
        if (KIND == Q8_0) {
            const uint bytes = two_bytes(block + at);
            return float2(as_type<char>(uchar(bytes)), as_type<char>(uchar(bytes >> 8)));
        }
        if (KIND == Q4_0 || KIND == Q4_1) {
            at = Q_AT + 2 * (i % 8);
            shift = i / 8 * 4;
        } else if (KIND == Q4_K) {
            at = Q_AT + group / 2 * 32 + 2 * i;
            shift = group % 2 * 4;
        } else if (KIND == Q5_K) {
            at = Q_AT + group / 2 * 32 + 2 * i;
            shift = group % 2 * 4;
            upper = (two_bytes(block + H_AT + 2 * i) >> group & 0x0101) << 4;
        } else {
            const uint part = group % 4;
            at = Q_AT + group / 4 * 64 + part % 2 * 32 + 2 * i;
            shift = part / 2 * 4;
            upper = (two_bytes(block + H_AT + group / 4 * 32 + 2 * i) >> (2 * part) & 0x0303) << 4;
        }
        const uint both = (two_bytes(block + at) >> shift & 0x0F0F) | upper;
        return float2(float(both & 255) - float(OFFSET), float(both >> 8) - float(OFFSET));
    }

    // Weights 2 i and 2 i + 1.
    float2 weights(uint i) const {
        float factor = scale;
        if (KIND == Q6_K) {
            factor *= float(as_type<char>(block[S_AT + 2 * group + i / 8]));
        }
        const float2 pair = codes(i);
        return float2(factor * pair.x + minimum, factor * pair.y + minimum);
    }
};

// Add products with one row of activations to the sums of ROWS rows from the first; a lane has the
// groups lane, lane + LANES, ... of each.
template <typename Weights>
inline void add_products(
    thread float* sums, device const SCALAR* x, device const uchar* blocks, ulong first,
    ulong num_rows, ulong num_groups, ulong row_bytes, uint lane) {
    for (ulong g = lane; g < num_groups; g += LANES) {
        float values[GROUP];
        for (uint i = 0; i < GROUP; i++) {
            values[i] = float(x[g * GROUP + i]);
        }
        for (uint r = 0; r < ROWS; r++) {
            // Past the end the last row is read again.
            const ulong row = first + r < num_rows ? first + r : num_rows - 1;
            const Weights group(blocks + row * row_bytes, g);
            float sum = 0.0f;
            for (uint i = 0; i < GROUP / 2; i++) {
                const float2 pair = group.weights(i);
                sum += pair.x * values[2 * i] + pair.y * values[2 * i + 1];
            }
            sums[r] += sum;
        }
    }
}

struct Product {
    long num_rows;
    long num_groups;  // of a row
    long row_bytes;
    long tiles;  // of rows that a threadgroup takes, for each token
};

// y = W x for each row of activations.
kernel void gemv_quant(
    device SCALAR* y [[buffer(0)]],
    device const SCALAR* x [[buffer(1)]],
    device const uchar* blocks [[buffer(2)]],
    constant Product& p [[buffer(3)]],
    uint threadgroup_id [[threadgroup_position_in_grid]],
    uint thread_id [[thread_position_in_threadgroup]]) {
    const ulong token = threadgroup_id / uint(p.tiles), tile = threadgroup_id % uint(p.tiles);
    const ulong first = (tile * SIMDGROUPS + thread_id / LANES) * ROWS;
    const ulong num_rows = p.num_rows, num_groups = p.num_groups;
    const uint lane = thread_id % LANES;
    float sums[ROWS] = {};
    x += token * num_groups * GROUP;
    add_products<WEIGHTS>(sums, x, blocks, first, num_rows, num_groups, p.row_bytes, lane);
    for (uint r = 0; r < ROWS; r++) {
        const float sum = simd_sum(sums[r]);
        if (lane == 0 && first + r < num_rows) {
            y[token * num_rows + first + r] = SCALAR(sum);
        }
    }
}

struct ExpertProduct {
    long num_experts;
    long num_rows;  // of an expert
    long num_groups;
    long row_bytes;
    long up_row_bytes;
    long tiles;
    long slots;  // that share a row of activations
};

// y = W x with the expert of each pair of a token and a slot; zeros where that is none.
kernel void gemv_quant_moe_id(
    device SCALAR* y [[buffer(0)]],
    device const SCALAR* x [[buffer(1)]],
    device const uchar* blocks [[buffer(2)]],
    device const ID* ids [[buffer(3)]],
    constant ExpertProduct& p [[buffer(4)]],
    uint threadgroup_id [[threadgroup_position_in_grid]],
    uint thread_id [[thread_position_in_threadgroup]]) {
    const ulong pair = threadgroup_id / uint(p.tiles), tile = threadgroup_id % uint(p.tiles);
    const ulong first = (tile * SIMDGROUPS + thread_id / LANES) * ROWS;
    const ulong num_rows = p.num_rows, num_groups = p.num_groups;
    const uint lane = thread_id % LANES;
    const long expert = long(ids[pair]);
    float sums[ROWS] = {};
    if (expert >= 0 && expert < p.num_experts) {
        x += pair / ulong(p.slots) * num_groups * GROUP;
        blocks += ulong(expert) * num_rows * ulong(p.row_bytes);
        add_products<WEIGHTS>(sums, x, blocks, first, num_rows, num_groups, p.row_bytes, lane);
    }
    for (uint r = 0; r < ROWS; r++) {
        const float sum = simd_sum(sums[r]);
        if (lane == 0 && first + r < num_rows) {
            y[pair * num_rows + first + r] = SCALAR(sum);
        }
    }
}

// y = silu(G x) (U x) with the expert of each pair.
kernel void gemv_quant_moe_id_gate_up_silu(
    device SCALAR* y [[buffer(0)]],
    device const SCALAR* x [[buffer(1)]],
    device const uchar* gate_blocks [[buffer(2)]],
    device const uchar* up_blocks [[buffer(3)]],
    device const ID* ids [[buffer(4)]],
    constant ExpertProduct& p [[buffer(5)]],
    uint threadgroup_id [[threadgroup_position_in_grid]],
    uint thread_id [[thread_position_in_threadgroup]]) {
    const ulong pair = threadgroup_id / uint(p.tiles), tile = threadgroup_id % uint(p.tiles);
    const ulong first = (tile * SIMDGROUPS + thread_id / LANES) * ROWS;
    const ulong num_rows = p.num_rows, num_groups = p.num_groups;
    const uint lane = thread_id % LANES;
    const long expert = long(ids[pair]);
    float gates[ROWS] = {}, ups[ROWS] = {};
    if (expert >= 0 && expert < p.num_experts) {
        x += pair / ulong(p.slots) * num_groups * GROUP;
        gate_blocks += ulong(expert) * num_rows * ulong(p.row_bytes);
        up_blocks += ulong(expert) * num_rows * ulong(p.up_row_bytes);
        add_products<WEIGHTS>(gates, x, gate_blocks, first, num_rows, num_groups, p.row_bytes, lane);
        add_products<UP_WEIGHTS>(ups, x, up_blocks, first, num_rows, num_groups, p.up_row_bytes, lane);
    }
    for (uint r = 0; r < ROWS; r++) {
        const float gate = simd_sum(gates[r]), up = simd_sum(ups[r]);
        if (lane == 0 && first + r < num_rows) {
            y[pair * num_rows + first + r] = SCALAR(gate / (1.0f + exp(-gate)) * up);
        }
    }
}

struct Decode {
    long count;  // of groups
    long num_groups;
    long row_bytes;
};

// One thread a group.
kernel void dequantize(
    device SCALAR* y [[buffer(0)]],
    device const uchar* blocks [[buffer(1)]],
    constant Decode& p [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
    if (i < ulong(p.count)) {
        const ulong row = i / uint(p.num_groups);
        const WEIGHTS group(blocks + row * ulong(p.row_bytes), i % uint(p.num_groups));
        for (uint j = 0; j < GROUP / 2; j++) {
            const float2 pair = group.weights(j);
            y[i * ulong(GROUP) + 2 * j] = SCALAR(pair.x);
            y[i * ulong(GROUP) + 2 * j + 1] = SCALAR(pair.y);
        }
    }
}

struct Lookup {
    long count;  // of groups
    long num_groups;
    long row_bytes;
    long vocab_size;
};

// One thread a group of a row that is looked up; an id outside the table gives zeros.
kernel void embedding_quant(
    device SCALAR* y [[buffer(0)]],
    device const uchar* blocks [[buffer(1)]],
    device const ID* ids [[buffer(2)]],
    constant Lookup& p [[buffer(3)]],
    uint i [[thread_position_in_grid]]) {
    if (i < ulong(p.count)) {
        const long id = long(ids[i / uint(p.num_groups)]);
        const bool known = id >= 0 && id < p.vocab_size;
        const WEIGHTS group(blocks + (known ? id * p.row_bytes : 0), i % uint(p.num_groups));
        for (uint j = 0; j < GROUP / 2; j++) {
            const float2 pair = group.weights(j);
            y[i * ulong(GROUP) + 2 * j] = SCALAR(known ? pair.x : 0.0f);
            y[i * ulong(GROUP) + 2 * j + 1] = SCALAR(known ? pair.y : 0.0f);
        }
    }
}
