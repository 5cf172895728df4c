// The GPT for few texts, in one launch that writes many tokens: layers, attention and the choice of a token.
//
// A cluster of BLOCKS blocks holds all matrices in its shared memory, each block the same share of the rows
// of every matrix. A pass of up to TEXTS texts goes through a layer in five phases: q, k and v; attention;
// its projection; the two halves of the MLP. A block stores its share into the blocks that need it. A store
// counts its bytes at the receiver's mbarrier, so a block waits for its data alone. Many numbers of several
// texts go as one copy. Source: PTX ISA, 'st.async', 'cp.async.bulk' and 'mbarrier'.
//
// A number is summed in the same order whatever texts share its pass. grid.cu reads the prompts.
//
// With DRAFTS the TEXTS of a pass are rows of one text: its pending token and the guesses of the next ones. All
// blocks guess the same. A wrong guess is forgotten, and the next row overwrites its key and value.
//
// Each phase but the first needs data of all blocks, sent after these read the data of the phase before. So a
// block is at most two phases ahead of another, or three at a choice: four barriers and alternating buffers
// suffice.
//
// The macros are those of cluster.h.
#include "cluster_attention.h"
#include "cluster_products.h"
#include "guess.h"

// A token for each of `texts` texts through all layers.
struct Pass {
    const Work& work;
    const int texts;
    Exchange& exchange;
    Shared& s = own();
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const unsigned block = rank();
    // units: this block's. row_bytes: of a number of each text.
    const int units = UNITS % BLOCKS == 0 ? OWN_UNITS : (UNITS - int(block) + BLOCKS - 1) / BLOCKS;
    const int row_bytes = texts * int(sizeof(float));
    // Results are collected in memory that no thread reads in that phase.
    float *const of_x = s.normed[0], *const of_qkv = s.various[0];

    __device__ void embed() const {
        for (int t = warp; t < texts; t += WARPS) {
            const float* token = work.tokens + max(s.token[t], 0) * WIDTH;
            const float* position = work.positions + min(s.length[t], work.capacity - 1) * WIDTH;
            for (int k = 4 * lane; k < WIDTH; k += 4 * LANES)
                store4(&s.x[t][k], load4(token + k) + load4(position + k));
        }
        __syncthreads();
        count(s, EMBEDDING);
    }

    // Keeps the numbers of rows that follow each other; one of the lanes that have them does.
    template <class Numbers> __device__ static void collect(float* to, const Numbers& y, int holder) {
        for (int n = 0; n < int(sizeof(y) / sizeof(float)); n++)
            if (holder == 0) to[n] = y[n];
    }

    // Queries, keys and values, to the blocks that have the head's units.
    __device__ void send_qkv(const Weight (&matrix)[QKV_ROWS][WIDTH], const Norm& norm, const float* bias) {
        const auto send = [&](int t, int row, int split, const auto& store) {
            const int column = block * SHARE + row % SHARE, i = column / HEAD_DIM * SPLITS + split;
            store(&s.qkv[i / BLOCKS][t][row / SHARE][column % HEAD_DIM], i % BLOCKS);
        };
        products_of_normalised(
            matrix, norm, texts,
            [&](int row, int, float y) { return biased(y, bias, row) * (row < SHARE ? work.scale : 1); },
            [&](int first, int t, const auto& y, int holder, int holders) {
                if (COLLECTED) return collect(of_qkv + t * QKV_ROWS + first, y, holder);
                for (int n = 0; n < int(sizeof(y) / sizeof(float)); n++)
                    for (int split = holder; split < SPLITS; split += holders)
                        send(t, first + n, split,
                             [&](const float* p, unsigned to) { exchange.store(p, to, y[n]); });
            });
        if (COLLECTED) exchange.store_collected<QKV_ROWS, SHARE>(of_qkv, texts, SPLITS, send);
        exchange.wait(QKV);
    }

    // x <- x + the matrix' products with in(text, piece), in all blocks.
    template <int K, class In>
    __device__ void add_to_x(const Weight (&matrix)[SHARE][K], const float* bias, const In& in, Phase phase) {
        products(
            matrix, texts, in,
            [&](int row, int t, float y) { return s.x[t][block * SHARE + row] + biased(y, bias, row); },
            [&](int row, int t, const auto& y, int holder, int holders) {
                if (COLLECTED) return collect(of_x + t * SHARE + row, y, holder);
                exchange.store_to_all(&s.x[t][block * SHARE + row], y, holder, holders);
            });
        if (COLLECTED)
            exchange.store_collected<SHARE, SHARE>(
                of_x, texts, BLOCKS,
                [&](int t, int row, int to, const auto& store) { store(&s.x[t][block * SHARE + row], to); });
        exchange.wait(phase);
    }

