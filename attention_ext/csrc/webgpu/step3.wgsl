// Step 3: 4 x 4 scores a thread in registers.
// Shapes: as in step 1. Tiles of BR = 64 queries and BC = 32 keys, smaller if they do not fit.
// Loop nest: the grid and the workgroup as in step 1. A thread has ROWS = 4 rows and four keys of the tile,
//     and ROWS ceil(d / 4 / LANES) fours of O.
// Dispatch: B H ceil(Nq / BR) workgroups of LANES LINES = 8 x 16 threads.
// Workgroup memory: Q, K, V, P, maxima: 28.5 KiB at d = 32, 13.5 KiB with 16 x 32, for a limit of 16.
// Improves on step 2: a number from workgroup memory serves four multiply-adds, and each weight is computed
//     once. A row's threads exchange their maxima through workgroup memory.
// Bound: reads of workgroup memory and instructions: a dot product of four is a multiplication, three
//     multiply-adds and an addition to the score. A tile of keys has four barriers.
// Command: python gpt.py explain part4 --device webgpu -N 256

const BR: u32 = ROWS * LINES;
const BC: u32 = 4 * LANES;
const PITCH: u32 = D4 + 1;  // rows of a column are in different banks
const P_PITCH: u32 = LANES + 1;

var<workgroup> Q: array<vec4f, BR * PITCH>;
var<workgroup> K: array<vec4f, BC * PITCH>;
var<workgroup> V: array<vec4f, BC * D4>;
// Four n of P[i][x] is the weight of key x + n LANES, as that of K and V.
var<workgroup> P: array<vec4f, BR * P_PITCH>;
var<workgroup> M: array<vec4f, LINES * LANES>;  // maxima of a thread's scores

@compute @workgroup_size(LANES * LINES)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u,
        @builtin(local_invocation_index) index: u32) {
    let block = block_of(group, groups, BR);
    if (!block.exists) { return; }
    // A thread's rows are LINES apart and its keys LANES, so neighbours read neighbouring banks.
    let x = index % LANES;
    let y = index / LANES;
    for (var at = index; at < BR * D4; at += LANES * LINES) {
        Q[at / D4 * PITCH + at % D4] = q_at(block.head, block.first_query + at / D4, at % D4);
    }

    var o: array<vec4f, ROWS * WIDTH>;
    var m = vec4f(LOWEST);
    var l: array<f32, ROWS>;  // of this thread's keys; added up at the end
    let all_see = keys_seen(block.first_query);
    let keys = keys_seen(min(block.first_query + BR, call.Nq) - 1);
    for (var j0 = 0u; j0 < keys; j0 += BC) {
        for (var at = index; at < BC * D4; at += LANES * LINES) {
            K[at / D4 * PITCH + at % D4] = k_at(block.head, j0 + at / D4, at % D4);
            V[at] = v_at(block.head, j0 + at / D4, at % D4);
        }
        workgroupBarrier();

        // S <- Q K^T
        var s = array<vec4f, ROWS>();  // naga does not clear a variable of a loop that has no value
        for (var c = 0u; c < D4; c++) {
            let b = mat4x4f(K[x * PITCH + c], K[(x + LANES) * PITCH + c], K[(x + 2 * LANES) * PITCH + c],
                            K[(x + 3 * LANES) * PITCH + c]);
            for (var i = 0u; i < ROWS; i++) {  // unroll
                s[i] += Q[(y + i * LINES) * PITCH + c] * b;  // four dot products
            }
        }
        if (j0 + BC > all_see) {
            for (var i = 0u; i < ROWS; i++) {  // unroll
                let seen = keys_seen(block.first_query + y + i * LINES);
                let key = j0 + x + LANES * vec4u(0, 1, 2, 3);
                s[i] = select(vec4f(LOWEST), s[i], key < vec4u(seen));
            }
        }

        // m <- max(m, rowmax(S)); l and O follow
        var top = vec4f(LOWEST);
        for (var i = 0u; i < ROWS; i++) {  // unroll
            top[i] = max(max(s[i].x, s[i].y), max(s[i].z, s[i].w));
        }
        M[y * LANES + x] = top;
        workgroupBarrier();
        let old = m;
        for (var lane = 0u; lane < LANES; lane++) { m = max(m, M[y * LANES + lane]); }
        let shrink = exp2(old - m);

        // P <- 2^(S - m)
        for (var i = 0u; i < ROWS; i++) {  // unroll
            let p = exp2(s[i] - m[i]);
            P[(y + i * LINES) * P_PITCH + x] = p;
            l[i] = l[i] * shrink[i] + (p.x + p.y + p.z + p.w);
            for (var w = 0u; w < WIDTH; w++) {  // unroll
                o[i * WIDTH + w] *= shrink[i];
            }
        }
        workgroupBarrier();

        // O <- O + P V
        for (var j = 0u; j < LANES; j++) {
            var p = array<vec4f, ROWS>();
            for (var i = 0u; i < ROWS; i++) {  // unroll
                p[i] = P[(y + i * LINES) * P_PITCH + j];
            }
            for (var w = 0u; w < WIDTH; w++) {  // unroll
                let at = j * D4 + min(x + w * LANES, D4 - 1);
                let b = mat4x4f(V[at], V[at + LANES * D4], V[at + 2 * LANES * D4], V[at + 3 * LANES * D4]);
                for (var i = 0u; i < ROWS; i++) {  // unroll
                    o[i * WIDTH + w] = product(p[i], b, o[i * WIDTH + w]);
                }
            }
        }
        workgroupBarrier();  // all threads have read the tiles
    }

    // O <- O / l
    for (var i = 0u; i < ROWS; i++) {  // unroll
        P[(y + i * LINES) * P_PITCH + x].x = l[i];
    }
    workgroupBarrier();
    for (var i = 0u; i < ROWS; i++) {  // unroll
        let query = block.first_query + y + i * LINES;
        if (query < call.Nq) {
            var sum = 0.0;
            for (var lane = 0u; lane < LANES; lane++) { sum += P[(y + i * LINES) * P_PITCH + lane].x; }
            let at = block.head * call.Nq + query;
            for (var w = 0u; w < WIDTH; w++) {  // unroll
                if (x + w * LANES < D4) { result[at * D4 + x + w * LANES] = Stored(o[i * WIDTH + w] / sum); }
            }
            if (x == 0) { lse[at] = LN2 * m[i] + log(sum); }
        }
    }
}
