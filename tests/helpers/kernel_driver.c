/* Run the kernels without Python: on another kind of CPU, maybe one that QEMU emulates.

   Reads cases from standard input: inputs, and the bits that the kernels computed elsewhere. All
   numbers are in the byte order of this machine. Each case must give the same bits whole, with
   several threads, and one row or one token alone (I2). Prints how many results were compared, and
   returns 1 if one of them has other bits. tests/models/test_other_cpu.py writes the cases. */
#include <stdio.h>
#include <stdlib.h>

#include "layer.c"

enum { END, LINEAR, ROWS, ATTENTION, LAYERS, LOW_RANK };

/* Functions that the other files have for Python only. */
void take_rows(const Weight *, int64_t, const int64_t *, int64_t, float *, int);
void add_low_rank(
    const float *, float *, int64_t, const int64_t *, const int64_t *, const float *,
    const float *, int64_t, int64_t, int64_t, int64_t, int);
int panel_size(void), block_size(void);

static int64_t results, wrong;

static void compare(const char *what, const void *got, const void *expected, size_t bytes)
{
    results++;
    if (memcmp(got, expected, bytes))
        wrong++, printf("%s: other bits\n", what);
}

static void take(void *to, size_t bytes)
{
    if (bytes && fread(to, bytes, 1, stdin) != 1)
        printf("the cases end too early\n"), exit(2);
}

static int64_t number(void)
{
    int64_t value;
    take(&value, sizeof value);
    return value;
}

static void *space(size_t bytes)
{
    void *memory = malloc(bytes);
    return memory ? memory : (exit(3), NULL);
}

/* An array: its bytes follow their number. Without bytes, it is NULL. */
static void *array(void)
{
    int64_t bytes = number();
    void *memory = bytes ? space(bytes) : NULL;
    take(memory, bytes);
    return memory;
}

static float real(void)
{
    float *value = array();
    return *value;
}

static Weight weight_of(void)
{
    Weight w = {.out = number()};
    w.format = number();
    w.data = array();
    return w;
}

static Linear linear_of(void)
{
    Linear l = {.in = number()};
    l.out = number();
    l.count = number();
    l.bias = array();
    for (int64_t i = 0; i < l.count; i++)
        l.weights[i] = weight_of();
    return l;
}

static void linear_case(void)
{
    Linear l = linear_of();
    int64_t rows = number();
    const float *x = array(), *add = array(), *expected = array();
    float *out = space(4 * rows * l.out);
    for (int threads = 1; threads <= 3; threads++) {
        linear(&l, x, add, out, rows, threads);
        compare("linear", out, expected, 4 * rows * l.out);
    }
    for (int64_t r = 0; r < rows; r++) {
        linear(&l, x + r * l.in, add ? add + r * l.out : NULL, out, 1, 1);
        compare("linear, a row alone", out, expected + r * l.out, 4 * l.out);
    }
}

static void rows_case(void)
{
    Weight w = weight_of();
    int64_t in = number(), count = number();
    const int64_t *ids = array();
    const float *expected = array();
    float *out = space(4 * count * in);
    take_rows(&w, in, ids, count, out, 2);
    compare("rows", out, expected, 4 * count * in);
}

static Memory memory_of(void)
{
    Memory m = {.kv_heads = number()};
    m.slots = number(), m.page_size = number(), m.key_dim = number();
    m.value_dim = m.key_dim;
    m.keys = array(), m.values = array();
    return m;
}

static BatchLayout layout_of(void)
{
    BatchLayout b = {.width = number()};
    b.page_table = array(), b.starts = array(), b.lengths = array(), b.slots = array();
    return b;
}

