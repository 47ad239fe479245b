/* Attention that reads keys and values from their pages, without copying them first.

   As in Flash-Decoding on a GPU, a context is divided into parts of a fixed size, so that one long
   request keeps all cores busy. Each part computes the weighted sum of its values, with weights
   relative to its own largest score. Then the parts are combined. A token of a prompt is computed
   in the same way as a decoded token. So it gets the same bits if the prompt is computed whole or
   in chunks, alone or in any batch (I2). */
#include "attention.h"

#include "team.h"

#define SPLIT 256 /* the number of tokens in a part */
#define AHEAD 32  /* a key is prefetched so many tokens before its use */
#define BLOCK 64  /* the number of tokens that are computed at the same time */

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

static inline void fetch(const float *line, int64_t dim)
{
    for (int64_t d = 0; d < dim; d += 16)
        __builtin_prefetch(line + d, 0, 2);
}

/* weights[rows][SPLIT] = scale * query[rows][dim] . keys[slots[count]][dim]

   This also prefetches the values, one row for each key. So the memory is never idle, and it never
   has so many outstanding reads that the core must wait before it can compute. */
static inline __attribute__((always_inline)) void score(
    int rows, const Row *row, const Memory *m, const float *keys, const float *values,
    const int64_t *slots, int64_t count, float scale, float *weights)
{
    const int64_t dim = m->key_dim;
    const float *query[TILE];
    for (int r = 0; r < rows; r++)
        query[r] = row[r].query;
    for (int64_t i = 0; i < count; i++) {
        const float *key = keys + slots[i] * dim;
        fetch(keys + slots[smaller(i + AHEAD, count - 1)] * dim, dim);
        fetch(values + slots[i] * m->value_dim, m->value_dim);
        vec products[TILE] = {0};
        float rest[TILE] = {0};
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES)
            for (int r = 0; r < rows; r++)
                products[r] = multiply_add(load(query[r] + d), load(key + d), products[r]);
        for (; d < dim; d++)
            for (int r = 0; r < rows; r++)
                rest[r] += query[r][d] * key[d];
        for (int r = 0; r < rows; r++)
            weights[r * SPLIT + i] = scale * (sum(products[r]) + rest[r]);
    }
}

/* Convert the scores of the first `seen` tokens to weights, in place. The tokens from `seen` to
   `count` get weight 0: only later queries of the tile attend to them. */
static Softmax weigh(float *weights, int64_t seen, int64_t count)
{
    vec total = {0};
    float largest = -INFINITY;
    int64_t padded = (count + LANES - 1) / LANES * LANES;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < seen; i++)
        largest = weights[i] > largest ? weights[i] : largest;
    for (int64_t i = 0; i < seen; i++)
        weights[i] = exponential(weights[i] - largest);
    for (int64_t i = seen; i < padded; i++)
        weights[i] = 0;
    for (int64_t i = 0; i < padded; i += LANES)
        total += load(weights + i);
    return (Softmax){largest, sum(total)};
}

/* parts[rows][dim] = weights[rows][SPLIT] * values[slots[count]][dim], for the columns of `vecs`
   vectors from column d on. */
static inline __attribute__((always_inline)) void mix_columns(
    int rows, int vecs, const Row *row, const float *weights, const float *values, int64_t dim,
    const int64_t *slots, int64_t count, int64_t d)
{
    vec sums[TILE][2] = {0};
    for (int64_t i = 0; i < count; i++) {
        const float *value = values + slots[i] * dim + d;
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vecs; v++)
                sums[r][v] = multiply_add(
                    repeat(weights[r * SPLIT + i]), load(value + v * LANES), sums[r][v]);
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++)
            store(row[r].part + d + v * LANES, sums[r][v]);
}

/* The same for all columns of the values. */
static inline __attribute__((always_inline)) void mix(
    int rows, const Row *row, const float *weights, const float *values, int64_t dim,
    const int64_t *slots, int64_t count)
{
    int64_t d = 0;
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

/* Compute one part of a context for all queries that share a KV head, in tiles of about the same
   size. A key or value that is loaded once is used for all queries of a tile. */
static void attend(
    const Memory *m, int64_t kv_head, const Row *row, int64_t rows, const int64_t *slots,
    int64_t count, float scale)
{
    const float *keys = m->keys + kv_head * m->slots * m->key_dim;
    const float *values = m->values + kv_head * m->slots * m->value_dim;
    float weights[TILE * SPLIT];
    for (int64_t i = 0; i < smaller(AHEAD, count); i++)
        fetch(keys + slots[i] * m->key_dim, m->key_dim);
    for (int64_t tiles = (rows + TILE - 1) / TILE, n; rows > 0; rows -= n, row += n, tiles--) {
        n = (rows + tiles - 1) / tiles;
        switch (n) {
#define SCORE(N) \
    case N: score(N, row, m, keys, values, slots, count, scale, weights); break;
            EACH(SCORE)
        }
        for (int64_t r = 0; r < n; r++)
            *row[r].softmax = weigh(weights + r * SPLIT, row[r].seen, count);
        switch (n) {
#define MIX(N) \
    case N: mix(N, row, weights, values, m->value_dim, slots, count); break;
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

/* A block of tokens that are computed together, and their tiles: tile i has the tokens from tile[i]
   to tile[i + 1], all of one request. */
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
    int64_t tiles, rows[BLOCK], seen[BLOCK], tile[BLOCK + 1]; /* rows, seen: request and context */
} Block;

/* Compute one part of the contexts of a tile, for the queries that share a KV head. */
static void attend_piece(const void *args, int64_t piece)
{
    const Block *b = args;
    const Memory *m = b->m;
    int64_t i = piece % b->tiles, kv_head = piece / b->tiles % m->kv_heads;
    int64_t s = piece / b->tiles / m->kv_heads, group = b->heads / m->kv_heads;
    int64_t last = b->tile[i + 1] - 1, start = s * SPLIT, slots[SPLIT], n = 0;
    int64_t length = smaller(SPLIT, b->seen[last] - start);
    if (length <= 0)
        return;
    find_slots(b->page_table + b->rows[last] * b->width, m->page_size, start, length, slots);
    Row row[TILE + group];
    for (int64_t t = b->tile[i]; t <= last; t++)
        for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++, n++) {
            int64_t part = (t * b->heads + h) * b->splits + s;
            row[n] = (Row){b->query + t * b->query_token + h * b->query_head,
                           larger(0, smaller(SPLIT, b->seen[t] - start)),
                           b->parts + part * m->value_dim, b->softmax + part};
        }
    attend(m, kv_head, row, n, slots, length, b->scale);
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
    int64_t together = larger(1, TILE / group); /* the most tokens of a request in a tile */
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
            if (t == 0 || b.rows[t] != b.rows[t - 1] || t - b.tile[b.tiles - 1] == together)
                b.tile[b.tiles++] = t;
        }
        b.tile[b.tiles] = count;
        spread(threads, splits * m->kv_heads * b.tiles, attend_piece, &b);
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
            memcpy(m->keys + line * m->key_dim, key + t * key_token + h * key_head,
                   m->key_dim * sizeof(float));
            memcpy(m->values + line * m->value_dim, value + t * value_token + h * value_head,
                   m->value_dim * sizeof(float));
        }
}
