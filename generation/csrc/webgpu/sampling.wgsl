// The choice of a token by a workgroup, for decoder.wgsl, as generation/csrc/sampling.cpp does it.

const FILTERS = array(TOP_K, TYPICAL_P, TOP_P, MIN_P);  // in order
const OWN = (VOCAB + INVOCATIONS - 1u) / INVOCATIONS;  // tokens of an invocation

// Sets filtered weights to 0, without a sort: a token is kept if those before it sum to less than the limit.
fn filter_weights(slot_settings: u32, id: u32) {
    for (var turn = 0u; turn < 4u; turn++) {
        let rule = FILTERS[turn];
        let limit = settings[slot_settings + rule];
        if rule == TOP_K && (limit == 0.0 || limit >= f32(VOCAB)) { continue; }
        if (rule == TYPICAL_P || rule == TOP_P) && limit >= 1.0 { continue; }
        if rule == MIN_P && limit == 0.0 { continue; }
        var sums = vec3f();
        for (var i = id; i < VOCAB; i += INVOCATIONS) {
            let w = numbers[i];
            sums = vec3f(sums.x + w, sums.y + w * numbers[VOCAB + i], max(sums.z, w));
        }
        sums = reduce(sums, VOCAB, id);
        let mean = sums.y / sums.x;  // of the logarithms
        var kept: array<bool, OWN>;
        for (var n = 0u; n < OWN; n++) {
            let i = min(n * INVOCATIONS + id, VOCAB - 1u);
            let w = numbers[i];
            let distance = abs(numbers[VOCAB + i] - mean);
            var before = 0.0;
            if rule != MIN_P {
                for (var j = 0u; j < VOCAB; j++) {
                    let other = numbers[j];
                    let is_before = select(other > w, abs(numbers[VOCAB + j] - mean) < distance, rule == TYPICAL_P);
                    before += select(0.0, select(other, 1.0, rule == TOP_K), is_before);
                }
            }
            let most = select(limit * sums.x, limit, rule == TOP_K);
            kept[n] = select(most > before, w >= limit * sums.z, rule == MIN_P);
        }
        workgroupBarrier();
        for (var n = 0u; n < OWN; n++) {
            let i = n * INVOCATIONS + id;
            if i < VOCAB && !kept[n] { numbers[i] = 0.0; }
        }
        workgroupBarrier();
    }
}

// The token that the text's uniform number falls on, by generation/csrc/sampling.cpp's rules, from the logits in
// `numbers`; to `next`, which is VOCAB if the logits hold NaN, or the largest is infinite.
fn choose(slot: u32, uniform_at: u32, id: u32) {
    let at = slot * SETTINGS;
    let temperature = settings[at + TEMPERATURE];
    let repetition = settings[at + REPETITION_PENALTY];
    let presence = settings[at + PRESENCE_PENALTY];
    let frequency = settings[at + FREQUENCY_PENALTY];
    let bias = params.slots * SETTINGS + slot * VOCAB;
    var wrong = 0.0;  // how many are NaN, or infinite
    var best = -3.4e38;
    for (var i = id; i < VOCAB; i += INVOCATIONS) {
        var y = numbers[i];
        wrong += f32((bitcast<u32>(y) & 0x7fffffffu) > 0x7f800000u);
        if settings[at + ADJUSTED] != 0.0 {
            if repetition != 1.0 && counts[2u * slot * VOCAB + i] > 0u {
                y = select(y * repetition, y / repetition, y > 0.0);
            }
            let written = counts[(2u * slot + 1u) * VOCAB + i];
            if written > 0u { y -= f32(written) * frequency + presence; }
            y += settings[bias + i];
            numbers[i] = y;
        }
        wrong += f32(bitcast<u32>(y) == 0x7f800000u);
        best = max(best, y);
    }
    let all = reduce(vec3f(wrong, 0, best), VOCAB, id);
    best = all.z;
    if id == 0u {
        atomicStore(&first_beyond, VOCAB);
        atomicStore(&last_kept, 0u);
    }
    // The factor of temperature 0 is 1e30: all weights but those of the largest logits are 0, and the first is taken.
    for (var i = id; i < VOCAB; i += INVOCATIONS) {
        let exponent = max((numbers[i] - best) * settings[at + INVERSE_TEMPERATURE], -200.0);
        numbers[i] = exp(exponent);
        numbers[VOCAB + i] = exponent;
    }
    workgroupBarrier();
    filter_weights(at, id);
    // Each of 32 invocations has tokens that follow each other.
    let begin = id * ((VOCAB + 31u) / 32u);
    let end = min(begin + (VOCAB + 31u) / 32u, VOCAB);
    if id < 32u {
        var sum = 0.0;
        for (var i = begin; i < end; i++) { sum += numbers[i]; }
        lanes[id].x = sum;
    }
    workgroupBarrier();
    if id < 32u {
        var reached = 0.0;
        var sum = 0.0;
        for (var i = 0u; i < 32u; i++) {
            if i == id { reached = sum; }
            sum += lanes[i].x;
        }
        var point = fma(bitcast<f32>(work[uniform_at]), sum, bitcast<f32>(work[uniform_at + 1u]) * sum);
        if temperature == 0.0 { point = 0.0; }
        for (var i = begin; i < end; i++) {
            let w = numbers[i];
            if w > 0.0 {
                reached += w;
                atomicMax(&last_kept, i);  // if rounding leaves a remainder
                if reached > point {
                    atomicMin(&first_beyond, i);
                    break;
                }
            }
        }
    }
    workgroupBarrier();
    if id == 0u {
        var token = atomicLoad(&first_beyond);
        if token == VOCAB { token = atomicLoad(&last_kept); }
        next = select(token, VOCAB, all.x > 0.0 || best <= -3.4e38);
    }
}
