// One simdgroup a head of a token. SCALAR is the type of qkv and q, WEIGHT_TABLE that of cos and sin,
// CACHE that of keys and values; if QUANTISED they are codes, and SCALE is the type of their scales.
// POSITION, SLOT, BLOCK, OFFSET and START are the types of integers. K_PIECE or V_PIECE elements of a
// cached vector lie side by side; pieces are a stride apart.

// How a head is prepared: ferrum_triton.ops.rope's modes.
constant constexpr long COPY = 0;
constant constexpr long NORM_ROPE = 1;
constant constexpr long ROPE_INTERLEAVED = 3;

// Where tokens go: to slots, to rows that count up, or to what block tables say, each token being of
// one sequence, of its own, or of that of the packed ones it lies in.
constant constexpr long TO_SLOTS = 0;
constant constexpr long COUNTED = 1;
constant constexpr long ONE_SEQUENCE = 2;
constant constexpr long ONE_EACH = 3;
constant constexpr long PACKED = 4;

struct Heads {
    long num_tokens;
    long num_heads;
    long num_kv_heads;
    long head_dim;
    long half_rotary_dim;
    long max_positions;
    long qk_mode;
    long eps;
    long has_positions;
    long pos_offset;
    long placement;
    long cache_len;
    long num_blocks;
    long block_size;
    long num_seqs;
    long max_blocks;
    long stride_table;
    long stride_x_token;
    long stride_x_head;
    long stride_q_token;
    long stride_q_head;
    long stride_k_block;
    long stride_k_head;
    long stride_k_slot;
    long stride_k_piece;
    long stride_v_block;
    long stride_v_head;
    long stride_v_slot;
    long stride_v_piece;
    long stride_k_scales_block;
    long stride_k_scales_head;
    long stride_k_scales_slot;
    long stride_v_scales_block;
    long stride_v_scales_head;
    long stride_v_scales_slot;
};

// A token's slot of the pool, or -1, and its position, or -1 where only the slot is known.
struct Place {
    long slot;
    long position;
};

inline Place place_of(
    long token, device const SLOT* slots, device const BLOCK* block_tables,
    device const OFFSET* pos_offsets, device const START* cu_seqlens_q, constant Heads& p) {
    Place place = {-1, -1};
    if (p.placement == TO_SLOTS || p.placement == COUNTED) {
        const long slot = p.placement == COUNTED ? p.cache_len + token : long(slots[token]);
        place.slot = slot < p.num_blocks * p.block_size ? slot : -1;
        return place;
    }
    long seq = p.placement == ONE_EACH ? token : 0, local = p.placement == ONE_EACH ? 0 : token;
    if (p.placement == PACKED) {
        long end = p.num_seqs;  // the first sequence whose end lies past the token is in [seq, end]
        while (seq < end) {
            const long middle = (seq + end) / 2;
            if (long(cu_seqlens_q[middle + 1]) <= token) {
                seq = middle + 1;
            } else {
                end = middle;
            }
        }
        local = token - long(cu_seqlens_q[seq]);
    }
    if (seq >= p.num_seqs || local < 0 || p.max_blocks == 0) {
        return place;
    }
    place.position = long(pos_offsets[seq]) + local;
    const long index = place.position / p.block_size;
    if (place.position >= 0 && index < p.max_blocks) {
        const long block = long(block_tables[seq * p.stride_table + index]);
        if (block >= 0 && block < p.num_blocks) {
            place.slot = block * p.block_size + place.position % p.block_size;
        }
    }
    return place;
}

// Element d of a head, prepared.
inline float prepared(
    device const SCALAR* x, device const float* weight, device const WEIGHT_TABLE* cosines,
    device const WEIGHT_TABLE* sines, uint d, float inverse, bool known, long mode,
    constant Heads& p) {
    const uint half_dim = uint(p.half_rotary_dim);
    float value = float(x[d]);
    if (mode == NORM_ROPE) {
        value = value * inverse * weight[d];
    }
    if (mode == COPY || d >= 2 * half_dim) {
        return value;
    }
    const bool interleaved = mode == ROPE_INTERLEAVED;
    const bool is_first = interleaved ? d % 2 == 0 : d < half_dim;
    const uint pair = interleaved ? d / 2 : d % half_dim;
    const uint partner = interleaved ? d ^ 1 : is_first ? d + half_dim : d - half_dim;
    float other = float(x[partner]);
    if (mode == NORM_ROPE) {
        other = other * inverse * weight[partner];
    }
    const float c = known ? float(cosines[pair]) : 1.0f, s = known ? float(sines[pair]) : 0.0f;
    return is_first ? value * c - other * s : value * c + other * s;
}

