/* Attention that reads keys and values from their pages, without copying them first.

   As in Flash-Decoding on a GPU, a context is divided into parts of a fixed size, so that one long
   request keeps all cores busy. Each part computes the weighted sum of its values, with weights
   relative to its own largest score. Then the parts are combined. A token of a prompt is computed
   in the same way as a decoded token. So it gets the same bits if the prompt is computed whole or
   in chunks, alone or in any batch (I2). */
#include "attention.h"

#include "lines.h"
#include "team.h"

#include <stdbool.h>

#define SPLIT 256         /* the number of tokens in a part */
#define BLOCK 64          /* the number of tokens that are computed at the same time */
#define WIDE (2 * LANES)  /* keys that are scored at the same time; SPLIT is a multiple */
#define SHARED (4 * TILE) /* queries that share one copy of the keys */
#define FEW 4             /* queries that are scored without a copy of the keys */
#define CHAINS 8          /* sums that hide how long one addition takes, if they are independent */

/* One query, and the place for its result from one part of the context. */
typedef struct {
    const float *query; /* [key_dim] */
    int64_t seen;       /* tokens of the part that the query attends to */
    float *part;        /* [value_dim] */
    Softmax *softmax;
} Row;

int split_size(void) { return SPLIT; }

int block_size(void) { return BLOCK; }

/* Find the slots of `count` tokens, from position `start` on, of the request with these pages. */
static void find_slots(
    const int32_t *pages, int64_t page_size, int64_t start, int64_t count, int64_t *slots)
{
    int64_t page = start / page_size, inside = start % page_size;
    for (int64_t i = 0; i < count; i++) {
        slots[i] = pages[page] * page_size + inside;
        if (++inside == page_size)
            page++, inside = 0;
    }
}

/* to[rows][cols] = a[rows][n] * lines[n][cols], for the columns of `vecs` vectors. The rows of `a`
   are SPLIT numbers apart, those of `to` are `to_row` numbers apart, and lines are `width` numbers
   apart. Line i of the product is line which[i], or line i if `which` is NULL. With `more`, the
   result is added to what `to` has.

   Each number of the result is one chain of sums, in the order of the lines. So it has the same
   bits, whatever else is computed with it (I2). */
static inline __attribute__((always_inline)) void multiply(
    int rows, int vecs, const float *a, const float *lines, int64_t width, const int64_t *which,
    int64_t n, bool more, float *to, int64_t to_row)
{
    vec sums[TILE][CHAINS / 2] = {0};
    if (more)
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vecs; v++)
                sums[r][v] = load(to + r * to_row + v * LANES);
    for (int64_t i = 0; i < n; i++) {
        const float *line = lines + (which ? which[i] : i) * width;
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vecs; v++)
                sums[r][v] = multiply_add(
                    repeat(a[r * SPLIT + i]), load(line + v * LANES), sums[r][v]);
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++)
            store(to + r * to_row + v * LANES, sums[r][v]);
}

/* The addresses of LANES keys. If fewer are left, the last one is repeated. */
static inline __attribute__((always_inline)) void find_keys(
    const float *keys, int64_t dim, const int64_t *slots, int64_t left, const float *key[LANES])
{
    for (int64_t k = 0; k < LANES; k++)
        key[k] = keys + slots[smaller(k, left - 1)] * dim;
}

/* While columns d to d + 4 of LANES keys are read: prefetch a part of the values of these keys, and
   of the keys that are `ahead` tokens later. So the memory is never idle, and it never has so many
   outstanding reads that the core must wait. GCC 12 removes a call that only prefetches, so this
   must be inlined. */
static inline __attribute__((always_inline)) void fetch(
    const Memory *m, const float *keys, const float *values, const int64_t *slots, int64_t left,
    int64_t ahead, int64_t d)
{
    int64_t line = d / 16 * 16, first = d / 4 % 4 * (LANES / 4);
    for (int64_t k = first; k < first + LANES / 4; k++) {
        __builtin_prefetch(keys + slots[smaller(k + ahead, left - 1)] * m->key_dim + line, 0, 2);
        __builtin_prefetch(values + slots[smaller(k, left - 1)] * m->value_dim + line, 0, 2);
    }
}

/* Copy keys in lines with one number of each of WIDE keys: to[dim][WIDE]. So the lanes of a vector
   are keys, and no score needs a sum over lanes. */
