// The GPT of model/gpt.py: a workgroup reads the tokens of one text and writes its next ones, in one dispatch.
//
// WebGPU has no barrier over a grid, so a text never leaves its workgroup: 256 invocations take a token through
// all layers, multiply by the weights, attend to the cached keys and choose the next token. All arithmetic is
// float32. A number is summed in the same order whatever else is written.
//
// A source is the constants, then cache_fp32.wgsl or cache_bf16.wgsl, then this file. Entry point: decode, with
// a workgroup for each text, (texts, 1, 1).
//
// Constants, each `const NAME: u32`: LAYERS, HEADS, HEAD_DIM, VOCAB; BIAS, 1 if layers have one, else 0; TILE,
// the keys of a tile of attention, a power of two from 16 to 256. HEADS * ceil(HEAD_DIM / 4) is at most 256.
// Bytes of workgroup memory: 16 (W + max(W, A) + max(4 W, A) + 256) + 4 max(HEADS * TILE, 2 VOCAB, 256)
// + 4 HEADS + 128, with W and A as below. With TILE 64 that fits the portable 16 KB up to a width of 384.
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
// 6 settings  f32 [slots][10], then f32 [slots][VOCAB], added to the logits. The ten: temperature, top_k, top_p,
//             min_p, typical_p, repetition_penalty, presence_penalty, frequency_penalty; 1 if a penalty or a bias
//             changes logits, else 0; 1 / temperature, at most 1e30
// 7 work      u32: TEXT words of each text, then what they point to: the tokens to be read, and at uniforms_at
//             for each (row, text) a number in [0, 1) as f32 bits, the nearest f32 below it and the rest
// 8 out       u32: [rows][texts], the chosen tokens, -1 where logits hold NaN or the largest is infinite; with
//             `every` then the logits as f32 bits: [rows][texts][VOCAB], those that each choice was made from, or
//             if rows is 0, [tokens][texts][VOCAB], those after each token (the longest text's count of them)
//
// A text's words: slot; length, tokens in its cache; at, the word of its tokens to be read; count of them, which
// may be 0 if its logits are known; flags: FIRST, the counts begin with these tokens; PROMPT, these tokens have
// occurred, LAST, the slot's logits are those after the last token. A text that is written again has read all
// tokens but the last one, which count 1 then reads.
//
// Weights, in quads. W = ceil(WIDTH / 4) of a row; A = HEADS * ceil(HEAD_DIM / 4) of a row by heads, each of
// which begins a quad; V = ceil(VOCAB / 4). What is left over is 0. A matrix of K inputs and N outputs is
// [4 K][N] quads, K and N in quads, a row for each input, so that neighbours read neighbours. In order:
//   tokens [VOCAB][W];
//   for each layer: ln_1 [W] (+ [W]); qkv W -> 3 A (+ [3 A]), the queries of all heads, then keys, then values;
//     proj A -> W (+ [W]); ln_2 [W] (+ [W]); fc W -> WIDTH (+ [WIDTH]); out WIDTH -> W (+ [W]);
//   ln_f [W] (+ [W]); head W -> V, the tokens' transpose; positions [block size][W].
// (+ ...) are biases, which are left out if BIAS is 0.

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
const SETTINGS = 10u;
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

// Quads of `row`: the residual stream; what the next matrix is multiplied with; the queries, then the MLP's
// hidden numbers.
const X = 0u;
const IN = W;
const WIDE = IN + max(W, A);
var<workgroup> row: array<vec4f, WIDE + max(WIDTH, A)>;
var<workgroup> lanes: array<vec4f, INVOCATIONS>;  // results of the invocations
var<workgroup> merged: array<vec2f, 8>;
// The scores of a tile, [HEADS][TILE]; then the sums of weights, [slices][HEADS]; then of each token the logit
// or weight, and for typical_p the weight's logarithm.
var<workgroup> numbers: array<f32, max(max(HEADS * TILE, 2u * VOCAB), INVOCATIONS)>;
var<workgroup> peaks: array<f32, HEADS>;  // m of each head
var<workgroup> found: atomic<u32>;
var<workgroup> likely: atomic<u32>;  // the last token with a weight
var<workgroup> next: u32;

