// The GPT of model/gpt.py: a workgroup reads the tokens of one text and writes its next ones, in one dispatch.
// WebGPU has no barrier over a grid, so a text never leaves its workgroup of 256 invocations. Arithmetic is
// float32, and the order of a sum does not depend on the other texts.
//
// A source: the constants, cache_fp32.wgsl or cache_bf16.wgsl, this file, sampling.wgsl. Grid: (texts, 1, 1).
//
// Constants, each `const NAME: u32`: LAYERS, HEADS, HEAD_DIM, VOCAB; BIAS, 1 if layers have one, else 0; TILE,
// the keys of a tile of attention, a power of two from 16 to 256; SETTINGS, and the place of each. HEADS *
// ceil(HEAD_DIM / 4) is at most 256.
// Bytes of workgroup memory: 16 (W + max(W, A) + max(4 W, A) + 256) + 4 max(HEADS * TILE, 2 VOCAB, 256)
// + 4 HEADS + 192, with W and A as below. With TILE 64 that fits the portable 16 KB up to a width of 384.
//
// Bindings of group 0. A quad is four numbers, 16 bytes:
// 0 params    uniform, 32 bytes: texts, rows (tokens to choose for each text), capacity (tokens of a slot), slots,
//             uniforms_at (a word of `work`), every (0, or 1 to keep all logits): u32; scale = log2(e) /
//             sqrt(HEAD_DIM): f32; 4 bytes unused
// 1 weights   f32, in quads, see below
// 2 keys      a slot and layer: [A][capacity] quads, so that invocations read neighbouring keys
// 3 values    a slot and layer: [capacity][A] quads. A quad of bfloat16 is 8 bytes
// 4 logits    f32 [slots][VOCAB], the latest
// 5 counts    u32 [slots][2][VOCAB]: how often a token has occurred; how often since the prompt
// 6 settings  f32 [slots][SETTINGS], then f32 [slots][VOCAB], added to the logits. The settings: those of
//             generation/sampling.py; ADJUSTED, 1 if a penalty or a bias changes logits, else 0;
//             INVERSE_TEMPERATURE, at most 1e30
// 7 work      u32: TEXT words of each text, then what they point to: the tokens to be read, and at uniforms_at
//             for each (row, text) a number in [0, 1) as f32 bits, the nearest f32 below it and the rest
// 8 out       u32: [rows][texts], the chosen tokens, -1 where logits hold NaN or the largest is infinite; with
//             `every` then the logits as f32 bits: [rows][texts][VOCAB], those that each choice was made from, or
//             if rows is 0, [tokens][texts][VOCAB], those after each token (the longest text's count of them)
//
// A text's words: slot; length, tokens in its cache; at, the word of its tokens to read; count of them, 0 if
// its logits are known; flags: FIRST, the counts begin with these tokens; PROMPT, these tokens have occurred;
// LAST, the slot's logits follow the last token. A continued text has read all but the last one: count is 1.
//
// Weights, in quads, padded with 0. W = ceil(WIDTH / 4) of a row; A = HEADS * ceil(HEAD_DIM / 4) of a row by
// heads, each of which begins a quad; V = ceil(VOCAB / 4). A matrix of K inputs and N outputs, in quads, is
// [4 K][N]: neighbours read neighbouring quads. In order, with biases (+ ...) if BIAS is 1:
//   tokens [VOCAB][W];
//   for each layer: ln_1 [W] (+ [W]); qkv W -> 3 A (+ [3 A]), the queries of all heads, then keys, then values;
//     proj A -> W (+ [W]); ln_2 [W] (+ [W]); fc W -> WIDTH (+ [WIDTH]); out WIDTH -> W (+ [W]);
//   ln_f [W] (+ [W]); head W -> V, the tokens' transpose; positions [block size][W].

const INVOCATIONS = 256u;
const WIDTH = HEADS * HEAD_DIM;
const W = (WIDTH + 3u) / 4u;
const D = (HEAD_DIM + 3u) / 4u;  // quads of a head
const A = HEADS * D;
const V = (VOCAB + 3u) / 4u;

