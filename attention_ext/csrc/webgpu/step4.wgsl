// Step 4: up to 4 x 8 scores a thread, Q, K and P by columns; K and V take turns in one place.
//
// The tile is in columns.wgsl, for steps 5 and 6 too; here is what is step 4's alone.
// Shapes: as in step 1. Tiles of BR = 128 queries and BC = 64 keys at d = 32, and of 64 x 64 at d = 64; fewer where
//     they do not fit.
// Loop nest: as in step 3. A thread has four rows, the components of a vector, and KEYS keys of the tile: 8 at
//     d = 32, 4 at d = 64. It has ceil(d / 4 / LANES) fours of O in each row.
// Dispatch: B H ceil(Nq / BR) workgroups of LANES LINES threads: 8 x 32 at d = 32, 16 x 16 at d = 64.
// Workgroup memory: Q, K or V, half of P and the maxima, 44.5 KiB at d = 32; where an adapter allows 16 KiB, 14.8
//     KiB with tiles of 48 x 32.
// Improves on step 3: a step along a column of Q and K reads 4 + KEYS numbers for 4 KEYS products, all of them
//     multiply-adds of a vector, and m, l and the weights of a key are vectors of rows, too. Few numbers are read
//     ahead, so registers do not spill. V is loaded after the barrier at which the maxima are exchanged, because K
//     has been read then. P goes by halves. More threads share a tile, which occupies a GPU with less memory.
// Bound: multiply-adds and reads of workgroup memory, which overlap if enough workgroups are resident. A tile
//     of keys has six barriers.
// Command: python gpt.py explain part4 --device webgpu -N 256

alias Held = vec4f;
var<workgroup> M: array<vec4f, LANES * LINES>;  // maxima of a thread's scores; at the end its sums

fn put(at: u32, value: vec4f) {
    M[at] = value;
}

fn got(at: u32) -> vec4f {
    return M[at];
}

fn highest(own: vec4f, x: u32, y: u32, by_lanes: bool) -> vec4f {
    return highest_by_memory(own, x, y);
}

@compute @workgroup_size(LANES * LINES)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u,
        @builtin(local_invocation_index) index: u32) {
    attend(group, groups, index, false);
}
