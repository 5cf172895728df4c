// Step 5: the maxima of rows by subgroups.
//
// Shapes, loop nest and dispatch: as in step 4.
// Workgroup memory: Q, K, V and P, 26 KiB at d = 32 and 42 KiB at d = 64.
// Improves on step 4: a row's lanes exchange their maxima by shuffles. K and V are loaded together, and a
//     tile of keys has three barriers. Where the lanes of a row are not neighbours in one subgroup, the
//     maxima pass through P, with two more barriers.
// Bound: as in step 4.
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
// K, transposed: K[c][x] is column c of the keys x + n LANES, n = 0 ... 3.
var<workgroup> K: array<vec4f, SLAB>;
var<workgroup> V: array<vec4f, SLAB>;
// P[i][x] has the weights of the keys x + n LANES.
var<workgroup> P: array<vec4f, BR * P_PITCH>;
var<workgroup> scattered: atomic<u32>;  // threads whose row is not in LANES neighbouring lanes
var<workgroup> together: u32;

@compute @workgroup_size(LANES * LINES)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u,
        @builtin(local_invocation_index) index: u32,
        @builtin(subgroup_invocation_id) lane: u32, @builtin(subgroup_size) size: u32) {
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

    // WGSL does not say which invocations form a subgroup, and a subgroup has 4 to 128 of them.
    if (size < LANES || lane != index % size) {
        atomicAdd(&scattered, 1u);
    }
    workgroupBarrier();
    if (index == 0) {
        together = select(0u, 1u, atomicLoad(&scattered) == 0);
    }
    let by_lanes = workgroupUniformLoad(&together) == 1;

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
            K[to] = b[0];
            K[to + LANES] = b[1];
            K[to + 2 * LANES] = b[2];
            K[to + 3 * LANES] = b[3];
        }
        for (var at = index; at < SLAB; at += LANES * LINES) {
            V[at] = v_at(block.head, j0 + at / D4, at % D4);
        }
        workgroupBarrier();

        // S <- Q K^T
        var s = array<vec4f, ROWS>();  // naga does not clear a variable of a loop that has no value
        for (var c0 = 0u; c0 < D4; c0 += CHAIN) {
            var part = array<vec4f, ROWS>();
            for (var c = c0; c < min(c0 + CHAIN, D4); c++) {
                let at = 4 * c * LANES + x;
                let b = mat4x4f(K[at], K[at + LANES], K[at + 2 * LANES], K[at + 3 * LANES]);
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
        if (by_lanes) {
            for (var i = 0u; i < FOURS; i++) {
                for (var far = LANES / 2; far > 0; far /= 2) {
                    top[i] = max(top[i], subgroupShuffleXor(top[i], far));
                }
            }
        } else {
            for (var i = 0u; i < FOURS; i++) {
                P[(y + i * LINES) * P_PITCH + x] = top[i];
            }
            workgroupBarrier();
            for (var i = 0u; i < FOURS; i++) {
                for (var other = 0u; other < LANES; other++) {
                    top[i] = max(top[i], P[(y + i * LINES) * P_PITCH + other]);
                }
            }
            workgroupBarrier();
        }
        var shrink = array<vec4f, FOURS>();
        for (var i = 0u; i < FOURS; i++) {
            top[i] = max(top[i], m[i]);
            shrink[i] = exp2(m[i] - top[i]);
            m[i] = top[i];
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
                let b = mat4x4f(V[at], V[at + LANES * D4], V[at + 2 * LANES * D4], V[at + 3 * LANES * D4]);
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
            for (var other = 0u; other < LANES; other++) {
                sum += P[(y + i * LINES) * P_PITCH + other].x;
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