    __device__ void project(const Weight (&matrix)[SHARE][WIDTH], const float* bias) {
        const auto at = [](int piece) { return Split<SHARE, WIDTH>::input(piece); };
        if constexpr (COLLECTED) {  // each warp merges the splits of one text, for all warps
            for (int t = warp; t < texts; t += WARPS)
                for (int k = 4 * lane; k < WIDTH; k += 4 * LANES) store4(&s.various[t][k], attended(t, k));
            __syncthreads();
            const auto in = [&](int t, int piece) { return load4(&s.various[t][at(piece)]); };
            add_to_x(matrix, bias, in, PROJECTION);
        } else {
            add_to_x(matrix, bias, [&](int t, int piece) { return attended(t, at(piece)); }, PROJECTION);
        }
    }

    __device__ void send_hidden(const Weight (&matrix)[FC_ROWS][WIDTH], const Norm& norm, const float* bias) {
        products_of_normalised(
            matrix, norm, texts, [&](int row, int, float y) { return gelu(biased(y, bias, row)); },
            [&](int row, int t, const auto& y, int holder, int holders) {
                float* to = &hidden(t, block * FC_ROWS + row);
                if (COLLECTED) return collect(to, y, holder);
                exchange.store_to_all(to, y, holder, holders);
            });
        if (COLLECTED) exchange.copy_to_others(&hidden(0, block * FC_ROWS), FC_ROWS * row_bytes);
        exchange.wait(MLP_UP);
    }

    // The logits go to various[t] of block t.
    __device__ void send_logits() {
        exchange.expect(block < texts ? LOGITS * int(sizeof(float)) : 0);
        products_of_normalised(
            s.weights.head, s.weights.ln_f, texts, [](int, int, float y) { return y; },
            [&](int row, int t, const auto& y, int holder, int) {
                // Rows beyond the vocabulary, too: block t then knows that all others have come as far.
                for (int n = 0; n < int(sizeof(y) / sizeof(float)); n++)
                    if (holder == 0) exchange.store(&s.various[t][block * HEAD_ROWS + row + n], t, y[n]);
            });
        exchange.wait(HEAD);
    }

    __device__ void run() {
        embed();
        // The first strip of a warp's first text.
        const bool attends = block < UNITS && warp / TEAM < texts;
        const int j0 = first_key(block) + lane / KEY_LANES, left = attends ? s.length[warp / TEAM] - j0 : 0;
        const long long layer_keys = (long long)HEADS * work.capacity * HEAD_DIM;
        const long long own_keys =
            head_at(work, attends ? s.slot[warp / TEAM] : 0, 0, attends ? block / SPLITS : 0) + j0 * HEAD_DIM +
            4 * (lane % KEY_LANES);
#pragma unroll 1  // the code of one layer stays in the instruction cache
        for (int l = 0; l < LAYERS; l++) {
            const Layer& layer = s.weights.layers[l];
            const auto& vectors = s.weights.vectors[l];
            const Biases biases = vectors.biases();
            exchange.expect(units * 3 * HEAD_DIM * row_bytes);
            const Strip strip = load_strip(work, own_keys + l * layer_keys, left);
            send_qkv(layer.qkv, vectors.ln_1, biases.qkv);
            if (COLLECTED && MERGED) __syncthreads();  // all warps have sent what attend() overwrites
            exchange.expect(COLLECTED ? (UNITS - units) * int(sizeof(Result))
                                      : UNITS * (HEAD_DIM + 2) * row_bytes);
            attend(work, l, texts, block, strip, exchange);
            exchange.wait(ATTENTION);
            exchange.expect(WIDTH * row_bytes);
            project(layer.proj, biases.proj);
            exchange.expect((COLLECTED ? HIDDEN - FC_ROWS : HIDDEN) * row_bytes);
            send_hidden(layer.fc, vectors.ln_2, biases.fc);
            exchange.expect(WIDTH * row_bytes);
            add_to_x(
                layer.out, biases.out,
                [](int t, int piece) { return load4(&hidden(t, Split<SHARE, HIDDEN>::input(piece))); },
                MLP_DOWN);
        }
        send_logits();
    }
};

