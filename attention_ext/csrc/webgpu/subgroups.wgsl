// Shared by steps 5 and 6: maxima of rows by subgroups. WGSL does not say which invocations form a subgroup,
// of 4 to 128. Where the lanes of a row are not neighbours, the maxima pass through memory.

var<workgroup> scattered: atomic<u32>;  // threads whose row is not in 2 LANES neighbouring lanes
var<workgroup> together: u32;

fn highest(own: vec4f, x: u32, y: u32, by_lanes: bool) -> vec4f {
    var top = own;
    if (by_lanes) {
        for (var far = LANES; far > 1; far /= 2) { top = max(top, subgroupShuffleXor(top, far)); }
    } else {
        top = highest_by_memory(own, x, y);
    }
    workgroupBarrier();  // K's tile has been read
    return top;
}

@compute @workgroup_size(LANES * LINES)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u,
        @builtin(local_invocation_index) index: u32,
        @builtin(subgroup_invocation_id) lane: u32, @builtin(subgroup_size) size: u32) {
    if (size < 2 * LANES || lane != index % size) { atomicAdd(&scattered, 1u); }
    workgroupBarrier();
    if (index == 0) { together = select(0u, 1u, atomicLoad(&scattered) == 0); }
    attend(group, groups, index, workgroupUniformLoad(&together) == 1);
}
