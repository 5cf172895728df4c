// Step 2: tiles of Q, K and V in workgroup memory.
// Shapes, loop nest: as in step 1. Tiles of 8 x 8 at d = 32, 16 x 16 at d = 64, smaller if they do not fit.
// Dispatch: B H ceil(Nq / BR) workgroups of LANES LINES threads, one for each score of a tile.
// Workgroup memory: Q, K, V and S, 16 (BR + 2 BC) (d / 4 + 1) + 4 BR BC bytes; 3.6 KiB at d = 32.
// Improves on step 1: a tile reads storage once: 8.25 MiB, not 96 MiB, for 4 heads of N = 256 and d = 32.
// Bound: reads of workgroup memory, two numbers a multiply-add. Each thread recomputes its row's weights.
// Command: python gpt.py explain part4 --device webgpu -N 256

const BR: u32 = LINES;
const BC: u32 = LANES;
const PITCH: u32 = D4 + 1;  // rows of a column are in different banks

var<workgroup> Q: array<vec4f, BR * PITCH>;
var<workgroup> K: array<vec4f, BC * PITCH>;
var<workgroup> V: array<vec4f, BC * PITCH>;
var<workgroup> S: array<f32, BR * BC>;

@compute @workgroup_size(LANES * LINES)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u,
        @builtin(local_invocation_index) index: u32) {
    let block = block_of(group, groups, BR);
    if (!block.exists) { return; }
    let x = index % LANES;
    let y = index / LANES;
    let query = block.first_query + y;
    let seen = keys_seen(query);
    for (var at = index; at < BR * D4; at += LANES * LINES) {
        Q[at / D4 * PITCH + at % D4] = q_at(block.head, block.first_query + at / D4, at % D4);
    }

    var o: array<vec4f, WIDTH>;
    var m = LOWEST;
    var l = 0.0;
    let keys = keys_seen(min(block.first_query + BR, call.Nq) - 1);
    for (var j0 = 0u; j0 < keys; j0 += BC) {
        for (var at = index; at < BC * D4; at += LANES * LINES) {
            K[at / D4 * PITCH + at % D4] = k_at(block.head, j0 + at / D4, at % D4);
            V[at / D4 * PITCH + at % D4] = v_at(block.head, j0 + at / D4, at % D4);
        }
        workgroupBarrier();

        var s = 0.0;
        for (var c = 0u; c < D4; c++) { s += dot(Q[y * PITCH + c], K[x * PITCH + c]); }
        S[y * BC + x] = select(LOWEST, s, j0 + x < seen);
        workgroupBarrier();

        let old = m;
        for (var j = 0u; j < BC; j++) { m = max(m, S[y * BC + j]); }
        let shrink = exp2(old - m);
        l *= shrink;
        for (var w = 0u; w < WIDTH; w++) { o[w] *= shrink; }
        for (var j = 0u; j < BC; j++) {
            let p = exp2(S[y * BC + j] - m);
            l += p;
            for (var w = 0u; w < WIDTH; w++) { o[w] += p * V[j * PITCH + min(x + w * LANES, D4 - 1)]; }
        }
        workgroupBarrier();  // all threads have read the tiles
    }

    if (query >= call.Nq) { return; }
    let at = block.head * call.Nq + query;
    for (var w = 0u; w < WIDTH; w++) {
        if (x + w * LANES < D4) { result[at * D4 + x + w * LANES] = Stored(o[w] / l); }
    }
    if (x == 0) { lse[at] = LN2 * m + log(l); }
}