static void turn_keys(
    const Memory *m, const float *keys, const float *values, const int64_t *slots, int64_t left,
    float *to)
{
    const int64_t dim = m->key_dim;
    for (int64_t i = 0; i < WIDE; i += LANES) {
        const int64_t more = larger(1, left - i), *slot = slots + smaller(i, left - 1);
        const float *key[LANES];
        int64_t d = 0;
        find_keys(keys, dim, slot, more, key);
        for (; d + 4 <= dim; d += 4) {
            vec turned[4];
            fetch(m, keys, values, slot, more, WIDE, d);
            turn_four(key, d, turned);
            for (int64_t j = 0; j < 4; j++)
                store(to + (d + j) * WIDE + i, turned[j]);
        }
        for (; d < dim; d++)
            for (int64_t k = 0; k < LANES; k++)
                to[d * WIDE + i + k] = key[k][d];
    }
}

/* Convert the scores of the first `seen` tokens to weights, in place. The tokens from `seen` to
   `count` get weight 0: only later queries of the piece attend to them. */
static Softmax weigh(float *weights, float scale, int64_t seen, int64_t count)
{
    vec total = {0};
    float largest = -INFINITY;
    int64_t padded = (count + LANES - 1) / LANES * LANES;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < seen; i++) {
        weights[i] *= scale;
        largest = weights[i] > largest ? weights[i] : largest;
    }
    for (int64_t i = 0; i < seen; i++)
        weights[i] = exponential(weights[i] - largest);
    for (int64_t i = seen; i < padded; i++)
        weights[i] = 0;
    for (int64_t i = 0; i < padded; i += LANES)
        total += load(weights + i);
    return (Softmax){largest, sum(total)};
}

/* scores[rows][WIDE] = queries[rows][dim] * keys[dim][WIDE]. queries: the first SPLIT numbers of each
   row; `chunk` numbers later, the next SPLIT numbers of each row; and so on. */
static inline __attribute__((always_inline)) void score(
    int rows, const float *queries, int64_t chunk, int64_t dim, const float *keys, float *scores)
{
    for (int64_t d = 0; d < dim; d += SPLIT)
        multiply(rows, 2, queries + d / SPLIT * chunk, keys + d * WIDE, WIDE, NULL,
                 smaller(SPLIT, dim - d), d > 0, scores, SPLIT);
}

/* The same for a few queries: the keys of all `count` tokens, turned while they are multiplied. */
static inline __attribute__((always_inline)) void score_few(
    const Memory *m, int rows, const Row *row, const float *keys, const float *values,
    const int64_t *slots, int64_t count, float *scores)
{
    const int64_t dim = m->key_dim;
    for (int64_t i = 0; i < count; i += LANES) {
        const float *key[LANES];
        vec sums[FEW] = {0};
        int64_t d = 0;
        find_keys(keys, dim, slots + i, count - i, key);
        for (; d + 4 <= dim; d += 4) {
            vec turned[4];
            fetch(m, keys, values, slots + i, count - i, LANES, d);
            turn_four(key, d, turned);
            for (int64_t j = 0; j < 4; j++)
                for (int r = 0; r < rows; r++)
                    sums[r] = multiply_add(repeat(row[r].query[d + j]), turned[j], sums[r]);
        }
        for (; d < dim; d++) {
            vec turned;
            for (int64_t k = 0; k < LANES; k++)
                turned[k] = key[k][d];
            for (int r = 0; r < rows; r++)
                sums[r] = multiply_add(repeat(row[r].query[d]), turned, sums[r]);
        }
        for (int r = 0; r < rows; r++)
            store(scores + r * SPLIT + i, sums[r]);
    }
}

/* parts[rows][dim] = weights[rows][SPLIT] * values[slots[count]][dim], for the columns of `vecs`
   vectors from column d on. */
static inline __attribute__((always_inline)) void mix_columns(
    int rows, int vecs, const Row *row, const float *weights, const float *values, int64_t dim,
    const int64_t *slots, int64_t count, int64_t d)
{
    float out[TILE * CHAINS / 2 * LANES];
    multiply(rows, vecs, weights, values + d, dim, slots, count, false, out, vecs * LANES);
    for (int r = 0; r < rows; r++)
        memcpy(row[r].part + d, out + r * vecs * LANES, vecs * LANES * sizeof(float));
}

/* The same for all columns of the values. */
static inline __attribute__((always_inline)) void mix(
    int rows, const Row *row, const float *weights, const float *values, int64_t dim,
    const int64_t *slots, int64_t count)
{
    int64_t d = 0;
    for (; 4 * rows <= CHAINS && d + 4 * LANES <= dim; d += 4 * LANES)
        mix_columns(rows, 4, row, weights, values, dim, slots, count, d);
    for (; d + 2 * LANES <= dim; d += 2 * LANES)
        mix_columns(rows, 2, row, weights, values, dim, slots, count, d);
    for (; d + LANES <= dim; d += LANES)
        mix_columns(rows, 1, row, weights, values, dim, slots, count, d);
    for (; d < dim; d++)
        for (int r = 0; r < rows; r++) {
            float total = 0;
            for (int64_t i = 0; i < count; i++)
                total += weights[r * SPLIT + i] * values[slots[i] * dim + d];
            row[r].part[d] = total;
        }
}

