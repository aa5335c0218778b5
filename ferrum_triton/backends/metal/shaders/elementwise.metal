// One thread an element, in float32. SCALAR is the type of x and y.

// erf, to 2^-20 of itself: a series of terms of one sign up to 2, and from there the continued fraction of
// 1 - erf (Abramowitz and Stegun, 7.1.6 and 7.1.14). Beyond 4 it is 1 in float32.
inline float error_function(float x) {
    const float a = fabs(x);
    if (a > 4.0f) {
        return copysign(1.0f, x);
    }
    const float bell = exp(-a * a);
    if (a < 2.0f) {
        float term = a;
        float sum = a;
        for (int n = 1; n < 26; n++) {
            term *= 2.0f * a * a / float(2 * n + 1);
            sum += term;
        }
        return copysign(sum * bell * 1.1283791670955126f, x);
    }
    float fraction = 0.0f;
    for (int n = 24; n > 0; n--) {
        fraction = 0.5f * float(n) / (a + fraction);
    }
    return copysign(1.0f - bell * 0.5641895835477563f / (a + fraction), x);
}

inline float sigmoid(float x) {
    return 1.0f / (1.0f + exp(-x));
}

inline float activated(float x, long activation) {
    if (activation == 0) {  // SiLU
        return x * sigmoid(x);
    }
    if (activation == 1) {  // GELU
        return 0.5f * x * (1.0f + error_function(x * 0.70710678118654752f));
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
        const ulong gate = i + i / ulong(p.columns) * ulong(p.columns);
        const float value = activated(float(gate_up[gate]), p.activation);
        y[i] = SCALAR(value * float(gate_up[gate + ulong(p.columns)]));
    }
}
