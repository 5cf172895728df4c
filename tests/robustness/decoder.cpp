// Generated models of all shapes for the native decoder. One thread and several read a prompt and continue it.
//
//   decoder SEED COUNT
//
// Threads, drafts, slices of prompts and log-probabilities must change no bit. Python's tests go through the C
// interface; they compare logits and log-probabilities with float64.
#include "generation/csrc/decoder.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <map>
#include <new>

#include "generated.h"

namespace {

// Guesses of which a share is right: it is told what each uniform number chooses, and all of these differ.
struct Told : Draft {
    mutable Random random;
    std::map<double, int64_t> tokens{};
    double share;
    int64_t V;

    Told(uint64_t seed, double share, int64_t V) : random(seed), share(share), V(V) {}
    Guess guess(const Tail&, double uniform, const Occurrences&, const Sampling&) const override {
        const double chance = random.uniform();
        const int64_t right = tokens.at(uniform), any = random.from(0, V - 1);
        return {chance < share ? right : any == right ? (any + 1) % V : any, chance / 2};
    }
};

constexpr double PATIENCE_SECONDS = 1e6;  // on a busy machine all decoders still write the same number
constexpr double SLICES[] = {0, 1e-5, 1e-3, INFINITY};

// A random model and its decoders: several texts by many threads and by one.
class Trial {
  public:
    explicit Trial(uint64_t seed) : seed(seed), random(seed) {
        many.record(recorded);
        if (!random.one_in(4)) many.set_draft(told);
        for (int64_t slot = 0; slot < slots; slot++) draw_sampling(slot);
    }

    std::string attempt() {
        std::string wrong = read_prompts();
        for (int64_t slot = 0; slot < slots && wrong.empty(); slot++)
            if (many.logits(slot) != one.logits(slot)) wrong = "threads or slices change what a prompt gives";
        for (int turn = 0; turn < 40 && wrong.empty(); turn++) wrong = write_and_change();
        return wrong;
    }

  private:
    const uint64_t seed;
    Random random;

    int64_t tile_side() { return random.one_in(9) ? 1 << 20 : random.size(MOST); }

    const int64_t H = random.from(1, 4), d = random.one_in(6) ? 64 : random.from(1, 33), V = random.size(200);
    const int64_t T = random.one_in(12) ? 600 : random.size(200);
    const int64_t window = random.one_in(2) ? 0 : random.size(70);
    const ModelShape shape{T, V, random.from(1, 3), H, H * d, random.one_in(2), window};
    const bool bias = random.one_in(2), untied = random.one_in(2), recorded = random.one_in(2);
    const PrecisionRow& precision = random.any(PRECISIONS);
    const CachePrecisionRow& kv = random.any(CACHE_PRECISIONS);
    const Part& part = random.any(PARTS);
    const int64_t threads = random.any({2, 3, 5, 16});
    const int64_t br = tile_side(), bc = tile_side();
    const int64_t slots = random.from(1, 9), longest = random.one_in(2) ? T : random.from(1, T);
    const int64_t capacity = shape.window > 0 ? int64_t{1} << 40 : longest;
    const bool described = [this] {
        set_running(seed, "H ", H, ", d ", d, ", V ", V, ", layers ", shape.n_layer, ", T ", T, ", bias ", bias,
                    ", untied ", untied, ", window ", shape.window, ", GELU by tanh ", shape.tanh_gelu, ", ",
                    precision.name, ", cache ", kv.name, ", ", part.name, ", tile ", br, " x ", bc, ", slots ",
                    slots, ", capacity ", capacity, ", threads ", threads);
        return true;
    }();

    std::map<std::string, std::vector<float>> weights;
    const Tensors tensors = [this](const std::string& name, int64_t floats) -> const float* {
        if (!bias && name.size() > 5 && name.compare(name.size() - 5, 5, ".bias") == 0) return nullptr;
        if (!untied && name == "lm_head.weight") return nullptr;
        std::vector<float>& w = weights[name];
        if (w.empty())
            for (int64_t i = 0; i < floats; i++) w.push_back(static_cast<float>(random.uniform() - 0.5));
        return w.data();
    };
    // Caches of any size, so that a batch is divided into groups of any.
    Decoder decoder(int64_t texts, int64_t members) {
        const int64_t bytes = random.any({int64_t{1}, int64_t{1} << random.from(10, 25), INT64_MAX});
        return {shape,        tensors, precision.precision,
                kv.precision, part,    {br, bc, texts, capacity, members, bytes}};
    }
    Decoder many = decoder(slots, threads), one = decoder(slots, 1);
    const std::shared_ptr<Told> told =
        std::make_shared<Told>(random.bits(), random.any({0.0, 0.5, 0.9, 1.0}), V);
    std::vector<int64_t> tops;  // of the log-probabilities that only `many` gives, or NO_LOGPROB