kernel void prepare_heads(
    device SCALAR* q [[buffer(0)]],
    device CACHE* k_cache [[buffer(1)]],
    device CACHE* v_cache [[buffer(2)]],
    device SCALE* k_scales [[buffer(3)]],
    device SCALE* v_scales [[buffer(4)]],
    device const SCALAR* qkv [[buffer(5)]],
    device const float* q_weight [[buffer(6)]],
    device const float* k_weight [[buffer(7)]],
    device const WEIGHT_TABLE* cosines [[buffer(8)]],
    device const WEIGHT_TABLE* sines [[buffer(9)]],
    device const POSITION* positions [[buffer(10)]],
    device const SLOT* slots [[buffer(11)]],
    device const BLOCK* block_tables [[buffer(12)]],
    device const OFFSET* pos_offsets [[buffer(13)]],
    device const START* cu_seqlens_q [[buffer(14)]],
    constant Heads& p [[buffer(15)]],
    uint i [[thread_position_in_grid]]) {
    const long heads = p.num_heads + 2 * p.num_kv_heads;
    const long token = long(i / LANES) / heads, head = long(i / LANES) % heads;
    if (token >= p.num_tokens) {
        return;
    }
    const uint lane = i % LANES;
    const bool is_query = head < p.num_heads, is_value = head >= p.num_heads + p.num_kv_heads;
    const long mode = is_value ? COPY : p.qk_mode;
    device const float* weight = is_query ? q_weight : k_weight;
    device const SCALAR* x = qkv + token * p.stride_x_token + head * p.stride_x_head;

    const Place place = place_of(token, slots, block_tables, pos_offsets, cu_seqlens_q, p);
    if (!is_query && place.slot < 0) {
        return;
    }
    const bool is_counted = p.placement == TO_SLOTS || p.placement == COUNTED;
    const long position = p.has_positions ? long(positions[token])
                          : is_counted    ? p.pos_offset + token
                                          : place.position;
    const bool known = position >= 0 && position < p.max_positions;
    device const WEIGHT_TABLE* cos_row = cosines + (known ? position * p.half_rotary_dim : 0);
    device const WEIGHT_TABLE* sin_row = sines + (known ? position * p.half_rotary_dim : 0);

    float inverse = 1.0f;
    if (mode == NORM_ROPE) {
        float sum = 0.0f;
        for (uint d = lane; d < uint(p.head_dim); d += LANES) {
            sum += float(x[d]) * float(x[d]);
        }
        inverse = rsqrt(simd_sum(sum) / float(p.head_dim) + as_type<float>(int(p.eps)));
    }
    if (is_query) {
        device SCALAR* y = q + token * p.stride_q_token + head * p.stride_q_head;
        for (uint d = lane; d < uint(p.head_dim); d += LANES) {
            y[d] = SCALAR(prepared(x, weight, cos_row, sin_row, d, inverse, known, mode, p));
        }
        return;
    }
    const long kv_head = head - p.num_heads - (is_value ? p.num_kv_heads : 0);
    const long block = place.slot / p.block_size, offset = place.slot % p.block_size;
    device CACHE* y = is_value ? v_cache + block * p.stride_v_block + kv_head * p.stride_v_head +
                                     offset * p.stride_v_slot
                               : k_cache + block * p.stride_k_block + kv_head * p.stride_k_head +
                                     offset * p.stride_k_slot;
#if QUANTISED
    // As integers the bits of magnitudes are ordered as these are, NaN above all.
    uint maximum_bits = 0;
    for (uint d = lane; d < uint(p.head_dim); d += LANES) {
        const float value = prepared(x, weight, cos_row, sin_row, d, inverse, known, mode, p);
        maximum_bits = max(maximum_bits, as_type<uint>(fabs(value)));
    }
    const float largest = as_type<float>(simd_max(maximum_bits));
    const float maximum = largest < LEAST_MAXIMUM ? LEAST_MAXIMUM : largest;
    const float inverse_step = LIMIT / maximum;
    if (lane == 0) {
        device SCALE* scale =
            is_value ? v_scales + block * p.stride_v_scales_block +
                           kv_head * p.stride_v_scales_head + offset * p.stride_v_scales_slot
                     : k_scales + block * p.stride_k_scales_block +
                           kv_head * p.stride_k_scales_head + offset * p.stride_k_scales_slot;
        *scale = SCALE(maximum / LIMIT);
    }
#endif
    for (uint d = lane; d < uint(p.head_dim); d += LANES) {
        const float value = prepared(x, weight, cos_row, sin_row, d, inverse, known, mode, p);
        const long at = is_value ? long(d / V_PIECE) * p.stride_v_piece + d % V_PIECE
                                 : long(d / K_PIECE) * p.stride_k_piece + d % K_PIECE;
#if QUANTISED
        const float code = value * inverse_step;
        y[at] = isnan(code) ? CACHE(0) : CACHE(rint(clamp(code, -LIMIT, LIMIT)));
#else
        y[at] = CACHE(value);
#endif
    }
}
