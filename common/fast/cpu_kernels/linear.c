/* The product of some rows and a weight. The weight was packed once, in the order in which this
   code reads it.

   With few rows, the weight is read from memory once, and the time of the product is the time of
   this reading. Therefore a weight stays in the format of the checkpoint: a format of 4 bits, with
   its scales, has about a sixth of the bytes of float32. With up to FEW rows, its numbers become
   floats in registers, just before they are used.

   With more rows, a block of the weight stays in the caches of the core while all rows of a chunk
   are multiplied with it, one tile of rows after the other. In another format than float32, the
   block becomes floats once for each chunk.

   Each output has its own lane, which adds up the products one by one, in the order of the inputs,
   always with the same rounding. So a row gets the same bits alone as among a thousand rows (I2),
   and the same bits in each format that stores the same numbers. */
#include "linear.h"

#include "team.h"

/* The most inputs of a block, with few and with many tiles of rows: 4 and 18 kB, or 8 and 36 kB
   with AVX-512. With few tiles, the next block of the weight is prefetched at the speed of the
   memory, and must fit into the first cache beside this block. With many tiles, a deep block is
   faster: a tile loads its sums less often, and the CPU foresees the reads of long pieces of its
   rows. */
#define SHALLOW 64
#define DEEP 288
#define CHUNK 96 /* the number of rows that share a block */
#define FEW 3    /* up to so many rows, numbers become floats in registers */
/* How many bytes ahead a stored weight is prefetched: with up to FEW rows, so many in formats of 4
   bits, and more in formats of more bits; with more rows, so many from the beginning of a block. In
   float32, the next block is prefetched. */
#define AHEAD 4096

/* sums[rows][2] += x[rows][depth] * block[depth][PANEL]; the rows of x are `stride` numbers apart.
   For each input, `step` more bytes are prefetched, from `next` on: at most 4 * PANEL. The number
   of prefetches is a constant, although a small step then prefetches some lines twice: a loop of
   unknown length takes more time. */
