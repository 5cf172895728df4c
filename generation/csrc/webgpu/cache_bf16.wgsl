// Four numbers of a key or a value, as the cache holds them: bfloat16, two in a word, the first in its lower half.
alias Cached = vec2u;
fn bf16(x: vec4f) -> vec4u {  // to nearest, ties to even
    let bits = bitcast<vec4u>(x);
    return (bits + 0x7fffu + ((bits >> vec4u(16u)) & vec4u(1u))) >> vec4u(16u);
}
fn to_cache(x: vec4f) -> Cached {
    let bits = bf16(x);
    return bits.xz | (bits.yw << vec2u(16u));
}
fn of_cache(x: Cached) -> vec4f {
    return bitcast<vec4f>(vec4u(x.x << 16u, x.x & 0xffff0000u, x.y << 16u, x.y & 0xffff0000u));
}