#if DRAFTS
// Writes the tokens of a text. Block t chooses the token after row t, as if all guesses up to it were right.
__device__ inline void write_with_drafts(const Work& work, int number, Exchange& exchange) {
    Shared& s = own();
    const int block = rank(), thread = threadIdx.x, lane = thread % LANES;
    const Text text = work.texts[number];
    const long long at = (long long)text.slot * VOCAB;
    float* logits = s.various[block % TEXTS];
    auto* memory = reinterpret_cast<double*>(logits + WEIGHTS);
    int cached = text.length, pending = text.token, passes = 0, guesses = 0;
    int known = min(cached, ORDER - 1);
    unsigned long long recent = unsigned(text.flags);
    const auto add = [&](int token) { recent = recent << 8 | unsigned(token), known++; };
    if (pending >= 0) add(pending);
    __syncthreads();
    if (thread < SETTINGS) s.settings[thread] = work.sampling[text.slot * SETTINGS + thread];
    sync_cluster();  // the first row may only choose, and other blocks' choices must come after this
    const Taste taste(s.settings);
    double uniforms = 0;  // a lane's, of the tokens from `loaded` on
    int loaded = -LANES;
    for (int done = 0; done < work.rows;) {
        const bool reads = pending >= 0;
        const int rows = reads ? min(min(TEXTS, work.rows - done), work.capacity - cached) : 1;
        if (done + rows > loaded + LANES) {
            loaded = done;
            const int row = min(loaded + lane, work.rows - 1);
            if (thread < LANES) uniforms = work.uniforms[row * work.count + number];
        }
        if (thread < LANES) {
            unsigned long long tokens = recent;
            for (int row = 1; row < rows; row++) {
                const float drawn = __shfl_sync(~0u, float(uniforms), done - loaded + row - 1);
                const int token = guess(work, tokens, known + row - 1, drawn, taste, s.settings, memory);
                tokens = tokens << 8 | unsigned(token);
                if (lane == 0) s.token[row] = token;
            }
        }
        if (thread == 0) s.token[0] = pending;
        if (thread < TEXTS) {
            s.slot[thread] = text.slot;
            s.length[thread] = cached + thread;
        }
        __syncthreads();
        if (reads) Pass{work, rows, exchange}.run();
        int token = 0;
        const bool chooses = block < rows && thread < LANES;
        if (chooses) {
            for (int i = lane; i < VOCAB && !reads; i += LANES) logits[i] = work.logits[at + i];
            __syncwarp();
            const double uniform = from_lane(uniforms, done - loaded + block);
            token = choose(work, at, logits, s.settings, uniform, memory);
            if (lane < BLOCKS) exchange.store(&s.next[block], lane, __int_as_float(max(token, 0)));
        }
        exchange.expect(rows * int(sizeof(int)));
        exchange.wait(SAMPLING);
        int right = 0;  // guesses
        while (right + 1 < rows && s.next[right] == s.token[right + 1]) right++;
        if (chooses && block <= right) {
            const int row = done + block, place = row * work.count + number;
            for (int i = lane; i < VOCAB; i += LANES) {
                if (work.every) work.every[(long long)place * VOCAB + i] = logits[i];
                if (row + 1 == work.rows) work.logits[at + i] = logits[i];
            }
            if (lane == 0) write_token(work, at, place, token);
        }
        for (int i = 0; i <= right; i++) add(s.next[i]);
        pending = s.next[right];
        cached += reads ? right + 1 : 0;
        done += right + 1;
        passes++;
        guesses += min(right + 1, rows - 1);
        __syncthreads();  // the guesses are compared before the next ones are made
    }
    if (block == 0 && thread == 0) {
        int* drafts = work.drafts + 2 * number;
        drafts[0] = passes;
        drafts[1] = guesses;
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode(const __grid_constant__ Work work) {
    Shared& s = own();
    const int block = rank(), clusters = gridDim.x / BLOCKS, cluster = blockIdx.x / BLOCKS;
    const int thread = threadIdx.x, lane = thread % LANES;
    {
        const auto* from = reinterpret_cast<const uint4*>(work.weights + block);
        auto* to = reinterpret_cast<uint4*>(&s.weights);
        for (int i = thread; i < int(sizeof(Weights) / sizeof(uint4)); i += THREADS)
            copy_async(to + i, from + i);
        wait_for_copies();
        if (thread < BARRIERS) initialise(s.barriers[thread]);
        start_counting(s);
        sync_cluster();
    }
    Exchange exchange;
#if DRAFTS
    for (int text = cluster; text < work.count; text += clusters) write_with_drafts(work, text, exchange);
#else
    for (int start = cluster * TEXTS; start < work.count; start += clusters * TEXTS) {
        const int texts = TEXTS == 1 ? 1 : min(TEXTS, work.count - start);
        __syncthreads();
        if (thread < texts) {
            const Text text = work.texts[start + thread];
            s.slot[thread] = text.slot;
            s.length[thread] = text.length;
            s.token[thread] = text.token;
            for (int i = 0; i < SETTINGS && thread == block; i++)
                s.settings[i] = work.sampling[text.slot * SETTINGS + i];
        }
        sync_cluster();  // the first row may only choose, and other blocks' choices must come after this
        for (int row = 0; row < work.rows; row++) {
            const bool reads = begin_row(s, row, texts);
            const int t = block, place = row * work.count + start + t;  // this block chooses text t's token
            const bool chooses = t < texts && thread < LANES;
            const double uniform = chooses ? work.uniforms[place] : 0;
            if (reads) Pass{work, texts, exchange}.run();
            if (chooses) {
                const long long at = (long long)s.slot[t] * VOCAB;
                float* logits = logits_of(work, s, t, place, row + 1 == work.rows);
                auto* memory = reinterpret_cast<double*>(logits + WEIGHTS);
                const int token = choose(work, at, logits, s.settings, uniform, memory);
                if (lane < BLOCKS) exchange.store(&s.next[t], lane, __int_as_float(max(token, 0)));
                if (lane == 0) write_token(work, at, place, token);
            }
            exchange.expect(texts * int(sizeof(int)));
            exchange.wait(SAMPLING);
        }
    }
#endif
    report(s, work);
    sync_cluster();  // no block ends while another may store into its shared memory
}
