// Step 4: up to 4 x 8 scores a thread, Q, K and P by columns; K and V share one place. See columns.wgsl.
// Shapes: as in step 1. Tiles of 128 x 64 at d = 32, and of 64 x 64 at d = 64; smaller if they do not fit.
// Loop nest: as in step 3. A thread has four rows, the components of a vector, and KEYS keys of the tile: 8 at
//     d = 32, 4 at d = 64. It has ceil(d / 4 / LANES) fours of O in each row.
// Dispatch: B H ceil(Nq / BR) workgroups of LANES LINES threads: 8 x 32 at d = 32, 16 x 16 at d = 64.
// Workgroup memory: Q, K or V, half of P, maxima: 44.5 KiB at d = 32; 14.8 with 48 x 32, for a limit of 16.
// Improves on step 3: a column of Q and K takes 4 + KEYS reads for 4 KEYS products, all vector multiply-adds;
//     m, l and a key's weights are vectors of rows. Few numbers are read ahead, so registers do not spill.
//     V replaces K after the barrier of the maxima, and P goes by halves: more threads share a tile.
// Bound: multiply-adds and workgroup reads, which overlap across workgroups. A tile has six barriers.
// Command: python gpt.py explain part4 --device webgpu -N 256

alias Held = vec4f;
var<workgroup> M: array<vec4f, LANES * LINES>;  // maxima of a thread's scores; at the end its sums

fn put(at: u32, value: vec4f) { M[at] = value; }
fn got(at: u32) -> vec4f { return M[at]; }

fn highest(own: vec4f, x: u32, y: u32, by_lanes: bool) -> vec4f {
    return highest_by_memory(own, x, y);
}

@compute @workgroup_size(LANES * LINES)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u,
        @builtin(local_invocation_index) index: u32) {
    attend(group, groups, index, false);
}
