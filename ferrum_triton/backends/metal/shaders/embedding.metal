// One thread an element. SCALAR is the table's type, ID that of the ids.

struct Embedding {
    long count;
    long hidden_size;
    long vocab_size;
};

// An id outside the table gives zeros.
kernel void embedding(
    device SCALAR* y [[buffer(0)]],
    device const SCALAR* table [[buffer(1)]],
    device const ID* ids [[buffer(2)]],
    constant Embedding& p [[buffer(3)]],
    uint i [[thread_position_in_grid]]) {
    if (i < ulong(p.count)) {
        const long id = long(ids[i / uint(p.hidden_size)]);
        const bool known = id >= 0 && id < p.vocab_size;
        y[i] = known ? table[id * p.hidden_size + long(i % uint(p.hidden_size))] : SCALAR(0.0f);
    }
}
