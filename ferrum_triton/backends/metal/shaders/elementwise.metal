// One thread an element, in float32. SCALAR is the type of x and y.

// 1 - erf(a) for a of 0 and more: below 1 a series of terms of one sign, from there a continued fraction,
// which keeps small results exact (Abramowitz and Stegun, 7.1.6 and 7.1.14).
inline float complementary_error_function(float a) {
    const float bell = exp(-a * a);
    if (a < 1.0f) {
        float term = a;
        float sum = a;
        for (int n = 1; n < 14; n++) {
            term *= 2.0f * a * a / float(2 * n + 1);
            sum += term;
        }
        return 1.0f - sum * bell * 1.1283791670955126f;
    }
    float fraction = 0.0f;
    for (int n = 48; n > 0; n--) {
        fraction = 0.5f * float(n) / (a + fraction);
    }
    return bell * 0.5641895835477563f / (a + fraction);
}

inline float sigmoid(float x) {
    return 1.0f / (1.0f + exp(-x));
}

inline float activated(float x, long activation) {
    if (activation == 0) {  // SiLU
        return x * sigmoid(x);
    }
    if (activation == 1) {  // GELU
        const float tail = complementary_error_function(fabs(x) * 0.70710678118654752f);
        return 0.5f * x * (x < 0.0f ? tail : 2.0f - tail);
    }
    // tanh(z) is 2 sigmoid(2z) - 1, which does not overflow.
    return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
}

struct Activation {
    long count;
    long activation;
};

kernel void activate(
    device SCALAR* y [[buffer(0)]],
    device const SCALAR* x [[buffer(1)]],
    constant Activation& p [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
    if (i < ulong(p.count)) {
        y[i] = SCALAR(activated(float(x[i]), p.activation));
    }
}

kernel void activate_multiply(
    device SCALAR* y [[buffer(0)]],
    device const SCALAR* gate [[buffer(1)]],
    device const SCALAR* up [[buffer(2)]],
    constant Activation& p [[buffer(3)]],
    uint i [[thread_position_in_grid]]) {
    if (i < ulong(p.count)) {
        y[i] = SCALAR(activated(float(gate[i]), p.activation) * float(up[i]));
    }
}

struct Split {
    long count;
    long columns;
    long activation;
};

// Rows of gate_up are [gate | up], of so many columns each.
kernel void activate_multiply_split(
    device SCALAR* y [[buffer(0)]],
    device const SCALAR* gate_up [[buffer(1)]],
    constant Split& p [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
    if (i < ulong(p.count)) {
        const ulong gate = i + ulong(i / uint(p.columns)) * ulong(p.columns);
        const float value = activated(float(gate_up[gate]), p.activation);
        y[i] = SCALAR(value * float(gate_up[gate + ulong(p.columns)]));
    }
}
