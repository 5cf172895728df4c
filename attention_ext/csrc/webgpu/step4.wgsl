// Step 4: 8 x 4 scores a thread; K is transposed, and K and V take turns in one place.
//
// Shapes: as in step 1. Tiles of BR = 64 queries and BC = 32 keys, fewer where they do not fit.
// Loop nest: as in step 3, with ROWS = 8.
// Dispatch: B H ceil(Nq / BR) workgroups of LANES LINES = 8 x 8 threads.
// Workgroup memory: Q, K or V, P and the maxima, 24 KiB at d = 32 and 36 KiB at d = 64; where an adapter
//     allows 16 KiB, 14 KiB at d = 32 with tiles of 32 x 32.
// Improves on step 3: a number of K or V serves eight multiply-adds. With a column of K for four keys in a
//     vector, all products are multiply-adds. V is loaded after the barrier at which the maxima are
//     exchanged, because K has been read then, so the second place needs no barrier of its own.
// Bound: multiply-adds and reads of workgroup memory, which overlap if enough workgroups are resident. A
//     tile of keys has four barriers.
// Command: python gpt.py explain part4 --device webgpu -N 256

const BR: u32 = ROWS * LINES;
const BC: u32 = 4 * LANES;
const WIDTH: u32 = (D4 + LANES - 1) / LANES;  // fours of O for each row of a thread
const PITCH: u32 = D4 + 1;  // rows of a column are in different banks
const P_PITCH: u32 = LANES + 1;
const SLAB: u32 = BC * D4;
const CHAIN: u32 = 16;  // fours that are added one after the other: a longer sum rounds more often
const FOURS: u32 = (ROWS + 3) / 4;  // of a thread's rows

var<workgroup> Q: array<vec4f, BR * PITCH>;
// K, transposed: KV[c][x] is column c of the keys x + n LANES, n = 0 ... 3. Then V, by rows.
var<workgroup> KV: array<vec4f, SLAB>;
// P[i][x] has the weights of the keys x + n LANES.
var<workgroup> P: array<vec4f, BR * P_PITCH>;
var<workgroup> M: array<vec4f, FOURS * LINES * LANES>;  // maxima of a thread's scores

