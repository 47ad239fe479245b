#include "team.h"
#include "vector.h"

typedef struct {
    const float *x;
    int64_t width, *out;
} Rows;

static void argmax_row(const void *args, int64_t row)
{
    const Rows *a = args;
    const float *x = a->x + row * a->width;
    float largest = -INFINITY;
    int nan = 0;
    int64_t i = 0;
#pragma omp simd reduction(max : largest) reduction(| : nan)
    for (int64_t k = 0; k < a->width; k++) {
        largest = x[k] > largest ? x[k] : largest;
        nan |= x[k] != x[k];
    }
    while (i < a->width - 1 && (nan ? x[i] == x[i] : x[i] != largest))
        i++;
    a->out[row] = i;
}

/* out [rows] = the index of the largest number in each row of x [rows, width]. Of equal numbers,
   the first one counts. In a row with NaN it is the index of the first NaN, as in torch. */
void argmax_rows(const float *x, int64_t width, int64_t rows, int64_t *out, int threads)
{
    spread(threads, rows, argmax_row, &(Rows){x, width, out});
}
