// Shared by steps 4 to 6: a tile by columns. A step adds main(), which calls attend(), and
//   Held                    four numbers of K, V and P in workgroup memory
//   put, got                four numbers of each thread in workgroup memory, while neither P nor V is read
//   highest                 the maxima of four rows over the LANES threads that share them; it ends with K's tile read

const BR: u32 = 4 * LINES;
const BC: u32 = KEYS * LANES;
const PART: u32 = BC / 2;  // keys whose weights are in P
const K_ROW: u32 = BC / 4;
const P_ROW: u32 = LINES + 1;  // rows of neighbouring keys are in different banks
const CHAIN: u32 = 64;  // columns of a partial sum; longer sums have a larger rounding error

// Q[c][y] is column c of four queries from 4 y on.
var<workgroup> Q: array<vec4f, 4 * D4 * LINES>;
// K[c][x + g LANES] is column c of the keys x + (4 g + n) LANES, n = 0 ... 3. Then V, by rows.
var<workgroup> KV: array<Held, BC * D4>;
// P[j][y] has the weights of key j for four queries from 4 y on.
var<workgroup> P: array<Held, PART * P_ROW>;

// The maxima of four rows, through workgroup memory.
fn highest_by_memory(own: vec4f, x: u32, y: u32) -> vec4f {
    put(y * LANES + x, own);
    workgroupBarrier();  // K's tile has been read, too
    var top = own;
    for (var other = 0u; other < LANES; other++) { top = max(top, got(y * LANES + other)); }
    return top;
}

// A tile of queries. by_lanes: whether the threads of a row are neighbours in a subgroup.
fn attend(group: vec3u, groups: vec3u, index: u32, by_lanes: bool) {
    let block = block_of(group, groups, BR);
    if (!block.exists) { return; }
    // A thread's keys are LANES apart. Threads 2 i and 2 i + 1 share keys: NVIDIA reads them once for both.
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
                KV[(4 * c + e) * K_ROW + at % K_ROW] = Held(b[e]);
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
        top = highest(top, x, y, by_lanes);
        for (var at = index; at < BC * D4; at += LANES * LINES) {
            KV[at] = Held(v_at(block.head, j0 + at / D4, at % D4));
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
                let p = Held(exp2(s[h * KEYS / 2 + n] - m));
                P[(n * LANES + x) * P_ROW + y] = p;
                l += vec4f(p);  // as it is held
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
    put(y * LANES + x, l);
    workgroupBarrier();
    var sum = vec4f();
    for (var other = 0u; other < LANES; other++) { sum += got(y * LANES + other); }
    for (var i = 0u; i < 4u; i++) {  // unroll
        if (first_row + i < call.Nq) {
            let at = block.head * call.Nq + first_row + i;
            for (var w = 0u; w < WIDTH; w++) {  // unroll
                if (x + w * LANES < D4) {
                    let row = vec4f(o[4 * w][i], o[4 * w + 1][i], o[4 * w + 2][i], o[4 * w + 3][i]);
                    result[at * D4 + x + w * LANES] = Stored(row / sum[i]);
                }
            }
            if (x == 0) { lse[at] = LN2 * m[i] + log(sum[i]); }
        }
    }
}
