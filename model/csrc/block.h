// The GPT on rows of activations, one a token: in a step the tokens of several texts, in a prompt those of one.
//
//   for each layer:
//       q, k, v <- LN(x) Wqkv^T;   the caller attends
//       x <- x + A Wproj^T
//       x <- x + gelu(LN(x) Wfc^T) Wout^T
//   logits <- LN(x) wte^T
//
// The members of a team share each line by panels. Results do not depend on the number of rows or members.
#pragma once

#include <algorithm>
#include <cstdint>

#include "buffer.h"
#include "weights.h"

// Rows of the results have room for all columns that a product sets, Linear::columns().
struct Rows {
    int64_t count;
    simd::Matrix X{}, Q{}, A{}, Y{},
        L{};                // x, (q, k, v) of each head, attention's result, hidden layer, logits
    simd::Matrix N{}, O{};  // a thread's own: normalized rows, and rows as the products take them

    // n of these rows, from row r on.
    Rows from(int64_t r, int64_t n) const {
        return {n, X.from(r), Q.from(r), A.from(r), Y.from(r), L.from(r), N.from(r), O.from(r)};
    }
};

// Member: as in generation/csrc/team.h. All members of a team call the same functions in the same order.
template <class Member> class Block {
  public:
    Block(const Rows& rows, Member& member) : rows(rows), member(member) {}

    // q, k and v of each head h; then attend(h, begin, end) for these rows. The first `skipped` columns are
    // optional. divisible: attend() may take some rows before the others' k and v.
    template <class Attend> void qkv(const Layer& w, int64_t skipped, bool divisible, const Attend& attend) {
        each(w.qkv, divisible, [&](int64_t h, int64_t begin, int64_t end) {
            normalize(w.ln_1, w.qkv, begin, end);
            {
                const auto timed = member.timed("QKV");
                w.qkv.multiply(rows.Q.from(begin), operand, end - begin, h, false, skipped);
            }
            const auto timed = member.timed("attention");
            attend(h, begin, end);
        });
    }

    // What follows attention.
    void rest(const Layer& w) {
        each(w.proj, true, [&](int64_t p, int64_t begin, int64_t end) {
            const auto timed = member.timed("projection");
            add(w.proj, rows.A, begin, end, p);
        });
        each(w.fc, true, [&](int64_t p, int64_t begin, int64_t end) {
            normalize(w.ln_2, w.fc, begin, end);
            {
                const auto timed = member.timed("MLP up");
                w.fc.multiply(rows.Y.from(begin), operand, end - begin, p, false);
            }
            const auto timed = member.timed("MLP GELU");
            for (int64_t r = begin; r < end; r++) w.gelu(rows.Y.row(r) + p * w.fc.width(), w.fc.columns(p));
        });
        each(w.out, true, [&](int64_t p, int64_t begin, int64_t end) {
            const auto timed = member.timed("MLP down");
            add(w.out, rows.Y, begin, end, p);
        });
    }

    void logits(const Weights& w) {
        each(w.head, true, [&](int64_t p, int64_t begin, int64_t end) {
            normalize(w.ln_f, w.head, begin, end);
            const auto timed = member.timed("head");
            w.head.multiply(rows.L.from(begin), operand, end - begin, p, false);
        });
    }

  private:
    // body(p, begin, end) for each panel p of w; with fewer panels than members the rows may be divided too.
    template <class Body> void each(const Linear& w, bool divisible, const Body& body) {
        const int64_t panels = w.panels(), most = divisible ? rows.count : 1;
        const int64_t blocks = std::clamp<int64_t>((member.members + panels - 1) / panels, 1, most);
        made_from = -1;
        member.share(blocks * panels, [&](int64_t i) {
            const int64_t block = i / panels;
            body(i % panels, rows.count * block / blocks, rows.count * (block + 1) / blocks);
        });
    }

    // The left operand of w's product, from `columns` columns of m. Each thread makes its own with its first
    // piece; another thread has just written most of m.
    template <class Make>
    void once(simd::Matrix m, int64_t columns, int64_t begin, int64_t end, const Make& make) {
        if (made_from == begin) return;
        for (int64_t r = begin; member.members > 1 && r < end; r++)
            for (int64_t i = 0; i < columns; i += LINE_FLOATS) __builtin_prefetch(m.row(r) + i);
        make();
        made_from = begin;
    }

    void normalize(const LayerNorm& norm, const Linear& w, int64_t begin, int64_t end) {
        once(rows.X, w.inputs(), begin, end, [&] {
            const auto timed = member.timed("norm");
            for (int64_t r = begin; r < end; r++) norm(rows.N.row(r), rows.X.row(r));
            set_operand(w, rows.N, begin, end);
        });
    }

    // x <- x + m W^T
    void add(const Linear& w, simd::Matrix m, int64_t begin, int64_t end, int64_t p) {
        once(m, w.inputs(), begin, end, [&] { set_operand(w, m, begin, end); });
        w.multiply(rows.X.from(begin), operand, end - begin, p, true);
    }

    void set_operand(const Linear& w, simd::Matrix m, int64_t begin, int64_t end) {
        operand = w.operand(m.from(begin), end - begin, rows.O.row(begin));
    }

    const Rows rows;
    Member& member;
    simd::ConstMatrix operand{};
    int64_t made_from = -1;
};
