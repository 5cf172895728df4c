// Step 6: K, V and P as float16 in workgroup memory.
//
// Shapes, loop nest and dispatch: as in step 4. q, k, v and the output are float16, or float32 if it is
//     asked for by name; then K, V and the weights are rounded. Values beyond 65,504 become infinity.
// Workgroup memory: Q in float32; K or V, and half of P; the maxima or sums: 32.3 KiB at d = 32.
// Improves on step 5: half the bytes of K, V and P. Products and sums are float32's, so the result errs by
//     the rounding of its inputs and weights alone.
// Bound: multiply-adds, and a conversion for every number that is read.
// Command: python gpt.py explain part4 --device webgpu -N 256

const BR: u32 = 4 * LINES;
const BC: u32 = KEYS * LANES;
const PART: u32 = BC / 2;  // keys whose weights are in P
const K_ROW: u32 = BC / 4;
const P_ROW: u32 = LINES + 1;  // rows of neighbouring keys are in different banks
const CHAIN: u32 = 64;  // columns that are added one after the other: a longer sum rounds more often

// Q[c][y] is column c of four queries from 4 y on.
var<workgroup> Q: array<vec4f, 4 * D4 * LINES>;
// K[c][x + g LANES] is column c of the keys x + (4 g + n) LANES, n = 0 ... 3. Then V, by rows.
var<workgroup> KV: array<vec4<f16>, BC * D4>;
// P[j][y] has the weights of key j for four queries from 4 y on.
var<workgroup> P: array<vec4<f16>, PART * P_ROW>;
var<workgroup> sums: array<vec4f, LANES * LINES>;  // maxima of a thread; at the end its sums
var<workgroup> scattered: atomic<u32>;  // threads whose row is not in 2 LANES neighbouring lanes
var<workgroup> together: u32;