// The sum of all invocations' numbers.
fn total(x: f32, id: u32) -> f32 {
    lanes[id].x = x;
    workgroupBarrier();
    if id < 8u {
        var sum = 0.0;
        for (var i = 0u; i < 32u; i++) { sum += lanes[8u * i + id].x; }
        merged[id].x = sum;
    }
    workgroupBarrier();
    return ((merged[0].x + merged[1].x) + (merged[2].x + merged[3].x)) +
           ((merged[4].x + merged[5].x) + (merged[6].x + merged[7].x));
}

// The largest of all invocations' numbers, of each component.
fn largest(x: vec2f, id: u32) -> vec2f {
    lanes[id] = vec4f(x, x);
    workgroupBarrier();
    if id < 8u {
        var most = lanes[id].xy;
        for (var i = 1u; i < 32u; i++) { most = max(most, lanes[8u * i + id].xy); }
        merged[id] = most;
    }
    workgroupBarrier();
    return max(max(max(merged[0], merged[1]), max(merged[2], merged[3])),
               max(max(merged[4], merged[5]), max(merged[6], merged[7])));
}

// The product of the row's quads from `first_input` on with a matrix of so many quads of inputs and outputs: the
// quad of output `first + id` in each of the first invocations. An invocation has four outputs and a slice of the
// inputs; the weights of eight inputs are loaded together.
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
            let w0 = weights[at];
            let w1 = weights[at + outputs];
            let w2 = weights[at + 2u * outputs];
            let w3 = weights[at + 3u * outputs];
            let w4 = weights[at + 4u * outputs];
            let w5 = weights[at + 5u * outputs];
            let w6 = weights[at + 6u * outputs];
            let w7 = weights[at + 7u * outputs];
            let x = row[first_input + k];
            let y = row[first_input + k + 1u];
            sum = fma(vec4f(x.x), w0, sum);
            sum = fma(vec4f(x.y), w1, sum);
            sum = fma(vec4f(x.z), w2, sum);
            sum = fma(vec4f(x.w), w3, sum);
            sum = fma(vec4f(y.x), w4, sum);
            sum = fma(vec4f(y.y), w5, sum);
            sum = fma(vec4f(y.z), w6, sum);
            sum = fma(vec4f(y.w), w7, sum);
            at += 8u * outputs;
        }
        if k < end {
            let x = row[first_input + k];
            sum = fma(vec4f(x.x), weights[at], sum);
            sum = fma(vec4f(x.y), weights[at + outputs], sum);
            sum = fma(vec4f(x.z), weights[at + 2u * outputs], sum);
            sum = fma(vec4f(x.w), weights[at + 3u * outputs], sum);
        }
    }
    lanes[id] = sum;
    workgroupBarrier();
    if id < line {
        for (var i = 1u; i < slices; i++) { sum += lanes[i * line + id]; }
    }
    return sum;
}

// Adds the product of the row's quads from `first_input` on with a matrix, and its bias, to x.
fn add_product(matrix: u32, bias: u32, inputs: u32, first_input: u32, id: u32) {
    for (var first = 0u; first < W; first += INVOCATIONS) {
        var y = product(matrix, inputs, W, first_input, first, id);
        let q = first + id;
        if id < INVOCATIONS && q < W {
            if BIAS == 1u { y += weights[bias + q]; }
            row[X + q] += y;
        }
        workgroupBarrier();
    }
}

// The components of a quad that a row has.
fn held(q: u32) -> vec4f { return select(vec4f(), vec4f(1), 4u * q + vec4u(0, 1, 2, 3) < vec4u(WIDTH)); }

