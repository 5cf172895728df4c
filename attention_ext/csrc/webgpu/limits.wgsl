// An adapter's limits, an entry point for each. The host puts REPEATS, the loops of a thread, in front. The
// compiler keeps the work: keep() may write its result, and it does not know the numbers in `never[1]`.
const THREADS: u32 = 256;
const FOURS: u32 = 1024;  // of workgroup memory: 16 KiB

@group(0) @binding(0) var<storage, read_write> never: array<vec4f>;
@group(0) @binding(1) var<storage, read> data: array<vec4f>;

var<workgroup> tile: array<vec4f, FOURS>;

fn keep(sum: vec4f) {
    if (sum.x + sum.y + sum.z + sum.w == -1.0) { never[0] = sum; }
}

// 256 multiply-adds in 16 chains for each loop
@compute @workgroup_size(THREADS)
fn multiply_adds(@builtin(local_invocation_index) index: u32) {
    let a = vec4f(never[1].x);
    let b = vec4f(never[1].y);
    var x = vec4f(f32(index));
    var y = x + 1.0;
    var z = x + 2.0;
    var w = x + 3.0;
    for (var r = 0u; r < REPEATS; r++) {
        for (var i = 0u; i < 16u; i++) {  // unroll
            x = fma(x, a, b);
            y = fma(y, a, b);
            z = fma(z, a, b);
            w = fma(w, a, b);
        }
    }
    keep(x + y + z + w);
}

// 8 exponentials for each loop
@compute @workgroup_size(THREADS)
fn exponentials(@builtin(local_invocation_index) index: u32) {
    var x = vec4f(f32(index)) * never[1].z;
    var y = x + 1.0;
    for (var r = 0u; r < REPEATS; r++) {
        x = exp2(-x);
        y = exp2(-y);
    }
    keep(x + y);
}

// 4 reads of 16 bytes for each loop
@compute @workgroup_size(THREADS)
fn workgroup_reads(@builtin(local_invocation_index) index: u32) {
    for (var at = index; at < FOURS; at += THREADS) { tile[at] = vec4f(f32(at)); }
    workgroupBarrier();
    var sum = vec4f();
    for (var r = 0u; r < REPEATS; r++) {
        let at = index + r;
        sum += tile[at % FOURS] + tile[(at + 256) % FOURS];
        sum += tile[(at + 512) % FOURS] + tile[(at + 768) % FOURS];
    }
    keep(sum);
}

// Reads all of `data` once.
@compute @workgroup_size(THREADS)
fn storage_reads(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    var sum = vec4f();
    for (var at = id.x; at < arrayLength(&data); at += THREADS * groups.x) { sum += data[at]; }
    keep(sum);
}