    void draw_sampling(int64_t slot) {
        Sampling s;
        s.temperature = random.any({0.0, 0.01, 0.8, 5.0});
        s.top_k = random.any({0, 1, 3, 1000});
        s.top_p = random.any({1.0, 0.9, 0.01});
        s.typical_p = random.any({1.0, 0.9, 0.01});
        s.min_p = random.any({0.0, 0.05});
        s.repetition_penalty = random.any({1.0, 1.1, 0.5});
        s.presence_penalty = random.any({0.0, 0.7});
        s.frequency_penalty = random.any({0.0, -0.3});
        if (random.one_in(2)) s.logit_bias = {{V - 1, 3.0}, {V / 2, -2.0}};
        tops.push_back(random.any<int64_t>({NO_LOGPROB, 0, 3, 5}));
        many.set_sampling(slot, s, tops[slot]), one.set_sampling(slot, s);
    }

    std::vector<int64_t> some_ids() {
        std::vector<int64_t> ids(static_cast<size_t>(random.from(1, longest)));
        for (int64_t& id : ids) id = random.from(0, V - 1);
        return ids;
    }

    // One thread reads each prompt at once. Several read all of them in turns, in slices of any length, and
    // give some up and begin again.
    std::vector<std::vector<int64_t>> prompts;
    std::string read_prompts() {
        std::vector<int64_t> unread;
        for (int64_t slot = 0; slot < slots; slot++) {
            prompts.push_back(some_ids());
            unread.push_back(slot);
            const bool continues = random.one_in(2);
            many.begin(slot, prompts[slot], continues, tops[slot]);
            one.begin(slot, prompts[slot], continues), one.read(slot);
        }
        for (int64_t given_up = 0; !unread.empty();) {
            const size_t at = random.bits() % unread.size();
            const int64_t slot = unread[at];
            if (given_up < slots && random.one_in(10)) {
                given_up++;
                many.drop(slot);
                if (many.length(slot) != 0) return "a prompt that was given up is held";
                many.begin(slot, prompts[slot], true, tops[slot]);
                many.take_logprobs(slot);
            }
            if (many.read(slot, random.any(SLICES))) unread.erase(unread.begin() + at);
        }
        return "";
    }

    // Several tokens of some texts; then perhaps a new text, or a copy.
    std::string write_and_change() {
        std::vector<int64_t> batch;
        for (int64_t slot = 0; slot < slots; slot++)  // the last token need not fit the cache
            if (many.length(slot) <= capacity && many.length(slot) > 0 && !random.one_in(4))
                batch.push_back(slot);
        UniformRows uniforms(static_cast<size_t>(random.from(1, 12)));
        for (std::vector<double>& row : uniforms)
            for (size_t i = 0; i < batch.size(); i++) row.push_back(random.uniform());
        const TokenRows written = one.write(batch, uniforms, PATIENCE_SECONDS);
        for (size_t row = 0; row < uniforms.size(); row++)  // of those that are not used any token
            for (size_t i = 0; i < batch.size(); i++)
                told->tokens[uniforms[row][i]] = row < written.size() ? written[row][i] : 0;
        if (many.write(batch, uniforms, PATIENCE_SECONDS) != written)
            return "threads or drafts change what is chosen";
        for (const int64_t slot : batch) many.take_logprobs(slot);
        const int64_t slot = random.from(0, slots - 1), other = random.from(0, slots - 1);
        if (random.one_in(10)) {  // a text that joins in the middle; at the end some are still being read
            const std::vector<int64_t> ids = some_ids();
            many.begin(slot, ids, false);
            one.begin(slot, ids, false), one.read(slot);
        }
        for (int64_t s = 0; s < slots; s++)
            if (many.length(s) == 0 && random.one_in(2)) many.read(s, random.any(SLICES));
        if (random.one_in(10) && slot != other && many.length(slot) > 0)
            many.copy(slot, other), one.copy(slot, other);
        for (int64_t s = 0; s < slots; s++)
            if (many.length(s) > 0 && many.logits(s) != one.logits(s))
                return "threads or drafts change what a step gives";
        if (recorded && random.one_in(10)) many.spans();
        return "";
    }
};

// Whether sizes that no memory has room for are refused before they wrap.
bool refuses_sizes() {
    constexpr int64_t WRAPS = int64_t{1} << 62;
    const CacheShape shape{WRAPS, 4, 8, 16, false, 1, CachePrecision::fp32};
    const std::function<void()> calls[] = {[] { Buffer{WRAPS}; }, [] { Buffer{-1}; }, [] { product(WRAPS, 4); },
                                           [] { Scratch().matrix(WRAPS, 4); }, [&] { (void)shape.words(); }};
    return std::all_of(std::begin(calls), std::end(calls), [](const auto& call) {
        try {
            call();
        } catch (const std::bad_alloc&) {
            return true;
        }
        return false;
    });
}

}  // namespace

int main(int argc, char** argv) {
    if (!refuses_sizes()) return 1;
    return run_seeds(argc, argv, [](uint64_t seed, int) { return Trial(seed).attempt(); });
}
