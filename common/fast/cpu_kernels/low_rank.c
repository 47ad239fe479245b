#include "vector.h"

/* y += x * A^T * B for each row, with the matrices of the row's slot: the product of a low-rank
   adapter (LoRA). x: [rows, in]; y: rows of `out` numbers, `stride` numbers apart; slots: [rows];
   a: [S, rank, in]; b: [S, rank, out]; ranks: [S], how many of the `rank` lines a slot uses. With
   rank 0, the row of y does not change. A row gets the same bits alone as among others (I2). */
void add_low_rank(
    const float *x, float *y, int64_t stride, const int64_t *slots, const int64_t *ranks,
    const float *a, const float *b, int64_t in, int64_t out, int64_t rank, int64_t rows,
    int threads)
{
#pragma omp parallel for num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        const float *down = a + slots[r] * rank * in, *up = b + slots[r] * rank * out;
        for (int64_t k = 0; k < ranks[slots[r]]; k++)
            add_scaled(y + r * stride, up + k * out, dot(down + k * in, x + r * in, in), out);
    }
}
