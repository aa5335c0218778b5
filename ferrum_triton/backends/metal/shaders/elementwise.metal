// One thread an element, in float32. SCALAR is the type of x and y.

// The normal distribution's share above s >= 0, erfc(s / sqrt(2)) / 2, within 1e-6 of itself. It is
// exp(-s^2 / 2) t P(t) with t = 1 / (1 + 0.35 s), P being fitted for the least relative error; 1 - erf
// would leave few bits of a small tail.
inline float normal_tail(float s) {
    s = min(s, 16.0f);  // from 14.2 on the tail is no number but 0
    const float t = 1.0f / (1.0f + 0.35f * s);
    float p = -0.029164928942918777f;
    p = p * t + 0.1440657675266266f;
    p = p * t - 0.25591233372688293f;
    p = p * t + 0.1594051569700241f;
    p = p * t - 0.023272467777132988f;
    p = p * t + 0.10557854920625687f;
    p = p * t + 0.11981452256441116f;
    p = p * t + 0.1398644745349884f;
    p = p * t + 0.13962124288082123f;
    const float square = s * s;
    const float rounded_off = fma(s, s, -square);
    return exp(-0.5f * square) * (1.0f - 0.5f * rounded_off) * (t * p);
}

inline float sigmoid(float x) {
    return 1.0f / (1.0f + exp(-x));
}

inline float activated(float x, long activation) {
    if (activation == 0) {  // SiLU
        return x * sigmoid(x);
    }
    if (activation == 1) {  // GELU
        const float tail = normal_tail(fabs(x));
        return x * (x < 0.0f ? tail : 1.0f - tail);
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
