/* The product of some rows and a weight. The weight was packed once, in the order in which this
   code reads it.

   With few rows, the weight is read from memory once, and the time of the product is the time of
   this reading. With many rows, a block of the weight stays in the first-level cache of the core
   while all rows of a chunk are multiplied with it, one tile of rows after the other. Each tile
   prefetches its share of the next block, so that reads from memory are spread evenly.

   Each output has its own lane, which adds up the products one by one, in the order of the inputs,
   always with the same rounding. So a row gets the same bits alone as among a thousand rows
   (I2). */
#include "linear.h"

#define DEPTH 64 /* inputs of a block. 64 * PANEL floats are 4 kB, or 8 kB with AVX-512 */
#define CHUNK 48 /* the number of rows that share a block */

/* sums[rows][2] += x[rows][depth] * block[depth][PANEL]; the rows of x are `stride` numbers apart.
   For each input, `step` more bytes are prefetched, from `next` on. */
static inline __attribute__((always_inline)) void multiply(
    int rows, const float *x, int64_t stride, const float *block, int64_t depth, const char *next,
    int64_t step, vec (*sums)[2])
{
    vec s[TILE][2];
    for (int r = 0; r < rows; r++)
        s[r][0] = sums[r][0], s[r][1] = sums[r][1];
    for (int64_t i = 0; i < depth; i++) {
        const float *line = block + i * PANEL;
        vec left = load(line), right = load(line + LANES);
        for (int64_t byte = 0; byte < step; byte += 64)
            __builtin_prefetch(next + i * step + byte);
        for (int r = 0; r < rows; r++) {
            vec input = repeat(x[r * stride + i]);
            s[r][0] = multiply_add(input, left, s[r][0]);
            s[r][1] = multiply_add(input, right, s[r][1]);
        }
    }
    for (int r = 0; r < rows; r++)
        sums[r][0] = s[r][0], sums[r][1] = s[r][1];
}

/* The same product for any number of rows, in tiles of about the same size. */
static void multiply_chunk(
    int64_t rows, const float *x, int64_t stride, const float *block, int64_t depth,
    vec (*sums)[2])
{
    int64_t tiles = (rows + TILE - 1) / TILE, step = (4 * PANEL + tiles - 1) / tiles;
    const char *next = (const char *)(block + depth * PANEL);
    for (int64_t r = 0, n; r < rows; r += n, tiles--, next += depth * step) {
        n = (rows - r + tiles - 1) / tiles;
        const float *from = x + r * stride;
        switch (n) {
#define CASE(N) case N: multiply(N, from, stride, block, depth, next, step, sums + r); break;
            EACH(CASE)
        }
    }
}

/* Add the bias and `add` to the sums of a row, and store the result. The last panel of a weight may
   have fewer than PANEL outputs. */
static inline void finish(
    const vec *sums, const float *bias, const float *add, float *out, int64_t count)
{
    vec left = sums[0], right = sums[1];
    if (count >= PANEL) {
        if (bias)
            left += load(bias), right += load(bias + LANES);
        if (add)
            left += load(add), right += load(add + LANES);
        store(out, left);
        store(out + LANES, right);
        return;
    }
    for (int64_t i = 0; i < count; i++)
        out[i] = ((const float *)sums)[i] + (bias ? bias[i] : 0.0f) + (add ? add[i] : 0.0f);
}

/* The product of `count` rows of x and one panel of the weight. */
static void multiply_panel(
    const Linear *l, int64_t panel, const float *x, int64_t count, vec (*sums)[2])
{
    const float *weight = l->weight + panel * l->in * PANEL;
    for (int64_t r = 0; r < count; r++)
        sums[r][0] = sums[r][1] = (vec){0};
    for (int64_t i = 0; i < l->in; i += DEPTH)
        multiply_chunk(count, x + i, l->in, weight + i * PANEL, smaller(DEPTH, l->in - i), sums);
}

void linear(const Linear *l, const float *x, const float *add, float *out, int64_t rows)
{
    for (int64_t start = 0; start < rows; start += CHUNK) {
        int64_t count = smaller(CHUNK, rows - start);
#pragma omp for schedule(static) nowait
        for (int64_t panel = 0; panel < (l->out + PANEL - 1) / PANEL; panel++) {
            vec sums[CHUNK][2];
            multiply_panel(l, panel, x + start * l->in, count, sums);
            int64_t first = panel * PANEL;
            for (int64_t r = 0; r < count; r++) {
                int64_t at = (start + r) * l->out + first;
                finish(sums[r], l->bias ? l->bias + first : NULL, add ? add + at : NULL, out + at,
                       l->out - first);
            }
        }
    }
#pragma omp barrier
}

/* gated = silu(gate) * up, for one row of a panel. */
static void activate(const float *gate, const float *up, float *gated)
{
    for (int64_t i = 0; i < PANEL; i++)
        gated[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
}

void gated_linear(const Linear *l, const float *x, float *out, int64_t rows)
{
    int64_t width = l->out / 2;
    for (int64_t start = 0; start < rows; start += CHUNK) {
        int64_t count = smaller(CHUNK, rows - start);
#pragma omp for schedule(static) nowait
        for (int64_t pair = 0; pair < width / PANEL; pair++) {
            vec sums[2][CHUNK][2];
            for (int64_t i = 0, panel = 2 * pair; i < 2; i++, panel++) {
                multiply_panel(l, panel, x + start * l->in, count, sums[i]);
                for (int64_t r = 0; l->bias && r < count; r++) {
                    float *sum = (float *)sums[i][r];
                    finish(sums[i][r], l->bias + panel * PANEL, NULL, sum, PANEL);
                }
            }
            for (int64_t r = 0; r < count; r++)
                activate((float *)sums[0][r], (float *)sums[1][r],
                         out + (start + r) * width + pair * PANEL);
        }
    }
#pragma omp barrier
}

int panel_size(void) { return PANEL; }

/* linear() with its own parallel region. */
void linear_alone(const Linear *l, const float *x, float *out, int64_t rows, int threads)
{
#pragma omp parallel num_threads(threads)
    linear(l, x, NULL, out, rows);
}