@compute @workgroup_size(LANES * LINES)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u,
        @builtin(local_invocation_index) index: u32) {
    let block = block_of(group, groups, BR);
    if (!block.exists) {
        return;
    }
    // A thread's rows are LINES apart and its keys LANES, so neighbours read neighbouring banks.
    let x = index % LANES;
    let y = index / LANES;
    for (var at = index; at < BR * D4; at += LANES * LINES) {
        Q[at / D4 * PITCH + at % D4] = q_at(block.head, block.first_query + at / D4, at % D4);
    }

    var o: array<vec4f, ROWS * WIDTH>;
    var m: array<vec4f, FOURS>;
    var l: array<f32, ROWS>;  // of this thread's keys; added up at the end
    for (var i = 0u; i < FOURS; i++) {
        m[i] = vec4f(LOWEST);
    }
    let all_see = keys_seen(block.first_query);
    let keys = keys_seen(min(block.first_query + BR, call.Nq) - 1);
    for (var j0 = 0u; j0 < keys; j0 += BC) {
        for (var at = index; at < LANES * D4; at += LANES * LINES) {
            let key = j0 + at % LANES;
            let c = at / LANES;
            let b = transpose(mat4x4f(k_at(block.head, key, c), k_at(block.head, key + LANES, c),
                                      k_at(block.head, key + 2 * LANES, c),
                                      k_at(block.head, key + 3 * LANES, c)));
            let to = 4 * c * LANES + at % LANES;
            KV[to] = b[0];
            KV[to + LANES] = b[1];
            KV[to + 2 * LANES] = b[2];
            KV[to + 3 * LANES] = b[3];
        }
        workgroupBarrier();

        // S <- Q K^T
        var s = array<vec4f, ROWS>();  // naga does not clear a variable of a loop that has no value
        for (var c0 = 0u; c0 < D4; c0 += CHAIN) {
            var part = array<vec4f, ROWS>();
            for (var c = c0; c < min(c0 + CHAIN, D4); c++) {
                let at = 4 * c * LANES + x;
                let b = mat4x4f(KV[at], KV[at + LANES], KV[at + 2 * LANES], KV[at + 3 * LANES]);
                for (var i = 0u; i < ROWS; i++) {
                    part[i] = product(Q[(y + i * LINES) * PITCH + c], b, part[i]);
                }
            }
            for (var i = 0u; i < ROWS; i++) {
                s[i] += part[i];
            }
        }
        if (j0 + BC > all_see) {
            for (var i = 0u; i < ROWS; i++) {
                let seen = keys_seen(block.first_query + y + i * LINES);
                let key = j0 + x + LANES * vec4u(0, 1, 2, 3);
                s[i] = select(vec4f(LOWEST), s[i], key < vec4u(seen));
            }
        }

        // m <- max(m, rowmax(S)); l and O follow
        var top = array<vec4f, FOURS>();
        for (var i = 0u; i < ROWS; i++) {
            top[i / 4][i % 4] = max(max(s[i].x, s[i].y), max(s[i].z, s[i].w));
        }
        for (var i = 0u; i < FOURS; i++) {
            M[(i * LINES + y) * LANES + x] = top[i];
        }
        workgroupBarrier();  // K's tile has been read, too
        for (var at = index; at < SLAB; at += LANES * LINES) {
            KV[at] = v_at(block.head, j0 + at / D4, at % D4);
        }
        var shrink = array<vec4f, FOURS>();
        for (var i = 0u; i < FOURS; i++) {
            let old = m[i];
            for (var lane = 0u; lane < LANES; lane++) {
                m[i] = max(m[i], M[(i * LINES + y) * LANES + lane]);
            }
            shrink[i] = exp2(old - m[i]);
        }

        // P <- 2^(S - m)
        for (var i = 0u; i < ROWS; i++) {
            let p = exp2(s[i] - m[i / 4][i % 4]);
            P[(y + i * LINES) * P_PITCH + x] = p;
            l[i] = l[i] * shrink[i / 4][i % 4] + (p.x + p.y + p.z + p.w);
            for (var w = 0u; w < WIDTH; w++) {
                o[i * WIDTH + w] *= shrink[i / 4][i % 4];
            }
        }
        workgroupBarrier();

        // O <- O + P V
        for (var j = 0u; j < LANES; j++) {
            var p = array<vec4f, ROWS>();
            for (var i = 0u; i < ROWS; i++) {
                p[i] = P[(y + i * LINES) * P_PITCH + j];
            }
            for (var w = 0u; w < WIDTH; w++) {
                let at = j * D4 + min(x + w * LANES, D4 - 1);
                let b = mat4x4f(KV[at], KV[at + LANES * D4], KV[at + 2 * LANES * D4],
                                KV[at + 3 * LANES * D4]);
                for (var i = 0u; i < ROWS; i++) {
                    o[i * WIDTH + w] = product(p[i], b, o[i * WIDTH + w]);
                }
            }
        }
        workgroupBarrier();  // all threads have read the tiles
    }

    // O <- O / l
    for (var i = 0u; i < ROWS; i++) {
        P[(y + i * LINES) * P_PITCH + x].x = l[i];
    }
    workgroupBarrier();
    for (var i = 0u; i < ROWS; i++) {
        let query = block.first_query + y + i * LINES;
        if (query < call.Nq) {
            var sum = 0.0;
            for (var lane = 0u; lane < LANES; lane++) {
                sum += P[(y + i * LINES) * P_PITCH + lane].x;
            }
            let at = block.head * call.Nq + query;
            for (var w = 0u; w < WIDTH; w++) {
                if (x + w * LANES < D4) {
                    result[at * D4 + x + w * LANES] = Stored(o[i * WIDTH + w] / sum);
                }
            }
            if (x == 0) {
                lse[at] = LN2 * m[i / 4][i % 4] + log(sum);
            }
        }
    }
}