// LayerNorm of x to `in`, as PyTorch's.
fn normalise(norm: u32, id: u32) {
    var sum = 0.0;
    for (var q = id; q < W; q += INVOCATIONS) { sum += dot(row[X + q], vec4f(1)); }
    let mean = total(sum, id) / f32(WIDTH);
    sum = 0.0;
    for (var q = id; q < W; q += INVOCATIONS) {
        let x = (row[X + q] - mean) * held(q);
        sum += dot(x, x);
    }
    let factor = inverseSqrt(total(sum, id) / f32(WIDTH) + 1e-5);
    for (var q = id; q < W; q += INVOCATIONS) {
        var y = (row[X + q] - mean) * factor * weights[norm + q];
        if BIAS == 1u { y += weights[norm + W + q]; }
        row[IN + q] = y;
    }
    workgroupBarrier();
}

// GELU by erfc(z) = t exp(P(t) - z^2), t = 1 / (1 + z / 2): Chebyshev's fit of log(erfc(z) exp(z^2) / t), by
// scipy.special.erfcx, for z up to 9 within 4.2e-8.
fn gelu(x: vec4f) -> vec4f {
    let z = abs(x) * 0.70710678118654752;
    let t = 1.0 / fma(z, vec4f(0.5), vec4f(1));
    var p = vec4f(0.1354247188493049);
    p = fma(p, t, vec4f(-0.6286316827558825));
    p = fma(p, t, vec4f(1.0327699228865832));
    p = fma(p, t, vec4f(-0.5295532645551162));
    p = fma(p, t, vec4f(-0.2197604457163112));
    p = fma(p, t, vec4f(0.07634552090457862));
    p = fma(p, t, vec4f(0.008687083954603967));
    p = fma(p, t, vec4f(0.3921549499090914));
    p = fma(p, t, vec4f(0.9979783023537578));
    p = fma(p, t, vec4f(-1.265415065369658));
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
            let some = min(TILE, last - first);
            var at = K + (first + slice) * A + quad;
            for (var j = slice; j < some; j += SLICES) {
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
        for (var i = 1u; i < SLICES; i++) {
            o += lanes[i * A + id];
        }
        l = 0.0;
        for (var i = 0u; i < SLICES; i++) { l += numbers[i * HEADS + head]; }
        row[IN + id] = o / l;
    }
    workgroupBarrier();
}

// Takes a token, which follows `length` others, through the layers.
fn read_token(slot: u32, length: u32, token: u32, id: u32) {
    for (var q = id; q < W; q += INVOCATIONS) {
        row[X + q] = weights[token * W + q] + weights[POSITIONS + length * W + q];
    }
    workgroupBarrier();
    for (var layer = 0u; layer < LAYERS; layer++) {
        let begin = VOCAB * W + layer * LAYER;
        let slot_layer = slot * LAYERS + layer;
        normalise(begin, id);
        for (var first = 0u; first < 3u * A; first += INVOCATIONS) {
            var y = product(begin + QKV, W, 3u * A, IN, first, id);
            let q = first + id;
            if id < min(3u * A, INVOCATIONS) && q < 3u * A {
                if BIAS == 1u { y += weights[begin + QKV_BIAS + q]; }
                if q < A {
                    row[WIDE + q] = y * params.scale;
                } else if q < 2u * A {
                    keys[(slot_layer * A + q - A) * params.capacity + length] = to_cache(y);
                } else {
                    values[(slot_layer * params.capacity + length) * A + q - 2u * A] = to_cache(y);
                }
            }
            workgroupBarrier();
        }
        storageBarrier();
        attend(slot_layer, length, id);
        add_product(begin + PROJ, begin + PROJ_BIAS, A, IN, id);
        normalise(begin + LN_2, id);
        for (var first = 0u; first < WIDTH; first += INVOCATIONS) {
            var y = product(begin + FC, W, WIDTH, IN, first, id);
            let q = first + id;
            if id < min(WIDTH, INVOCATIONS) && q < WIDTH {
                if BIAS == 1u { y += weights[begin + FC_BIAS + q]; }
                row[WIDE + q] = gelu(y);
            }
            workgroupBarrier();
        }
        add_product(begin + OUT, begin + OUT_BIAS, WIDTH, WIDE, id);
    }
}