/* weights[rows][SPLIT] = the scores of queries that share a KV head. A key that is loaded once is
   used for all queries of a tile. Tiles have about the same size. */
static void score_all(
    const Memory *m, const Row *row, int64_t rows, const float *keys, const float *values,
    const int64_t *slots, int64_t count, float *weights)
{
    const int64_t dim = m->key_dim, chunk = rows * SPLIT, tiles = (rows + TILE - 1) / TILE;
    float queries[(dim + SPLIT - 1) / SPLIT * chunk], lines[dim * WIDE];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < dim; d += SPLIT)
            memcpy(queries + d / SPLIT * chunk + r * SPLIT, row[r].query + d,
                   smaller(SPLIT, dim - d) * sizeof(float));
    for (int64_t i = 0; i < count; i += WIDE) {
        turn_keys(m, keys, values, slots + i, count - i, lines);
        for (int64_t t = 0, r = 0, n; t < tiles; t++, r += n) {
            n = (rows - r + tiles - t - 1) / (tiles - t);
            switch (n) {
#define SCORE(N) \
    case N: score(N, queries + r * SPLIT, chunk, dim, lines, weights + r * SPLIT + i); break;
                EACH(SCORE)
            }
        }
    }
}

/* Compute one part of a context for queries that share a KV head. */
static void attend(
    const Memory *m, int64_t kv_head, const Row *row, int64_t rows, const int64_t *slots,
    int64_t count, float scale)
{
    const int64_t tiles = (rows + TILE - 1) / TILE;
    const float *keys = m->keys + kv_head * m->slots * m->key_dim;
    const float *values = m->values + kv_head * m->slots * m->value_dim;
    float weights[rows * SPLIT];
    switch (rows) {
    case 1: score_few(m, 1, row, keys, values, slots, count, weights); break;
    case 2: score_few(m, 2, row, keys, values, slots, count, weights); break;
    case 3: score_few(m, 3, row, keys, values, slots, count, weights); break;
    case 4: score_few(m, 4, row, keys, values, slots, count, weights); break;
    default: score_all(m, row, rows, keys, values, slots, count, weights);
    }
    for (int64_t t = 0, r = 0, n; t < tiles; t++, r += n) {
        n = (rows - r + tiles - t - 1) / (tiles - t);
        for (int64_t k = r; k < r + n; k++)
            *row[k].softmax = weigh(weights + k * SPLIT, scale, row[k].seen, count);
        switch (n) {
#define MIX(N) \
    case N: mix(N, row + r, weights + r * SPLIT, values, m->value_dim, slots, count); break;
            EACH(MIX)
        }
    }
}

/* Combine the parts [count, dim] of the result of one query. The weight of a part is its share of
   the softmax over the whole context. */
static void combine(
    const float *parts, const Softmax *softmax, int64_t count, int64_t dim, float *output)
{
    float largest = softmax[0].largest, total = 0;
    for (int64_t s = 1; s < count; s++)
        largest = softmax[s].largest > largest ? softmax[s].largest : largest;
    for (int64_t s = 0; s < count; s++)
        total += softmax[s].total * exponential(softmax[s].largest - largest);
    memset(output, 0, dim * sizeof(float));
    for (int64_t s = 0; s < count; s++)
        add_scaled(output, parts + s * dim, exponential(softmax[s].largest - largest) / total, dim);
}

/* Compute one part of a context with packed lines. They are unpacked once, for all queries of
   the run, and attended to like any other memory. */
static __attribute__((noinline)) void attend_packed(
    const Memory *m, int64_t kv_head, const Row *row, int64_t rows, const int64_t *slots,
    int64_t count, float scale)
{
    const int64_t key_line = line_bytes(m->packed, m->key_dim);
    const int64_t value_line = line_bytes(m->packed, m->value_dim);
    const uint8_t *key = (const uint8_t *)m->keys + kv_head * m->slots * key_line;
    const uint8_t *value = (const uint8_t *)m->values + kv_head * m->slots * value_line;
    float keys[count * m->key_dim], values[count * m->value_dim];
    int64_t unpacked_slots[SPLIT];
    for (int64_t i = 0; i < count; i++) {
        unpack_line(m->packed, key + slots[i] * key_line, m->key_dim, keys + i * m->key_dim);
        unpack_line(
            m->packed, value + slots[i] * value_line, m->value_dim, values + i * m->value_dim);
        unpacked_slots[i] = i;
    }
    const Memory unpacked = {.keys = keys, .values = values, .kv_heads = 1, .slots = count,
                             .key_dim = m->key_dim, .value_dim = m->value_dim};
    attend(&unpacked, 0, row, rows, unpacked_slots, count, scale);
}