static void attention_case(void)
{
    Memory m = memory_of();
    BatchLayout b = layout_of();
    int64_t requests = number(), heads = number(), splits = number(), dim = m.key_dim;
    float scale = real();
    const float *key = array(), *value = array(), *query = array(), *expected = array();
    int64_t tokens = b.starts[requests], line = heads * dim, lines = block_size() * heads * splits;
    float *parts = space(4 * lines * dim), *out = space(4 * tokens * line);
    Softmax *softmax = space(lines * sizeof *softmax);
    int64_t kept = m.kv_heads * dim;
    store_kv(&m, key, kept, dim, value, kept, dim, b.slots, tokens);
    for (int threads = 1; threads <= 3; threads++) {
        paged_attention(&m, &b, 0, requests, query, line, dim, parts, softmax, out, heads, splits,
                        scale, threads);
        compare("attention", out, expected, 4 * tokens * line);
    }
    for (int64_t r = 0; r < requests; r++)
        for (int64_t t = b.starts[r]; t < b.starts[r + 1]; t++) {
            int32_t starts[] = {0, 1}, length = b.lengths[r] - (b.starts[r + 1] - 1 - t);
            BatchLayout one = {b.page_table + r * b.width, starts, &length, NULL, b.width};
            paged_attention(&m, &one, 0, 1, query + t * line, line, dim, parts, softmax, out, heads,
                            splits, scale, 1);
            compare("attention, a token alone", out, expected + t * line, 4 * line);
        }
}

static void layers_case(void)
{
    int64_t count = number(), rows = number(), splits = number();
    Layer layers[count];
    const Layer *each[count];
    Memory memories[count];
    for (int64_t i = 0; i < count; i++) {
        Layer l = {.heads = number()};
        l.kv_heads = number(), l.head_dim = number(), l.epsilon = real();
        l.input_norm = array(), l.mlp_norm = array(), l.q_norm = array(), l.k_norm = array();
        l.qkv = linear_of(), l.output = linear_of(), l.gate_up = linear_of(), l.down = linear_of();
        layers[i] = l, each[i] = layers + i, memories[i] = memory_of();
    }
    BatchLayout b = layout_of();
    float scale = real();
    const float *cos = array(), *sin = array(), *x = array(), *expected = array();
    int64_t dim = layers->head_dim, hidden = layers->qkv.in, lines = rows * layers->heads * splits;
    float *out = space(4 * rows * hidden), *qkv = space(4 * rows * layers->qkv.out);
    float *attended = space(4 * rows * layers->output.in);
    float *between = space(4 * rows * (hidden + layers->down.in)), *parts = space(4 * lines * dim);
    Softmax *softmax = space(lines * sizeof *softmax);
    for (int threads = 1; threads <= 3; threads++) {
        Heads h = {cos, sin, qkv, rows};
        memcpy(out, x, 4 * rows * hidden);
        decode_layers(each, memories, count, &h, &b, out, attended, between, parts, softmax, splits,
                      scale, threads);
        compare("layers", out, expected, 4 * rows * hidden);
    }
    for (int64_t r = 0; r < rows; r++) {
        int32_t starts[] = {0, 1};
        BatchLayout one = {b.page_table + r * b.width, starts, b.lengths + r, b.slots + r, b.width};
        Heads h = {cos + r * dim, sin + r * dim, qkv, 1};
        memcpy(out, x + r * hidden, 4 * hidden);
        decode_layers(each, memories, count, &h, &one, out, attended, between, parts, softmax,
                      splits, scale, 1);
        compare("layers, a request alone", out, expected + r * hidden, 4 * hidden);
    }
}

static void low_rank_case(void)
{
    int64_t in = number(), width = number(), rank = number(), rows = number();
    const float *x = array(), *y = array();
    const int64_t *slots = array(), *ranks = array();
    const float *a = array(), *b = array(), *expected = array();
    float *out = space(4 * rows * width);
    memcpy(out, y, 4 * rows * width);
    add_low_rank(x, out, width, slots, ranks, a, b, in, width, rank, rows, 2);
    compare("low rank", out, expected, 4 * rows * width);
    for (int64_t r = 0; r < rows; r++) {
        memcpy(out, y + r * width, 4 * width);
        add_low_rank(x + r * in, out, width, slots + r, ranks, a, b, in, width, rank, 1, 1);
        compare("low rank, a row alone", out, expected + r * width, 4 * width);
    }
}

int main(void)
{
    if (number() != panel_size())
        return printf("the cases are for panels of another size than %d\n", panel_size()), 2;
    void (*cases[])(void) = {
        [LINEAR] = linear_case, [ROWS] = rows_case,       [ATTENTION] = attention_case,
        [LAYERS] = layers_case, [LOW_RANK] = low_rank_case,
    };
    for (int64_t kind; (kind = number()) != END;)
        cases[kind]();
    printf("%lld results compared, %lld have other bits\n", (long long)results, (long long)wrong);
    return wrong > 0;
}
