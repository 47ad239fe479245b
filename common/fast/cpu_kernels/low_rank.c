#include "team.h"
#include "vector.h"

typedef struct {
    const float *x;
    float *y;
    int64_t stride;
    const int64_t *slots, *ranks;
    const float *a, *b;
    int64_t in, out, rank;
} Adapters;

static void add_to_row(const void *args, int64_t r)
{
    const Adapters *t = args;
    int64_t slot = t->slots[r];
    const float *down = t->a + slot * t->rank * t->in, *up = t->b + slot * t->rank * t->out;
    for (int64_t k = 0; k < t->ranks[slot]; k++)
        add_scaled(t->y + r * t->stride, up + k * t->out,
                   dot(down + k * t->in, t->x + r * t->in, t->in), t->out);
}

/* y += x * A^T * B for each row, with the matrices of the row's slot: the product of a low-rank
   adapter (LoRA). x: [rows, in]; y: rows of `out` numbers, `stride` numbers apart; slots: [rows];
   a: [S, rank, in]; b: [S, rank, out]; ranks: [S], how many of the `rank` lines a slot uses. With
   rank 0, the row of y does not change. A row gets the same bits alone as among others (I2). */
void add_low_rank(
    const float *x, float *y, int64_t stride, const int64_t *slots, const int64_t *ranks,
    const float *a, const float *b, int64_t in, int64_t out, int64_t rank, int64_t rows,
    int threads)
{
    spread(threads, rows, add_to_row,
           &(Adapters){x, y, stride, slots, ranks, a, b, in, out, rank});
}