@compute @workgroup_size(LANES * LINES)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u,
        @builtin(local_invocation_index) index: u32,
        @builtin(subgroup_invocation_id) lane: u32, @builtin(subgroup_size) size: u32) {
    let block = block_of(group, groups, BR);
    if (!block.exists) {
        return;
    }
    // A thread's keys are LANES apart. Threads 2 i and 2 i + 1 have the same keys and other rows: NVIDIA reads 16
    // bytes once for both.
    let x = index / 2 % LANES;
    let y = index / (2 * LANES) * 2 + index % 2;
    for (var at = index; at < LINES * D4; at += LANES * LINES) {
        let query = block.first_query + at % LINES * 4;
        let c = at / LINES;
        let b = transpose(mat4x4f(q_at(block.head, query, c), q_at(block.head, query + 1, c),
                                  q_at(block.head, query + 2, c), q_at(block.head, query + 3, c)));
        for (var e = 0u; e < 4u; e++) {  // unroll
            Q[(4 * c + e) * LINES + at % LINES] = b[e];
        }
    }

    // WGSL does not say which invocations form a subgroup, and a subgroup has 4 to 128 of them.
    if (size < 2 * LANES || lane != index % size) {
        atomicAdd(&scattered, 1u);
    }
    workgroupBarrier();
    if (index == 0) {
        together = select(0u, 1u, atomicLoad(&scattered) == 0);
    }
    let by_lanes = workgroupUniformLoad(&together) == 1;

    var o: array<vec4f, 4 * WIDTH>;  // a column of the four rows each
    var m = vec4f(LOWEST);
    var l = vec4f();  // of this thread's keys; added up at the end
    let first_row = block.first_query + 4 * y;
    let all_see = keys_seen(block.first_query);
    let keys = keys_seen(min(block.first_query + BR, call.Nq) - 1);
    for (var j0 = 0u; j0 < keys; j0 += BC) {
        for (var at = index; at < K_ROW * D4; at += LANES * LINES) {
            let key = j0 + at % LANES + at / LANES % (KEYS / 4) * 4 * LANES;
            let c = at / K_ROW;
            let b = transpose(mat4x4f(k_at(block.head, key, c), k_at(block.head, key + LANES, c),
                                      k_at(block.head, key + 2 * LANES, c),
                                      k_at(block.head, key + 3 * LANES, c)));
            for (var e = 0u; e < 4u; e++) {  // unroll
                KV[(4 * c + e) * K_ROW + at % K_ROW] = vec4<f16>(b[e]);
            }
        }
        workgroupBarrier();

        // S <- Q K^T
        var s = array<vec4f, KEYS>();  // naga does not clear a variable of a loop that has no value
        var chains = array<vec4f, KEYS>();
        for (var c0 = 0u; c0 < 4 * D4; c0 += COLUMNS) {
            for (var i = 0u; i < COLUMNS; i++) {  // unroll
                let a = Q[(c0 + i) * LINES + y];
                for (var g = 0u; g < KEYS / 4; g++) {  // unroll
                    let b = vec4f(KV[(c0 + i) * K_ROW + g * LANES + x]);
                    for (var n = 0u; n < 4u; n++) {  // unroll
                        s[4 * g + n] = fma(a, vec4f(b[n]), s[4 * g + n]);
                    }
                }
            }
            if (4 * D4 > CHAIN && (c0 + COLUMNS) % CHAIN == 0) {
                for (var n = 0u; n < KEYS; n++) {  // unroll
                    chains[n] += s[n];
                    s[n] = vec4f();
                }
            }
        }
        for (var n = 0u; n < KEYS; n++) {  // unroll
            s[n] += chains[n];
        }
        if (j0 + BC > all_see) {
            let seen = vec4u(keys_seen(first_row), keys_seen(first_row + 1), keys_seen(first_row + 2),
                             keys_seen(first_row + 3));
            for (var n = 0u; n < KEYS; n++) {  // unroll
                s[n] = select(vec4f(LOWEST), s[n], vec4u(j0 + n * LANES + x) < seen);
            }
        }

        // m <- max(m, rowmax(S)); l and O follow
        var top = m;
        for (var n = 0u; n < KEYS; n++) {  // unroll
            top = max(top, s[n]);
        }
        if (by_lanes) {
            for (var far = LANES; far > 1; far /= 2) {
                top = max(top, subgroupShuffleXor(top, far));
            }
        } else {
            sums[y * LANES + x] = top;
            workgroupBarrier();
            for (var other = 0u; other < LANES; other++) {
                top = max(top, sums[y * LANES + other]);
            }
        }
        workgroupBarrier();  // K's tile has been read
        for (var at = index; at < BC * D4; at += LANES * LINES) {
            KV[at] = vec4<f16>(v_at(block.head, j0 + at / D4, at % D4));
        }
        let shrink = exp2(m - top);
        m = top;
        l *= shrink;
        for (var w = 0u; w < 4 * WIDTH; w++) {  // unroll
            o[w] *= shrink;
        }

        for (var h = 0u; h < 2u; h++) {  // unroll
            // P <- 2^(S - m), for half of the keys
            for (var n = 0u; n < KEYS / 2; n++) {  // unroll
                let rounded = vec4<f16>(exp2(s[h * KEYS / 2 + n] - m));
                P[(n * LANES + x) * P_ROW + y] = rounded;
                l += vec4f(rounded);  // the sum is that of the rounded weights
            }
            workgroupBarrier();

            // O <- O + P V
            for (var i0 = 0u; i0 < PART; i0 += SOME) {
                for (var i = 0u; i < SOME; i++) {  // unroll
                    let p = vec4f(P[(i0 + i) * P_ROW + y]);
                    for (var w = 0u; w < WIDTH; w++) {  // unroll
                        let b = vec4f(KV[(h * PART + i0 + i) * D4 + min(x + w * LANES, D4 - 1)]);
                        for (var e = 0u; e < 4u; e++) {  // unroll
                            o[4 * w + e] = fma(p, vec4f(b[e]), o[4 * w + e]);
                        }
                    }
                }
            }
            workgroupBarrier();  // all threads have read P, and at last V
        }
    }

    // O <- O / l
    sums[y * LANES + x] = l;
    workgroupBarrier();
    var sum = vec4f();
    for (var other = 0u; other < LANES; other++) {
        sum += sums[y * LANES + other];
    }
    for (var i = 0u; i < 4u; i++) {  // unroll
        if (first_row + i < call.Nq) {
            let at = block.head * call.Nq + first_row + i;
            for (var w = 0u; w < WIDTH; w++) {  // unroll
                if (x + w * LANES < D4) {
                    let row = vec4f(o[4 * w][i], o[4 * w + 1][i], o[4 * w + 2][i], o[4 * w + 3][i]);
                    result[at * D4 + x + w * LANES] = Stored(row / sum[i]);
                }
            }
            if (x == 0) {
                lse[at] = LN2 * m[i] + log(sum[i]);
            }
        }
    }
}
