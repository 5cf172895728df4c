// The SIMD helpers of attention, declared in the namespace that includes this: portable.h's and simd.h's.
//
// No element outside of the given sizes is read or written. NaN in gives NaN out.

// Floats in a vector. The products below are fastest for a multiple of panel() columns and of rows() rows.
int64_t lanes();
int64_t panel();
int64_t rows();

// The name of the implementation, for people.
const char* name();

// Instructions of online_softmax for a vector of scores, without loads and stores; 0 without vectors.
int64_t softmax_instructions();

// Whether the kernels may also use instructions that multiply tiles of matrices.
bool may_use_tiles();

// T[c][r] <- scale * X[r][c]                      T (cols, rows), X (rows, cols)
void transpose(Matrix T, ConstMatrix X, int64_t rows, int64_t cols, float scale);

// C[i][c] <- sum_k A(i, k) * B[k][c]              C (rows, cols), B (depth, cols), none of them empty
// A(i, k) is broadcast; the lanes span the columns of B and C.
void multiply(Matrix C, const Strided& A, ConstMatrix B, int64_t rows, int64_t cols, int64_t depth);

// C[i][c] <- C[i][c] + sum_k A(i, k) * B[k][c]    for k < first + c, first >= 0: a causal mask's staircase.
// With first >= depth it takes all.
void multiply_add(Matrix C, const Strided& A, ConstMatrix B, int64_t rows, int64_t cols, int64_t depth,
                  int64_t first);

// s[j] <- scale * x . B[j]                        s (rows), x (depth), B (rows, depth)
void dot_rows(float* s, const float* x, ConstMatrix B, int64_t rows, int64_t depth, float scale);

// o <- o + sum_j p[j] * B[j]                      o (cols), p (rows), B (rows, cols)
void add_weighted_rows(float* o, const float* p, ConstMatrix B, int64_t rows, int64_t cols);

// The largest of m and x[0 .. n-1]; NaN is ignored.
float row_max(const float* x, int64_t n, float m);

// x[i] <- exp(x[i] - m), or 0 where that would be denormal, where x[i] <= m; returns their sum.
float exp_sum(float* x, int64_t n, float m);

// x[i] <- a * x[i]
void scale_row(float* x, int64_t n, float a);

// The online softmax down each column c of S (rows, cols), in units of log(2). The live rows of column c are
// its first `first + c`; the others are not read, and left as they are or set to 0.
//   m'            <- max(m[c], S[j][c]) over the live rows j, or m[c] where that is at most SIMD_MAX_LAG less
//   S[j][c]       <- 2^(S[j][c] - m')
//   correction[c] <- 2^(m[c] - m')
//   l[c]          <- correction[c] * l[c] + sum_j S[j][c], NaN if a live score is
//   m[c]          <- m'
// m begins at -infinity or at a whole number. A maximum that lags leaves a factor of at most 2^SIMD_MAX_LAG in
// S and l, which cancels in S / l. cols is a multiple of lanes(). Returns whether any correction is not 1.
bool online_softmax(Matrix S, int64_t rows, int64_t cols, int64_t first, float* m, float* l, float* correction);

// C[i][c] <- a[c] * C[i][c]                       C (rows, cols), a (cols)
void scale_columns(Matrix C, int64_t rows, int64_t cols, const float* a);
