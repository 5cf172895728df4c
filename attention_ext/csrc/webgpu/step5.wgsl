// Step 5: step 4 with the maxima of rows by subgroups.
// Shapes, loop nest and dispatch: as in step 4.
// Workgroup memory: Q, K or V, and half of P, 40.5 KiB at d = 32.
// Improves on step 4: the lanes of a row exchange their maxima without memory (subgroups.wgsl).
// Bound: multiply-adds and reads of workgroup memory. A tile of keys has six barriers. Where the lanes of a row are
//     not neighbours in a subgroup, the maxima pass through P, with one more barrier.
// Command: python gpt.py explain part4 --device webgpu -N 256

alias Held = vec4f;

fn put(at: u32, value: vec4f) { P[at] = value; }
fn got(at: u32) -> vec4f { return P[at]; }