// The logits of x to `numbers` and to the slot.
fn find_logits(slot: u32, id: u32) {
    normalise(LN_F, id);
    for (var first = 0u; first < V; first += INVOCATIONS) {
        let y = product(HEAD, W, V, IN, first, id);
        let q = first + id;
        if id < min(V, INVOCATIONS) && q < V {
            for (var i = 0u; i < 4u; i++) {
                let token = 4u * q + i;
                if token < VOCAB {
                    numbers[token] = y[i];
                    logits[slot * VOCAB + token] = y[i];
                }
            }
        }
        workgroupBarrier();
    }
}

// The smallest weight that top_k keeps: of each weight, those above it and as large as it are counted, so that
// nothing is sorted. All tokens that have it are kept.
fn least_of_top_k(top_k: f32, id: u32) -> f32 {
    var least = 0.0;
    for (var i = id; i < VOCAB; i += INVOCATIONS) {
        let w = numbers[i];
        var above = 0u;
        var as_large = 0u;
        for (var j = 0u; j < VOCAB; j++) {
            above += u32(numbers[j] > w);
            as_large += u32(numbers[j] >= w);
        }
        if f32(above) < top_k && top_k <= f32(as_large) { least = w; }
    }
    return largest(vec2f(least, 0), id).x;
}

// Sets the weights to 0 that typical_p leaves out: whose logarithm is far from its mean. Those below `least` are
// left out before.
fn keep_typical(typical_p: f32, least: f32, id: u32) {
    var sum = 0.0;
    var weighted = 0.0;
    for (var i = id; i < VOCAB; i += INVOCATIONS) {
        let w = numbers[i];
        if w > 0.0 && w >= least {
            sum += w;
            weighted += w * numbers[VOCAB + i];
        }
    }
    let all = total(sum, id);
    let mean = total(weighted, id) / all;
    var farthest = 0.0;
    for (var i = id; i < VOCAB; i += INVOCATIONS) {
        let w = numbers[i];
        if w > 0.0 && w >= least {
            let distance = abs(numbers[VOCAB + i] - mean);
            var nearer = 0.0;
            for (var j = 0u; j < VOCAB; j++) {
                let other = numbers[j];
                if other > 0.0 && other >= least && abs(numbers[VOCAB + j] - mean) < distance { nearer += other; }
            }
            if nearer < typical_p * all { farthest = max(farthest, distance); }
        }
    }
    farthest = largest(vec2f(farthest, 0), id).x;
    for (var i = id; i < VOCAB; i += INVOCATIONS) {
        if numbers[i] < least || abs(numbers[VOCAB + i] - mean) > farthest { numbers[i] = 0.0; }
    }
    workgroupBarrier();
}

// The smallest weight that top_p keeps of those that are at least `least`.
fn least_of_top_p(top_p: f32, least: f32, id: u32) -> f32 {
    var sum = 0.0;
    for (var i = id; i < VOCAB; i += INVOCATIONS) { sum += select(0.0, numbers[i], numbers[i] >= least); }
    let all = total(sum, id);
    var lowest = 2.0;
    for (var i = id; i < VOCAB; i += INVOCATIONS) {
        let w = numbers[i];
        if w >= least {
            var above = 0.0;
            for (var j = 0u; j < VOCAB; j++) { above += select(0.0, numbers[j], numbers[j] > w); }
            if above < top_p * all { lowest = min(lowest, w); }
        }
    }
    return -largest(vec2f(-lowest, 0), id).x;
}