INLINE void multiply(
    int rows, const float *x, int64_t stride, const float *block, int64_t depth, const char *next,
    int64_t step, vec (*sums)[2])
{
    vec s[TILE][2];
    for (int r = 0; r < rows; r++)
        s[r][0] = sums[r][0], s[r][1] = sums[r][1];
    for (int64_t i = 0; i < depth; i++) {
        const float *line = block + i * PANEL;
        vec left = load(line), right = load(line + LANES);
        for (int64_t byte = 0; byte < 4 * PANEL; byte += 64)
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

/* The same product for any number of rows, in tiles of about the same size. The next `size` bytes
   are prefetched from `next` on. */
static void multiply_chunk(
    int64_t rows, const float *x, int64_t stride, const float *block, int64_t depth,
    const char *next, int64_t size, vec (*sums)[2])
{
    int64_t tiles = (rows + TILE - 1) / TILE, step = (size / depth + tiles - 1) / tiles;
    for (int64_t r = 0, n; r < rows; r += n, tiles--, next += depth * step) {
        n = (rows - r + tiles - 1) / tiles;
        const float *from = x + r * stride;
        switch (n) {
#define CASE(N) case N: multiply(N, from, stride, block, depth, next, step, sums + r); break;
            EACH(CASE)
#undef CASE
        }
    }
}

/* sums[rows][2] += x[rows][in] * panel, for 1 to FEW rows and any format but F32. */
INLINE void multiply_stored(
    Format f, int rows, const float *x, int64_t in, const uint8_t *panel, vec (*sums)[2])
{
    vec s[FEW][2];
    for (int r = 0; r < rows; r++)
        s[r][0] = sums[r][0], s[r][1] = sums[r][1];
    for (int64_t first = 0; first < in; first += f.inputs) {
        Group g = group_of(f, panel, first / f.inputs);
        int64_t bytes = group_bytes(f) / f.inputs; /* of an input */
        int64_t count = f.bits < 16 ? f.inputs : smaller(f.inputs, in - first);
#pragma GCC unroll 32 /* i is then a constant, and so is the place of its bits */
        for (int64_t i = 0; i < count; i++) {
            vec weights[2];
            line_of(f, &g, i, weights);
            /* Once for each cache line, spread over the inputs: a core waits for few lines at once */
            if (i * bytes % 64 < bytes)
                __builtin_prefetch(g.quanta + AHEAD * f.bits / 4 + i * bytes);
            for (int r = 0; r < rows; r++) {
                vec input = repeat(x[r * in + first + i]);
                s[r][0] = multiply_add(input, weights[0], s[r][0]);
                s[r][1] = multiply_add(input, weights[1], s[r][1]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        sums[r][0] = s[r][0], sums[r][1] = s[r][1];
}

/* The weights of some inputs of a panel as floats, [count, PANEL]. first: a multiple of the inputs
   of a group. */
INLINE void unpack_as(
    Format f, const uint8_t *panel, int64_t first, int64_t count, float *to)
{
    for (int64_t start = 0; start < count; start += f.inputs) {
        Group g = group_of(f, panel, (first + start) / f.inputs);
        int64_t inputs = f.bits < 16 ? f.inputs : smaller(f.inputs, count - start);
#pragma GCC unroll 32
        for (int64_t i = 0; i < inputs; i++, to += PANEL) {
            vec weights[2];
            line_of(f, &g, i, weights);
            store(to, weights[0]);
            store(to + LANES, weights[1]);
        }
    }
}

static void unpack(
    int64_t format, const uint8_t *panel, int64_t first, int64_t count, float *to)
{
    switch (format) {
#define CASE(NAME, _) case NAME: unpack_as(FORMATS[NAME], panel, first, count, to); break;
        EACH_FORMAT(CASE, )
#undef CASE
    case F32:
        memcpy(to, (const float *)panel + first * PANEL, 4 * count * PANEL);
    }
}

static int64_t panel_size_of(int64_t format, int64_t in)
{
    return panel_bytes(FORMATS[format], in);
}

/* The number of inputs of a block: a multiple of the inputs of a group, and about the same for all
   blocks of a panel. */
static int64_t block_depth(int64_t in, int64_t rows)
{
    int64_t most = rows > 2 * TILE ? DEEP : SHALLOW, blocks = (in + most - 1) / most;
    return ((in + blocks - 1) / blocks + 31) / 32 * 32;
}

/* The product of `rows` rows of x and one panel of a weight. */
static void multiply_panel(
    const Weight *w, int64_t panel, const float *x, int64_t in, int64_t rows, vec (*sums)[2])
{
    int64_t size = panel_size_of(w->format, in);
    const uint8_t *data = w->data + panel * size;
    for (int64_t r = 0; r < rows; r++)
        sums[r][0] = sums[r][1] = (vec){0};
    if (w->format != F32 && rows <= FEW)
        switch (w->format * (FEW + 1) + rows) {
#define FOR_ROWS(NAME, N) \
    case NAME * (FEW + 1) + N: multiply_stored(FORMATS[NAME], N, x, in, data, sums); return;
            EACH_FORMAT(FOR_ROWS, 1) EACH_FORMAT(FOR_ROWS, 2) EACH_FORMAT(FOR_ROWS, 3)
        }
    int64_t most = block_depth(in, rows);
    float floats[DEEP * PANEL];
    for (int64_t i = 0; i < in; i += most) {
        int64_t depth = smaller(most, in - i), bytes = size * depth / in;
        const float *block = (const float *)data + i * PANEL;
        if (w->format != F32)
            unpack(w->format, data, i, depth, floats), block = floats;
        const char *next = (const char *)data + size * i / in + (w->format == F32 ? bytes : AHEAD);
        multiply_chunk(rows, x + i, in, block, depth, next, bytes, sums);
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

static int64_t panels_of(const Weight *w) { return (w->out + PANEL - 1) / PANEL; }

/* A chunk of the rows of a product. */
typedef struct {
    const Linear *l;
    const float *x, *add;
    float *out;
    int64_t rows;
} Chunk;

/* A panel of linear(). */
static void add_panel(const void *args, int64_t panel)
{
    const Chunk *c = args;
    const Linear *l = c->l;
    const Weight *w = l->weights;
    int64_t before = 0; /* the outputs of the weights before w */
    for (; panel >= panels_of(w); w++)
        panel -= panels_of(w), before += w->out;
    vec sums[CHUNK][2];
    multiply_panel(w, panel, c->x, l->in, c->rows, sums);
    int64_t first = before + panel * PANEL;
    for (int64_t r = 0; r < c->rows; r++) {
        int64_t at = r * l->out + first;
        finish(sums[r], l->bias ? l->bias + first : NULL, c->add ? c->add + at : NULL, c->out + at,
               w->out - panel * PANEL);
    }
}

void linear(
    const Linear *l, const float *x, const float *add, float *out, int64_t rows, int threads)
{
    int64_t panels = 0;
    for (int64_t i = 0; i < l->count; i++)
        panels += panels_of(l->weights + i);
    for (int64_t start = 0; start < rows; start += CHUNK) {
        int64_t at = start * l->out;
        Chunk chunk = {l, x + start * l->in, add ? add + at : NULL, out + at,
                       smaller(CHUNK, rows - start)};
        spread(threads, panels, add_panel, &chunk);
    }
}

/* gated = silu(gate) * up, for `count` outputs of a row. */
static void activate(const float *gate, const float *up, float *gated, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        gated[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
}

/* A panel of gated_linear(). */
static void gate_panel(const void *args, int64_t panel)
{
    const Chunk *c = args;
    const Linear *l = c->l;
    int64_t width = l->out / 2, first = panel * PANEL, outputs = smaller(PANEL, width - first);
    vec sums[2][CHUNK][2];
    for (int i = 0; i < 2; i++) {
        multiply_panel(l->weights + i, panel, c->x, l->in, c->rows, sums[i]);
        const float *bias = l->bias + i * width + first;
        for (int64_t r = 0; l->bias && r < c->rows; r++)
            finish(sums[i][r], bias, NULL, (float *)sums[i][r], outputs);
    }
    for (int64_t r = 0; r < c->rows; r++)
        activate((float *)sums[0][r], (float *)sums[1][r], c->out + r * width + first, outputs);
}

void gated_linear(const Linear *l, const float *x, float *out, int64_t rows, int threads)
{
    for (int64_t start = 0; start < rows; start += CHUNK) {
        Chunk chunk = {l, x + start * l->in, NULL, out + start * (l->out / 2),
                       smaller(CHUNK, rows - start)};
        spread(threads, panels_of(l->weights), gate_panel, &chunk);
    }
}

int panel_size(void) { return PANEL; }

/* The bytes of a panel of a weight with `in` inputs. */
int64_t stored_bytes(int64_t format, int64_t in) { return panel_size_of(format, in); }

typedef struct {
    const float *both;
    float *gated;
    int64_t width;
} Gates;

static void activate_row(const void *args, int64_t row)
{
    const Gates *g = args;
    const float *gate = g->both + 2 * row * g->width;
    activate(gate, gate + g->width, g->gated + row * g->width, g->width);
}

/* gated [rows, width] = silu(gate) * up. both: [rows, 2 * width], the outputs of gate and of up. */
void activate_rows(const float *both, float *gated, int64_t width, int64_t rows, int threads)
{
    spread(threads, rows, activate_row, &(Gates){both, gated, width});
}

typedef struct {
    const Weight *w;
    int64_t in;
    const int64_t *ids;
    float *out;
} Taken;

static void take_row(const void *args, int64_t row)
{
    const Taken *t = args;
    const uint8_t *panel = t->w->data + t->ids[row] / PANEL * panel_size_of(t->w->format, t->in);
    float floats[SHALLOW * PANEL];
    for (int64_t i = 0; i < t->in; i += SHALLOW) {
        int64_t depth = smaller(SHALLOW, t->in - i);
        unpack(t->w->format, panel, i, depth, floats);
        for (int64_t k = 0; k < depth; k++)
            t->out[row * t->in + i + k] = floats[k * PANEL + t->ids[row] % PANEL];
    }
}

/* out [count, in] = the rows `ids` of a weight, for an embedding. */
void take_rows(
    const Weight *w, int64_t in, const int64_t *ids, int64_t count, float *out, int threads)
{
    spread(threads, count, take_row, &(Taken){w, in, ids, out});
}
