// Step 6: K, V and P as float16 in workgroup memory.
// Shapes, loop nest and dispatch: as in step 4. q, k, v and the output are float16, or float32 if it is
//     asked for by name; then K, V and the weights are rounded. Values beyond 65,504 become infinity.
// Workgroup memory: Q in float32; K or V, and half of P; the maxima or sums: 32.3 KiB at d = 32.
// Improves on step 5: half the bytes of K, V and P. Products and sums are float32's, so the result errs by
//     the rounding of its inputs and weights alone.
// Bound: multiply-adds, and a conversion for every number that is read.
// Command: python gpt.py explain part4 --device webgpu -N 256

alias Held = vec4<f16>;
var<workgroup> sums: array<vec4f, LANES * LINES>;  // maxima of a thread; at the end its sums

fn put(at: u32, value: vec4f) { sums[at] = value; }
fn got(at: u32) -> vec4f { return sums[at]; }
