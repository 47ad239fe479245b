#pragma once

#include "vector.h"

/* The KV memory of a layer. keys: [slots, key_dim] for each of kv_heads heads; values: [slots,
   value_dim]. Heads are `slots` apart, and pages `page_size`: token i of page p has the slot
   p * page_size + i.

   packed: if not 0, the memory holds packed lines instead, [slots, line_bytes], in a format of
   `lines.h`. */
typedef struct {
    float *keys, *values;
    int64_t kv_heads, slots, page_size, key_dim, value_dim, packed;
} Memory;

/* The requests of a forward. page_table: one row of pages for each request, rows are `width` apart.
   starts: the index of the first query of each request, and at the end the number of queries.
   lengths: the number of tokens of each request up to and including its last query. slots: the slot
   where the key and the value of each token are stored. */
typedef struct {
    const int32_t *page_table, *starts, *lengths;
    const int64_t *slots;
    int64_t width;
} BatchLayout;

/* The softmax statistics of one part of a context, for one query: needed to combine the parts. */
typedef struct {
    float largest, total; /* the largest score; the sum of all exp(score - largest) */
} Softmax;

/* Causal attention for the queries of `requests` requests, from request `first` on.

   query: [tokens, heads, key_dim], with strides query_token and query_head. parts: [BLOCK, heads,
   splits, value_dim] and softmax: [BLOCK, heads, splits] are space for intermediate results;
   `splits` is the number of parts of the longest context. output: [tokens, heads, value_dim]. */
void paged_attention(
    const Memory *m, const BatchLayout *all, int64_t first, int64_t requests,
    const float *query, int64_t query_token, int64_t query_head, float *parts, Softmax *softmax,
    float *output, int64_t heads, int64_t splits, float scale, int threads);

/* Write key [tokens, kv_heads, key_dim] and value [tokens, kv_heads, value_dim] to their slots.
   *_token, *_head: the strides of their tokens and heads. */
void store_kv(
    const Memory *m, const float *key, int64_t key_token, int64_t key_head, const float *value,
    int64_t value_token, int64_t value_head, const int64_t *slots, int64_t tokens);