// Where a layer's weights begin, in quads.
const QKV = W * (1u + BIAS);
const QKV_BIAS = QKV + 4u * W * 3u * A;
const PROJ = QKV_BIAS + 3u * A * BIAS;
const PROJ_BIAS = PROJ + 4u * A * W;
const LN_2 = PROJ_BIAS + W * BIAS;
const FC = LN_2 + W * (1u + BIAS);
const FC_BIAS = FC + 4u * W * WIDTH;
const OUT = FC_BIAS + WIDTH * BIAS;
const OUT_BIAS = OUT + 4u * WIDTH * W;
const LAYER = OUT_BIAS + W * BIAS;
const LN_F = VOCAB * W + LAYERS * LAYER;
const HEAD = LN_F + W * (1u + BIAS);
const POSITIONS = HEAD + 4u * W * V;

const TEXT = 5u;
const FIRST = 1u;
const PROMPT = 2u;
const LAST = 4u;
const LOWEST = -1e30;  // below all scores and logits; WGSL has no infinity

struct Params {
    texts: u32,
    rows: u32,
    capacity: u32,
    slots: u32,
    uniforms_at: u32,
    every: u32,
    scale: f32,
    unused: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> weights: array<vec4f>;
@group(0) @binding(2) var<storage, read_write> keys: array<Cached>;
@group(0) @binding(3) var<storage, read_write> values: array<Cached>;
@group(0) @binding(4) var<storage, read_write> logits: array<f32>;
@group(0) @binding(5) var<storage, read_write> counts: array<u32>;
@group(0) @binding(6) var<storage, read> settings: array<f32>;
@group(0) @binding(7) var<storage, read> work: array<u32>;
@group(0) @binding(8) var<storage, read_write> out: array<u32>;

// Quads of `row`: the residual stream; the next matrix's input; the queries, then the MLP's hidden numbers.
const X = 0u;
const IN = W;
const WIDE = IN + max(W, A);
var<workgroup> row: array<vec4f, WIDE + max(WIDTH, A)>;
var<workgroup> lanes: array<vec4f, INVOCATIONS>;  // results of the invocations
var<workgroup> merged: array<vec4f, 8>;
// A tile's scores [HEADS][TILE]; sums of weights [slices][HEADS]; tokens' logits or weights, and logarithms.
var<workgroup> numbers: array<f32, max(max(HEADS * TILE, 2u * VOCAB), INVOCATIONS)>;
var<workgroup> peaks: array<f32, HEADS>;  // m of each head
var<workgroup> first_beyond: atomic<u32>;  // the first token whose sum of weights is beyond the uniform number
var<workgroup> last_kept: atomic<u32>;  // the last token with a weight, of those up to it
var<workgroup> next: u32;

// The sums of x and y and the largest z of the first `count` invocations. It reads them in eights: up to
// seven more must hold 0, 0 and the least z.
fn reduce(x: vec3f, count: u32, id: u32) -> vec3f {
    lanes[id] = vec4f(x, 0);
    workgroupBarrier();
    if id < 8u {
        var all = lanes[id];
        for (var i = 1u; i < (min(count, INVOCATIONS) + 7u) / 8u; i++) {
            let other = lanes[8u * i + id];
            all = vec4f(all.xy + other.xy, max(all.zw, other.zw));
        }
        merged[id] = all;
    }
    workgroupBarrier();
    var all = merged[0].xyz;
    for (var i = 1u; i < 8u; i++) {
        let other = merged[i].xyz;
        all = vec3f(all.xy + other.xy, max(all.z, other.z));
    }
    return all;
}

// The row's quads from `first_input` on times a matrix (inputs, outputs, in quads): output `first + id`.
// An invocation has four outputs and a slice of the inputs, and loads the weights of eight inputs together.
fn product(matrix: u32, inputs: u32, outputs: u32, first_input: u32, first: u32, id: u32) -> vec4f {
    let line = min(outputs, INVOCATIONS);
    let slices = min(INVOCATIONS / line, inputs);
    let depth = (inputs + slices - 1u) / slices;
    let slice = id / line;
    let column = first + id % line;
    var sum = vec4f();
    if slice < slices && column < outputs {
        var k = slice * depth;
        let end = min(k + depth, inputs);
        var at = matrix + 4u * k * outputs + column;
        for (; k + 2u <= end; k += 2u) {
            var w = array<vec4f, 8>();
            for (var i = 0u; i < 8u; i++) {  // unroll
                w[i] = weights[at + i * outputs];
            }
            let x = array(row[first_input + k], row[first_input + k + 1u]);
            for (var i = 0u; i < 8u; i++) {  // unroll
                sum = fma(vec4f(x[i / 4u][i % 4u]), w[i], sum);
            }
            at += 8u * outputs;
        }
        if k < end {
            let x = row[first_input + k];
            for (var i = 0u; i < 4u; i++) {  // unroll
                sum = fma(vec4f(x[i]), weights[at + i * outputs], sum);
            }
        }
    }
    lanes[id] = sum;
    workgroupBarrier();
    if id < line {
        for (var i = 1u; i < slices; i++) { sum += lanes[i * line + id]; }
    }
    return sum;
}

// The components of a quad that a row has.
fn held(q: u32) -> vec4f { return select(vec4f(), vec4f(1), 4u * q + vec4u(0, 1, 2, 3) < vec4u(WIDTH)); }

// LayerNorm of x to `in`, as PyTorch's.
fn normalise(norm: u32, id: u32) {
    var mean = 0.0;
    var variance = 0.0;
    for (var moment = 0u; moment < 2u; moment++) {
        var sum = 0.0;
        for (var q = id; q < W; q += INVOCATIONS) {
            let x = (row[X + q] - mean) * held(q);
            sum += select(dot(x, vec4f(1)), dot(x, x), moment == 1u);
        }
        sum = reduce(vec3f(sum), W, id).x / f32(WIDTH);
        if moment == 0u { mean = sum; } else { variance = sum; }
    }
    let factor = inverseSqrt(variance + 1e-5);
    for (var q = id; q < W; q += INVOCATIONS) {
        var y = (row[X + q] - mean) * factor * weights[norm + q];
        if BIAS == 1u { y += weights[norm + W + q]; }
        row[IN + q] = y;
    }
    workgroupBarrier();
}

// GELU by erfc(z) = t exp(P(t) - z^2), t = 1 / (1 + z / 2), P's highest power first: Chebyshev's fit of
// log(erfc(z) exp(z^2) / t), by scipy.special.erfcx, for z up to 9 within 4.2e-8.
const P = array(0.1354247188493049, -0.6286316827558825, 1.0327699228865832, -0.5295532645551162, -0.2197604457163112,
                0.07634552090457862, 0.008687083954603967, 0.3921549499090914, 0.9979783023537578, -1.265415065369658);
fn gelu(x: vec4f) -> vec4f {
    let z = abs(x) * 0.70710678118654752;
    let t = 1.0 / fma(z, vec4f(0.5), vec4f(1));
    var p = vec4f(P[0]);
    for (var i = 0u; i < 9u; i++) {  // unroll
        p = fma(p, t, vec4f(P[i + 1u]));
    }
    let half_erfc = 0.5 * t * exp(max(p - z * z, vec4f(-80)));
    return x * select(1.0 - half_erfc, half_erfc, x < vec4f());
}

const SLICES = INVOCATIONS / A;  // of a tile's keys, when values are summed
const PEAKS = max(1u, min(16u, INVOCATIONS / HEADS));  // partial maxima of a head

// Attention of the queries to `in`: part 4's online softmax over tiles of keys, all heads together.
fn attend(slot_layer: u32, length: u32, id: u32) {
    let K = slot_layer * A * params.capacity;
    let last = length + 1u;
    let quad = id % A;
    let head = quad / D;
    let slice = id / A;
    var o = vec4f();
    var l = 0.0;
    var m = LOWEST;
    for (var h = id; h < HEADS; h += INVOCATIONS) { peaks[h] = LOWEST; }
    for (var first = 0u; first < last; first += TILE) {
        // Sij <- Qi Kj^T
        for (var i = id; i < HEADS * TILE; i += INVOCATIONS) {
            let h = i / TILE;
            let j = first + i % TILE;
            var score = LOWEST;
            if j < last {
                score = 0.0;
                var at = K + h * D * params.capacity + j;
                for (var q = 0u; q < D; q++) {
                    score += dot(row[WIDE + h * D + q], of_cache(keys[at]));
                    at += params.capacity;
                }
            }
            numbers[i] = score;
        }
        workgroupBarrier();
        for (var i = id; i < HEADS * PEAKS; i += INVOCATIONS) {
            let h = i / PEAKS;
            var most = peaks[h];
            for (var j = i % PEAKS; j < TILE; j += PEAKS) { most = max(most, numbers[h * TILE + j]); }
            lanes[i].x = most;
        }
        workgroupBarrier();
        // Pij <- exp(Sij - m_new)
        for (var i = id; i < HEADS * TILE; i += INVOCATIONS) {
            let h = i / TILE;
            var most = LOWEST;
            for (var j = 0u; j < PEAKS; j++) { most = max(most, lanes[h * PEAKS + j].x); }
            numbers[i] = exp2(numbers[i] - most);
            if i % TILE == 0u { peaks[h] = most; }
        }
        workgroupBarrier();
        // l <- exp(m - m_new) * l + rowsum(Pij);  O <- exp(m - m_new) * O + Pij Vj
        if slice < SLICES {
            let correction = exp2(m - peaks[head]);
            m = peaks[head];
            o *= correction;
            l *= correction;
            let count = min(TILE, last - first);
            var at = K + (first + slice) * A + quad;
            for (var j = slice; j < count; j += SLICES) {
                let p = numbers[head * TILE + j];
                o = fma(vec4f(p), of_cache(values[at]), o);
                l += p;
                at += SLICES * A;
            }
        }
        workgroupBarrier();
    }
    lanes[id] = o;
    if slice < SLICES && quad % D == 0u { numbers[slice * HEADS + head] = l; }
    workgroupBarrier();
    if id < A {
        for (var i = 1u; i < SLICES; i++) { o += lanes[i * A + id]; }
        l = 0.0;
        for (var i = 0u; i < SLICES; i++) { l += numbers[i * HEADS + head]; }
        row[IN + id] = o / l;
    }
    workgroupBarrier();
}

// The matrices of a layer, in order, and the one after the last layer.
const TO_QKV = 0u;
const TO_PROJ = 1u;
const TO_FC = 2u;
const TO_OUT = 3u;
const TO_LOGITS = 4u;

// A product's weights, in quads from the layer's first one: the LayerNorm before it, if any, the matrix, the bias.
const NORM = array(0u, 0u, LN_2, 0u, 0u);
const MATRIX = array(QKV, PROJ, FC, OUT, HEAD - LN_F);
const MATRIX_BIAS = array(QKV_BIAS, PROJ_BIAS, FC_BIAS, OUT_BIAS, 0u);
const INPUTS = array(W, A, W, WIDTH, W);
const OUTPUTS = array(3u * A, W, WIDTH, W, V);

// Takes a token, which follows `length` others, through the layers. with_logits: also the logits after it, to
// `numbers` and to the slot. Each function is called in one place here: compilers inline it once.
fn read_token(slot: u32, length: u32, token: u32, with_logits: bool, id: u32) {
    for (var q = id; q < W; q += INVOCATIONS) {
        row[X + q] = weights[token * W + q] + weights[POSITIONS + length * W + q];
    }
    workgroupBarrier();
    let matrices = 4u * LAYERS + select(0u, 1u, with_logits);
    for (var number = 0u; number < matrices; number++) {
        let kind = select(number % 4u, TO_LOGITS, number == 4u * LAYERS);
        let begin = VOCAB * W + number / 4u * LAYER;
        let outputs = OUTPUTS[kind];
        let slot_layer = slot * LAYERS + number / 4u;
        if kind % 2u == 0u { normalise(begin + NORM[kind], id); }
        if kind == TO_PROJ { attend(slot_layer, length, id); }
        for (var first = 0u; first < outputs; first += INVOCATIONS) {
            let inputs_at = select(IN, WIDE, kind == TO_OUT);
            var y = product(begin + MATRIX[kind], INPUTS[kind], outputs, inputs_at, first, id);
            let q = first + id;
            if q < outputs {
                if BIAS == 1u && kind != TO_LOGITS { y += weights[begin + MATRIX_BIAS[kind] + q]; }
                switch kind {
                    case TO_QKV: {
                        if q < A {
                            row[WIDE + q] = y * params.scale;
                        } else if q < 2u * A {
                            keys[(slot_layer * A + q - A) * params.capacity + length] = to_cache(y);
                        } else {
                            values[(slot_layer * params.capacity + length) * A + q - 2u * A] = to_cache(y);
                        }
                    }
                    case TO_FC: { row[WIDE + q] = gelu(y); }
                    case TO_LOGITS: {
                        for (var i = 0u; i < min(4u, VOCAB - 4u * q); i++) {
                            numbers[4u * q + i] = y[i];
                            logits[slot * VOCAB + 4u * q + i] = y[i];
                        }
                    }
                    default: { row[X + q] += y; }
                }
            }
            if kind == TO_QKV { storageBarrier(); }  // for the keys and values; it waits for memory
            workgroupBarrier();
        }
    }
}

@compute @workgroup_size(INVOCATIONS)
fn decode(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) id: u32) {
    let text = group.x;
    let slot = work[text * TEXT];
    let length = work[text * TEXT + 1u];
    let at = work[text * TEXT + 2u];
    let count = work[text * TEXT + 3u];
    let flags = work[text * TEXT + 4u];
    let seen = 2u * slot * VOCAB;
    let written = seen + VOCAB;
    if (flags & FIRST) != 0u {
        for (var i = id; i < 2u * VOCAB; i += INVOCATIONS) { counts[seen + i] = 0u; }
        storageBarrier();
    }
    // Step `begun` is the first that chooses a token. A step reads the last token unless count is 0.
    let begun = max(count, 1u) - 1u;
    var steps = count;
    if params.rows > 0u { steps = begun + params.rows; }
    for (var step = 0u; step < steps; step++) {
        let chooses = params.rows > 0u && step >= begun;
        let reads = step < count || step > begun;
        if reads {
            var token = 0u;
            if step < count { token = work[at + step]; } else { token = workgroupUniformLoad(&next); }
            let place = length + step - select(0u, 1u, count == 0u);
            let last = step + 1u == count && (flags & LAST) != 0u;
            read_token(slot, place, token, chooses || params.every != 0u || last, id);
            if step < count && (flags & PROMPT) != 0u && id == 0u { counts[seen + token] += 1u; }
        } else {
            for (var i = id; i < VOCAB; i += INVOCATIONS) { numbers[i] = logits[slot * VOCAB + i]; }
            workgroupBarrier();
        }
        var chosen = step - begun;
        if params.rows == 0u { chosen = step; }
        let place = chosen * params.texts + text;
        if params.every != 0u {
            let kept = params.rows * params.texts + place * VOCAB;
            for (var i = id; i < VOCAB; i += INVOCATIONS) { out[kept + i] = bitcast<u32>(numbers[i]); }
        }
        if chooses {
            if settings[slot * SETTINGS + ADJUSTED] != 0.0 {  // the token that was just read is counted
                storageBarrier();
            }
            choose(slot, params.uniforms_at + 2u * place, id);
            if id == 0u {
                if next < VOCAB {
                    out[place] = next;
                    counts[seen + next] += 1u;
                    counts[written + next] += 1u;
                } else {
                    out[place] = 0xffffffffu;
                    next = 0u;
                }
            }
        }
        if settings[slot * SETTINGS + ADJUSTED] != 0.0 { storageBarrier(); }  // for the counts; it waits for memory
        workgroupBarrier();
    }
}
