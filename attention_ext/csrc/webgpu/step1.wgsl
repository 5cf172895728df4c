// Step 1: a thread for each score; Q, K and V are read from storage buffers.
// Source: Dao 2023, arXiv:2307.08691, Algorithm 1.
// Shapes: q and output (B H, Nq, d), k and v (B H, Nk, d); d a multiple of 4 up to 256. BR = 32, BC = 8.
// Loop nest: the grid goes over (batch, head) and tiles of queries, a workgroup over tiles of keys. A
//     thread computes one score, then ceil(d / 4 / LANES) fours of O in its registers.
// Dispatch: B H ceil(Nq / BR) workgroups of LANES LINES = 8 x 32 threads.
// Workgroup memory: S, 4 BR BC bytes; 1 KiB.
// Improves on the sequential loop: all scores of a tile are computed at once, and no N x N matrix exists.
// Bound: storage. Each multiply-add reads both its numbers there: 96 MiB for 4 heads of N = 256 and d = 32.
// Command: python gpt.py explain part4 --device webgpu -N 256

const BR: u32 = LINES;
const BC: u32 = LANES;

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

    var o: array<vec4f, WIDTH>;
    var m = LOWEST;
    var l = 0.0;
    let keys = keys_seen(min(block.first_query + BR, call.Nq) - 1);
    for (var j0 = 0u; j0 < keys; j0 += BC) {
        var s = 0.0;
        for (var c = 0u; c < D4; c++) { s += dot(q_at(block.head, query, c), k_at(block.head, j0 + x, c)); }
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
            for (var w = 0u; w < WIDTH; w++) {
                o[w] += p * v_at(block.head, j0 + j, min(x + w * LANES, D4 - 1));
            }
        }
        workgroupBarrier();  // all threads have read S
    }

    if (query >= call.Nq) { return; }
    let at = block.head * call.Nq + query;
    for (var w = 0u; w < WIDTH; w++) {
        if (x + w * LANES < D4) { result[at * D4 + x + w * LANES] = Stored(o[w] / l); }
    }
    if (x == 0) { lse[at] = LN2 * m + log(l); }
}
