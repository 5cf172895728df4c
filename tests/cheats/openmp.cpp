// Asks OpenMP for more threads than the call has.
// found: threads
#include "right.h"

void attention(const Attention& a, float*) {
#pragma omp parallel for num_threads(4)
    for (int i = 0; i < 4; i++) right(a, a.out, i, 4);
}