// The token that the text's uniform number falls on, by generation/csrc/sampling.cpp's rules, from the logits in
// `numbers`; to `next`, which is VOCAB if the logits hold NaN, or the largest is infinite.
fn choose(slot: u32, uniform_at: u32, id: u32) {
    let at = slot * SETTINGS;
    let temperature = settings[at];
    let top_k = settings[at + 1u];
    let top_p = settings[at + 2u];
    let min_p = settings[at + 3u];
    let typical_p = settings[at + 4u];
    let repetition = settings[at + 5u];
    let presence = settings[at + 6u];
    let frequency = settings[at + 7u];
    let bias = params.slots * SETTINGS + slot * VOCAB;
    var best = vec2f(-3.4e38, 0);  // the largest; 1 if one is NaN or infinite
    for (var i = id; i < VOCAB; i += INVOCATIONS) {
        var y = numbers[i];
        best.y = max(best.y, f32((bitcast<u32>(y) & 0x7fffffffu) > 0x7f800000u));
        if settings[at + 8u] != 0.0 {
            if repetition != 1.0 && counts[2u * slot * VOCAB + i] > 0u {
                y = select(y * repetition, y / repetition, y > 0.0);
            }
            let written = counts[(2u * slot + 1u) * VOCAB + i];
            if written > 0u { y -= f32(written) * frequency + presence; }
            y += settings[bias + i];
            numbers[i] = y;
        }
        best.y = max(best.y, f32(bitcast<u32>(y) == 0x7f800000u));
        best.x = max(best.x, y);
    }
    best = largest(best, id);
    if id == 0u {
        atomicStore(&found, VOCAB);
        atomicStore(&likely, 0u);
    }
    if temperature == 0.0 {
        workgroupBarrier();
        for (var i = id; i < VOCAB; i += INVOCATIONS) {
            if numbers[i] == best.x { atomicMin(&found, i); }
        }
        workgroupBarrier();
    } else {
        for (var i = id; i < VOCAB; i += INVOCATIONS) {
            let exponent = max((numbers[i] - best.x) * settings[at + 9u], -200.0);
            numbers[i] = exp(exponent);
            numbers[VOCAB + i] = exponent;
        }
        workgroupBarrier();
        var least = 0.0;
        if top_k > 0.0 && top_k < f32(VOCAB) { least = least_of_top_k(top_k, id); }
        if typical_p < 1.0 { keep_typical(typical_p, least, id); }
        if top_p < 1.0 { least = least_of_top_p(top_p, least, id); }
        if min_p > 0.0 {
            var highest = 0.0;
            for (var i = id; i < VOCAB; i += INVOCATIONS) { highest = max(highest, numbers[i]); }
            least = max(least, min_p * largest(vec2f(highest, 0), id).x);
        }
        // Each of 32 invocations has tokens that follow each other.
        let each = (VOCAB + 31u) / 32u;
        if id < 32u {
            var sum = 0.0;
            for (var i = id * each; i < min((id + 1u) * each, VOCAB); i++) {
                sum += select(0.0, numbers[i], numbers[i] >= least);
            }
            lanes[id].x = sum;
        }
        workgroupBarrier();
        if id < 32u {
            var reached = 0.0;
            var all = 0.0;
            for (var i = 0u; i < 32u; i++) {
                if i == id { reached = all; }
                all += lanes[i].x;
            }
            let point = fma(bitcast<f32>(work[uniform_at]), all, bitcast<f32>(work[uniform_at + 1u]) * all);
            for (var i = id * each; i < min((id + 1u) * each, VOCAB); i++) {
                let w = numbers[i];
                if w > 0.0 && w >= least {
                    reached += w;
                    atomicMax(&likely, i);  // if rounding leaves a remainder
                    if reached > point {
                        atomicMin(&found, i);
                        break;
                    }
                }
            }
        }
        workgroupBarrier();
    }
    if id == 0u {
        var token = atomicLoad(&found);
        if token == VOCAB { token = atomicLoad(&likely); }
        let wrong = best.y > 0.0 || best.x <= -3.4e38;
        next = select(token, VOCAB, wrong);
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
            read_token(slot, place, token, id);
            if chooses || params.every != 0u || (step + 1u == count && (flags & LAST) != 0u) {
                find_logits(slot, id);
            }
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
        storageBarrier();
        workgroupBarrier();
    }
}
