// Four numbers of a key or a value, as the cache holds them: float32.
alias Cached = vec4f;
fn to_cache(x: vec4f) -> Cached { return x; }
fn of_cache(x: Cached) -> vec4f { return x; }
