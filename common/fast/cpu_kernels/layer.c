/* A decoder layer like Llama's: the part before attention and the part after it.

       x -> norm -> q, k, v -> rotate q, k | attention | -> o, + x -> norm -> gate, up -> down, + x

   The caller's thread runs this code. Workers help it with the pieces of each operation. */
#include "attention.h"
#include "linear.h"
#include "team.h"

#define GRAIN 16 /* rows in a piece of a small operation: to share fewer takes longer than they do */

typedef struct {
    const float *input_norm, *mlp_norm; /* [hidden] */
    const float *q_norm, *k_norm;       /* [head_dim] or NULL: norms of each head (Qwen3) */
    double epsilon;
    int64_t heads, kv_heads, head_dim;
    Linear qkv, output, gate_up, down;
} Layer;

/* qkv: [rows, heads + 2 * kv_heads, head_dim], the input of attention; cos, sin: [rows, head_dim],
   for the rotation of q and k. */
typedef struct {
    const float *cos, *sin;
    float *qkv;
    int64_t rows;
} Heads;

/* to = from / sqrt(mean(from^2) + epsilon) * weight, for n numbers. from and to may be the same. */
static void rms_norm(const float *from, const float *weight, double epsilon, int64_t n, float *to)
{
    float factor = 1.0f / sqrtf(dot(from, from, n) / n + (float)epsilon);
    for (int64_t i = 0; i < n; i++)
        to[i] = from[i] * factor * weight[i];
}

/* Rotate a head. Its two halves are the coordinates of points in a plane; each point has its angle.
   sin: negative in its first half. */
static void rotate(float *head, const float *cos, const float *sin, int64_t head_dim)
{
    int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = a * cos[i] + b * sin[i];
        head[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

typedef struct {
    const float *from, *weight;
    double epsilon;
    int64_t n;
    float *to;
    int64_t rows;
} Norms;

static void norm_piece(const void *args, int64_t piece)
{
    const Norms *a = args;
    for (int64_t r = piece * GRAIN; r < smaller((piece + 1) * GRAIN, a->rows); r++)
        rms_norm(a->from + r * a->n, a->weight, a->epsilon, a->n, a->to + r * a->n);
}

/* to = the norms of `rows` rows of `from`, [rows, n]. */
void norm_rows(
    const float *from, const float *weight, double epsilon, int64_t n, float *to, int64_t rows,
    int threads)
{
    spread(threads, (rows + GRAIN - 1) / GRAIN, norm_piece,
           &(Norms){from, weight, epsilon, n, to, rows});
}

typedef struct {
    const Layer *l;
    const Heads *h;
} Turns;

static void turn_piece(const void *args, int64_t piece)
{
    const Layer *l = ((const Turns *)args)->l;
    const Heads *h = ((const Turns *)args)->h;
    int64_t dim = l->head_dim;
    for (int64_t r = piece * GRAIN; r < smaller((piece + 1) * GRAIN, h->rows); r++)
        for (int64_t i = 0; i < l->heads + l->kv_heads; i++) {
            float *head = h->qkv + r * l->qkv.out + i * dim;
            const float *norm = i < l->heads ? l->q_norm : l->k_norm;
            if (norm)
                rms_norm(head, norm, l->epsilon, dim, head);
            rotate(head, h->cos + r * dim, h->sin + r * dim, dim);
        }
}

/* Normalize, if the model does so, and rotate the heads of q and k in h->qkv. */
void turn_heads(const Layer *l, const Heads *h, int threads)
{
    spread(threads, (h->rows + GRAIN - 1) / GRAIN, turn_piece, &(Turns){l, h});
}

/* Compute h->qkv. x: [rows, hidden], the input of the layer; space: [rows, hidden]. */
void before_attention(const Layer *l, const Heads *h, const float *x, float *space, int threads)
{
    norm_rows(x, l->input_norm, l->epsilon, l->qkv.in, space, h->rows, threads);
    linear(&l->qkv, space, NULL, h->qkv, h->rows, threads);
    turn_heads(l, h, threads);
}

/* attended: [rows, heads * head_dim], the output of attention; x: [rows, hidden], the input of the
   layer; space: rows * (hidden + down.in) numbers; out: [rows, hidden], the output of the layer,
   which may be x. */
void after_attention(
    const Layer *l, const float *attended, const float *x, float *space, float *out, int64_t rows,
    int threads)
{
    int64_t hidden = l->output.out;
    float *normed = space, *gated = space + rows * hidden;
    linear(&l->output, attended, x, out, rows, threads);
    norm_rows(out, l->mlp_norm, l->epsilon, hidden, normed, rows, threads);
    gated_linear(&l->gate_up, normed, gated, rows, threads);
    linear(&l->down, gated, out, out, rows, threads);
}

/* Compute `count` layers of a decode step: each row is the only query of its request.

   x: [rows, hidden], the input of the first layer, becomes the output of the last one. memories:
   the KV memory of each layer. attended: [rows, heads * head_dim]; space, parts and softmax: as in
   after_attention() and paged_attention(). */
void decode_layers(
    const Layer *const *layers, const Memory *memories, int64_t count, const Heads *h,
    const BatchLayout *requests, float *x, float *attended, float *space, float *parts,
    Softmax *softmax, int64_t splits, float scale, int threads)
{
    int64_t rows = h->rows;
    for (int64_t i = 0; i < count; i++) {
        const Layer *l = layers[i];
        int64_t dim = l->head_dim, token = l->qkv.out;
        const float *key = h->qkv + l->heads * dim, *value = key + l->kv_heads * dim;
        before_attention(l, h, x, space, threads);
        store_kv(memories + i, key, token, dim, value, token, dim, requests->slots, rows);
        paged_attention(memories + i, requests, 0, rows, h->qkv, token, dim, parts, softmax,
                        attended, l->heads, splits, scale, threads);
        after_attention(l, attended, x, space, x, rows, threads);
    }
}
