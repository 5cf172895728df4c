// The shape contract of every part. No torch header: the kernels build alone.
//
//   out = softmax(scale * q k^T) v        per batch and head
//
// q, k, v and out are float32, for part 4 also bfloat16; lse and all arithmetic are float32.
// q (B, H, Nq, d); k, v (B, H / group, Nk, d): strided, the last dimension contiguous. Exception:
// flash_decoding.cpp also takes k transposed, for at most part4::FEW queries, either as one matrix (row_stride
// 1) or as consecutive panels of Bc keys, each (d, Bc) and padded (row_stride d, col_stride Bc). With panels kv
// may be bf16: then the rows of the panels and of v are Bf16Pairs, v's padded with any numbers. Strides then
// count 32-bit words (k's col_stride: Bc / 2), except k's row_stride, d. out (B, H, Nq, d), lse (B, H, Nq) or
// null: contiguous. causal: query i sees the keys j <= i + (Nk - Nq); Nq <= Nk.
#pragma once

#include <cstdint>
#include <functional>

#include "bf16.h"
#include "rules.h"

// The Pool of threads.h, which a user's kernel need not include.
using RunsThreads = void(int threads, const std::function<void(int)>& body);

inline constexpr int MOST_THREADS = 1024;  // of a call, and of a decoder's team

// The precisions of cached keys and values. The Python side is CachePrecision in attention_ext/parts.py.
enum class CachePrecision { fp32, bf16 };

struct CachePrecisionRow {
    CachePrecision precision;
    const char* name;
};

inline constexpr CachePrecisionRow CACHE_PRECISIONS[] = {{CachePrecision::fp32, "fp32"},
                                                         {CachePrecision::bf16, "bf16"}};

template <class Element> struct MatricesOf {  // one (N, d) matrix per batch and head; strides in elements
    const Element* data;
    int64_t batch_stride, head_stride, row_stride, col_stride;
    int64_t group = 1;  // heads of q that share a matrix of k or v

    const Element* at(int64_t b, int64_t h) const { return data + b * batch_stride + h / group * head_stride; }
};

using Matrices = MatricesOf<float>;

struct AttentionSizes {
    int64_t B, H, Nq, Nk, d;
    bool causal;
    float scale;
    int64_t Br, Bc;  // part 4's tile, at most Nq and Nk
    int threads;
    const Rules* rules = nullptr;  // null if there are none; they include `causal`
    RunsThreads* pool = nullptr;   // null: the caller's thread does all

    // Query i sees the keys 0 .. seen(i) - 1.
    int64_t seen(int64_t i) const { return causal ? i + 1 + (Nk - Nq) : Nk; }

    // The keys that any of `count` queries from i on may see, and the change of a strip of their scores.
    Range keys(int64_t head, int64_t i, int64_t count = 1) const {
        return rules ? rules->keys(*this, head, i, count) : Range{0, seen(i + count - 1)};
    }
    void change(int64_t head, const Strip& scores) const {
        if (rules) rules->change(*this, head, scores);
    }
    void change_row(int64_t head, int64_t i, float* row, const Range& seen) const {
        change(head, {row, 0, 1, i, 1, seen.first, seen.count(), 1.0f});
    }

    // A row's softmax begins with this maximum: a sink, or what no score is below.
    float lowest(int64_t head) const {
        if (!rules) return -std::numeric_limits<float>::infinity();
        return rules->sinks ? rules->sinks[head % H] : HIDDEN;
    }
};

template <class Element> struct AttentionOf : AttentionSizes {
    MatricesOf<Element> q{}, k{}, v{};
    Element* out = nullptr;
    float* lse = nullptr;
    CachePrecision kv = CachePrecision::fp32;  // precision of k and v

    // The matrices of head 0 .. B * H - 1.
    const Element* q_of(int64_t head) const { return q.at(head / H, head % H); }
    const Element* k_of(int64_t head) const { return k.at(head / H, head % H); }
    const Element* v_of(int64_t head) const { return v.at(head / H, head % H); }
    Element* out_at(int64_t b, int64_t h) const { return out + (b * H + h) * Nq * d; }
    float* lse_at(int64_t b, int64_t h) const { return lse ? lse + (b * H + h) * Nq : nullptr; }
};

using Attention = AttentionOf<float>;  // attention.isph has the same layout

// A backward pass: the gradients of `out` and `lse`, in float32.
//
//   P = exp(scale q k^T - lse)    dS = scale * P * (dout v^T - D + dlse), D = rowsum(dout * out)
//   dq = dS k                     dk = dS^T q                            dv = P^T dout
//
// q, dout (B, H, Nq, d); k, v (B, H, Nk, d): strided, the last dimension contiguous. out, dq (B, H, Nq, d),
// dk, dv (B, H, Nk, d), lse and dlse (B, H, Nq): contiguous; dlse may be null. causal as in a call. dbias
// (B, H, Nq, Nk), contiguous or null: where no query sees a key it is left as it is.
struct AttentionGradient : AttentionSizes {
    Matrices q{}, k{}, v{}, dout{};
    const float *out = nullptr, *lse = nullptr, *dlse = nullptr;
    float *dq = nullptr, *dk = nullptr, *dv = nullptr, *dbias = nullptr;
};

// Part 4's backward pass; its scratch in floats.
int64_t flash_backward_scratch(const AttentionGradient&);
void flash_backward(const AttentionGradient&, float* scratch);
