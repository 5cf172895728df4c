// Shared by all steps: the call, the masks and the tiles' places. The host puts in front of it
//   Stored                  vec4<f32> or vec4<f16>: four numbers of q, k, v and the output
//   D4                      fours of a row; the host pads d to a multiple of 4 with zeros
//   LANES, LINES            threads beside each other, threads below each other; ROWS, KEYS: of a thread
//   WIDTH                   fours of O in each row of a thread
//   COLUMNS, SOME           columns of Q and K, and keys of P and V, that a loop takes at a time
// and `enable f16;` or, for browsers, `enable subgroups;` where a step needs it. It writes out loops marked
// `unroll`: drivers keep an array in registers only if all its indices are constant.

// softmax(scale q k^T) v for every head of every batch. q and the output are (heads, Nq, 4 D4); k and v are
// (heads, Nk, 4 D4); lse is (heads, Nq), each row's logsumexp.
struct Call {
    heads: u32,
    Nq: u32,
    Nk: u32,
    causal: u32,  // 1: query i sees the keys j <= i + Nk - Nq; 0: it sees all
    first: u32,  // number of the dispatch's first workgroup, of those of the call
    scale: f32,  // of the scores, times log2(e): the softmax takes powers of two
}

@group(0) @binding(0) var<storage, read> q: array<Stored>;
@group(0) @binding(1) var<storage, read> k: array<Stored>;
@group(0) @binding(2) var<storage, read> v: array<Stored>;
@group(0) @binding(3) var<storage, read_write> result: array<Stored>;
@group(0) @binding(4) var<storage, read_write> lse: array<f32>;
@group(0) @binding(5) var<uniform> call: Call;

const LN2: f32 = 0.6931471805599453;
// For -infinity, which WGSL lacks: a masked score, the first m. A row sees a key of its first tile.
const LOWEST: f32 = -3.4e38;

// A tile of queries of a head. The grid may have more workgroups than there are tiles.
struct Block {
    head: u32,
    first_query: u32,
    exists: bool,
}

// The workgroup's tile. A dispatch has at most 65,535 workgroups in a dimension, so two are used.
// With a causal mask the tiles with most keys come first.
fn block_of(group: vec3u, groups: vec3u, rows: u32) -> Block {
    let number = call.first + group.y * groups.x + group.x;
    let tiles = (call.Nq + rows - 1) / rows;
    let tile = number % tiles;
    let head = number / tiles;
    return Block(head, rows * select(tile, tiles - 1 - tile, call.causal == 1), head < call.heads);
}

// A query sees this many keys, the first ones.
fn keys_seen(query: u32) -> u32 {
    return select(call.Nk, min(query + 1 + call.Nk - call.Nq, call.Nk), call.causal == 1);
}

// Four numbers of a row of q, times the scale, of k and of v; rows past the end are 0.
fn q_at(head: u32, query: u32, c: u32) -> vec4f {
    if (query >= call.Nq) { return vec4f(); }
    return call.scale * vec4f(q[(head * call.Nq + query) * D4 + c]);
}

fn k_at(head: u32, key: u32, c: u32) -> vec4f {
    if (key >= call.Nk) { return vec4f(); }
    return vec4f(k[(head * call.Nk + key) * D4 + c]);
}

fn v_at(head: u32, key: u32, c: u32) -> vec4f {
    if (key >= call.Nk) { return vec4f(); }
    return vec4f(v[(head * call.Nk + key) * D4 + c]);
}

// a.x b[0] + a.y b[1] + a.z b[2] + a.w b[3] + sum: 16 multiply-adds
fn product(a: vec4f, b: mat4x4f, sum: vec4f) -> vec4f {
    return fma(vec4f(a.w), b[3], fma(vec4f(a.z), b[2], fma(vec4f(a.y), b[1], fma(vec4f(a.x), b[0], sum))));
}