/* A block of tokens that are computed together, and its runs: run i has the tokens from run[i] to
   run[i + 1], all of one request. */
typedef struct {
    const Memory *m;
    const int32_t *page_table;
    int64_t width;
    const float *query; /* of the first token of the block */
    int64_t query_token, query_head;
    float *parts;
    Softmax *softmax;
    float *output;
    int64_t heads, splits;
    float scale;
    int64_t runs, rows[BLOCK], seen[BLOCK], run[BLOCK + 1]; /* rows, seen: request and context */
} Block;

/* Compute one part of the contexts of a run, for the queries that share a KV head. */
static void attend_piece(const void *args, int64_t piece)
{
    const Block *b = args;
    const Memory *m = b->m;
    int64_t i = piece % b->runs, kv_head = piece / b->runs % m->kv_heads;
    int64_t s = piece / b->runs / m->kv_heads, group = b->heads / m->kv_heads;
    int64_t last = b->run[i + 1] - 1, start = s * SPLIT, slots[SPLIT], n = 0;
    int64_t length = smaller(SPLIT, b->seen[last] - start);
    if (length <= 0)
        return;
    find_slots(b->page_table + b->rows[last] * b->width, m->page_size, start, length, slots);
    Row row[SHARED + group];
    for (int64_t t = b->run[i]; t <= last; t++)
        for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++, n++) {
            int64_t part = (t * b->heads + h) * b->splits + s;
            row[n] = (Row){b->query + t * b->query_token + h * b->query_head,
                           larger(0, smaller(SPLIT, b->seen[t] - start)),
                           b->parts + part * m->value_dim, b->softmax + part};
        }
    (m->packed ? attend_packed : attend)(m, kv_head, row, n, slots, length, b->scale);
}

static void combine_token(const void *args, int64_t t)
{
    const Block *b = args;
    int64_t dim = b->m->value_dim, count = (b->seen[t] + SPLIT - 1) / SPLIT;
    for (int64_t i = t * b->heads; i < (t + 1) * b->heads; i++)
        combine(b->parts + i * b->splits * dim, b->softmax + i * b->splits, count, dim,
                b->output + i * dim);
}

void paged_attention(
    const Memory *m, const BatchLayout *all, int64_t first, int64_t requests,
    const float *query, int64_t query_token, int64_t query_head, float *parts, Softmax *softmax,
    float *output, int64_t heads, int64_t splits, float scale, int threads)
{
    const int32_t *starts = all->starts + first, *lengths = all->lengths + first;
    int64_t group = heads / m->kv_heads, tokens = starts[requests] - starts[0], request = 0;
    int64_t together = larger(1, SHARED / group); /* the most tokens of a run */
    for (int64_t start = 0; start < tokens; start += BLOCK) {
        int64_t count = smaller(BLOCK, tokens - start);
        Block b = {.m = m, .page_table = all->page_table + first * all->width, .width = all->width,
                   .query = query + start * query_token, .query_token = query_token,
                   .query_head = query_head, .parts = parts, .softmax = softmax,
                   .output = output + start * heads * m->value_dim, .heads = heads,
                   .splits = splits, .scale = scale};
        for (int64_t t = 0; t < count; t++) {
            while (starts[request + 1] - starts[0] <= start + t)
                request++;
            b.rows[t] = request;
            b.seen[t] = lengths[request] - (starts[request + 1] - starts[0] - 1 - start - t);
            if (t == 0 || b.rows[t] != b.rows[t - 1] || t - b.run[b.runs - 1] == together)
                b.run[b.runs++] = t;
        }
        b.run[b.runs] = count;
        spread(threads, splits * m->kv_heads * b.runs, attend_piece, &b);
        spread(threads, count, combine_token, &b);
    }
}

void store_kv(
    const Memory *m, const float *key, int64_t key_token, int64_t key_head, const float *value,
    int64_t value_token, int64_t value_head, const int64_t *slots, int64_t tokens)
{
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < m->kv_heads; h++) {
            int64_t line = h * m->slots + slots[t];
            const float *k = key + t * key_token + h * key_head;
            const float *v = value + t * value_token + h * value_head;
            if (m->packed) {
                uint8_t *keys = (uint8_t *)m->keys, *values = (uint8_t *)m->values;
                keys += line * line_bytes(m->packed, m->key_dim);
                values += line * line_bytes(m->packed, m->value_dim);
                pack_line(m->packed, k, m->key_dim, keys);
                pack_line(m->packed, v, m->value_dim, values);
            } else {
                memcpy(m->keys + line * m->key_dim, k, m->key_dim * sizeof(float));
                memcpy(m->values + line * m->value_dim, v, m->value_dim * sizeof(float));
            }
        }
}
